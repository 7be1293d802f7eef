"""`offloadtrain tui --web`: serves the monitor to browsers with textual-serve (extra `web`).

Each browser tab has its own process, `offloadtrain tui` with the same options. There is no
password: anyone who can reach the address sees the runs. A page of another origin in the same
browser could also reach a loopback address. Requests from pages with another scheme, host or port
are refused, as are requests for another host name (DNS rebinding), and no page may embed the
monitor in a frame.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from offloadtrain.config.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

_TABS_END_S = 5.0
"""Longest time in seconds that a shutdown waits for tabs, which end by themselves without it."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")


def serve(
    host: str,
    port: int,
    runs: Sequence[str],
    options: Mapping[str, object],
    flags: Mapping[str, bool],
    most_tabs: int,
) -> int:
    """Serve until Ctrl-C; return the exit code. `options` and `flags` are those of each tab, of
    which at most `most_tabs` are open.

    Raises:
        ConfigError: textual-serve is not installed, or the address cannot be listened on.
    """
    if find_spec("textual_serve") is None:
        raise ConfigError(
            "--web needs textual-serve, which is not installed: pip install 'offloadtrain[web]'"
        )
    _try_to_listen(host, port)
    allowed = "" if flags["--readonly"] else ", and may stop them"
    if host not in LOOPBACK:
        print(f"whoever reaches {host} port {port} sees the runs{allowed}", file=sys.stderr)
    _server(shlex.join(command(runs, options, flags)), host, port, most_tabs)
    return 0


def command(
    runs: Sequence[str], options: Mapping[str, object], flags: Mapping[str, bool]
) -> list[str]:
    """Return the command line of a tab's process."""
    arguments = [word for key, value in options.items() if value for word in (key, str(value))]
    raised = [key for key, is_set in flags.items() if is_set]
    return [sys.executable, "-m", "offloadtrain", "tui", *runs, *arguments, *raised]


def end_without_server() -> None:
    """End this tab's process if its server, at the other end of stdin, has ended. Otherwise textual
    would continue to draw without a reader."""
    stdin = select.poll()
    stdin.register(sys.__stdin__ or 0, 0)  # without events: POLLHUP is always reported
    if stdin.poll(0):
        os._exit(0)  # an orderly end would write to a closed pipe


def is_from_here(host: str, origin: str | None, served: str) -> bool:
    """Return True if a request comes from a page of this server.

    Args:
        host: Host header of the request.
        origin: Origin header; None if the request has none.
        served: address on which the server listens.
    """
    name = _name_of(f"//{host}")
    known = {*LOOPBACK, served, socket.gethostname(), socket.getfqdn()}
    if name not in known and not (served not in LOOPBACK and _is_address(name)):
        return False
    return origin is None or origin == f"http://{host}"


def _name_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    """Return True for an IP address: unlike a name, nobody can make it point to another host."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _try_to_listen(host: str, port: int) -> None:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {why}") from None


def _server(command_line: str, host: str, port: int, most_tabs: int) -> None:
    from aiohttp import web
    from textual_serve.server import Server

    named = socket.gethostname() if host in _ANY else f"[{host}]" if ":" in host else host
    authority = named.lower() if port == 80 else f"{named}:{port}".lower()  # as in Host headers
    url = f"http://{authority}"
    # Allow no other hosts and no frames. textual-serve's page refers to a font of Google's, for
    # which a machine without internet access would wait.
    policy = (
        f"default-src 'self' {url} ws://{authority} data: 'unsafe-inline'; frame-ancestors 'none'"
    )
    tabs: set[asyncio.Task[object]] = set()

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not is_from_here(request.host, request.headers.get("Origin"), host):
            raise web.HTTPForbidden(text="this request comes from another site")
        if request.path == "/" and request.host != authority:
            raise web.HTTPFound(url + request.path_qs)  # its socket accepts only this origin
        if request.path in ("/", "/ws") and len(tabs) >= most_tabs:
            text = (
                f"{most_tabs} tabs are open: close one, or start the monitor with a larger --tabs"
            )
            raise web.HTTPServiceUnavailable(text=text)
        tab = asyncio.current_task()
        if tab is not None and request.path == "/ws":
            tabs.add(tab)
        try:
            response = await handler(request)
            if not response.prepared:
                response.headers["Content-Security-Policy"] = policy
            return response
        finally:
            tabs.difference_update({tab})

    class Guarded(Server):
        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(guard)
            return app

        async def on_startup(self, app: web.Application) -> None:
            print(f"the monitor is at {self.public_url}; Ctrl-C ends it", flush=True)

        async def on_shutdown(self, app: web.Application) -> None:
            """End the tabs; otherwise aiohttp would wait a minute for browsers to leave."""
            for tab in tabs:
                tab.cancel()  # its handler ends the tab's process and closes the socket
            with suppress(TimeoutError):
                async with asyncio.timeout(_TABS_END_S):
                    while tabs:
                        await asyncio.sleep(0.02)

    Guarded(command_line, host, port, "offloadtrain", public_url=url).serve()
