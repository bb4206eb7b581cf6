"""Simulation of a busy swarm with drafted tokens: throughput of 64 peers on eight sites of three continents. Prints JSON.

    python contrib/studies/drafts.py [--sessions 8 64 512] [--seconds 60] [--seed 0] [--pass-ms 8] [--position-ms 0.6]

The network is DT-FM's worldwide one (contrib/scenarios/dtfm_worldwide_geo.json). Each of eight stages has a replica at every
site. The hops of a session's route are in turn at the site where it begins and at the site with the fewest sessions. A peer
computes all waiting rows in one pass, of `--pass-ms` and `--position-ms` for each row. A third of the sessions copy with edits
(95 % of the guesses are right), a third write code (60 %) and a third write freely (25 %).

    off        no guesses.
    measured   the budget of live nodes (plan/serving/draft_budget.py). It knows the costs, and the sessions at the route's hops.
    selfish    the same budget, but each session counts only itself.
    always 8   eight guesses in flight, always.

`all` is the sum of tokens/s. The kinds are the median session's tokens/s. `gain` is relative to off. `wasted` are rows in vain
for each token.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.plan.serving.draft_budget import MeasuredBudget, RowCost, RowLoad, batch

STAGES = 8
KINDS = {"edits": 0.95, "code": 0.6, "free": 0.25}
ALWAYS = 8
MAX_DRAFTS = 32
SCENARIO = Path(__file__).parents[1] / "scenarios" / "dtfm_worldwide_geo.json"


@dataclass(eq=False)
class Job:
    """Rows of a session on their way: for each whether its token is of the text. All belong to one turn."""

    session: Session
    turn: int
    rows: list[bool]
    sent_s: float


@dataclass(eq=False)
class Stage:
    """A peer: its place in the scenario, its waiting jobs, and the sessions whose routes pass it."""

    place: int
    waiting: deque[Job] = field(default_factory=deque)
    sessions: int = 0
    busy: bool = False
    load: RowLoad = field(default_factory=RowLoad)


@dataclass(eq=False)
class Session:
    """A text without end. `flying` has a mark for each guess in flight: whether it is right."""

    kind: str
    route: list[Stage]
    budget: MeasuredBudget | None
    chance: random.Random
    turn: int = 0
    flying: deque[bool] = field(default_factory=deque)
    tokens: int = 0
    wasted: int = 0


class Network:
    """The event loop of the study: passes at stages, and jobs on the lines between them."""

    def __init__(self, delay_s: list[list[float]], cost: RowCost, always: int | None) -> None:
        self.now_s = 0.0
        self._delay_s = delay_s
        self._cost = cost
        self._always = always
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` after `delay_s` seconds."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        """Let events happen until a time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def begin(self, session: Session) -> None:
        """Send the first token of a session round its ring."""
        self._send(session, [True])

    def _send(self, session: Session, rows: list[bool]) -> None:
        room = self._room(session)
        guesses = [session.chance.random() < KINDS[session.kind] for _ in range(room)]
        session.flying.extend(guesses)
        first, *others = self._batches(session, rows + guesses)
        for part in (first, *others):
            if part:
                self._arrive(Job(session, session.turn, part, self.now_s), 0)

    def _room(self, session: Session) -> int:
        if session.budget is not None:
            return max(0, min(session.budget.window("lookup"), MAX_DRAFTS) - len(session.flying))
        return max(0, (self._always or 0) - len(session.flying))

    def _batches(self, session: Session, rows: list[bool]) -> list[list[bool]]:
        size = max(1, batch(len(session.flying)) + 1)
        return [rows[start : start + size] for start in range(0, len(rows), size)] or [[]]

    def _arrive(self, job: Job, hop: int) -> None:
        stage = job.session.route[hop]
        stale = [one for one in stage.waiting if one.session is job.session and one.turn < job.turn]
        for one in stale:  # overtaken
            stage.waiting.remove(one)
        stage.waiting.append(job)
        if not stage.busy:
            self._compute(stage)

    def _compute(self, stage: Stage) -> None:
        jobs = list(stage.waiting)
        stage.waiting.clear()
        stage.busy = bool(jobs)
        if jobs:
            rows = sum(len(job.rows) for job in jobs)
            self.later(self._cost.pass_s + rows * self._cost.position_s, lambda: self._computed(stage, jobs))

    def _computed(self, stage: Stage, jobs: list[Job]) -> None:
        rows = sum(len(job.rows) for job in jobs)
        stage.load.record(self.now_s, rows * self._cost.position_s)
        for job in jobs:
            hop = job.session.route.index(stage) + 1
            there = job.session.route[hop % STAGES]
            act = (
                (lambda job=job, hop=hop: self._arrive(job, hop))
                if hop < STAGES
                else (lambda job=job: self._verdict(job))
            )
            self.later(self._delay_s[stage.place][there.place], act)
        self._compute(stage)

    def _verdict(self, job: Job) -> None:
        """Take the tokens that the last stage drew for a job, at the first one."""
        session = job.session
        if job.turn < session.turn:
            session.wasted += len(job.rows)
            return
        if session.budget is not None:
            session.budget.turn(self.now_s - job.sent_s)
        judged = 0
        for _ in job.rows:
            session.tokens += 1
            judged += 1
            if not session.flying:
                break
            right = session.flying.popleft()
            if session.budget is not None:
                session.budget.verdict("lookup", int(right), 0 if right else 1 + len(session.flying))
            if not right:
                session.turn += 1
                session.flying.clear()
                break
        else:
            if session.flying:
                self._send(session, [])
                return
        session.wasted += len(job.rows) - judged
        if not session.flying:
            session.turn += 1
            self._send(session, [True])


