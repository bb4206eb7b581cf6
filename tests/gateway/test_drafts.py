"""Answers of the API are the same with and without guesses, in whatever way they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from swarmnode.codec.messages import Open
from swarmnode.measuring.meters import ACCEPTED
from swarmnode.serving.drafting.drafter import DraftBudget, Drafter, Drafting, no_drafting
from tests.gateway.conftest import HALVES, MODEL, Served, serving
from tests.gateway.speaking import VOCABULARY
from tests.gateway.test_openai_api import PERSON, SAID, WEATHER
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.serving.drafting import Oracle, Steady

SAMPLED = {"max_tokens": 32, "temperature": 0.9, "seed": 5}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FREE: dict[str, dict[str, Any]] = {
    "two choices": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "bias": {"logit_bias": {"200": 4.0, "7": -50.0}},
}
FORCED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": SCHEMA, "max_tokens": 64},
    "tool": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 64},
}


class Listener:
    """Proposes nothing, and keeps the text."""

    name = "listener"

    def __init__(self) -> None:
        self.text: list[int] = []

    def push(self, ids: Sequence[int]) -> None:
        self.text += ids

    def cut(self, length: int) -> None:
        del self.text[length:]

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        return []


class OneOf(Listener):
    """Knows several texts, and says what one of them that begins alike goes on with, wrongly at random."""

    name = "one of"

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float) -> None:
        super().__init__()
        self._oracles = [Oracle(text, wrong, vocabulary=VOCABULARY) for text in texts]

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        for oracle in self._oracles:
            if self.text == oracle.text[: len(self.text)]:
                oracle.accepted = self.text
                return oracle.propose(guessed, count)
        return []


def let_guess(served: Served, drafting: Drafting) -> None:
    """Let all nodes guess in this way."""
    for member in served.swarm.members.values():
        if member.node._stage is not None:
            member.node._stage.server.drafting = drafting  # type: ignore[attr-defined]


def accepted(served: Served) -> int:
    """Guesses of all nodes that were right."""
    stages: list[Any] = [member.node._stage for member in served.swarm.members.values()]
    counts = [one for stage in stages for one in stage.server.meter.drafts.items()]
    return sum(count for (_, result), count in counts if result == ACCEPTED)


class Asker:
    """Asks a chat without guesses, then with the grammar's alone, then with right and wrong ones."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.listeners: list[Listener] = []
        self.budgets: list[Steady] = []

    def listening(self, _opened: Open) -> tuple[Drafter, DraftBudget]:
        self.listeners.append(Listener())
        return self.listeners[-1], Steady(0)

    def guessing(self, _opened: Open) -> tuple[Drafter, DraftBudget]:
        self.budgets.append(Steady(6))
        return OneOf([one.text for one in self.listeners], wrong=0.3), self.budgets[-1]

    async def runs(self, **fields: Any) -> list[list[Choice]]:
        answers = []
        for drafting in (no_drafting, self.listening, self.guessing):
            let_guess(self.served, drafting)
            asked = {**SAMPLED, **fields}
            answer = await self.served.openai.chat.completions.create(model=MODEL, messages=SAID, **asked)
            answers.append(answer.choices)
        return answers


def said(choices: Sequence[Choice]) -> list[Any]:
    """What the choices say; ids of calls are new each time."""
    calls = [[call.function for call in one.message.tool_calls or ()] for one in choices]  # type: ignore[union-attr]
    return [(one.message.content, functions) for one, functions in zip(choices, calls, strict=True)]


def logprobs(choices: Sequence[Choice]) -> list[float]:
    """Log probabilities of the drawn tokens."""
    told = [one.logprobs.content or () for one in choices if one.logprobs is not None]
    return [token.logprob for tokens in told for token in tokens]


@pytest.mark.parametrize("fields", FREE.values(), ids=FREE)
@in_virtual_time
async def test_an_answer_is_the_same(founded: Founded, tmp_path: Path, fields: dict[str, Any]) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        asker = Asker(served)
        plain, heard, guessed = await asker.runs(**fields)
        assert said(plain) == said(heard) == said(guessed)
        assert len(plain) == len(asker.budgets) == fields.get("n", 1)
        assert all(one.accepted > 5 and one.rejected > 0 for one in asker.budgets)
        assert logprobs(guessed) == pytest.approx(logprobs(plain), abs=1e-4)
        assert len(logprobs(plain)) == (SAMPLED["max_tokens"] if "logprobs" in fields else 0)


@pytest.mark.parametrize("fields", FORCED.values(), ids=FORCED)
@in_virtual_time
async def test_an_answer_by_a_schema_is_the_same(founded: Founded, tmp_path: Path, fields: dict[str, Any]) -> None:
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        plain, forced, guessed = await Asker(served).runs(**fields)
        assert said(plain) == said(forced) == said(guessed)
        assert accepted(served) > 20


@in_virtual_time
async def test_an_answer_ends_where_it_ended(founded: Founded, tmp_path: Path) -> None:
    """Guesses behind a stop string are in flight when the gateway leaves."""
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        let_guess(served, no_drafting)
        asker = Asker(served)
        whole = (await asker.runs())[0][0].message.content
        stop = whole[len(whole) // 2 :][:3]
        asker = Asker(served)
        plain, heard, guessed = await asker.runs(stop=stop)
        assert plain[0].message.content == whole[: whole.index(stop)] and plain[0].finish_reason == "stop"
        assert said(plain) == said(heard) == said(guessed)
        assert asker.budgets[0].accepted > 0
        assert await served.freed()
