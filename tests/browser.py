"""A real browser, driven by its DevTools protocol; tests that need one are skipped where there is none."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {', '.join(BROWSERS)}")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-dev-shm-usage",
)


# What DevTools says of a script that a navigation interrupted.
INTERRUPTED = (
    "Inspected target navigated or closed",
    "Execution context was destroyed",
    "Cannot find context",
    "Cannot find default execution context",
)


class NavigatedError(Exception):
    """The page was replaced by another before a script in it had its value."""


class Tab:
    """One tab of a running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._session: str | None = None

    async def open(self) -> None:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        await self.send("Page.enable")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its result."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        while True:
            told = json.loads(await self._socket.receive_str())
            if told.get("id") == number:
                if str(told.get("error", {}).get("message", "")).startswith(INTERRUPTED):
                    raise NavigatedError(told)
                assert "error" not in told, told
                return dict(told["result"])

    async def goto(self, url: str) -> None:
        """Waits for the new document, even where the old one had the same address."""
        begun = await self.send("Page.navigate", url=url)
        assert not begun.get("errorText"), begun
        while (await self.send("Page.getFrameTree"))["frameTree"]["frame"]["loaderId"] != begun["loaderId"]:
            await asyncio.sleep(0.05)
        await self.until(f"location.href === {json.dumps(url)}")

    async def leave(self, script: str) -> None:
        """Runs an expression that makes the tab load another page, and waits until that is there."""
        await self.value("window.isOld = true")
        with suppress(NavigatedError):
            await self.value(script)
        await self.until("!window.isOld")

    async def value(self, script: str) -> Any:
        """What a JavaScript expression evaluates to."""
        told = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until the page is loaded and the expression true, in whichever page the tab shows by then.

        The test has a limit of its own.
        """
        is_true = f"document.readyState === 'complete' && Boolean({script})"
        while True:
            with suppress(NavigatedError):
                if await self.value(is_true):
                    return
            await asyncio.sleep(0.05)

    async def look(self, width: int, scheme: str = "light", height: int = 900) -> None:
        """Shows the page so wide, in this colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def shot(self, path: Path) -> None:
        told = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A browser with a profile in this folder, and one tab."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        *OPTIONS,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'profile'}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    address = ""
    try:
        while not address:
            line = (await process.stderr.readline()).decode()
            assert line, "the browser ended"
            address = line.partition("DevTools listening on ")[2].strip()
        draining = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0) as socket,
        ):
            tab = Tab(socket)
            await tab.open()
            yield tab
            await socket.send_json({"id": 0, "method": "Browser.close"})
        await draining
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
