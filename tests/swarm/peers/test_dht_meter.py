"""The DHT's times and failures, as a directory meets them."""

import asyncio

import pytest

from swarmnode.errors import NetworkDown
from swarmnode.metrics import table
from swarmnode.swarm.peers.directory import GET, STORE, DhtMeter


def figures(meter):
    times = {
        reading.labels[0]: reading.value.count for reading in meter.readings() if reading.metric is table.DHT_SECONDS
    }
    failures = {
        reading.labels[0]: reading.value for reading in meter.readings() if reading.metric is table.DHT_FAILURES
    }
    return times, failures


def test_successes_are_timed_and_failures_counted():
    meter = DhtMeter()
    with meter.timing(GET):
        pass
    with pytest.raises(NetworkDown), meter.timing(STORE):
        raise NetworkDown("no")
    with pytest.raises(asyncio.TimeoutError), meter.timing(GET):
        raise asyncio.TimeoutError
    assert figures(meter) == ({GET: 1, STORE: 0}, {GET: 1, STORE: 1})


def test_what_is_cancelled_has_not_failed():
    meter = DhtMeter()
    with pytest.raises(asyncio.CancelledError), meter.timing(GET):
        raise asyncio.CancelledError
    assert figures(meter) == ({GET: 0, STORE: 0}, {GET: 0, STORE: 0})
