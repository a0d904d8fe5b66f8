"""The dashboard's pages, and the server, which runs until a signal ends it."""

from __future__ import annotations

import asyncio
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from types import FrameType

import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hpcddp import report
from hpcddp.dashboard.access import AccessCheck
from hpcddp.dashboard.all_runs import Folder
from hpcddp.dashboard.answers import Answer
from hpcddp.dashboard.listener import Listener
from hpcddp.errors import HpcddpError

THREADS = 4  # that read runs at the same time
CONNECTIONS = 64  # at the same time: any user of the machine may connect to a port
GRACE = 1  # seconds for unfinished answers at the end
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def make(folder: Folder, token: str | None) -> Starlette:
    """The pages of a folder."""
    limit: list[CapacityLimiter] = []

    async def look(request: Request, ask: Callable[[], Answer]) -> Response:
        limit[:] = limit or [CapacityLimiter(THREADS)]  # belongs to the running event loop
        try:
            answer = await to_thread.run_sync(ask, abandon_on_cancel=True, limiter=limit[0])
        except (HpcddpError, OSError) as error:
            return JSONResponse({"error": str(error)}, 404)
        headers = {"ETag": answer.tag}
        if request.headers.get("if-none-match") == answer.tag:
            return Response(status_code=304, headers=headers)
        return Response(answer.body, media_type="application/json", headers=headers)

    async def runs(request: Request) -> Response:
        return await look(request, folder.runs)

    async def run(request: Request) -> Response:
        return await look(request, partial(folder.run, request.path_params["name"]))

    application = Starlette(
        routes=[
            Route("/", _page),
            Route("/run/{name}", _page),
            Route("/api/runs", runs),
            Route("/api/run/{name}", run),
            Route("/assets/{name}", _asset),
        ],
        middleware=[
            Middleware(AccessCheck, token=token),
            Middleware(GZipMiddleware, compresslevel=4),
        ],
    )
    application.router.redirect_slashes = False  # other addresses are not found
    return application


async def _page(request: Request) -> Response:
    return shipped("run.html" if request.path_params else "list.html")


async def _asset(request: Request) -> Response:
    return shipped(request.path_params["name"])


OWN = ("list.html", "list.css", "list.js", "run.html", "run.js", "ask.js", "icon.svg")
DRAWING: dict[str, Callable[[], str]] = {
    "report.css": report.style,
    "report.js": report.script,
    "words.js": partial(report.asset, "words.js"),
    "uplot.js": partial(report.asset, "uPlot.iife.min.js"),
}


def shipped(name: str) -> Response:
    """A file of the program: the same for every reader, without any data of a run."""
    if name in OWN:
        text = files("hpcddp.dashboard").joinpath("assets", name).read_text(encoding="utf-8")
    elif name in DRAWING:
        text = DRAWING[name]()
    else:
        return Response("not found\n", 404, media_type="text/plain")
    return Response(text, media_type=TYPES[name.rpartition(".")[2]])


class Connection(H11Protocol):
    """A connection, closed at once where there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()


def serve(folder: Folder, door: Listener) -> int:
    """Answer until Ctrl-C, TERM, or the end of the terminal; the exit code of the command."""
    ended: list[int] = []
    config = uvicorn.Config(
        make(folder, door.token), log_config=None, log_level="error", access_log=False,
        server_header=False, proxy_headers=False, lifespan="off", ws="none", http=Connection,
        loop="asyncio", timeout_graceful_shutdown=GRACE, timeout_notify=1,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def leave(number: int, frame: FrameType | None = None) -> None:
        ended.append(number)
        server.should_exit = True

    async def watch() -> None:
        folder.forget()
        if abandoned():
            leave(signal.SIGHUP)

    config.callback_notify = watch
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, leave)
    server.run(sockets=[door.listener])  # it handles INT and TERM, and sends them to us at its end
    return 128 + ended[0] if ended else 1


def abandoned() -> bool:
    """Whether the terminal of this command is gone: ssh can end without sending a signal."""
    if sys.stdout is None or sys.stdout.closed:
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
