"""What a hop does with an OPEN that says that its session begins as another one does, whoever sends it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Branch, Error, Mode, Open, Ready, Truncate, Want, branch_proof
from swarmnode.codec.sampling import Sampling
from swarmnode.errors import ErrorCode
from swarmnode.links.switchboard import Channel
from swarmnode.serving.client.session_spec import ids_entry
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm

PROMPT = [(7 * position) % 90 for position in range(20)]
SAMPLING = Sampling(prompt_length=20, max_new_tokens=1)


class Opener:
    """A stranger who opens sessions with single hops, and what it hears."""

    def __init__(self, swarm: ToySwarm) -> None:
        self.swarm = swarm
        self.heard: list[Body] = []
        self._ids = itertools.count(1)

    async def open(
        self, *, source: bytes = bytes(16), truncations: int = 0, length: int = 0, proof: bytes = b"", **changes: object
    ) -> tuple[bytes, Channel]:
        """A session, with a branch where a length is said."""
        session = bytes([next(self._ids)] * 16)
        proof = proof or branch_proof(source, truncations, session, length)
        peer = self.swarm.volunteers[0].peer
        fields = {
            "route": (HopSpec(peer, 0, 4),),
            "mode": Mode.RING,
            "rows": 1,
            "max_length": 40,
            "sampling": SAMPLING,
            "branch": Branch(proof, length) if length else None,
            **changes,
        }
        channel = await self.swarm.switchboard.call(peer, self._hear, lambda _error: None)
        channel.send(Open(session, 0, index=0, **fields))  # type: ignore[arg-type]
        await settle()
        return session, channel

    async def source(self, count: int = len(PROMPT)) -> tuple[bytes, Channel]:
        """A session of which so many positions were computed."""
        session, channel = await self.open()
        entry = ids_entry(0, [PROMPT[:count]], Want.NOTHING)
        channel.send(entry.body, seq=0, payload=entry.payload)
        await settle()
        self.heard.clear()
        return session, channel

    def _hear(self, _frame: Frame, body: Body) -> None:
        self.heard.append(body)


async def settle() -> None:
    await asyncio.sleep(2.0)


@in_virtual_time
async def test_what_was_computed_is_there() -> None:
    opener = Opener(await ToySwarm.start((0, 4)))
    source, _ = await opener.source()
    for length in (1, 7, 20):
        await opener.open(source=source, length=length)
    assert opener.heard == [Ready(1), Ready(7), Ready(20)]


@in_virtual_time
async def test_no_more_than_what_was_computed() -> None:
    opener = Opener(await ToySwarm.start((0, 4)))
    source, _ = await opener.source(count=5)
    await opener.open(source=source, length=20)
    assert opener.heard == [Ready(5)]


@in_virtual_time
async def test_nothing_without_the_right_proof() -> None:
    """Of another session or text, for another length, or one that was seen with somebody else."""
    opener = Opener(await ToySwarm.start((0, 4)))
    source, _ = await opener.source()
    seen = branch_proof(source, 0, bytes([99] * 16), 7)
    await opener.open(source=bytes([77] * 16), length=7)
    await opener.open(source=source, truncations=1, length=7)
    await opener.open(proof=seen, length=7)
    await opener.open(proof=branch_proof(source, 0, bytes([5] * 16), 8), length=7)
    assert opener.heard == [Ready(0)] * 4


@in_virtual_time
async def test_nothing_of_another_span() -> None:
    opener = Opener(await ToySwarm.start((0, 4)))
    source, _ = await opener.source()
    peer = opener.swarm.volunteers[0].peer
    await opener.open(source=source, length=7, route=(HopSpec(peer, 0, 2), HopSpec(opener.swarm.client.peer_id, 2, 4)))
    assert opener.heard[0] == Ready(0)


@in_virtual_time
async def test_nothing_of_a_text_that_the_source_has_no_more() -> None:
    opener = Opener(await ToySwarm.start((0, 4)))
    source, channel = await opener.source()
    channel.send(Truncate(1, 3))
    entry = ids_entry(3, [[1, 2, 3, 4]], Want.NOTHING)
    channel.send(entry.body, seq=3, payload=entry.payload)
    await settle()
    await opener.open(source=source, length=7)
    await opener.open(source=source, truncations=1, length=7)
    assert opener.heard == [Ready(0), Ready(7)]


@in_virtual_time
async def test_the_end_of_one_is_not_the_end_of_the_other() -> None:
    opener = Opener(await ToySwarm.start((0, 4)))
    source, channel = await opener.source()
    _, branch = await opener.open(source=source, length=7)
    channel.close()
    await settle()
    entry = ids_entry(7, [PROMPT[7:]], Want.NOTHING)
    branch.send(entry.body, seq=7, payload=entry.payload)
    await settle()
    assert opener.swarm.loads == [1]
    assert opener.swarm.volunteers[0].worker.positions == 20 + 13, "what was copied is not computed"
    await opener.open(source=source, length=7)
    assert opener.heard[-1] == Ready(0)
    branch.close()


@in_virtual_time
async def test_each_has_its_own_memory() -> None:
    opener = Opener(await ToySwarm.start((0, 4), cache_bytes=2 * 40 * 4))
    source, _ = await opener.source()
    await opener.open(source=source, length=7)
    await opener.open(source=source, length=7)
    refusal = opener.heard[-1]
    assert opener.heard[0] == Ready(7) and isinstance(refusal, Error) and refusal.code == ErrorCode.BUSY


@pytest.mark.parametrize("number", range(3))
@in_virtual_time
async def test_a_position_is_not_skipped_whatever_follows(number: int) -> None:
    """A gap behind what was copied ends that session alone."""
    opener = Opener(await ToySwarm.start((0, 4)))
    source, _ = await opener.source()
    _, branch = await opener.open(source=source, length=7)
    entry = ids_entry(8 + number, [[1]], Want.NOTHING)
    branch.send(entry.body, seq=8 + number, payload=entry.payload)
    await settle()
    assert opener.heard == [Ready(7), Error(ErrorCode.MALFORMED)]
    assert opener.swarm.loads == [1]
