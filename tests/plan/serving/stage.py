"""A stage in virtual time, for tests of the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

from swarmnode.plan.serving.scheduler import PassScheduler

LONGEST_STEP, LONGEST_CHUNK = 8, 512
FIXED_S, POSITION_S = 0.010, 0.001
OTHERS = range(4)  # peers with one session each
TOKENS = 4_000  # of each of them: the first hundredth of them may wait while a newcomer's long prompt goes by
GREEDY = itertools.count(100)


def cost_s(counts: Mapping[int, int], position_s: float = POSITION_S) -> float:
    """Of a pass: all rows are filled up to the longest."""
    return FIXED_S + position_s * len(counts) * max(counts.values())


class Stage:
    """A stage whose passes cost what `cost_s` says. Who decodes asks for the next step as soon as one is done."""

    def __init__(self, position_s: float = POSITION_S) -> None:
        self.cost_s = partial(cost_s, position_s=position_s)
        self.scheduler = PassScheduler(longest_step=LONGEST_STEP, longest_chunk=LONGEST_CHUNK)
        self.passes: list[dict[int, int]] = []
        self.now_s = 0.0
        self.decoding: set[int] = set()

    def turn(self) -> dict[int, int]:
        counts = self.scheduler.next()
        if counts:
            self.scheduler.took(counts)
            self.now_s += self.cost_s(counts)
            self.scheduler.ran(len(counts) * max(counts.values()), self.cost_s(counts))
            self.passes.append(counts)
        for session in self.decoding.intersection(counts):
            self.scheduler.add(session, 1)
        return counts

    def decode(self, *sessions: int, turns: int = 20) -> None:
        """Let them decode. The stage then knows what passes cost."""
        for positions in (1, LONGEST_CHUNK):
            self.scheduler.ran(positions, self.cost_s({0: positions}))
        for session in sessions:
            self.scheduler.add(session, 1)
            self.decoding.add(session)
        for _ in range(turns):
            self.turn()
        self.passes.clear()

    def run(self) -> list[dict[int, int]]:
        while self.turn():
            pass
        return self.passes


def p99_s(stage: Stage) -> float:
    """Of the waits for the tokens of others."""
    last_s, waits_s = dict.fromkeys(OTHERS, stage.now_s), []
    while len(waits_s) < TOKENS * len(OTHERS):
        for session in stage.turn().keys() & last_s.keys():
            waits_s.append(stage.now_s - last_s[session])
            last_s[session] = stage.now_s
    return sorted(waits_s)[int(0.99 * len(waits_s))]


def with_others() -> Stage:
    stage = Stage()
    for session in OTHERS:
        stage.scheduler.open(session, f"other {session}")
    stage.decode(*OTHERS)
    return stage


def open_greedy(stage: Stage, count: int, peers: int = 1) -> Iterator[int]:
    for number in range(count):
        session = next(GREEDY)
        stage.scheduler.open(session, f"greedy {number % peers}")
        yield session
