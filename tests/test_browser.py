"""The browser that page tests drive: a page that loads itself again is waited for."""

from __future__ import annotations

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
