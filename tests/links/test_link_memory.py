"""What a link holds is in the ledger: its buffers while it is open, payloads until nobody keeps them; without memory the large one
ends its link, and no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import (
    ALLOCATE_BYTES,
    HEADER_BYTES,
    LARGE_BYTES,
    RECEIVE_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    pack_header,
)
from swarmnode.codec.messages import Hello, Output
from swarmnode.errors import ErrorCode, PeerLost, PeerRefused, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.links.link import SMALL_BYTES, Link, OnFrame
from swarmnode.net.memory.medium import Path
from tests.links.test_link import CONFIG, HELLO, PROTOCOL, Pair, nothing
from tests.net.virtual import in_virtual_time

HUGE = 4 * ALLOCATE_BYTES


def frame(size_bytes: int) -> bytes:
    return pack_header(FrameKind.INPUT, 0, size_bytes, 1) + bytes(size_bytes)


async def open_apart(pair: Pair, on_frame: OnFrame) -> Link:
    """Alice's end, whose memory is not Bob's."""
    await pair.serve(on_frame)
    config = replace(pair.config, ledger=MemoryLedger())
    return await Link.connect(pair.alice, pair.bob.peer_id, PROTOCOL, HELLO, config=config)


def test_a_large_payload_counts_as_long_as_it_is_kept() -> None:
    ledger = MemoryLedger()
    reader = FrameReader(ledger=ledger)
    (small,) = reader.feed(frame(LARGE_BYTES))
    assert ledger.used_bytes == RECEIVE_BYTES, "small ones are bounded by what their conversation may say"
    (large,) = reader.feed(frame(HUGE))
    assert ledger.accounts()[Account.MESSAGES] == RECEIVE_BYTES + HUGE
    view = memoryview(large.payload)[5:]
    del large, small
    assert ledger.used_bytes == RECEIVE_BYTES + HUGE, "a part of it is still used"
    del view
    assert ledger.used_bytes == RECEIVE_BYTES
    reader.give_up()
    assert ledger.used_bytes == 0


def test_a_payload_that_is_cut_off_counts_no_longer() -> None:
    ledger = MemoryLedger()
    reader = FrameReader(ledger=ledger)
    assert list(reader.feed(frame(HUGE)[: HUGE // 2])) == []
    assert ledger.used_bytes > RECEIVE_BYTES
    del reader
    assert ledger.used_bytes == 0


def test_without_memory_a_payload_grows_no_further_but_may_later() -> None:
    ledger = MemoryLedger(ALLOCATE_BYTES + RECEIVE_BYTES)
    reader = FrameReader(ledger=ledger)
    data = frame(HUGE)
    list(reader.feed(data[:ALLOCATE_BYTES]))
    with pytest.raises(Full):
        list(reader.feed(data[ALLOCATE_BYTES:]))
    at = ALLOCATE_BYTES + HEADER_BYTES
    ledger.limit_bytes = None
    (done,) = reader.feed(data[at:])
    assert done.payload == bytes(HUGE)


@in_virtual_time
async def test_an_open_link_counts_and_a_closed_one_does_not() -> None:
    ledger = MemoryLedger()
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    near = await pair.open()
    both_ends = 2 * (RECEIVE_BYTES + SMALL_BYTES)
    assert ledger.accounts()[Account.MESSAGES] == both_ends, "that nothing was said yet changes nothing"
    running = asyncio.ensure_future(near.run(nothing))
    near.send(Output((1,)), channel=1, payload=[bytes(100_000)])
    await asyncio.sleep(0)
    assert ledger.accounts()[Account.MESSAGES] >= both_ends - SMALL_BYTES + 100_000, "what leaves soon is held, too"
    await near.close()
    await pair.there_ended
    await running
    assert ledger.used_bytes == 0


@in_virtual_time
async def test_a_link_that_is_refused_counts_no_longer() -> None:
    ledger = MemoryLedger()
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    await pair.serve()
    with pytest.raises(PeerRefused):
        await Link.connect(pair.alice, pair.bob.peer_id, PROTOCOL, Hello(VERSION, bytes(32)), config=pair.config)
    await asyncio.sleep(1)
    assert ledger.used_bytes == 0


@in_virtual_time
async def test_a_payload_without_memory_ends_its_link_alone() -> None:
    ledger = MemoryLedger(2 * ALLOCATE_BYTES + RECEIVE_BYTES + SMALL_BYTES)
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    heard = asyncio.get_running_loop().create_future()

    def on_frame(got: Frame, _body: Body) -> None:
        heard.set_result(len(got.payload))

    link = await open_apart(pair, on_frame)
    link.send(Output((1,)), channel=1, payload=[bytes(ALLOCATE_BYTES)])
    assert await heard == ALLOCATE_BYTES, "what is not huge is always taken"
    link.send(Output((1,)), channel=1, payload=[bytes(HUGE)])
    error = await pair.there_ended
    assert isinstance(error, ProtocolError)
    assert error.code is ErrorCode.BUSY
    assert ledger.limit_bytes is not None and ledger.peak_bytes <= ledger.limit_bytes
    del error
    await asyncio.sleep(1)
    assert ledger.used_bytes == 0


@in_virtual_time
async def test_a_payload_waits_for_memory_a_moment() -> None:
    ledger = MemoryLedger(2 * ALLOCATE_BYTES)
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    heard = asyncio.get_running_loop().create_future()
    link = await open_apart(pair, lambda got, _body: heard.set_result(len(got.payload)))
    link.send(Output((1,)), channel=1, payload=[bytes(HUGE)])
    await asyncio.sleep(0.5)
    ledger.limit_bytes = 3 * HUGE
    assert await heard == HUGE


@in_virtual_time
async def test_what_a_peer_does_not_take_counts_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not hang: it may answer each PING, and read slowly while much is made for it."""
    monkeypatch.setattr("swarmnode.links.link.MAX_UNSENT_BYTES", 16 << 20)
    ledger = MemoryLedger()
    pair = Pair(Path(latency_s=0.01, bytes_per_s=1e4), replace(CONFIG, ledger=ledger))
    near = await pair.open()
    payload = bytes(4 << 20)
    for sent in range(1, 5):
        near.send(Output(ids=(1,)), channel=1, payload=(payload,))
        await asyncio.sleep(0)
        assert ledger.accounts()[Account.MESSAGES] >= sent * len(payload) - 100_000
    near.send(Output(ids=(1,)), channel=1, payload=(payload,))
    assert near.closed
    with pytest.raises(PeerLost, match="does not take"):
        near.send(Output(ids=(1,)))
    assert ledger.used_bytes < 1 << 20  # what Bob's end reads
