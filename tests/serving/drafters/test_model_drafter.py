"""What a model computes ahead for a session: guesses that are ready, also while the text changes meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from swarmnode.errors import Busy
from swarmnode.serving.drafting.model_drafter import STRIDE, Continued, ModelDrafter
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import expected

PROMPT = [5, 17, 3]
TEXT = PROMPT + expected(PROMPT, 60)
LIMIT = 64
CHUNK = 8


class Model:
    """The toy model, which computes when told to, and checks that its cache holds what the drafter believes."""

    def __init__(self) -> None:
        self.cache: list[int] = []
        self.waiting: tuple[asyncio.Future[Continued], list[int], int, int] | None = None
        self.ends = 0
        self.wakes = 0
        self.times: list[tuple[int, float]] = []
        self.drafter = ModelDrafter(self.go_on, self.end, LIMIT, lambda *took: self.times.append(took))
        self.drafter.listen(self.wake)

    def go_on(self, start: int, ids: Sequence[int], count: int) -> asyncio.Future[Continued]:
        assert self.waiting is None, "one computation at a time"
        assert 0 <= start <= len(self.cache) and ids and 0 < count <= STRIDE
        future = asyncio.get_running_loop().create_future()
        self.waiting = future, list(ids), start, count
        return future

    def end(self) -> None:
        self.ends += 1

    def wake(self) -> None:
        self.wakes += 1

    async def compute(self) -> None:
        """Do what waits, and let the drafter hear of it."""
        assert self.waiting is not None
        (future, ids, start, count), self.waiting = self.waiting, None
        del self.cache[start:]
        if len(ids) > CHUNK:
            self.cache += ids[:CHUNK]
            future.set_result(Continued(len(self.cache), (), 0.1))
        else:
            text = [*self.cache, *ids]
            new = expected(text, count)
            self.cache = [*text, *new[:-1]]
            future.set_result(Continued(len(self.cache), tuple(new), 0.1 * count))
        await asyncio.sleep(0)

    async def compute_all(self) -> None:
        while self.waiting is not None:
            await self.compute()


@in_virtual_time
async def test_guesses_are_those_of_the_model_once_they_are_ready() -> None:
    model = Model()
    drafter = model.drafter
    drafter.push(PROMPT)
    assert drafter.propose([], 6) == [] and model.wakes == 0
    await model.compute()
    assert model.wakes == 1
    assert drafter.propose([], 6) == TEXT[3:7]
    await model.compute_all()
    assert drafter.propose(TEXT[3:7], 2) == TEXT[7:9]
    assert model.times[0] == (STRIDE, 0.1 * STRIDE)


@in_virtual_time
async def test_nothing_is_computed_unless_it_is_asked_for() -> None:
    model = Model()
    model.drafter.push(PROMPT)
    assert model.waiting is None
    model.drafter.propose([], 2)
    await model.compute_all()
    assert len(model.cache) < len(PROMPT) + 2 + STRIDE + 1


@in_virtual_time
async def test_right_guesses_that_are_accepted_need_no_second_computation() -> None:
    model = Model()
    drafter = model.drafter
    drafter.push(PROMPT)
    drafter.propose([], 4)
    await model.compute_all()
    drafter.push(TEXT[3:5])
    assert drafter.propose(TEXT[5:6], 2) == TEXT[6:8]


@in_virtual_time
async def test_a_wrong_guess_is_forgotten_with_all_behind_it() -> None:
    model = Model()
    drafter = model.drafter
    drafter.push(PROMPT)
    drafter.propose([], 4)
    await model.compute_all()
    other = (TEXT[3] + 1) % 7
    drafter.push([other])
    assert drafter.propose([], 4) == []
    await model.compute_all()
    assert drafter.propose([], 4) == expected([*PROMPT, other], 4)


@in_virtual_time
async def test_a_text_that_changes_during_a_computation_gets_guesses_of_its_own() -> None:
    """Whatever happens meanwhile: in the end the guesses are those of the model for the text as it is."""
    for seed in range(30):
        chance, model = random.Random(seed), Model()
        drafter, text = model.drafter, list(PROMPT)
        drafter.push(text)
        for _ in range(40):
            event = chance.randrange(5)
            if event == 0 and len(text) < 40:
                new = [chance.choice([expected(text, 1)[0], chance.randrange(7)])]
                drafter.push(new)
                text += new
            elif event == 1:
                text = text[: chance.randrange(1, len(text) + 1)]
                drafter.cut(len(text))
            elif event == 2 and model.waiting is not None:
                await model.compute()
            else:
                guessed = expected(text, chance.randrange(4))
                guessed[-1:] = [chance.randrange(7)] if guessed and event == 3 else guessed[-1:]
                count = chance.randrange(1, 6)
                ready = drafter.propose(guessed, count)
                assert ready == expected([*text, *guessed], count)[: len(ready)]
        await model.compute_all()
        drafter.propose([], 4)
        await model.compute_all()
        assert drafter.propose([], 4) == expected(text, 4), f"seed {seed}"


@in_virtual_time
async def test_a_long_prompt_is_read_in_chunks() -> None:
    model = Model()
    model.drafter.push(TEXT[:30])
    model.drafter.propose([], 4)
    for _ in range(30 // CHUNK):
        await model.compute()
        assert model.wakes == 0
    await model.compute()
    assert model.wakes == 1 and model.drafter.propose([], 4) == TEXT[30:34]


@in_virtual_time
async def test_the_model_stops_at_its_last_position() -> None:
    model = Model()
    model.drafter.push(TEXT[: LIMIT - 2])
    model.drafter.propose([], 8)
    await model.compute_all()
    assert len(model.drafter.propose([], 8)) == 2
    assert model.waiting is None


@in_virtual_time
async def test_a_model_that_fails_is_asked_no_more() -> None:
    model = Model()
    model.drafter.push(PROMPT)
    model.drafter.propose([], 4)
    assert model.waiting is not None
    model.waiting[0].set_exception(Busy("no room", retry_s=1.0))
    model.waiting = None
    await asyncio.sleep(0)
    assert model.drafter.propose([], 4) == [] and model.waiting is None
    assert model.ends == 1
    model.drafter.close()
    assert model.ends == 1
