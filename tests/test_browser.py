"""The browser that page tests drive: a page that loads itself again is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.browser import NavigatedError, Tab, browser, needs_browser
from tests.serving.router_world import run

RELOAD = "(location.reload(), new Promise(() => {}))"
"""A script that has no value before its page is gone."""


async def respond(_: web.Request) -> web.Response:
    return web.Response(text="<title>again</title>", content_type="text/html")


def numbered(pages: Iterator[int]) -> web.Application:
    """Each time it is asked it sends a page of another title, and late."""

    async def respond_late(_: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.Response(text=f"<title>{next(pages)}</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", respond_late)
    return app


@pytest.mark.slow
@needs_browser
def test_the_next_page_is_waited_for_at_the_same_address(tmp_path: Path):
    async def body() -> None:
        async with TestServer(numbered(count())) as server, browser(tmp_path) as tab:
            url = str(server.make_url("/"))
            for number in (0, 1):
                await tab.goto(url)
                assert await tab.value("document.title") == str(number)
            for number, script in enumerate(("location.reload()", RELOAD), 2):
                await tab.leave(script)
                assert await tab.value("document.title") == str(number)

    run(body)


@pytest.mark.slow
@needs_browser
def test_a_wait_goes_on_in_the_next_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    num_asked = 0
    value = Tab.value

    async def interrupted(tab: Tab, script: str) -> object:
        nonlocal num_asked
        num_asked += 1
        return await value(tab, RELOAD if num_asked <= 3 else script)

    async def body() -> None:
        app = web.Application()
        app.router.add_get("/", respond)
        async with TestServer(app) as server, browser(tmp_path) as tab:
            await tab.goto(str(server.make_url("/")))
            with pytest.raises(NavigatedError):
                await tab.value(RELOAD)
            monkeypatch.setattr(Tab, "value", interrupted)
            await tab.until("document.title === 'again'")
            assert num_asked > 3

    run(body)
