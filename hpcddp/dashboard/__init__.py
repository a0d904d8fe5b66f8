"""All runs of a folder in a browser, live and read only; for one person, on a shared machine.

It imports ``report``, ``observe`` and the rooms below. The command line uses ``app``, ``listener``
and ``all_runs``.

Whom it must hold against:

- Other users of the login node, who can connect to any port of loopback. So it listens on a Unix
  socket that only its owner can open (listener.py), or on a port where all data needs a token. The
  token is no cookie: a browser sends a host's cookies to all of its ports, other users' too.
- Other pages in the user's browser: the Host is checked (a name of theirs that points to loopback
  is refused), the Origin, and Sec-Fetch-Site; only GET and HEAD are served (access.py).
- What runs wrote: names, logs and metrics are data of JSON, put on a page as text; the pages'
  policy allows the dashboard's own scripts alone. Names in addresses are looked up among the
  folder's runs, and never become paths (all_runs.py).
"""
