"""The monitor in a browser: a page, a websocket that draws, keys that send no request."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from offloadtrain_tui import web

from offloadtrain.cli.main import main
from tests.conftest import Command
from tests.tui.test_runs import live, trainer

pytestmark = pytest.mark.slow
LONGEST_S = 120.0


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Yield the address of a server over a run."""
    with server(folder, *options) as (address, _):
        yield address


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["offloadtrain", "tui", str(folder), "--web", f"--port={port}", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port};" in process.stdout.readline()
        while not _listens(port):  # it says so when it begins to listen
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.communicate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def drawn(socket_: aiohttp.ClientWebSocketResponse, wanted: str) -> str:
    """Return all text that the browser gets until it has received `wanted`."""
    text = ""
    while wanted not in (shown := re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)):
        message = await socket_.receive(timeout=LONGEST_S)
        assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), shown[-2000:]
        if message.type == aiohttp.WSMsgType.BINARY:
            text += message.data.decode(errors="replace")
    return shown


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Yield the connection of a page that shows the run."""
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{address}/ws?width=120&height=40") as screen:
            await drawn(screen, "step 20/20")
            yield screen


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_browser_shows_the_run(tmp_path: Path, allowed: bool) -> None:
    folder = live(tmp_path / "run")

    with trainer(folder), served(folder, *["--allow-requests"] * allowed) as address:
        async with aiohttp.ClientSession() as session, session.get(address) as page:
            assert page.status == 200
            assert f"{address.replace('http', 'ws')}/ws" in await page.text()
            policy = page.headers["Content-Security-Policy"]
            assert policy.startswith(f"default-src 'self' {address} ws://127"), "no other host"
            assert "frame-ancestors 'none'" in policy
        async with tab(address) as screen:
            await screen.send_json(["stdin", "S"])
            await drawn(screen, "end the run?" if allowed else "requests are disabled")
    assert not list((folder / "control").glob("*.json")), "nothing was confirmed"


def monitors_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    monitors = psutil.Process(process.pid).children(recursive=True)
    assert monitors
    return monitors


def runs(process: psutil.Process) -> bool:
    """Whether it runs; a zombie that its new parent does not collect does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ended", ["tab", "server"])
async def test_a_monitor_ends_with_its_tab_and_with_a_killed_server(
    tmp_path: Path, ended: str
) -> None:
    folder = live(tmp_path / "run")

    with server(folder) as (address, process):
        async with tab(address):
            monitors = monitors_of(process)
            if ended == "server":
                process.kill()
                process.wait(LONGEST_S)
        end_s = time.monotonic() + LONGEST_S
        try:
            while running := list(filter(runs, monitors)):
                assert time.monotonic() < end_s, running
                await asyncio.sleep(0.2)
        finally:
            for monitor in filter(runs, monitors):
                monitor.kill()


async def test_ctrl_c_does_not_wait_for_an_open_tab(tmp_path: Path) -> None:
    """aiohttp gives open connections a minute to leave."""
    folder = live(tmp_path / "run")

    with server(folder) as (address, process):
        async with tab(address) as screen:
            monitors = monitors_of(process)
            process.send_signal(signal.SIGINT)
            message = await screen.receive(timeout=30)
            while message.type is aiohttp.WSMsgType.BINARY:
                message = await screen.receive(timeout=30)
            assert message.type is aiohttp.WSMsgType.CLOSE
            assert process.wait(30) == 0
            assert not list(filter(runs, monitors))


async def test_a_page_of_another_site_reaches_nothing(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    foreign = [
        {"Origin": "http://evil.example"},
        {"Host": "evil.example:8000"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://127.0.0.1:1"},
    ]

    with served(folder) as address:
        async with aiohttp.ClientSession() as session:
            for headers in foreign:
                async with session.get(address, headers=headers) as page:
                    assert page.status == 403
                with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                    await session.ws_connect(f"{address}/ws", headers=headers)
            other_name = address.replace("127.0.0.1", "localhost")
            async with session.get(other_name, allow_redirects=False) as page:
                assert (page.status, page.headers["Location"]) == (302, f"{address}/")
            headers = {"Origin": address}
            async with session.ws_connect(f"{address}/ws", headers=headers) as screen:
                await drawn(screen, "step 20/20")


async def test_a_tab_too_many_is_refused_until_another_is_closed(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")

    with server(folder, "--tabs=1") as (address, process):
        async with aiohttp.ClientSession() as session:
            async with tab(address):
                number = len(monitors_of(process))
                with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                    await session.ws_connect(f"{address}/ws")
                async with session.get(address) as page:
                    assert page.status == 503 and "larger --tabs" in await page.text()
                assert len(monitors_of(process)) == number, "no process was started for it"
            end_s = time.monotonic() + LONGEST_S
            while (await session.get(address)).status == 503:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.1)


def test_a_server_that_cannot_start_gives_the_reason(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(live(tmp_path / "run"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["tui", folder, "--web", f"--port={port}"]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    assert "is for --web" in command("tui", folder, "--allow-requests", code=2).err
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    assert "pip install 'offloadtrain[web]'" in command("tui", folder, "--web", code=2).err
