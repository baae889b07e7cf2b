"""The router's page: what its stream says, that it stays small, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.browser import Tab, browser, needs_browser
from tests.serving.peers import Fault, story
from tests.serving.router_world import World, run, until, world
from tests.session.registry_world import SECRET

from baton.engine.trace import HandoffTrace
from baton.serving import metrics, page
from baton.serving.fleet import FleetInstance
from baton.serving.http import Credentials
from baton.serving.metrics import AttemptLog, AttemptRecord
from baton.serving.page import drawing, page_text
from baton.serving.router import LocalMode, Router, RouterConfig
from baton.session.registry import Role

PROMPT = {"prompt": "the fox"}
KEY = "key-of-an-operator"
HOSTILE = "</td></script><img/src=x/onerror=document.title='taken'><b>&\"'"
"""Without spaces: an X-Request-Id may have none."""


@pytest.fixture(autouse=True)
def _draws_without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, no hand-over is passed over."""
    monkeypatch.setattr(page, "DRAWING_SHARE", 1e9)


@asynccontextmanager
async def events(w: World, url: str = "", **headers: str) -> AsyncIterator[Callable[[], Any]]:
    """An open page, without its browser: each call waits for the next event."""
    async with w.session.get(f"{url or w.router.url}/events", headers=headers) as response:
        assert response.status == 200, await response.text()

        async def next_event() -> Any:
            data = (await response.content.readuntil(b"\n\n")).decode()
            return json.loads(data.removeprefix("data: "))

        yield next_event


async def snapshot(w: World) -> dict[str, Any]:
    async with events(w) as next_event:
        return (await next_event())[0]


