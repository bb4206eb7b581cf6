"""Answers that end when nobody reads them any more."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gateway.http.event_stream import ClientGone, ClientWatch, TextEvents
from swarmnode.gateway.openai.replies import TextChoice
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
        await ClientWatch(gone).run(work())
    assert ended.is_set()


@given(st.text())
def test_a_filled_event_says_what_a_written_one_does(text: str) -> None:
    told = TextEvents(lambda index, text: TextChoice(index=index, text=text)).fill(0, text)
    assert told.endswith(b"\n\n") and told.count(b"\n") == 2
    assert TextChoice.model_validate_json(told.removeprefix(b"data: ")) == TextChoice(index=0, text=text)
