"""Smoothness of the page of a large swarm: frames in real Chromium while many of its machines change.

    python contrib/benchmarks/page.py

The page and its endpoints are the real ones; the swarm behind them is announcements alone. Some of them change before each
update. Its view is opened, left alone, scrolled, and searched. Prints JSON: the time from one frame to the next.
Also the CPU time of the longest task of the browser's main thread (a trace of `toplevel`), which depends on no other work on this
machine. For the gateway, the time that it looks at the swarm for an update. Needs Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from swarmnode.codec.body import HopSpec
from swarmnode.errors import UsageError
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.http_server import serving_http
from swarmnode.gateway.page import page as feed
from swarmnode.gateway.page.page import Page
from swarmnode.net.identity import Identity
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.swarm_status import picture_of
from swarmnode.serving.client.generation import Generation
from swarmnode.swarm.records.announcement import VERSION, Announcement, State
from swarmnode.swarm.records.manifest import Manifest, ModelInfo
from swarmnode.swarm.storage.content import FileContent
from swarmnode.swarm.storage.swarmfile import Swarm
from tests.browser.chromium import BrowserPage, Chromium, find_chromium

UNITS, WIDTHS, HOPS = 48, (4, 8, 8, 12), 6
TOKEN_S = 0.05
DEVICES = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060", "Apple M3 Max", "CPU, 16 cores")
WATCH = """
window.framesMs = [];
let last = performance.now();
const look = (now) => {
  window.framesMs.push(now - last);
  last = now;
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
SCROLL = """
document.querySelector("#machines .more")?.click();
let down = 40;
const go = () => {
  const before = scrollY;
  scrollBy(0, down);
  if (scrollY === before) down = -down;
  requestAnimationFrame(go);
};
go();
"""
SEARCH = """
const find = document.getElementById("find");
const words = ["", "n", "no", "nod", "node", "node-1", "rtx", "rtx 4090"];
let typed = 0;
setInterval(() => {
  find.value = words[typed++ % words.length];
  find.dispatchEvent(new Event("input"));
}, 250);
"""


class Crowd:
    """Stand-in for a client of a swarm of `machines` made-up machines, with what the page asks of it."""

    cached_positions = cached_defaults = None

    def __init__(self, folder: Path, machines: int, sessions: int) -> None:
        self._dice = random.Random(0)
        model = ModelInfo("llama", UNITS, 4096)
        manifest = Manifest("crowd", model, (FileContent("model.safetensors", 140 << 30, b""),), 0)
        self.swarm = Swarm(bytes(32), "crowd", manifest=manifest)
        self.manifest = manifest
        self.revision = 0
        self.looked_s: list[float] = []
        self._standing = Findings(folder / "standing", time.time)
        self._peers = {peer.peer: peer for peer in map(self._machine, range(machines))}
        ids = list(self._peers)
        self.running = {
            f"{number:032x}": Generation(
                ids=[0],
                first_token_s=TOKEN_S,
                seconds=TOKEN_S,
                route=tuple(HopSpec(self._dice.choice(ids), 8 * hop, 8 * hop + 8) for hop in range(HOPS)),
            )
            for number in range(sessions)
        }

    def _machine(self, number: int) -> Announcement:
        now, dice = time.time(), self._dice
        start = dice.randrange(UNITS - 3)
        peer = Identity(number.to_bytes(32, "big")).peer_id
        return Announcement(
            *(VERSION, bytes(32), peer, 1, now, now + 600, now - dice.randrange(100_000), State.READY),
            span=(start, min(UNITS, start + dice.choice(WIDTHS))),
            name=f"node-{number}",
            device=dice.choice(DEVICES),
            decode_units_per_s=dice.uniform(50, 5000),
            cache_tokens_free=65536,
            memory_bytes=24 << 30,
            up_bps=4.1e7,
            down_bps=2.2e8,
            number_format="bfloat16",
        )

    def change(self, changed: int) -> None:
        """Change the announcements of `changed` machines, let one machine drain or come back, and advance every session by
        a token."""
        dice = self._dice
        for peer in dice.sample(list(self._peers), changed):
            news = {"sessions": dice.randrange(20), "cache_tokens_free": dice.randrange(1 << 16)}
            self._peers[peer] = msgspec.structs.replace(self._peers[peer], **news)
        turned = dice.choice(list(self._peers))
        state = State.DRAINING if self._peers[turned].state == State.READY else State.READY
        self._peers[turned] = msgspec.structs.replace(self._peers[turned], state=state)
        for session in self.running.values():
            session.ids.append(0)
            session.seconds += TOKEN_S
        self.revision += 1

    def status(self) -> dict[str, Any]:
        """Return the picture of the made-up swarm, and record the seconds that this took."""
        began_s = time.perf_counter()
        try:
            return picture_of(self.swarm, self._peers, self._standing)
        finally:
            self.looked_s.append(time.perf_counter() - began_s)

    def links(self, most: int) -> dict[str, Any]:
        """Return made-up links of `most` machines, in the form of `SwarmClient.links`."""
        dice = np.random.default_rng(self.revision)
        return {
            "peers": sorted(self._peers, key=lambda peer: (self._peers[peer].span, peer))[:most],
            "rtt_s": dice.uniform(0.001, 0.3, (most, most)).tolist(),
            "measured": dice.integers(0, 2, (most, most)).astype(bool).tolist(),
            "bandwidth_bps": dice.uniform(1e6, 1e9, (most, most)).tolist(),
        }

    def as_owner(self) -> Any:
        """Raise UsageError, as SwarmClient does in a swarm without an owner."""
        raise UsageError("this swarm has no owner")

    def readings(self) -> tuple[()]:
        """Return no readings."""
        return ()


def watch(program: str, folder: Path, address: str, seconds: float) -> dict[str, Any]:
    """Measure a browser from the moment at which it opens the page: frames and tasks per phase, and its complaints."""
    told: dict[str, Any] = {}
    with Chromium(program, folder) as browser:
        page = browser.open("about:blank")
        page.resize(1280, 800)
        page.call("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        with traced(browser, told, "loaded"):
            page.call("Page.navigate", {"url": address})
            page.wait_until("document.getElementById('model')?.value")
            told["loaded"] = frames(page, 1.0)
        with traced(browser, told, "opened"):
            page.evaluate("location.hash = '#swarm'")
            page.wait_until("document.querySelectorAll('#machines .machine').length > 4")
            page.wait_until("document.querySelectorAll('#links td').length > 4")
            told["opened"] = frames(page, 1.0)
        for name, script in {"left alone": "", "scrolled": SCROLL, "scrolled and searched": SEARCH}.items():
            with traced(browser, told, name):
                page.evaluate(script)
                told[name] = frames(page, seconds)
        told["complaints"] = page.complaints()
    return told


def frames(page: BrowserPage, seconds: float) -> dict[str, Any]:
    """Return figures of the frames since the last call, after waiting `seconds`."""
    page.evaluate(f"new Promise((resolve) => setTimeout(resolve, {1000 * seconds}))")
    intervals_ms = page.evaluate("window.framesMs.splice(0)")
    return {
        "frames": len(intervals_ms),
        "median_ms": round(statistics.median(intervals_ms), 1),
        "longest_ms": round(max(intervals_ms), 1),
        "over_50_ms": sum(interval_ms > 50 for interval_ms in intervals_ms),
    }


@contextlib.contextmanager
def traced(browser: Chromium, told: dict[str, Any], name: str) -> Iterator[None]:
    """Trace a block, and set `longest_task_cpu_ms` of `told[name]` to the CPU time of the page's longest main-thread task."""
    config = {"includedCategories": ["toplevel"], "excludedCategories": ["*"]}
    browser.call("Tracing.start", {"traceConfig": config, "transferMode": "ReportEvents"})
    yield
    browser.call("Tracing.end")
    events: list[dict[str, Any]] = []
    is_over = False
    while not is_over:
        browser.call("Browser.getVersion")  # all events before its answer are in `browser.events`
        events += [each for event in taken(browser, "Tracing.dataCollected") for each in event["params"]["value"]]
        is_over = bool(taken(browser, "Tracing.tracingComplete"))
    named = [event for event in events if event["name"] == "thread_name"]
    main = {(each["pid"], each["tid"]) for each in named if each["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if (event["pid"], event["tid"]) in main and event["name"].endswith("RunTask")]
    told[name]["longest_task_cpu_ms"] = max((task.get("tdur", 0) for task in tasks), default=0) / 1000


def taken(browser: Chromium, method: str) -> list[dict[str, Any]]:
    """Remove the browser's events of the kind `method`, and return them."""
    found = [event for event in browser.events if event.get("method") == method]
    browser.events[:] = [event for event in browser.events if event.get("method") != method]
    return found


async def measure(program: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the page of a changing swarm, watch it in a browser, and return the figures."""
    feed.SWARM_PERIOD_S = 1 / options.updates_per_s
    crowd = Crowd(folder, options.machines, options.sessions)
    gateway = Gateway({"crowd": crowd})  # type: ignore[dict-item]
    page = Page(gateway, folder / "page")

    async def change() -> None:
        while True:
            await asyncio.sleep(1 / options.updates_per_s)
            crowd.change(options.changed)

    async with page.watching(), serving_http(build_app(gateway, page), "127.0.0.1", 0) as port:
        changing = asyncio.ensure_future(change())
        try:
            address = f"http://127.0.0.1:{port}/#owner={page.owner.token}"
            told = await asyncio.to_thread(watch, program, folder / "profile", address, options.seconds)
        finally:
            changing.cancel()
    looked_ms = sorted(1000 * each for each in crowd.looked_s)
    return {
        **told,
        "gateway_looks_ms": {"median": round(statistics.median(looked_ms), 1), "longest": round(looked_ms[-1], 1)},
        "updates": crowd.revision,
    }


def main(options: argparse.Namespace) -> None:
    """Measure the page and print the results. Raises SystemExit if Chromium is not installed."""
    program = find_chromium()
    if program is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(program, Path(folder), options)), indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--updates-per-s", type=float, default=10.0)
    parser.add_argument("--changed", type=int, default=50, help="machines, for each update")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    main(parser.parse_args())