async def handoffs(w: World, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with events(w) as next_event:
        while len(found) < number:
            found += (await next_event())[1:]
    return found


def test_the_page_needs_nothing_from_outside():
    async def body() -> None:
        async with world() as w, w.session.get(w.router.url + "/") as response:
            text, policy = await response.text(), response.headers["Content-Security-Policy"]
            assert (response.status, response.content_type) == (200, "text/html")
        assert text == page_text()
        assert not re.search(r"@import|url\(|import\(|XMLHttp|innerHTML|insertAdjacent|document\.write", text)
        assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
        assert not re.search(r"\son\w+=|\sstyle=|\ssrc=", text)
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy

    run(body)


def test_a_snapshot_says_what_the_router_knows():
    async def body() -> None:
        async with world(1, 1) as w:
            w.d0.told = {"pages": {"free": 60, "cached": 20, "used": 30, "leased": 10, "total": 100}}
            w.d0.faults = [Fault(status=503, code="OUT_OF_PAGES")]
            await w.stream(PROMPT)
            w.d0.pace_s = 0.05
            headers = {"X-Request-Id": "mine"}
            asking = asyncio.create_task(w.post({"stream": True, **PROMPT}, headers=headers))
            await until(lambda: w.d0.num_sent > 9)
            now = await snapshot(w)
            assert (now["status"], now["num_running"], now["num_waiting"]) == ("ok", 1, 0)
            decode, prefill = now["instances"]
            assert (decode["name"], decode["state"], decode["layout"]) == ("d0", "able", "tp1")
            assert (prefill["name"], prefill["role"]) == ("p0", "prefill")
            assert now["totals"]["retries"] == 1
            (running,) = now["running"]
            assert (running["client_id"], running["model"], running["names"]) == (
                "mine",
                "tiny",
                ["d0", "p0"],
            )
            assert (running["waits_for"], running["num_failures"]) == ("", 0)
            assert running["num_tokens"] > 0
            (failed,) = now["failures"]
            assert (failed["number"], failed["names"]) == (1, ["p0", "d0"])
            assert failed["text"] == "OUT_OF_PAGES: told to fail with 503"
            (answered,) = now["answered"]
            assert (answered["names"], answered["local"]) == (["p0", "d0"], "")
            await asking
            await until(lambda: w.router.fleet.instances["d0"].health.info.pages.total)
            assert (await snapshot(w))["instances"][0]["pages"]["leased"] == 10

    run(body)


def test_of_a_whole_answer_no_first_token_is_known():
    async def body() -> None:
        async with world(1, 1) as w:
            w.d0.gate.clear()
            asking = asyncio.create_task(w.post(PROMPT))
            await until(lambda: w.d0.seen)
            (running,) = (await snapshot(w))["running"]
            assert running["waits_for"] == "answer"
            w.d0.gate.set()
            await asking
            await w.stream(PROMPT)
            while len(answered := (await snapshot(w))["answered"]) < 2:
                await asyncio.sleep(0.1)
            streamed, whole = answered
            assert streamed["first_s"] <= streamed["total_s"]
            assert whole["first_s"] is None

    run(body)


def test_an_instance_that_can_never_hand_off_is_shown():
    async def body() -> None:
        async with world(1, 0, local=LocalMode.AUTO) as w:
            await w.join("d0", Role.DECODE, "other", fingerprint="beef")
            await until(w.router.fleet.unpaired)
            now = await snapshot(w)
            assert now["status"] == "degraded", "each side answers alone"
            assert "no hand-over for p0 (tiny), d0 (other)" in now["message"]
            await w.join("d1", Role.DECODE)
            async with events(w) as next_event:
                while "p0" in now["message"]:  # events are one a second
                    (now, *_) = await next_event()
            assert now["message"].startswith("no hand-over for d0 (other): no peer")

    run(body)


def test_a_request_that_no_instance_is_given_is_a_failure_too():
    async def body() -> None:
        async with world(0, 0) as w:
            for _ in range(3):
                assert (await w.post(PROMPT))[0] == 503
            now = await snapshot(w)
            assert now["status"] == "down"
            assert "none has registered" in now["message"]
            (failed,) = now["failures"]
            assert (failed["number"], failed["names"]) == (3, [])
            assert failed["text"].startswith("NO_INSTANCE: ")

    run(body)


def test_handoffs_are_sampled_only_while_somebody_looks():
    async def body() -> None:
        async with world(1, 1) as w:
            w.p0.unpipelined = ["cost: 3 groups are done soonest"]
            for _ in range(5):
                await w.stream(PROMPT)
            assert w.p0.num_listings == 0
            # Of an instance's requests only the newest are drawn, and every one is a point.
            first, second = await handoffs(w, 2)
            assert second["number"] == first["number"] + 1
            now = await snapshot(w)
            assert [point[1] for point in now["points"]] == [0.9] * 5
            assert now["reasons"] == {"cost: N groups are done soonest": 5}
            assert first["names"] == ["p0", "d0"]
            assert first["unpipelined"] == ["cost: 3 groups are done soonest"]
            assert first["exposed_s"] == pytest.approx(0.04)
            assert first["matrix"]["cells"] == [
                [source, target, 4 * 65536 * (1 + target)] for source in range(2) for target in range(3)
            ]
            names = [(track["group"], track["name"]) for track in first["tracks"]]
            assert names[:5] == [
                ("request", stage)
                for stage in ("queue", "prefill", "exposed transfer", "admission", "first decode step")
            ]
            assert ("source rank 1", "copy to 2") in names
            num_listings = w.p0.num_listings
            await w.stream(PROMPT)  # several polls later nobody has asked for it
            polls = w.router.fleet.instances["p0"].health
            heard_s = polls.heard_s
            await until(lambda: polls.heard_s > heard_s + 2 * page.TICK_S)
            assert w.p0.num_listings <= num_listings + 1

    run(body)


def test_a_page_gets_each_handoff_once():
    async def body() -> None:
        async with world(1, 1) as w:
            found: list[int] = []
            async with events(w) as next_event:
                for _ in range(4):
                    await w.stream(PROMPT)
                    found += [each["number"] for each in (await next_event())[1:]]
                while not found or found[-1] < 2:
                    found += [each["number"] for each in (await next_event())[1:]]
            assert found == sorted(set(found))

    run(body)


def test_a_long_answer_is_drawn_when_it_has_ended():
    """Decode records a request when its last token is out; its hand-over was listed long before."""

    async def body() -> None:
        async with world(1, 1) as w:
            w.d0.gate.clear()
            asking = asyncio.create_task(w.stream(PROMPT))
            async with events(w) as next_event:
                while not (told := await next_event())[0]["points"]:
                    assert len(told) == 1
                assert (await next_event())[1:] == []
                w.d0.gate.set()
                while len(told := await next_event()) == 1:
                    pass
                await asking
            assert told[1]["names"] == ["p0", "d0"]

    run(body)


def test_the_page_says_what_health_says():
    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO) as w:
            w.d0.told = {"has_draft": True}
            await until(w.router.fleet.unpaired)
            now, (_, health) = await snapshot(w), await w.get("/health")
            assert {name: now[name] for name in health} == health
            assert "decode with --draft needs prefill" in now["message"]

    run(body)


def test_timelines_that_are_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "FETCH_BYTES_MAX", 10_000)

    async def body() -> None:
        async with world(2, 1) as w:
            w.p0.ranks = (4, 40)
            for _ in range(4):
                await w.stream(PROMPT)
            assert [each["names"][0] for each in await handoffs(w, 2)] == ["p1", "p1"]

    run(body)


