"""Requests for adapters and the search for their routes: sizes that the wire or the machines cannot carry get a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmnode.codec.body import MAX_ROWS, HopSpec
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import decode_body, encode_body
from swarmnode.codec.tuning_messages import MAX_ADAPTER_BYTES, MAX_TUNED_POSITIONS, MAX_WINDOW, AdapterOpened
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.errors import ErrorCode, NoRoute, PeerRefused, UsageError
from swarmnode.tuning.client import route_opener
from swarmnode.tuning.client.route_opener import AdapterRequest, SwarmRoutes
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.tuning.client.tuned_route import HopFault
from tests.net.virtual import in_virtual_time

ROUTE = (HopSpec("a", 0, 2),)
MANY_TARGETS = AdapterRecipe(targets=tuple(f"{number:064}" for number in range(64)))


@pytest.mark.parametrize(
    ("size", "window", "recipe", "words"),
    [
        ((MAX_ROWS, MAX_TUNED_POSITIONS // MAX_ROWS), MAX_WINDOW, AdapterRecipe(), ""),
        ((1, MAX_TUNED_POSITIONS), 1, AdapterRecipe(), ""),
        ((MAX_ROWS + 1, 8), 5, AdapterRecipe(), "257 rows of a microbatch .*--microbatch.*: 1 to 256 are possible"),
        ((0, 8), 5, AdapterRecipe(), "0 rows"),
        ((16, 65_536 + 20), 5, AdapterRecipe(), r"65,556 tokens of a row .*--sequence.*: 1 to 65,536"),
        ((16, 0), 5, AdapterRecipe(), "0 tokens of a row"),
        ((1, 8), MAX_WINDOW + 1, AdapterRecipe(), "65 microbatches in flight"),
        ((1, 8), 1, MANY_TARGETS, "bytes of the recipe .*--targets"),
    ],
)
def test_a_size_beyond_the_wire_is_refused_before_it_is_sent(
    size: tuple[int, int], window: int, recipe: AdapterRecipe, words: str
) -> None:
    if words:
        with pytest.raises(UsageError, match=words):
            AdapterRequest.of(recipe, size, window, "none")
        return
    asked = AdapterRequest.of(recipe, size, window, "none").to(ROUTE, 1)
    assert decode_body(FrameKind.OPEN_ADAPTER, encode_body(asked)) == asked


@dataclass
class Machines:
    """Router of one peer after another, and the routes that open there."""

    peers: Sequence[str]
    opened: list[str] = field(default_factory=list)
    sizes: list[tuple[HopSpec, AdapterOpened]] = field(default_factory=list)
    leavers: frozenset[str] = frozenset()
    pass_bytes: int = 0

    def route(self, avoid: Collection[str], _beside: object, _size: object) -> Sequence[HopSpec]:
        for peer in self.peers:
            if peer not in avoid:
                return (HopSpec(peer, 0, 2),)
        raise NoRoute("no machine has layers 0 to 1")

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def suspect(self, _peer: str, _why: str) -> None:
        pytest.fail("a machine without room is not at fault")

    async def open(self, _board: object, request: Any, _shapes: object, _state: object) -> Machines:
        (hop,) = request.route
        self.opened.append(hop.peer)
        self.sizes = [(hop, AdapterOpened(1, self.pass_bytes))]
        return self


@pytest.mark.parametrize("at_opening", [False, True])
@pytest.mark.parametrize(
    ("pass_bytes", "told"),
    [
        (5 * 3_400_000_000, r"\(8 rows of 512 tokens take about 3\.4 GB at one of them\)"),
        (MAX_ADAPTER_BYTES, r"\(8 rows of 512 tokens take at least 13\.7 GB at one of them\)"),
        (0, ": lower"),
    ],
)
@in_virtual_time
async def test_each_machine_without_room_is_asked_once_and_then_the_need_is_told(
    monkeypatch: pytest.MonkeyPatch, at_opening: bool, pass_bytes: int, told: str
) -> None:
    machines = Machines("abc", pass_bytes=pass_bytes)
    monkeypatch.setattr(route_opener.TunedRoute, "open", machines.open)
    request = AdapterRequest.of(AdapterRecipe(), (8, 512), 5, "none")
    clock = asyncio.get_running_loop().time
    routes = SwarmRoutes(
        None,  # type: ignore[arg-type]
        machines,  # type: ignore[arg-type]
        request,
        StateShapes({}),
        cannot_tune=tuple,
        on_waiting=lambda _why, _missing: None,
        clock=clock,
        patience_s=60.0,
    )

    async def refused() -> None:
        for _ in machines.peers:
            await routes.open(None)
            error = PeerRefused("it has no room", code=ErrorCode.TOO_LARGE, peer=machines.opened[-1])
            last = machines.opened[-1]
            routes.failed(error if at_opening else HopFault(error, claimant=last, suspects=[last]))
        with pytest.raises(NoRoute, match=f"at once than the machines have ?{told}"):
            await routes.open(None)

    begin_s = clock()
    await refused()
    assert machines.opened == ["a", "b", "c"] and clock() - begin_s < 60.0, "nobody is asked twice, and nothing waits"
    await refused()
    assert machines.opened == 2 * ["a", "b", "c"], "a smaller microbatch may fit"
