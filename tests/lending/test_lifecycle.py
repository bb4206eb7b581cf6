"""The states of lending, and who may change them."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarmnode.lending.lending import RULES, Keep, Lending, LendingEvent, LendingState, next_state
from tests.net.virtual import in_virtual_time

STOPS = (LendingEvent.PAUSE, LendingEvent.FINISH)


def running() -> tuple[Lending, list[str]]:
    told: list[str] = []
    lending = Lending(lambda state, reason: told.append(f"{state.value} {reason}".strip()))
    lending.happened(LendingEvent.LOADED)
    return lending, told


def test_from_every_state_every_wish_is_reached() -> None:
    """Whatever was wanted before: what the node does by itself (load, drain) leads to what is wanted last."""
    for state, wish in itertools.product(LendingState, (*STOPS, LendingEvent.RESUME)):
        goal = LendingState.RUNNING if wish is LendingEvent.RESUME else LendingState.PAUSED
        reached = next_state(state, wish)
        for event in (LendingEvent.DRAINED, wish, LendingEvent.LOADED, wish, LendingEvent.DRAINED, wish):
            if not (event is LendingEvent.DRAINED and reached is LendingState.RUNNING):
                reached = next_state(reached, event)
        assert reached in (goal, LendingState.FINISHING if wish is LendingEvent.FINISH else goal), (state, wish)


def test_pause_and_resume() -> None:
    lending, told = running()
    lending.pause("a film", keep=Keep.MEMORY)
    lending.pause("a longer film")
    lending.happened(LendingEvent.DRAINED)
    assert lending.reason == "a longer film" and lending.keep is Keep.MEMORY
    lending.resume()
    lending.happened(LendingEvent.LOADED)
    assert told == ["running", "draining a film", "paused a longer film", "waiting", "running"]


def test_who_resumes_while_it_drains_need_not_wait_for_the_end() -> None:
    lending, told = running()
    lending.pause("a film")
    lending.resume()
    assert lending.state is LendingState.DRAINING, "sessions have been told to go"
    lending.happened(LendingEvent.DRAINED)
    assert told[-2:] == ["paused", "waiting"]


def test_the_owner_cannot_resume_what_a_rule_holds() -> None:
    lending, _ = running()
    lending.pause("on battery", by=RULES)
    lending.pause("a film")
    lending.happened(LendingEvent.DRAINED)
    lending.resume()
    assert lending.state is LendingState.PAUSED and lending.reason == "on battery"
    lending.resume(by=RULES)
    assert lending.state is LendingState.WAITING and not lending.reason


def test_finishing_may_be_thought_better_of_and_hurried() -> None:
    lending, told = running()
    lending.finish("soon")
    lending.resume()
    lending.finish("soon")
    lending.pause("now", by=RULES)
    lending.happened(LendingEvent.DRAINED)
    assert told[1:] == ["finishing soon", "running", "finishing soon", "draining soon; now", "paused soon; now"]


@in_virtual_time
async def test_what_has_finished_says_so_and_leaves_where_it_was_asked_to() -> None:
    lending, told = running()
    leaving = asyncio.ensure_future(lending.finished())
    lending.finish("a trip")
    lending.happened(LendingEvent.DRAINED)
    await asyncio.sleep(0)
    assert told[1:] == ["finishing a trip", "paused finished: a trip"] and not leaving.done()
    lending.finish("the summer", leave=True)
    await asyncio.wait_for(leaving, 1)


@in_virtual_time
async def test_who_thinks_better_of_leaving_stays() -> None:
    lending, told = running()
    leaving = asyncio.ensure_future(lending.finished())
    lending.finish("a trip", leave=True)
    assert told[-1] == "finishing a trip; then it leaves"
    lending.pause("no trip")
    lending.happened(LendingEvent.DRAINED)
    await asyncio.sleep(0)
    assert told[-1] == "paused no trip" and not leaving.done()
    leaving.cancel()


@in_virtual_time
async def test_waiting_for_a_state() -> None:
    lending, _ = running()
    waiting = asyncio.ensure_future(lending.until(LendingState.PAUSED))
    lending.pause("a film")
    settled = asyncio.ensure_future(lending.settled())
    await asyncio.sleep(0)
    assert not waiting.done() and not settled.done()
    lending.happened(LendingEvent.DRAINED)
    await asyncio.wait_for(asyncio.gather(waiting, settled), 1)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(lending.until(LendingState.RUNNING), 1)