def test_no_more_pages_than_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "NUM_PAGES_MAX", 1)

    async def body() -> None:
        async with world() as w:
            async with events(w) as next_event:
                await next_event()
                status, told = await w.get("/events")
                assert (status, told["error"]["code"]) == (429, "QUEUE_FULL")
                assert "1 pages are open" in told["error"]["message"]
            status = 429
            while status == 429:  # until the router has noticed
                async with w.session.get(w.router.url + "/events") as response:
                    status = response.status
            assert status == 200

    run(body)


def test_a_router_that_ends_ends_its_pages():
    async def body() -> None:
        async with world() as w, w.session.get(w.router.url + "/events") as response:
            await response.content.readuntil(b"\n\n")
            await w.router.close()
            await response.read()  # raises where the stream was cut

    run(body)


# ---- keys


@asynccontextmanager
async def locked(w: World) -> AsyncIterator[Router]:
    """A second router before the same instances, with an API key."""
    config = RouterConfig(w.registry.url, poll_s=0.1, local=LocalMode.NEVER)
    router = Router(config, SECRET, Credentials((KEY,), SECRET))
    await router.start("127.0.0.1", 0)
    await until(lambda: not router.fleet.missing())
    try:
        yield router
    finally:
        await router.close()


async def check_keys(w: World, router: Router) -> None:
    """What is served without a key has nothing of the deployment in it."""
    async with w.session.get(router.url + "/") as response:
        assert (response.status, await response.text()) == (200, page_text())
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with w.session.get(router.url + "/events", headers=headers) as response:
            assert response.status == 401, "data without a key"
    async with events(w, router.url, Authorization=f"Bearer {KEY}") as next_event:
        assert len((await next_event())[0]["instances"]) == 2


def test_with_an_api_key_only_the_empty_page_is_open():
    async def body() -> None:
        async with world() as w, locked(w) as router:
            await check_keys(w, router)

    run(body)


@pytest.mark.long
def test_a_stream_without_a_key_is_found():
    async def body() -> None:
        async with world() as w, locked(w) as router:
            limits = router._http.limits
            router._http.limits = replace(limits, open_paths=limits.open_paths | {"/events"})
            with pytest.raises(AssertionError, match="data without a key"):
                await check_keys(w, router)

    run(body)


# ---- bounds


def check_failures_are_bounded() -> None:
    """Any number of causes and instances, and a message of any length."""
    log = AttemptLog()
    for index in range(2000):
        record = AttemptRecord((f"d{index}", f"p{index}"), "")
        record.fail("PEER_LOST", "x" * 10_000)
        log.add(f"cmpl-{index}", record)
        log.add_failure(f"cmpl-{index}", record)
    assert len(log.failures) <= 64, "failures pile up"
    assert max(len(count.record.failure) for count in log.failures.values()) <= 500, "a long text is kept"


