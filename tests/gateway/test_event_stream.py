"""Answers that end when nobody reads them any more."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from swarmnode.gateway.http.event_stream import ClientGone, while_connected
from tests.net.virtual import in_virtual_time


@in_virtual_time
async def test_work_that_loses_its_cancellation_ends_when_the_client_goes() -> None:
    """As `asyncio.wait_for` does before Python 3.12 where its result comes in the same moment."""
    ended = asyncio.Event()

    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def gone() -> dict[str, str]:
        await asyncio.sleep(1.0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await while_connected(gone, work())
    assert ended.is_set()