def routes(sites: list[list[int]], sessions: int, chance: random.Random) -> list[list[Stage]]:
    """Return a route for each session over the stages of all sites."""
    stages = [[Stage(place) for place in site] for site in sites]
    found = []
    for _ in range(sessions):
        home = chance.randrange(len(stages))
        route = []
        for number in range(STAGES):
            away = min(stages, key=lambda site: site[number].sessions)
            route.append((away if number % 2 else stages[home])[number])
        for stage in route:
            stage.sessions += 1
        found.append(route)
    return found


def measure(way: str, sessions: int, options: argparse.Namespace) -> dict[str, float]:
    """Simulate `sessions` sessions and return their tokens/s."""
    scenario = json.loads(SCENARIO.read_text())
    places = range(scenario["devices"])
    sites = [
        [place for place in places if scenario["region"][place] == region]
        for region in dict.fromkeys(scenario["region"])
    ]
    delay_s = [[delay / 1e3 for delay in row] for row in scenario["delay_ms"]]
    chance = random.Random(options.seed)
    position_s, pass_s = options.position_ms / 1e3, options.pass_ms / 1e3
    network = Network(delay_s, RowCost(pass_s, position_s), ALWAYS if way == "always 8" else None)
    running = []
    for number, route in enumerate(routes(sites, sessions, chance)):
        budget = None
        if way in ("measured", "selfish"):

            def cost(route: list[Stage] = route) -> RowCost:
                if way == "selfish":
                    return RowCost(pass_s, position_s, hops=STAGES)
                most, first = max(stage.sessions for stage in route), route[0]
                load = min(1.0, first.load.share(network.now_s) * most / first.sessions)
                return RowCost(pass_s, position_s, most - 1, load, hops=STAGES)

            budget = MeasuredBudget(cost, max_window=MAX_DRAFTS)
        kind = list(KINDS)[number % len(KINDS)]
        running.append(Session(kind, route, budget, random.Random(f"{options.seed} {number}")))
        network.later(chance.random(), lambda session=running[-1]: network.begin(session))
    network.run(options.seconds / 3)  # until the budgets know their sessions
    before = [(one.tokens, one.wasted) for one in running]
    network.run(options.seconds)
    seconds = options.seconds * 2 / 3
    speed = {one: (one.tokens - tokens) / seconds for one, (tokens, _) in zip(running, before, strict=True)}
    wasted = sum(one.wasted - earlier for one, (_, earlier) in zip(running, before, strict=True))
    kinds = {kind: statistics.median(speed[one] for one in running if one.kind == kind) for kind in KINDS}
    return {"all": sum(speed.values()), **kinds, "wasted": wasted / seconds / max(1e-9, sum(speed.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 64, 512, 2048])
    for name, default in (("seconds", 60.0), ("pass-ms", 10.0), ("position-ms", 4.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for sessions in options.sessions:
        found = {way: measure(way, sessions, options) for way in ("off", "measured", "selfish", "always 8")}
        report[str(sessions)] = {
            way: {
                **{name: round(value, 3) for name, value in values.items()},
                "gain": {name: round(values[name] / found["off"][name], 3) for name in ("all", *KINDS)},
            }
            for way, values in found.items()
        }
    print(json.dumps({"settings": vars(options), "sessions": report}, indent=1))


if __name__ == "__main__":
    main()
