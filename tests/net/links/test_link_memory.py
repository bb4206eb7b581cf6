"""Payloads that come in are in the ledger until nobody keeps them; without memory the large one ends its link, and no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarmnode.codec.frames import ALLOCATE_BYTES, LARGE_BYTES, Frame, FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import Body, Output
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.net.memory.network import Path
from tests.net.links.test_link import CONFIG, Pair
from tests.net.virtual import in_virtual_time

HUGE = 4 * ALLOCATE_BYTES


def frame(size_bytes: int) -> bytes:
    return pack_header(FrameKind.INPUT, 0, size_bytes, 1) + bytes(size_bytes)


def test_a_large_payload_counts_as_long_as_it_is_kept() -> None:
    ledger = MemoryLedger()
    reader = FrameReader(ledger=ledger)
    (small,) = reader.feed(frame(LARGE_BYTES))
    assert ledger.used_bytes == 0, "small ones are bounded by what their conversation may say"
    (large,) = reader.feed(frame(HUGE))
    assert ledger.accounts()[Account.MESSAGES] == HUGE
    view = memoryview(large.payload)[5:]
    del large, small
    assert ledger.used_bytes == HUGE, "a part of it is still used"
    del view
    assert ledger.used_bytes == 0


def test_a_payload_that_is_cut_off_counts_no_longer() -> None:
    ledger = MemoryLedger()
    reader = FrameReader(ledger=ledger)
    assert list(reader.feed(frame(HUGE)[: HUGE // 2])) == []
    assert ledger.used_bytes > 0
    del reader
    assert ledger.used_bytes == 0


def test_without_memory_a_payload_grows_no_further_but_may_later() -> None:
    ledger = MemoryLedger(ALLOCATE_BYTES)
    reader = FrameReader(ledger=ledger)
    data = frame(HUGE)
    list(reader.feed(data[:ALLOCATE_BYTES]))
    with pytest.raises(Full):
        list(reader.feed(data[ALLOCATE_BYTES:]))
    at = ledger.used_bytes + len(data) - len(frame(HUGE)) + 16
    ledger.limit_bytes = None
    (done,) = reader.feed(data[at:])
    assert done.payload == bytes(HUGE)


@in_virtual_time
async def test_a_payload_without_memory_ends_its_link_alone() -> None:
    ledger = MemoryLedger(2 * ALLOCATE_BYTES)
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    heard = asyncio.get_running_loop().create_future()

    def on_frame(got: Frame, _body: Body) -> None:
        heard.set_result(len(got.payload))

    link = await pair.open(on_frame)
    link.send(Output((1,)), channel=1, payload=[bytes(ALLOCATE_BYTES)])
    assert await heard == ALLOCATE_BYTES, "what is not huge is always taken"
    link.send(Output((1,)), channel=1, payload=[bytes(HUGE)])
    error = await pair.there_ended
    assert isinstance(error, ProtocolError)
    assert error.code is ErrorCode.BUSY
    assert ledger.peak_bytes <= 2 * ALLOCATE_BYTES
    del error
    await asyncio.sleep(1)
    assert ledger.used_bytes == 0


@in_virtual_time
async def test_a_payload_waits_for_memory_a_moment() -> None:
    ledger = MemoryLedger(2 * ALLOCATE_BYTES)
    pair = Pair(Path(latency_s=0.01), replace(CONFIG, ledger=ledger))
    heard = asyncio.get_running_loop().create_future()
    link = await pair.open(lambda got, _body: heard.set_result(len(got.payload)))
    link.send(Output((1,)), channel=1, payload=[bytes(HUGE)])
    await asyncio.sleep(0.5)
    ledger.limit_bytes = 3 * HUGE
    assert await heard == HUGE
