"""The page in a real headless browser: what it shows is what /metrics says, and lanes are drawn as they were sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from core.lanes import PLAN
from service.client import SlipstreamClient
from service.page import feed
from tests.contract.page.browser import INSTALL, Tab, browser, program
from tests.contract.page.pixels import colour, contrast, misdrawn, picture, shown_event
from tests.contract.page.watching import Serving, serve_bundled, serve_emulated, watched
from tests.support.repository import ROOT
from tests.support.until import until

pytestmark = [pytest.mark.tools, pytest.mark.skipif(program() is None, reason=INSTALL)]

ARTEFACTS = ROOT / "build" / "artefacts"
ROWS, PAGES, STREAMS = 4, 256, 6
TEXT_CONTRAST = 4.5
WORDS = [
    *(("ink", "card"), ("ink", "paper"), ("quiet", "card"), ("quiet", "paper"), ("accent", "card"), ("quiet", "track")),
    *(
        ("good", "good-back"),
        ("warn", "warn-back"),
        ("bad", "bad-back"),
        ("on-device", "device"),
        ("on-device", "device-odd"),
        ("on-gap", "gap"),
    ),
]
"""Text and what it stands on."""


@asynccontextmanager
async def load(client: SlipstreamClient, seed: int) -> AsyncIterator[None]:
    """Six streams for four rows, until the end; a new one for each that ends."""
    rng = random.Random(seed)

    async def ask(number: int) -> None:
        for turn in range(1000):
            prompt = [rng.randrange(3, 200) for _ in range(rng.randint(8, 60))]
            name = f"chat-{number}-{turn:03d}"
            await client.complete(prompt, max_tokens=rng.randint(100, 300), ignore_eos=True, request_id=name)

    tasks = [asyncio.create_task(ask(number)) for number in range(STREAMS)]
    try:
        yield
        assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def number(tab: Tab, place: str) -> float:
    """The figure in the element of this id."""
    return float((await tab.text(f"#{place}")).replace(",", "").removesuffix(" %"))


async def figures(tab: Tab) -> dict[str, float]:
    """The totals that the page shows, all of one event."""
    places = json.dumps(["step", "generated", "prompted", "running", "waiting"])
    told = await tab.run(f"{places}.map((id) => document.getElementById(id).textContent.replaceAll(',', ''))")
    return dict(zip(json.loads(places), map(float, told), strict=True))


async def agrees_with_metrics(tab: Tab, server: Serving) -> None:
    """Counters lie between those of two scrapes, capacities are equal, and the batch is full."""
    before = await server.metrics()
    newer = (
        f"Number(document.getElementById('step').textContent.replaceAll(',', '')) > {before['slipstream_steps_total']}"
    )
    await tab.until(newer)
    shown = await figures(tab)
    after = await server.metrics()
    for place, metric in (("step", "steps"), ("generated", "generation_tokens"), ("prompted", "prompt_tokens")):
        name = f"slipstream_{metric}_total"
        assert before[name] <= shown[place] <= after[name], (place, shown)
    assert 0 < shown["running"] <= ROWS and shown["running"] + shown["waiting"] <= STREAMS
    pools = await tab.run(
        "Object.fromEntries([...document.querySelectorAll('[role=meter]')].map((meter) =>"
        " [meter.parentElement.dataset.pool, [meter.ariaValueMax, meter.ariaValueText]]))"
    )
    for name, most in (("req", ROWS), ("kv_page", PAGES)):
        capacity = after[f'slipstream_pool_capacity{{pool="{name}"}}']
        assert float(pools[name][0]) == capacity == most and pools[name][1].endswith(f"of {most}"), pools


async def lanes_are_drawn(tab: Tab) -> None:
    """Hold the page still, and compare its canvas with the event that it shows; then let it go on."""
    await tab.run("document.getElementById('pause').click()")
    event = shown_event(tab, int(await number(tab, "step")))
    for steps in (8, 32):
        await tab.run(f"document.querySelector('input[name=steps][value=\"{steps}\"]').click()")
        seen = await picture(tab)
        looked, wrong = misdrawn(seen, event, steps)
        assert not wrong and looked >= steps // 2, (looked, wrong)
        lanes = {lane: seen.shares(lane) for lane in ("scheduler", "device", "copy")}
        phases = sum(lanes["scheduler"][ink] for ink in ("take", "plan", "tell"))
        assert phases > 0 and lanes["scheduler"]["device"] == lanes["scheduler"]["gap"] == 0, lanes
        assert lanes["device"]["device"] > 0.2 and not any(
            lanes["device"][ink] for ink in ("take", "plan", "tell", "copy")
        )
        assert lanes["copy"]["copy"] > 0 and lanes["copy"]["device"] == 0, lanes
        assert abs(lanes["device"]["gap"] - await number(tab, "view-idle") / 100) < 0.06, lanes
    await tab.run("document.getElementById('pause').click()")


async def reads_well(tab: Tab) -> None:
    """Nothing is cut off at the side, and every text stands out from what it stands on."""
    assert await tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    names = json.dumps([name for pair in WORDS for name in pair])
    values = await tab.run(
        f"{names}.map((name) => getComputedStyle(document.documentElement).getPropertyValue(`--${{name}}`))"
    )
    inks = iter(map(colour, map(str.strip, values)))
    for text, back in WORDS:
        assert (ratio := contrast(next(inks), next(inks))) >= TEXT_CONTRAST, (text, back, ratio)


async def has_names(tab: Tab) -> None:
    """What can be operated or read out has a role and a name."""
    await tab.ask("Accessibility.enable")
    nodes = (await tab.ask("Accessibility.getFullAXTree"))["nodes"]
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if node.get("name", {}).get("value")]
    for role, name in (
        *(
            ("heading", "slipstream"),
            ("heading", "Pools"),
            ("button", "Pause"),
            ("radio", "32"),
            ("link", "All metrics"),
        ),
        *(("meter", "KV pages"), ("meter", "Request rows"), ("columnheader", "Output"), ("region", "Streams")),
    ):
        assert (role, name) in named, (role, name, named)
    assert any(role in ("image", "img") and "device idle" in name for role, name in named), named


async def keys_reach_everything(tab: Tab) -> None:
    """Tab goes through all that can be operated; Enter pauses, arrow keys walk over the steps, Escape chooses none."""
    visited = []
    for _ in range(5):
        await tab.press("Tab")
        visited.append(
            await tab.run("((now) => now.id || now.name || now.className || now.tagName)(document.activeElement)")
        )
        if visited[-1] == "pause":
            await tab.press("Enter")
            assert await tab.run("paused")
        if visited[-1] == "lanes":
            await tab.press("ArrowLeft")
            assert (await tab.text("#readout")).startswith("Step ")
            # The outline of a chosen step would lie over steps that are few points wide when pixels are looked at.
            await tab.press("Escape")
            assert not await tab.run("selected")
    assert visited == ["pause", "steps", "lanes", "scroll", "A"]
    await tab.run("pause() || document.activeElement.blur()")


async def test_the_page_shows_what_metrics_say_and_the_lanes_as_they_were(tmp_path: Path, seed: int) -> None:
    settings = {"max_running_requests": ROWS, "max_total_tokens": PAGES * 16, "page_size": 16, "native": "off"}
    async with serve_bundled(**settings) as serving, load(serving.client, seed), browser(tmp_path) as chromium:
        tab = await chromium.open(1200, 900)
        await tab.visit(f"http://127.0.0.1:{serving.port}/ui")
        await tab.until("document.getElementById('link').textContent === 'live' && samples.length > 4")
        await tab.until("view()?.steps.length === 32")
        await agrees_with_metrics(tab, serving)
        await streams_move(tab)
        await lanes_are_drawn(tab)
        await has_names(tab)
        await reads_well(tab)
        await tab.shoot(ARTEFACTS / "page-light.png")
        await keys_reach_everything(tab)
        await tab.colours(dark=True)
        await tab.until("inks.card !== '#ffffff'")
        await lanes_are_drawn(tab)
        await reads_well(tab)
        await tab.shoot(ARTEFACTS / "page-dark.png")
        await tab.resize(390, 844)
        await tab.until("document.getElementById('lanes').clientWidth < 390")
        await lanes_are_drawn(tab)
        await reads_well(tab)
        await tab.shoot(ARTEFACTS / "page-phone.png")
        assert tab.complaints == []


async def streams_move(tab: Tab) -> None:
    """Every stream has its line, with the id that its client gave, and what is decoded grows."""
    lines = "[...document.querySelectorAll('#streams tbody tr')]"
    rows = f"{lines}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    await tab.until(f"{rows}.filter((row) => row[1] === 'decode').length === {ROWS}")
    before = {row[0]: row for row in await tab.run(rows)}
    assert len(before) <= STREAMS and all(name.startswith("chat-") for name in before)
    tokens = json.dumps({name: int(row[3]) for name, row in before.items()})
    await tab.until(f"{rows}.some((row) => ({tokens})[row[0]] < Number(row[3]))")


async def test_the_page_says_when_it_is_refused_and_comes_back_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with browser(tmp_path) as chromium, AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve_emulated())
        held = await stack.enter_async_context(AsyncExitStack())
        for _ in range(feed.MAX_WATCHERS):
            await held.enter_async_context(watched(first.port))
        tab = await chromium.open(1000, 800)
        await tab.visit(f"http://127.0.0.1:{first.port}/ui")
        await tab.until("document.getElementById('link').textContent.startsWith('as many pages')")
        await held.aclose()
        await tab.until("document.getElementById('link').textContent === 'live'")
        monkeypatch.setattr(feed, "PERIOD_SECONDS", 60.0)
        # Every look makes it half a second later.
        await tab.until("(heardAt -= 500) && document.getElementById('link').textContent.startsWith('no news')")
        await first.server.close(grace=0)
        await tab.until("document.getElementById('link').textContent === 'connection lost, trying again'")
        monkeypatch.undo()
        second = await stack.enter_async_context(serve_emulated(metrics_port=first.port))
        await tab.until("document.getElementById('link').textContent === 'live'")
        await tab.run("document.dispatchEvent(new Event('visibilitychange'))")
        await tab.until("document.getElementById('link').textContent === 'live'")
        assert second.engine.lanes.recording is not None
        await tab.visit("about:blank")
        await until(lambda: second.engine.lanes.recording is None)


async def drafts_shown(tab: Tab) -> list[str]:
    """What the page says of drafts, as far as it is to be seen."""
    shown = "[...document.querySelectorAll('.drafts')].filter((each) => each.checkVisibility())"
    found: list[str] = await tab.run(f"{shown}.map((each) => each.lastElementChild.textContent)")
    return found


async def test_gaps_and_names_are_shown_as_they_came(tmp_path: Path) -> None:
    """An event that no server sends: eight steps with as much idle time between them, and names that are markup."""
    async with browser(tmp_path) as chromium, serve_emulated() as serving:
        tab = await chromium.open(1000, 800)
        await tab.visit(f"http://127.0.0.1:{serving.port}/ui")
        await tab.until("document.getElementById('link').textContent === 'live'")
        await tab.run("document.getElementById('pause').click()")
        event = json.loads(tab.events[-1])
        hostile = "<img src=x onerror='document.title=1'>"
        event["served"]["model"] = event["pools"][0]["name"] = hostile
        event["streams"] = {"age": 0, "total": 1, "rows": [[hostile, hostile, 1, 1, 0.5, hostile]]}
        steps = [number for step in range(8) for number in (2000 * step, 1000, step + 1, 3)]
        work = [number for step in range(8) for number in (2000 * step + 500, 1000, PLAN, 0)]
        assert event["drafts"] is None and await drafts_shown(tab) == []
        event["drafts"] = {"rows": 4, "tokens": 1900, "accepted": 7}
        event["timeline"] = {"span": 15000, "device": steps, "scheduler": work, "copy": []}
        await tab.run(f"show({json.dumps(event)})")
        assert await tab.run("document.images.length") == 0
        for place in ("#served", "#streams", "#pools"):
            assert hostile in await tab.text(place)
        assert await tab.text("#shown") == "8 in 15 ms" and await tab.text("#median") == "1 ms"
        assert await tab.text("#view-idle") == "47 %" and await tab.text("#beside") == "53 %"
        assert await drafts_shown(tab) == ["1,900", "0.4 %", "2.75"]
        seen = await picture(tab)
        shares = seen.shares("device")
        assert abs(shares["gap"] - 7 / 15) < 0.01 and abs(shares["device"] - 8 / 15) < 0.01, shares
        assert misdrawn(seen, event, 8) == (16, [])
        assert tab.complaints == []
