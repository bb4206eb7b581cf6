"""What `status --watch` tells beside its table."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from swarmnode.cli.use.status import KEPT, SwarmNews, changes, reroutes_here, slowest_links, watched
from swarmnode.lending.control import GATEWAYS, CommandSocket


def picture(*peers: tuple[str, tuple[int, int], str]) -> dict[str, Any]:
    told = {"device": "cpu", "sessions": 0, "reached": "unknown", "sends": {}}
    listed = [
        {"peer": f"12D3{name}", "name": name, "span": span, "state": state, **told} for name, span, state in peers
    ]
    return {
        "name": "friends",
        "units": 6,
        "mode": "serve",
        "adapters": [],
        "missing": [],
        "ungiven": [],
        "peers": listed,
    }


FIRST = picture(("alice", (0, 3), "ready"), ("bob", (3, 6), "ready"))
LINKS = {
    "peers": ["12D3alice", "12D3bob", "12D3carol"],
    "rtt_s": [[0, 0.02, 0.3], [0.02, 0, 0.1], [0.3, 0.1, 0]],
    "measured": [[False, True, False], [True, False, True], [False, True, False]],
    "bandwidth_bps": [[None, 8e6, None], [20e6, None, None], [None, None, None]],
}


def test_who_came_went_moved_or_changed() -> None:
    assert list(changes(FIRST, FIRST)) == []
    after = picture(("alice", (0, 3), "draining"), ("carol", (3, 6), "loading"))
    assert sorted(changes(FIRST, after)) == [
        f"alice ({'12D3alice'[-8:]}) is draining",
        f"bob ({'12D3bob'[-8:]}) has left; it held layers 3:6",
        f"carol ({'12D3carol'[-8:]}) has joined with layers 3:6",
    ]
    moved = picture(("alice", (3, 6), "joining"), ("bob", (0, 0), "paused"))
    assert [line.split(") ")[1] for line in changes(FIRST, moved)] == [
        "moves from layers 0:3 to layers 3:6",
        "moves from layers 3:6 to no layers",
    ]


def test_which_texts_asked_for_here_were_moved() -> None:
    before, after = {**FIRST, "reroutes": {"lost": 2, "busy": 1}}, {**FIRST, "reroutes": {"lost": 5, "timed_out": 1}}
    assert list(changes(before, after)) == [
        "3 texts of yours moved to another route (lost)",
        "1 text of yours moved to another route (timed out)",
    ]
    assert list(changes(after, before)) == ["1 text of yours moved to another route (busy)"], "one was begun anew"


async def test_the_gateways_of_a_home_are_asked(tmp_path: Path) -> None:
    swarms = {"friends": "aa", "others": "bb"}

    def answering(swarm_id: str) -> Any:
        async def obey(_request: Any) -> dict[str, Any]:
            return {"swarm_id": swarm_id, "reroutes": {"lost": 2}}

        return CommandSocket(obey)

    async with contextlib.AsyncExitStack() as sockets:
        for name, swarm_id in swarms.items():
            await sockets.enter_async_context(answering(swarm_id).listening(tmp_path / GATEWAYS, name))
        assert await asyncio.to_thread(reroutes_here, tmp_path, "aa") == {"lost": 2}
    assert reroutes_here(tmp_path, "aa") == {}


def test_markup_of_strangers_and_more_than_there_is_room_for() -> None:
    news = SwarmNews(FIRST, clock=lambda: "12:00:00")
    for number in range(3 * KEPT):
        name = f"\x1b[31m[bold]{number}"
        news.update(picture((name, (0, 6), "ready")))
    assert len(news.lines) == KEPT and all("\x1b" not in line for line in news.lines)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(watched(FIRST, LINKS, news))
    shown = console.export_text()
    assert "Slowest links" in shown and "Lately" in shown and "[bold]" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_slowest_links_come_first() -> None:
    first, second, third = slowest_links(LINKS, FIRST)
    assert "300.0 ms (estimated)" in first and first.startswith("alice") and "Mbit" not in first
    assert "100.0 ms" in second and third.endswith("20.0 ms, 8 Mbit/s")
    assert list(slowest_links({**LINKS, "peers": []}, FIRST)) == []
