"""Tests of bandwidth: what they find, what they cost, and who is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.measuring_messages import Probe
from swarmnode.codec.messages import Error, Hello
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import LinkStatistics
from swarmnode.measuring.bandwidth import PROBE_PROTOCOL, SIZES, ProbeConfig, Prober
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeNetwork, FakeWorld
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import ToyPeer

HELLO = Hello(VERSION, bytes(32), "test")


@dataclass
class Peer:
    network: FakeNetwork
    config: ProbeConfig
    busy: bool = False
    link_statistics: LinkStatistics = field(init=False)

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.link_statistics = LinkStatistics(clock=clock)
        self.link_config = LinkConfig(link_statistics=self.link_statistics, clock=clock)
        self.prober = Prober(
            ToyPeer(self.network, self.link_config, HELLO), busy=lambda: self.busy, config=self.config, seed=1
        )


async def peers(count: int, path: Path, **config: float) -> list[Peer]:
    world = FakeWorld(seed=5)
    world.default_path = path
    made = [Peer(world.join(), ProbeConfig(**config)) for _ in range(count)]  # type: ignore[arg-type]
    for one in made:
        await one.prober.serve()
        await one.network.connect(await made[0].network.addresses(), timeout_s=1)
    return made


@pytest.mark.parametrize("rate_bps", [2e6, 20e6, 500e6])
@in_virtual_time
async def test_both_sides_learn_both_directions(rate_bps: float) -> None:
    alice, bob = await peers(2, Path(latency_s=0.02, bytes_per_s=rate_bps / 8))
    began_s = asyncio.get_running_loop().time()
    await alice.prober.test(bob.network.peer_id)
    for one in (alice, bob):
        assert one.link_statistics.up_bps == pytest.approx(rate_bps, rel=0.15)
        assert one.link_statistics.down_bps == pytest.approx(rate_bps, rel=0.15)
        assert len(one.link_statistics.rated_peers()) == 1
    spent_s = asyncio.get_running_loop().time() - began_s
    assert spent_s < 2.5, "about a second of sending, one of listening"


@in_virtual_time
async def test_a_slow_line_is_tested_with_little() -> None:
    alice, bob = await peers(2, Path(latency_s=0.02, bytes_per_s=1e6 / 8))
    before = alice.link_config.traffic
    await alice.prober.test(bob.network.peer_id)
    assert alice.link_statistics.up_bps == pytest.approx(1e6, rel=0.15)
    assert before.sent_bytes["probe"] < SIZES[0] + 2000


@in_virtual_time
async def test_who_asks_too_often_is_refused_for_a_while() -> None:
    alice, bob = await peers(2, Path(latency_s=0.01, bytes_per_s=100e6 / 8), pause_s=100.0)
    await alice.prober.test(bob.network.peer_id)
    with pytest.raises(PeerRefused) as caught:
        await alice.prober.test(bob.network.peer_id)
    assert caught.value.code == ErrorCode.BUSY and 90 < (caught.value.retry_s or 0) <= 100
    await asyncio.sleep(100)
    await alice.prober.test(bob.network.peer_id)


@in_virtual_time
async def test_a_busy_peer_and_one_that_answers_another_refuse() -> None:
    alice, bob, carol = await peers(3, Path(latency_s=0.01, bytes_per_s=10e6 / 8))
    bob.busy = True
    with pytest.raises(PeerRefused):
        await alice.prober.test(bob.network.peer_id)
    bob.busy = False
    outcomes = await asyncio.gather(
        *(one.prober.test(bob.network.peer_id) for one in (alice, carol)), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "PeerRefused"]


@in_virtual_time
async def test_nobody_gets_more_than_he_gave() -> None:
    alice, bob = await peers(2, Path(latency_s=0.01, bytes_per_s=100e6 / 8))
    link = await Link.connect(alice.network, bob.network.peer_id, PROBE_PROTOCOL, HELLO, config=alice.link_config)
    answers: asyncio.Queue[tuple[object, int]] = asyncio.Queue()
    running = asyncio.ensure_future(link.run(lambda frame, body: answers.put_nowait((body, len(frame.payload)))))
    link.send(Probe(answer_bytes=SIZES[-1]), channel=1, payload=[bytes(1000)])
    assert await answers.get() == (Probe(), 1000)
    link.send(HELLO, channel=1)
    body, _ = await answers.get()
    assert isinstance(body, Error) and body.code == ErrorCode.MALFORMED
    await link.close()
    await running


@in_virtual_time
async def test_a_node_asks_around_until_it_knows_enough() -> None:
    made = await peers(6, Path(latency_s=0.01, bytes_per_s=30e6 / 8), test_interval_s=10.0)
    everybody = [one.network.peer_id for one in made]
    first = made[0]
    await first.prober.start(lambda: everybody)
    await asyncio.sleep(300)
    assert len(first.link_statistics.rated_peers()) == first.config.enough_peers
    assert first.link_statistics.up_bps == pytest.approx(30e6, rel=0.15)
    assert first.prober.choose([first.network.peer_id]) is None, "never itself"
    await first.prober.close()


@in_virtual_time
async def test_the_first_tests_come_soon_and_later_ones_seldom() -> None:
    made = await peers(6, Path(latency_s=0.01, bytes_per_s=30e6 / 8), enough_peers=9)
    first, everybody = made[0], [one.network.peer_id for one in made]
    await first.prober.start(lambda: everybody)
    loop, seen_s = asyncio.get_running_loop(), list[float]()
    began_s = loop.time()
    while len(seen_s) < 5:
        await asyncio.sleep(0.5)
        seen_s += [loop.time() - began_s] * (len(first.prober._asked) - len(seen_s))
    await first.prober.close()
    assert seen_s[0] <= 8.0 and seen_s[1] <= 23.0 and seen_s[-1] - seen_s[-2] >= 25.0


@in_virtual_time
async def test_the_network_at_home_is_tested_as_soon_as_the_line_out_of_it() -> None:
    """Of two at home and two elsewhere; what one path shows says nothing of the other kind."""
    made = await peers(5, Path(latency_s=0.01, bytes_per_s=30e6 / 8))
    first, *others = made
    home = {one.network.peer_id for one in others[:2]}
    first.link_statistics.at_home = home.__contains__
    for mate in home:
        first.network._world.set_path(first.network.peer_id, mate, Path(latency_s=0.001, bytes_per_s=800e6 / 8))
    await first.prober.start(lambda: [one.network.peer_id for one in made])
    await asyncio.sleep(12.0)
    rated = first.link_statistics.rated_peers()
    assert rated & home and rated - home
    assert first.link_statistics.up_bps == pytest.approx(30e6, rel=0.15)
    await first.prober.close()


@in_virtual_time
async def test_who_is_busy_at_first_tests_as_soon_as_it_is_not() -> None:
    alice, bob = await peers(2, Path(latency_s=0.01, bytes_per_s=30e6 / 8))
    alice.busy = True
    await alice.prober.start(lambda: [bob.network.peer_id])
    await asyncio.sleep(60.0)
    alice.busy = False
    await asyncio.sleep(12.0)
    assert bob.network.peer_id in alice.link_statistics.rated_peers()
    await alice.prober.close()


@in_virtual_time
async def test_nobody_is_asked_twice_in_a_while() -> None:
    alice, bob = await peers(2, Path(latency_s=0.01, bytes_per_s=100e6 / 8), pause_s=50.0)
    assert alice.prober.choose([bob.network.peer_id]) == bob.network.peer_id
    await alice.prober.test(bob.network.peer_id)
    assert alice.prober.choose([bob.network.peer_id]) is None
    await asyncio.sleep(50)
    assert alice.prober.choose([bob.network.peer_id]) == bob.network.peer_id


@in_virtual_time
async def test_a_client_tests_with_some_peers_and_leaves_out_who_is_busy_or_gone() -> None:
    alice, *others = await peers(5, Path(latency_s=0.01, bytes_per_s=30e6 / 8))
    names = [one.network.peer_id for one in others]
    others[0].busy = True
    found = await alice.prober.probe_candidates([*names, "nobody", alice.network.peer_id], 3)
    assert found.peers == 3 and found.up_bps == pytest.approx(30e6, rel=0.15)
    assert found.down_bps == pytest.approx(30e6, rel=0.15)
    again = await alice.prober.probe_candidates(names, 3)
    assert again.peers <= 1, "who was asked is left alone for a while"