def check_drawing_is_bounded() -> None:
    """Many ranks on both sides, or many copies between few."""
    for num_sources, num_targets, num_more in ((64, 64, 0), (2, 2, 2000)):
        trace = story(num_sources, num_targets)
        trace.groups = {rank: groups * (1 + num_more // 4) for rank, groups in trace.groups.items()}
        trace.copies = {rank: copies * (1 + num_more // 4) for rank, copies in trace.copies.items()}
        shown = drawing(HandoffTrace(10.0, 10.2, trace, trace))
        assert len(msgspec.json.encode(shown)) < 64 << 10, "a drawing is too large"
        assert sum(cell[2] for cell in shown["matrix"]["cells"]) == shown["num_bytes"]


BOUNDS = [check_failures_are_bounded, check_drawing_is_bounded]


@pytest.mark.parametrize("check", BOUNDS)
def test_what_is_kept_and_sent_is_bounded(check: Callable[[], None]):
    check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "name", "check"),
    [
        (metrics, "NUM_FAILURES_MAX", check_failures_are_bounded),
        (metrics, "FAILURE_CHARACTERS_MAX", check_failures_are_bounded),
        (page, "NUM_TRACKS_MAX", check_drawing_is_bounded),
        (page, "NUM_SPANS_MAX", check_drawing_is_bounded),
        (page, "NUM_RANKS_MAX", check_drawing_is_bounded),
    ],
)
def test_a_missing_bound_is_found(
    module: Any, name: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, name, 1 << 30)
    if name == "NUM_SPANS_MAX":
        monkeypatch.setattr(page, "NUM_LANES_MAX", 1 << 30)
    with pytest.raises(AssertionError):
        check()


def crowd(w: World, number: int) -> None:
    """So many more instances, which do not answer."""
    fleet = w.router.fleet
    for index in range(number):
        roster = msgspec.structs.replace(fleet.instances["d0"].roster, instance=f"decode-instance-{index}")
        fleet.instances[roster.instance] = FleetInstance(roster)
        fleet.instances[roster.instance].health.problem = "unreachable" * 500


def test_a_snapshot_of_many_instances_is_small():
    async def body() -> None:
        async with world(1, 1) as w:
            crowd(w, 300)
            async with events(w) as next_event:
                now = (await next_event())[0]
            assert (now["num_instances"], len(now["instances"])) == (302, 256)
            assert now["instances"][0]["state"] != "able", "what needs attention comes first"
            assert len(json.dumps(now)) < 300_000

    run(body)


# ---- in a browser


async def shown(tab: Tab, url: str) -> None:
    """The page, drawn at least once."""
    await tab.goto(url + "/")
    await tab.until("document.documentElement.dataset.ticks > 0")


async def check_drawn(tab: Tab) -> None:
    assert await tab.value("document.documentElement.dataset.error || ''") == ""


KINDS = ["admission", "compute", "copy", "exposed", "prefill", "queue", "step"]


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_page_and_keeps_up(tmp_path: Path):
    async def body() -> None:
        async with world(1, 1) as w, browser(tmp_path) as tab:
            w.p0.unpipelined = ["cost: one group finishes first"]
            w.d0.told = {"pages": {"free": 40, "used": 60, "total": 100}}
            w.d0.faults = [Fault(status=503, code="OUT_OF_PAGES")]
            await w.stream(PROMPT)
            await tab.look(1280)
            await shown(tab, w.router.url)
            await tab.until("document.querySelector('#shown svg')")
            kinds = "[...document.querySelectorAll('#shown rect[data-kind]')].map(e => e.dataset.kind)"
            assert sorted(set(await tab.value(kinds))) == KINDS
            cells = "[...document.querySelectorAll('.matrix [data-bytes]')].map(e => Number(e.dataset.bytes))"
            assert await tab.value(cells) == [4 * 65536 * (1 + target) for target in range(3)] * 2
            await tab.until("document.querySelector('#points circle')")
            assert "one group finishes first" in await tab.value("document.querySelector('#why').innerText")
            assert "OUT_OF_PAGES" in await tab.value("document.querySelector('#failures').innerText")
            rows = "[...document.querySelectorAll('#instances tr')].map(e => e.dataset.instance)"
            assert await tab.value(rows) == ["d0", "p0"]
            await tab.until("document.querySelector('[data-instance=d0]').innerText.includes('60 % of 100')")
            requests = "document.querySelector('#requests').innerText"
            await tab.until(f"{requests}.includes('to the first token')")
            w.d0.gate.clear()
            asking = asyncio.create_task(w.post(PROMPT))
            cells = "[...document.querySelectorAll('#requests td')].map(e => e.innerText)"
            await tab.until(f"{cells}.includes('runs')")
            w.d0.gate.set()
            await asking
            await tab.until(f"{requests}.includes('answered after')")
            # It goes on by itself, and stays with the hand-over that was chosen.
            chosen = "document.querySelector('#overs [aria-pressed=true]').dataset.number"
            await tab.value("document.querySelector('#overs button').click()")
            await w.stream(PROMPT)
            await tab.until("document.querySelectorAll('#overs button').length >= 2")
            assert await tab.value(chosen) == "1"
            await tab.value("document.querySelector('#follow').click()")
            assert await tab.value(chosen) == "2"
            await check_drawn(tab)
            await w.router.close()
            await tab.until("document.documentElement.dataset.state === 'lost'")
            await tab.until("document.querySelector('#news').innerText.includes('old')")
            await check_drawn(tab)

    run(body)


async def check_hostile(tab: Tab, w: World) -> None:
    """Names from clients and instances are text, wherever they are shown."""
    w.p0.unpipelined = [HOSTILE]
    await w.stream(PROMPT)
    other = await w.join("other", Role.BOTH, HOSTILE)
    other.gate.clear()
    await w.join("sick", Role.DECODE)
    w.sick.health = (503, json.dumps({"error": {"message": HOSTILE}}).encode())
    headers = {"X-Request-Id": HOSTILE}
    asking = asyncio.create_task(w.post({"prompt": "x", "model": HOSTILE}, headers=headers))
    await until(lambda: other.seen and not w.is_able("sick"))
    await shown(tab, w.router.url)
    for place in ("#instances", "#requests", "#shown", "#why"):
        script = f"document.querySelector('{place}').textContent.includes('onerror')"
        await tab.until(f"{script} || document.querySelector('{place} img')")
    other.gate.set()
    await asking
    assert await tab.value("document.querySelectorAll('img, b').length") == 0, "a name became markup"
    assert await tab.value("document.title") == "Baton"
    assert await tab.value(f"document.querySelector('#shown').textContent.includes({json.dumps(HOSTILE)})")
    await check_drawn(tab)


@pytest.mark.slow
@needs_browser
def test_hostile_names_stay_text(tmp_path: Path):
    async def body() -> None:
        async with world(1, 1) as w, browser(tmp_path) as tab:
            await check_hostile(tab, w)

    run(body)


@pytest.mark.long
@needs_browser
def test_names_that_become_markup_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = page_text()
    broken = text.replace(
        "document.createTextNode(child)", "document.createRange().createContextualFragment(child)"
    )
    assert broken != text
    monkeypatch.setattr(page, "page_text", lambda: broken)

    async def body() -> None:
        async with world(1, 1) as w, browser(tmp_path) as tab:
            with pytest.raises(AssertionError, match="became markup"):
                await check_hostile(tab, w)

    run(body)


async def check_asks_for_the_key(tab: Tab, url: str) -> None:
    await tab.goto(url + "/")
    enter = "document.querySelector('#secret').value = '{}'; document.querySelector('#gate button').click()"
    is_asking = "document.documentElement.dataset.state === 'key' && !document.querySelector('#gate').hidden"
    await tab.until(is_asking)
    assert await tab.value("document.querySelector('main').hidden")
    await tab.value(enter.format("key-of-a-stranger"))
    await tab.until("document.querySelector('#refused').innerText.includes('not known')")
    await tab.value(enter.format(KEY))
    await tab.until("document.documentElement.dataset.state === 'live'")
    assert await tab.value("document.querySelectorAll('#instances tr').length") == 2
    stores = (
        "JSON.stringify([localStorage, document.cookie, location.href, document.documentElement.outerHTML])"
    )
    assert KEY not in await tab.value(stores), "the key is kept"
    assert await tab.value("Object.values(sessionStorage)") == [KEY]
    await tab.leave("document.querySelector('#forget').click()")
    await tab.until(is_asking)
    assert await tab.value("sessionStorage.length") == 0


@pytest.mark.slow
@needs_browser
def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(tmp_path: Path):
    async def body() -> None:
        async with world() as w, locked(w) as router, browser(tmp_path) as tab:
            await check_asks_for_the_key(tab, router.url)

    run(body)


@pytest.mark.long
@needs_browser
def test_a_key_that_is_kept_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = page_text().replace("sessionStorage", "localStorage")
    monkeypatch.setattr(page, "page_text", lambda: broken)

    async def body() -> None:
        async with world() as w, locked(w) as router, browser(tmp_path) as tab:
            with pytest.raises(AssertionError, match="the key is kept"):
                await check_asks_for_the_key(tab, router.url)

    run(body)


async def check_fits(tab: Tab, w: World) -> None:
    """Light, dark and narrow, with a hundred instances that have much to say."""
    crowd(w, 100)
    w.p0.ranks = (4, 12)
    w.d0.faults = [Fault(status=503, code="OUT_OF_PAGES")]
    await w.stream(PROMPT)
    papers = []
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light")):
        await tab.look(width, scheme)
        await shown(tab, w.router.url)
        await tab.until("document.querySelector('#shown svg')")
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        papers.append(await tab.value("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] == papers[2] != papers[1]
    assert await tab.value("document.querySelectorAll('#instances tr').length") == 102
    await check_drawn(tab)


@pytest.mark.slow
@needs_browser
def test_the_page_fits_any_screen(tmp_path: Path):
    async def body() -> None:
        async with world(1, 1) as w, browser(tmp_path) as tab:
            await check_fits(tab, w)

    run(body)


@pytest.mark.long
@needs_browser
def test_a_page_that_is_too_wide_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = page_text().replace("min-width: 0; }\nbutton, input", "min-width: 700px; }\nbutton, input")
    monkeypatch.setattr(page, "page_text", lambda: broken)

    async def body() -> None:
        async with world(1, 1) as w, browser(tmp_path) as tab:
            with pytest.raises(AssertionError, match="sideways"):
                await check_fits(tab, w)

    run(body)
