"""`tui --web` in a real browser: headless Chromium draws the monitor, and its keys arrive.

Driven by Chromium's own protocol over a websocket. Skipped where no Chromium is installed.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from tests.tui.test_runs import live, trainer
from tests.tui.test_web import served

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1400,900", "--remote-debugging-port=0",
)  # fmt: skip
LONGEST_S = 120.0


@contextmanager
def browser() -> Iterator[str]:
    """A Chromium without a window; the address of its protocol."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM or "", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        try:
            assert process.stderr is not None
            told = next(line for line in process.stderr if "DevTools listening on" in line)
            yield re.sub(r"ws://([^/]*)/.*", r"http://\1", told.split()[-1])
        finally:
            process.kill()
            process.wait()
            process.stderr.close() if process.stderr else None


class Page:
    """A tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self.hosts: set[str] = set()
        """Those that the page has got something from."""
        self.received = ""
        """Text that the page's own websocket has got, without escapes."""

    async def ask(self, method: str, **params: Any) -> Any:
        self._asked += 1
        asked = self._asked
        await self._socket.send_json({"id": asked, "method": method, "params": params})
        while (answer := await self._next()).get("id") != asked:
            pass
        return answer.get("result", answer)

    async def until(self, wanted: str) -> None:
        while wanted not in self.received:
            await self._next()

    async def _next(self) -> Any:
        message = json.loads((await self._socket.receive(timeout=LONGEST_S)).data)
        if message.get("method") == "Network.requestWillBeSentExtraInfo":
            headers = message["params"]["headers"]
            self.hosts.add(headers.get("Host") or headers.get(":authority"))
        if message.get("method") == "Network.webSocketFrameReceived":
            frame = message["params"]["response"]
            data = base64.b64decode(frame["payloadData"]) if frame["opcode"] == 2 else b""
            self.received += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))
        return message

    async def picture(self) -> Image.Image:
        found = await self.ask("Page.captureScreenshot", format="png")
        return Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")

    async def click(self, x: int, y: int) -> None:
        """Give the page the keyboard."""
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            await self.ask("Input.dispatchMouseEvent", type=kind, **where)

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" else {}
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)


@asynccontextmanager
async def page(devtools: str, address: str) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{devtools}/json/list") as answer:
            tabs = await answer.json(content_type=None)
        socket = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(socket, max_msg_size=1 << 26) as connection:
            found = Page(connection)
            await found.ask("Network.enable")
            await found.ask("Page.enable")
            await found.ask("Page.navigate", url=address)
            yield found


def drawn(picture: Image.Image) -> int:
    """Pixels that stand out from the most frequent color."""
    counts = sorted((count for count, _ in picture.getcolors(1 << 24) or ()), reverse=True)
    return sum(counts[1:])


def test_a_browser_draws_the_monitor_and_its_keys_arrive(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")

    async def look(devtools: str, address: str) -> None:
        async with page(devtools, address) as tab:
            await tab.until("step 20/20")
            before = await tab.picture()
            while drawn(before) < 20_000:  # it has the text, and draws it a frame later
                before = await tab.picture()
            assert len(before.getcolors(1 << 24) or ()) > 50, "colored, and its text is smoothed"
            await tab.click(600, 8)
            tab.received = ""
            await tab.press("2")
            await tab.until("owner")
            after = await tab.picture()
            while after.tobytes() == before.tobytes():
                after = await tab.picture()
            before.save(tmp_path / "overview.png")
            after.save(tmp_path / "memory.png")
            tab.received = ""
            await tab.press("S")
            await tab.until("requests are disabled")
            assert {address.split("/")[2]} == tab.hosts, "nothing is loaded from elsewhere"

    with trainer(folder), served(folder) as address, browser() as devtools:
        asyncio.run(asyncio.wait_for(look(devtools, address), LONGEST_S))
