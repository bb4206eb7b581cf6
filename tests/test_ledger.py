"""MemoryLedger: what is promised stays within the limit, and comes back."""

from __future__ import annotations

import threading

import pytest

from swarmnode.errors import ErrorCode
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.metrics import table


def test_what_is_reserved_is_counted_by_account_until_it_is_released() -> None:
    ledger = MemoryLedger(100)
    cache = ledger.reserve(Account.KV_CACHE, 60)
    journal = ledger.reserve(Account.JOURNALS, 30)
    assert (ledger.used_bytes, ledger.free_bytes) == (90, 10)
    assert ledger.accounts()[Account.KV_CACHE] == 60
    cache.release()
    cache.release()
    assert (ledger.used_bytes, ledger.free_bytes, ledger.peak_bytes) == (30, 70, 90)
    journal.release()
    assert ledger.used_bytes == 0


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = MemoryLedger(100, retry_s=3.0)
    held = ledger.reserve(Account.WEIGHTS, 80)
    with pytest.raises(Full, match="no room for") as caught:
        ledger.reserve(Account.KV_CACHE, 21)
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.retry_s == 3.0
    with pytest.raises(Full):
        held.resize(101)
    assert held.size_bytes == ledger.used_bytes == 80
    held.resize(100)
    held.resize(10)
    assert ledger.used_bytes == 10


def test_a_reservation_ends_with_its_block_also_after_an_error() -> None:
    ledger = MemoryLedger(100)
    with pytest.raises(KeyError), ledger.reserve(Account.AVERAGING, 50):
        raise KeyError
    assert ledger.used_bytes == 0


def test_what_cannot_be_refused_counts_beyond_the_limit_and_keeps_others_out() -> None:
    ledger = MemoryLedger(100)
    late = ledger.count(Account.MESSAGES, 120)
    assert (ledger.used_bytes, ledger.free_bytes) == (120, 0)
    with pytest.raises(Full):
        ledger.reserve(Account.KV_CACHE, 1)
    late.resize(110)  # giving back is possible however full it is
    late.release()
    assert ledger.reserve(Account.KV_CACHE, 100).size_bytes == 100


def test_without_a_limit_everything_is_counted_and_nothing_refused() -> None:
    ledger = MemoryLedger()
    ledger.reserve(Account.WEIGHTS, 10**15)
    assert ledger.free_bytes == float("inf")
    ledger.limit_bytes = 10**6  # found out later: what is there stays
    with pytest.raises(Full):
        ledger.reserve(Account.KV_CACHE, 1)
    assert ledger.accounts()[Account.WEIGHTS] == 10**15


def test_a_negative_size_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        MemoryLedger().reserve(Account.WEIGHTS, -1)


def test_threads_lose_no_byte() -> None:
    ledger = MemoryLedger(64)

    def take_and_give() -> None:
        for _ in range(2000):
            try:
                ledger.reserve(Account.ACTIVATIONS, 20).release()
            except Full:
                continue

    threads = [threading.Thread(target=take_and_give) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used_bytes == 0
    assert ledger.peak_bytes <= 64


def test_it_tells_its_state() -> None:
    ledger = MemoryLedger(8_000_000, name="device")
    ledger.reserve(Account.WEIGHTS, 3_000_000)
    assert repr(ledger) == "<MemoryLedger device: 3.0 MB of 8.0 MB (weights 3.0)>"
    assert repr(MemoryLedger()) == "<MemoryLedger host: 0.0 MB of no limit>"
    told = {(reading.metric.name, *reading.labels): reading.value for reading in ledger.readings()}
    assert told[table.MEMORY_RESERVED.name, "device", "weights"] == 3_000_000
    assert told[table.MEMORY_RESERVED.name, "device", "kv_cache"] == 0
    assert told[table.MEMORY_LIMIT.name, "device"] == 8_000_000
