"""The page in Chromium, over announcements of made-up machines: its sentences and figures, and what strangers and accidents do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.options.node_file import LendingOptions
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.http_server import serving_http
from swarmnode.gateway.page.page import Page
from swarmnode.lending.control import ControlServer
from swarmnode.net.identity import Identity
from swarmnode.node.node import Node
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from swarmnode.swarm.records.announcement import VERSION, Announcement, State
from tests.browser.chromium import BrowserPage, Chromium, find_chromium
from tests.browser.views import VIEWS
from tests.contrib.script import CONTRIB, load

Crowd = load(CONTRIB / "benchmarks" / "page.py").Crowd
UNITS = 48
PHONE, WIDE = (390, 844), (1280, 800)
MARKUP = "<img src=x onerror=alert(1)>"
HEAD = "document.querySelector('#readiness').textContent"
SCROLLERS = """[...document.querySelectorAll('main *')].filter((each) => each.checkVisibility()
  && ['auto', 'scroll'].includes(getComputedStyle(each).overflowY) && each.scrollHeight > each.clientHeight + 1
  && each.tagName !== 'TEXTAREA').map((each) => each.id || each.className)"""
SETTLE = "new Promise((resolve) => setTimeout(resolve, 700))"
QUICK_S = 2.0  # a task of the page that takes longer is seen

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no chromium here: apt-get install chromium")


def machine(
    number: int, span: tuple[int, int], host: str = "", state: State = State.READY, name: str = ""
) -> Announcement:
    """An announcement of a machine with an address of its own, or at `host`."""
    now = time.time()
    peer = Identity(number.to_bytes(32, "big")).peer_id
    address = f"/ip4/{host or f'10.0.{number // 250}.{number % 250 + 1}'}/tcp/{4000 + number}"
    return Announcement(
        *(VERSION, bytes(32), peer, 1, now, now + 600, now - 5000, state),
        span=span,
        name=name or f"node-{number}",
        device="CPU",
        decode_units_per_s=480.0,
        memory_bytes=1 << 30,
        addresses=(address,),
    )


def crowd_of(folder: Path, *machines: Announcement) -> Any:
    """A client of a swarm of these machines."""
    crowd = Crowd(folder, 0, 0)
    crowd._peers = {each.peer: each for each in machines}
    return crowd


@contextlib.asynccontextmanager
async def opened(folder: Path, crowd: Any, *, token: bool = True) -> AsyncIterator[Callable[..., Any]]:
    """A browser at the page of `crowd`; yields `do(function of the page)`, which runs in a thread."""
    gateway = Gateway({"crowd": crowd})
    page = Page(gateway, folder / "home")
    program = find_chromium()
    assert program is not None
    async with page.watching(), serving_http(build_app(gateway, page), "127.0.0.1", 0) as port:
        address = f"http://127.0.0.1:{port}/" + (f"#owner={page.owner.token}" if token else "")
        browser = await asyncio.to_thread(Chromium, program, folder / "profile")
        try:
            tab = await asyncio.to_thread(browser.open, address)
            await asyncio.to_thread(tab.wait_until, "document.getElementById('model')?.value")
            yield lambda work: asyncio.to_thread(work, tab)
            assert await asyncio.to_thread(tab.complaints) == []
        finally:
            await asyncio.to_thread(browser.__exit__, None, None, None)


ONE, FRONT, BACK = machine(1, (0, UNITS)), machine(1, (0, 24)), machine(2, (24, UNITS))
HEADS: list[tuple[list[Announcement], str]] = [
    ([ONE], "Ready: one machine holds all of crowd, about 10 tokens/s"),
    ([machine(1, (0, 24), "10.0.0.9"), machine(2, (24, UNITS), "10.0.0.9")], "Ready: one machine holds all of crowd"),
    ([FRONT, BACK], "Ready: 2 machines together hold all of crowd, about 10 tokens/s"),
    ([ONE, machine(2, (0, UNITS))], "Ready: 2 machines each hold all of crowd, about 10 tokens/s"),
    ([FRONT, machine(2, (30, UNITS))], "Not ready: layers 24–29 of crowd are missing"),
    ([], "Not ready: no machine holds crowd yet"),
    ([machine(1, (0, UNITS), state=State.LOADING)], "Getting ready: node-1 (layers 0–47) is loading crowd"),
    ([FRONT, machine(2, (24, UNITS), state=State.LOADING)], "Getting ready: node-2 (layers 24–47) is loading crowd"),
]


async def test_the_head_says_in_plain_words_what_the_swarm_can_do(tmp_path: Path) -> None:
    crowd = crowd_of(tmp_path)
    async with opened(tmp_path, crowd) as do:
        for machines, head in HEADS:
            crowd._peers = {each.peer: each for each in machines}
            crowd.revision += 1
            await do(lambda page, head=head: page.wait_until(f"{HEAD}.startsWith({json.dumps(head)})"))
            texts = {view: await do(lambda page, view=view: shown_text(page, view)) for view in ("swarm", "chat")}
            assert head in texts["swarm"] and "unit" not in "".join(texts.values()).lower()
            if head.startswith("Ready"):
                several = "2 machines write each sentence together" in texts["chat"]
                assert several == ("together" in head) and ("One machine writes" in texts["chat"]) == (not several)
            if head.startswith("Not ready"):
                assert "“swarmnode run crowd”" in texts["swarm"], "it says what helps"


def shown_text(page: BrowserPage, view: str) -> str:
    """All text of a view."""
    page.evaluate(f"location.hash = '#{view}'")
    page.wait_until(f"!document.getElementById('view-{view}').hidden")
    page.evaluate(SETTLE)
    return str(page.evaluate("document.body.innerText")).replace("\xa0", " ")


async def test_figures_and_dates_are_those_of_the_readers_country(tmp_path: Path) -> None:
    crowd = crowd_of(tmp_path, machine(1, (0, UNITS)))
    async with opened(tmp_path, crowd) as do:
        until = "import('/page/format.js').then((format) => format.until(4e9))"
        assert "1.07 GB lent" in await do(lambda page: shown_text(page, "swarm"))
        assert await do(lambda page: page.evaluate(until)) == "until Oct 2, 2096"
        await do(lambda page: page.call("Emulation.setLocaleOverride", {"locale": "de-DE"}))
        await do(lambda page: page.call("Page.reload"))
        await do(lambda page: page.wait_until("document.getElementById('model')?.value"))
        assert "1,07 GB lent" in await do(lambda page: shown_text(page, "swarm"))
        assert await do(lambda page: page.evaluate(until)) == "until 02.10.2096"


async def test_a_crowd_with_names_of_markup_scrolls_with_the_page_and_stays_quick(tmp_path: Path) -> None:
    crowd = crowd_of(tmp_path, *(machine(number, (0, 12 + number % 37), name=MARKUP) for number in range(1, 201)))
    answer = f"{MARKUP}\n" + "long" * 500 + "\n\n" + "- *point* `code` [x](javascript:alert(1))\n" * 180
    talk = [{"id": "1", "messages": [{"role": "user", "content": MARKUP}, {"role": "assistant", "content": answer}]}]
    assert len(answer) > 9500
    async with opened(tmp_path, crowd) as do:
        store = f"localStorage.setItem('swarmnode.conversations', {json.dumps(json.dumps(talk))})"
        await do(lambda page: page.evaluate(store))
        await do(lambda page: page.call("Page.reload"))
        await do(lambda page: page.wait_until("document.querySelector('.message.assistant')"))
        for size in (PHONE, WIDE):
            await do(lambda page, size=size: page.resize(*size))
            for view in VIEWS:
                await do(lambda page, view=view: shown_text(page, view))
                assert await do(lambda page: page.evaluate("document.documentElement.scrollWidth <= innerWidth")), view
                if size == PHONE:
                    assert await do(lambda page: page.evaluate(SCROLLERS)) == [], view
        await do(lambda page: page.resize(*PHONE))
        await do(lambda page: page.evaluate("location.hash = '#swarm'"))
        await do(lambda page: page.wait_until("document.querySelector('#machines .machine')"))
        assert await do(lambda page: page.evaluate("document.querySelectorAll('#machines .machine').length")) <= 12
        await do(lambda page: page.evaluate("document.querySelector('#machines .more').click()"))
        await do(
            lambda page: page.evaluate("document.querySelector('#machines .sheet').lastElementChild.scrollIntoView()")
        )
        await do(lambda page: page.evaluate(SETTLE))
        bottom = "document.querySelector('#machines .sheet').getBoundingClientRect().bottom"
        await do(lambda page: page.evaluate(f"scrollBy(0, {bottom} - innerHeight)"))
        await do(lambda page: page.wait_until("document.querySelector('#machines [aria-posinset=\"200\"]')"))
        assert await do(lambda page: page.evaluate("document.querySelectorAll('#machines .machine').length")) < 30
        name = await do(lambda page: page.evaluate("document.querySelector('#machines h3 span').textContent"))
        assert name == MARKUP
        assert await do(lambda page: page.evaluate("document.querySelectorAll('main img, main script').length")) == 0
        links = "[...document.querySelectorAll('main a')].filter((each) => each.protocol === 'javascript:').length"
        assert await do(lambda page: page.evaluate(links)) == 0


HARD = ("*" * 10_000, "[" * 10_000, "`" * 10_000, "> " * 5_000, "| a " * 2_500, "_a " * 3_333, "- \n" * 5_000)


async def test_no_answer_takes_long_to_show(tmp_path: Path) -> None:
    async with opened(tmp_path, crowd_of(tmp_path, ONE)) as do:
        for text in HARD:
            timed = f"""import('/page/markdown.js').then(({{markdown}}) => {{
                const began = performance.now();
                markdown({json.dumps(text)});
                return (performance.now() - began) / 1000;
            }})"""
            assert await do(lambda page, timed=timed: page.evaluate(timed)) < QUICK_S, text[:10]


async def test_a_wrong_token_is_asked_for_again(tmp_path: Path) -> None:
    async with opened(tmp_path, crowd_of(tmp_path, machine(1, (0, UNITS))), token=False) as do:
        await do(lambda page: page.evaluate("location.hash = '#machine'"))
        for _ in range(2):
            await do(lambda page: page.wait_until("document.querySelector('#owner')"))
            await do(lambda page: page.type_and_enter("#owner", "guessed"))
            said = await do(lambda page: page.wait_until("document.querySelector('#machine .error')?.textContent"))
            assert "only the owner of this machine" in said
        token = (tmp_path / "home" / "page-token").read_text()
        await do(lambda page: page.type_and_enter("#owner", f"http://127.0.0.1:8000/#owner={token}"))
        await do(lambda page: page.wait_until("document.querySelector('#machine .empty')?.checkVisibility()"))


EDIT = "[...document.querySelectorAll('.node button')].find((each) => each.textContent === 'Edit')"
SAVE = "document.querySelector('.options button[type=submit]').click()"


async def test_rules_are_edited_and_a_node_that_stops_goes_from_the_page(tmp_path: Path) -> None:
    crowd = crowd_of(tmp_path, machine(1, (0, UNITS)))
    home = tmp_path / "home"
    node = Node(crowd.swarm, NodeConfig(HostConfig(home)))
    control = ControlServer(node.lending, asyncio.Event(), node.describe, node.why, LendingOptions(home, node))

    def put(name: str, value: str) -> Callable[[BrowserPage], Any]:
        return lambda page: page.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")

    async with opened(tmp_path, crowd) as do:
        async with control.listening(home, "crowd"):
            await do(lambda page: page.evaluate("location.hash = '#machine'"))
            await do(lambda page: page.wait_until(f"{EDIT} !== undefined"))
            await do(lambda page: page.evaluate(f"{EDIT}.click()"))
            await do(lambda page: page.wait_until("document.querySelectorAll('.options input').length > 5"))
            await do(put("hours", "25:00-07:00"))
            await do(lambda page: page.evaluate(SAVE))
            wrong = await do(lambda page: page.wait_until("document.querySelector('.options .error').textContent"))
            assert wrong == "hours 25:00-07:00: write the hours as 22:00-07:00", "the command line's sentence"
            assert await do(lambda page: page.evaluate("document.activeElement.name")) == "hours"
            assert not (home / "rules.toml").exists() and not node.lending.rules.any
            await do(put("hours", "22:00-07:00"))
            await do(put("exclusive", f"blender, {MARKUP}"))
            await do(lambda page: page.evaluate(SAVE))
            said = await do(
                lambda page: page.wait_until("document.querySelector('.options [role=status]').textContent")
            )
            assert said == f"Kept in {home / 'rules.toml'} for later starts."
            assert str(node.lending.rules.hours) == "22:00-07:00" and node.lending.rules.exclusive == {
                "blender",
                MARKUP,
            }
            await do(
                lambda page: page.wait_until(
                    "document.querySelector('.node ul').textContent.includes('at 22:00-07:00')"
                )
            )
            assert "hours: 22:00-07:00" in node.why()["decisions"][0]["facts"], "`swarmnode why` knows it"
        await do(put("hours", ""))
        await do(lambda page: page.evaluate(SAVE))
        gone = "document.querySelector('.options .error')?.textContent || document.querySelector('#machine .empty')?.innerText"
        assert "swarmnode run" in await do(lambda page: page.wait_until(gone))
        await do(lambda page: page.wait_until("!document.querySelector('.node')"))
