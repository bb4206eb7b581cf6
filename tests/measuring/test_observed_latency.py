"""Speed is what neighbours measured: peers that declare more than they do lose their sessions after a few tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Want
from swarmnode.config import ServerConfig
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.paths import FRESH_S, PEERS_KEPT, ObservedLatency
from swarmnode.plan.routes.routing import SessionSize, find_route
from swarmnode.plan.view import view_of
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from swarmnode.swarm.records.announcement import VERSION, Announcement, State, peer_digest
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import UNITS, ToyRouter, ToySwarm, expected

PROMPT = [5, 17, 3, 99, 42]


class Watch:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class PlanningRouter(ToyRouter):
    """Routes by the live rule, from declared speeds and experience."""

    def __init__(self, swarm: ToySwarm, declared: dict[PeerId, float]) -> None:
        super().__init__(swarm.volunteers)
        self.announced = [
            Announcement(
                *(VERSION, bytes(32), one.peer, 1, 0.0, 1.0, 0.0, State.READY, (one.start, one.end)),
                decode_units_per_s=declared[one.peer],
            )
            for one in swarm.volunteers
        ]

    def route(self, avoid: frozenset[PeerId], retain: Sequence[HopSpec], size: SessionSize) -> Route:
        view = view_of(UNITS, self.announced, unit_s=self.observed_latency.units_s())
        return find_route(view, client="client", avoid=avoid, retain=retain).hops


async def swarm_with_a_liar(spans: list[tuple[int, int]], liar: int, slowness: float = 1.0) -> tuple[ToySwarm, PeerId]:
    """Everybody declares what it does (a step takes 10 ms), but the liar a hundred times as much."""
    swarm = await ToySwarm.start(*spans)
    declared = {one.peer: (one.end - one.start) / one.worker.step_s for one in swarm.volunteers}
    peer = swarm.volunteers[liar].peer
    swarm.volunteers[liar].worker.step_s *= slowness
    declared[peer] *= 100
    swarm.router = PlanningRouter(swarm, declared)
    return swarm, peer


async def generate(swarm: ToySwarm, count: int) -> list[PeerId]:
    """The peers that a generation of so many tokens went through."""
    stream = swarm.ring(PROMPT, count)
    assert [token async for token in stream] == expected(PROMPT, count)
    return [hop.peer for hop in stream.result.route]


PLACES = {
    "alone": ([(0, 4), (0, 4), (0, 4)], 1),
    "first": ([(0, 2), (0, 2), (2, 4)], 0),
    "last": ([(0, 2), (2, 4), (2, 4)], 1),
    "middle": ([(0, 1), (1, 3), (1, 3), (3, 4)], 2),
}


@pytest.mark.parametrize("place", PLACES)
@in_virtual_time
async def test_a_liar_gets_one_short_session_wherever_it_stands(place: str) -> None:
    spans, liar = PLACES[place]
    swarm, peer = await swarm_with_a_liar(spans, liar, slowness=2.0)
    assert peer in await generate(swarm, 10), "its word opens the door"
    used = Counter([used for _ in range(5) for used in await generate(swarm, 10)])
    assert used[peer] == 0


@in_virtual_time
async def test_peers_are_timed_right_whoever_tells_it() -> None:
    swarm = await ToySwarm.start((0, 1), (1, 3), (3, 4))
    for one, step_s in zip(swarm.volunteers, (0.02, 0.08, 0.01), strict=True):
        one.worker.step_s = step_s
    await generate(swarm, 12)
    unit_s = [swarm.router.observed_latency.unit_s(one.peer) for one in swarm.volunteers]
    assert unit_s == [pytest.approx(0.02, rel=0.1), pytest.approx(0.04, rel=0.1), pytest.approx(0.01, rel=0.1)]


@in_virtual_time
async def test_a_client_that_drives_times_the_first_hop_itself() -> None:
    swarm = await ToySwarm.start((0, 4))
    clock = asyncio.get_running_loop().time
    session = ClientSession(
        swarm.switchboard, swarm.router, SessionSpec(Mode.DRIVEN, max_length=32), swarm.config, clock=clock
    )
    await session.start()
    await asyncio.sleep(1)  # a PING has come back: the round trip is known
    for position in range(6):
        session.send(ids_entry(position, [[7]], Want.LAST), expect=position + 1)
        await session.receive()
    await asyncio.sleep(0.1)
    (peer,) = (one.peer for one in swarm.volunteers)
    assert swarm.router.observed_latency.unit_s(peer) == pytest.approx(0.01 / 4, rel=0.1)
    await session.close()


@in_virtual_time
async def test_prompts_and_replays_are_not_taken_for_single_steps() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), (2, 4), config=ServerConfig())
    stream = swarm.ring(PROMPT, 20)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 10:
            swarm.world.kill(swarm.volunteers[1].peer)
    assert tokens == expected(PROMPT, 20)
    assert swarm.router.observed_latency.unit_s(swarm.volunteers[2].peer) == pytest.approx(0.005, rel=0.3)


def test_what_others_measured_counts_before_what_a_peer_says_of_itself() -> None:
    def announce(peer: str, unit_us: dict[bytes, int]) -> Announcement:
        return Announcement(
            *(VERSION, bytes(32), peer, 1, 0.0, 1.0, 0.0, State.READY, (0, 2)),
            decode_units_per_s=5000.0,
            unit_us=unit_us,
        )

    digest = peer_digest("used")
    announced = [
        announce("used", {digest: 1}),
        announce("b", {digest: 20_000}),
        announce("c", {digest: 21_000}),
        announce("slanderer", {digest: 9_000_000}),
    ]
    speeds = {peer.peer: peer.decode_units_per_s for peer in view_of(2, announced).peers}
    assert speeds == {"b": 5000, "c": 5000, "slanderer": 5000, "used": pytest.approx(1e6 / 21_000)}
    own = view_of(2, announced, unit_s={"used": 0.01}).peers[-1]
    assert own.decode_units_per_s == pytest.approx(100), "our own experience first"


def test_observed_latency_follows_what_it_sees_and_forgets_what_is_old() -> None:
    watch = Watch()
    observed_latency = ObservedLatency(clock=watch)
    for unit_s in [0.01] * 5 + [0.5]:
        observed_latency.saw("a", unit_s)
    assert 0.01 < (observed_latency.unit_s("a") or 0) <= 0.11, "one slow step is not everything"
    for _ in range(20):
        observed_latency.saw("a", 0.5)
    assert observed_latency.unit_s("a") == pytest.approx(0.5, rel=0.05)
    observed_latency.saw("b", 0.02)
    assert list(observed_latency.units_s(most=1)) == ["b"]
    assert observed_latency.section().unit_us[peer_digest("b")] == 20_000
    watch.now_s = FRESH_S + 1
    assert observed_latency.units_s() == {} and observed_latency.unit_s("a") is None
    observed_latency.saw("a", 0.03)
    assert observed_latency.unit_s("a") == 0.03, "what is known anew owes nothing to what was forgotten"


def test_memory_is_bounded() -> None:
    observed_latency = ObservedLatency()
    for number in range(3 * PEERS_KEPT):
        observed_latency.saw(str(number), 0.01)
    assert len(observed_latency.units_s()) == PEERS_KEPT
