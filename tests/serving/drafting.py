"""Drafters of tests: one that knows the text, one that is always wrong, and one that is wrong at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from swarmnode.codec.messages import Open
from swarmnode.serving.drafting.drafter import DraftBudget, Drafter, Drafting
from tests.peer.toy_swarm import MODULUS, ToySwarm, expected


class Steady:
    """A budget of a fixed number of guesses in flight. It keeps what it is told."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.accepted = 0
        self.rejected = 0
        self.turns_s: list[float] = []

    def count(self, in_flight: int) -> int:
        return self.most - in_flight

    def verdict(self, proposer: str, accepted: int, rejected: int) -> None:
        self.accepted += accepted
        self.rejected += rejected

    def turn(self, took_s: float) -> None:
        self.turns_s.append(took_s)


class Oracle:
    """Knows the text, and says something else with probability `wrong`."""

    name = "oracle"

    def __init__(self, text: Sequence[int], wrong: float = 0.0, seed: int = 1, vocabulary: int = MODULUS) -> None:
        self.text = text  # may change between the texts of a session
        self._vocabulary = vocabulary
        self.accepted: list[int] = []
        self._wrong = wrong
        self._random = random.Random(seed)

    def push(self, ids: Sequence[int]) -> None:
        self.accepted += ids
        assert self.accepted == list(self.text[: len(self.accepted)]), "only what is of the text counts as accepted"

    def cut(self, length: int) -> None:
        del self.accepted[length:]

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        begin = len(self.accepted) + len(guessed)
        right = self.text[begin : begin + count]
        return [self._other(token) if self._random.random() < self._wrong else token for token in right]

    def _other(self, token: int) -> int:
        return (token + 1 + self._random.randrange(self._vocabulary - 1)) % self._vocabulary


class ToyDrafter(Oracle):
    """Computes the toy model by itself, whatever the text, and says something else with probability `wrong`."""

    def __init__(self, wrong: float = 0.0, seed: int = 1) -> None:
        super().__init__([], wrong, seed)

    def push(self, ids: Sequence[int]) -> None:
        self.accepted += ids

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        right = expected([*self.accepted, *guessed], count)
        return [self._other(token) if self._random.random() < self._wrong else token for token in right]


def toy_drafting(wrong: float, most: int = 8) -> Drafting:
    """Let any session of the toy model guess."""
    seeds = itertools.count()
    return lambda _opened: (ToyDrafter(wrong, next(seeds)), Steady(most))


class Drafts:
    """Lets all volunteers of a swarm guess texts, and keeps the drafters and budgets that they made."""

    def __init__(self, swarm: ToySwarm, text: Sequence[int], *, most: int = 8, wrong: float = 0.0) -> None:
        self.text, self.most, self.wrong = text, most, wrong
        self.budgets: list[Steady] = []
        swarm.router.most_drafts = most
        for one in swarm.volunteers:
            one.server.drafting = self.of

    def of(self, _opened: Open) -> tuple[Drafter, DraftBudget]:
        self.budgets.append(Steady(self.most))
        return Oracle(self.text, self.wrong, seed=len(self.budgets)), self.budgets[-1]
