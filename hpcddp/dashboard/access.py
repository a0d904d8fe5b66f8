"""Access to the dashboard: every request passes here before any other code sees it."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.ASCII)  # ssh -L picks the port
METHODS = ("GET", "HEAD")
FOREIGN = "requests from other pages are not allowed"
# Files of the program, the same for every reader. All other addresses may have data of runs.
PAGES = re.compile(r"/|/run/[^/]+|/assets/[^/]+")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class AccessCheck:
    """Refuses requests that the dashboard's own pages would not send, and limits the browser.

    Args:
        token: required in a request for data; None where the socket's mode protects it.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = refusal(scope["method"], scope["path"], Headers(scope=scope), self.token)
        app = PlainTextResponse(f"{refused[1]}\n", refused[0]) if refused else self.app
        await app(scope, receive, answer)


def refusal(method: str, path: str, headers: Headers, token: str | None) -> tuple[int, str] | None:
    """The status and the reason of a refusal; None for a good request."""
    hosts, page = headers.getlist("host"), PAGES.fullmatch(path)
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        return 421, "the dashboard answers only to the host name localhost"
    if method not in METHODS:
        return 405, "the dashboard is read-only"
    if headers.get("origin", f"http://{hosts[0]}") != f"http://{hosts[0]}":
        return 403, FOREIGN
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        # A link to this place is allowed: the page with the link does not see the answer.
        kind = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        if kind != ("navigate", "document") or not page:
            return 403, FOREIGN
    if token is not None and not page:
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if not secrets.compare_digest(given, f"Bearer {token}".encode()):
            return 401, "the token is missing or wrong: open the address that the dashboard printed"
    return None
