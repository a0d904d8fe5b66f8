"""All runs of a folder in a browser, live and read only; for one person, on a shared machine.

It imports ``report``, ``observe`` and the rooms below. The command line uses ``app``, ``listener``
and ``all_runs``.

It guards against:

- Other users of the login node, who can connect to any port of loopback. So it listens on a Unix
  socket that only its owner can open (listener.py), or on a port where all data needs a token. The
  token is no cookie: a browser sends a host's cookies to all of its ports, other users' too.
- Other pages in the user's browser. It checks Host (another name that points to loopback is
  refused), Origin and Sec-Fetch-Site, and serves only GET and HEAD (access.py).
- Hostile texts in runs: names, logs and metrics are JSON data, which the page shows as text. The
  policy of the pages allows only the dashboard's own scripts. Names in addresses are looked up
  among the folder's runs, and never become paths (all_runs.py).
"""
