"""Scheduler of a stage's passes: the positions of each session in the next pass, by continuous batching with chunked prompts.

    add(session, count) -> next() -> {session: count} -> took(them) -> [the pass] -> ran(positions, seconds)

Sessions that decode go together (Orca, OSDI 2022): a pass over several costs little more than over one. Prompts go in chunks, in
turn with the steps, so that neither starves the other (Sarathi-Serve, arXiv 2403.02310), and short ones together. Steps and chunks
do not share a pass as they do there: all rows of a pass are as long as the longest (`compute/serving/cohort.py`), so a chunk of T
positions beside B steps would be one of (B + 1) T.

The length of a chunk follows from the measured cost of passes (a fixed time f, and p for each position):

  - While other sessions decode, a chunk takes at most STALL times as long as their step, so no step waits longer for it.
  - While no session decodes, a chunk takes up to UNDISTURBED times as long as a step of one session. Reading the weights is then
    a small part of it, on a card as on a slow processor, and a new session does not wait long.
  - An owner that has used much more of the device than others (`DeviceShares`) gets a few positions of its prompt beside their
    steps, as many as lengthen that pass by half. If no step waits, it gets a short chunk. Others hardly notice.
  - If stages follow, they should work on the beginning of the prompt while this stage works on its end. With L positions in n
    chunks, h stages take (n + h - 1) (f + p L / n), which is least for n = sqrt((h - 1) p L / f). For f the cost of one position
    is used.

The fixed part of a pass is reading the weights and starting the operators, the other multiplying. A straight line is fitted to
(positions, seconds) by least squares. Older passes count less and less: caches grow, and machines get other work.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.net.fair_share import Recent

KEPT = 0.97  # of the weight of all earlier passes, at each new one


class PassCost:
    """Learnt seconds of a pass, `fixed_s + positions * position_s`; both are zero before the first `record`."""

    def __init__(self, kept: float = KEPT) -> None:
        self._kept = kept
        self.position_s = 0.0  # of each further position: all of the time is theirs where all passes were alike
        self.fixed_s = 0.0  # of a pass, however short
        self.mean_s = self.mean_positions = 0.0  # of the last passes
        self._sums = [0.0] * 5  # of passes, with x positions and y seconds: 1, x, y, x * x, x * y

    def record(self, positions: int, took_s: float) -> None:
        """Record that a pass over `positions` positions took `took_s` seconds."""
        new = 1.0, positions, took_s, positions * positions, positions * took_s
        self._sums = [self._kept * old + one for old, one in zip(self._sums, new, strict=True)]
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        slope_s = (weight * xy - x * y) / spread if spread > 1e-6 * weight * xx else y / x
        self.position_s = min(max(slope_s, 0.0), y / x)
        self.fixed_s = (y - self.position_s * x) / weight
        self.mean_s, self.mean_positions = y / weight, x / weight

    def seconds(self, positions: float) -> float:
        """Return the expected seconds of a pass over `positions` positions; 0 before the first note."""
        return self.fixed_s + positions * self.position_s

    def positions(self, within_s: float) -> float:
        """Return the positions that fit into `within_s` seconds: infinite if a position costs nothing, maybe negative."""
        return (within_s - self.fixed_s) / self.position_s if self.position_s else float("inf")


STALL = 2.0  # times a step: a session that arrives just after a chunk has begun waits for the chunk and for a step
UNDISTURBED = 10.0  # times a step
SHORTEST_CHUNK, USUAL_CHUNK = 16, 128  # positions; shorter chunks are mostly overhead: USUAL_CHUNK if no step waits
FADING = 0.8  # of the weight of all earlier passes of a kind, at each new one: caches grow while a prompt is computed
RECENT_PASSES = 16  # a session without a step in all of these is too slow to notice a whole chunk
SLOWDOWN = 1.5  # of a pass, by the owners with the most sessions or time
ALLOWED_POSITIONS = 512  # about a prompt: the lead of an owner that still counts as equal
MAX_OWNERS = 1024  # remembered at most

Owner = str | int
"""Name of an owner, or the number of a session without owner"""


class DeviceShares:
    """Shares of one device's time that each owner of sessions has used."""

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._owners: dict[int, Owner] = {}  # of open sessions that have one
        self._weights: dict[int, float] = {}  # of open sessions that have an owner
        self._used_s: Recent[Owner, float] = Recent(MAX_OWNERS)

    def open(self, session: int, owner: str, weight: float = 1.0) -> None:
        """Charge the session's further time to `owner`, divided by `weight`."""
        self._owners[session] = owner
        self._weights[session] = weight

    def close(self, session: int) -> None:
        """Forget the session, but not the time that its named owner has used."""
        self._used_s.pop(session, None)
        self._owners.pop(session, None)
        self._weights.pop(session, None)

    def arrive(self, session: int, present: Iterable[int]) -> None:
        """Note that an idle session has work again while the sessions `present` have some, too.

        An owner without a session among them counts as having used at least as much time as the owner that used least, so that
        time without work earns no lead.
        """
        owner, there = self._owner(session), {self._owner(other) for other in present}
        if owner not in there:
            least_s = min((self._used_s.get(other, 0.0) for other in there), default=0.0)
            self._used_s[owner] = max(self._used_s.get(owner, 0.0), least_s)

    def charge(self, counts: Mapping[int, int]) -> None:
        """Charge the owners for a pass over `counts` positions by session, with all rows filled up to the longest."""
        each_s = self._cost.seconds(len(counts) * max(counts.values())) / sum(counts.values())
        for session, count in counts.items():
            owner = self._owner(session)
            used_s = self._used_s.get(owner, 0.0)
            self._used_s[owner] = used_s + count * each_s / self._weights.get(session, 1.0)

    def _owner(self, session: int) -> Owner:
        return self._owners.get(session, session)

    def ahead_s(self, sessions: Iterable[int], present: Iterable[int]) -> dict[int, float]:
        """Return, for each of `sessions`, the seconds that its owner has used more than the owner that used least.

        Only owners of the sessions in `present` are compared. A session without owner is 0 seconds ahead.
        """
        least_s = min(
            (self._used_s.get(owner, 0.0) for owner in {self._owner(other) for other in present}), default=0.0
        )
        return {
            session: self._used_s.get(self._owners[session], 0.0) - least_s if session in self._owners else 0.0
            for session in sessions
        }

    @property
    def allowed_s(self) -> float:
        """Lead in seconds that an owner may have without being held back."""
        return self._cost.seconds(ALLOWED_POSITIONS)

    def of_others(self, sessions: Iterable[int], session: int) -> list[int]:
        """Return the sessions that have another owner than `session`."""
        return [other for other in sessions if self._owner(other) != self._owner(session)]

    def steps(self, waiting: Sequence[int], decoding: Collection[int]) -> list[int]:
        """Return the sessions from `waiting`, in order, whose steps go into the next pass; each owner has a limit of rows."""
        rows = Counter(self._owner(session) for session in {*waiting, *decoding})
        most = self._rows_of_owner(list(rows.values()))
        taken: Counter[Owner] = Counter()
        steps = []
        for session in waiting:
            owner = self._owner(session)
            taken[owner] += 1
            if taken[owner] <= most:
                steps.append(session)
        return steps

    def _rows_of_owner(self, rows: Sequence[int]) -> int:
        """Return the largest number of rows of one owner in a pass, given the `rows` that each owner wants."""
        most, usual = max(rows, default=0), statistics.median_low(rows) if rows else 0
        if usual == most or not self._cost.position_s:
            return most
        fit = self._cost.positions(SLOWDOWN * self._cost.seconds(sum(count for count in rows if count <= usual)))
        return next((more for more in range(most, usual, -1) if sum(min(count, more) for count in rows) <= fit), usual)


@dataclass(slots=True)
class Backlog:
    """Waiting work of a session: its `positions`, the most that have waited at once (`prompt`), and the stages after this one."""

    positions: int = 0
    prompt: int = 0
    stages_after: int = 0


class PassScheduler:
    """Scheduler of one stage's passes. A session with at most `longest_step` waiting positions may go as a step; a session with
    more is in its prompt and goes in chunks of at most `longest_chunk` positions, and of at least `least_beside` beside steps."""

    def __init__(self, *, longest_step: int, longest_chunk: int, least_beside: int = 1) -> None:
        self.cost = PassCost()
        self.shares = DeviceShares(self.cost)
        self._longest_step = longest_step
        self._longest_chunk = longest_chunk
        self._least_beside = least_beside
        self._backlogs: dict[int, Backlog] = {}  # the session with the latest turn stands last
        self._stepped_at: dict[int, int] = {}  # by session that decodes, the number of the last pass with a step of it
        self._passes = 0
        self._prompts_next = False
        self._steps, self._prompts = PassCost(FADING), PassCost(FADING)
        self._running = (
            PassCost()
        )  # costs of the kind of the pass that has begun; at first of what is measured without sessions

    def open(self, session: int, owner: str, weight: float = 1.0) -> None:
        """Charge the session's time to `owner`, divided by `weight`."""
        self.shares.open(session, owner, weight)

    def add(self, session: int, positions: int, *, stages_after: int = 0) -> None:
        """Add `positions` to the backlog of a session, which passes `stages_after` more stages after this one."""
        if session not in self._backlogs and session not in self._stepped_at:
            self.shares.arrive(session, self._present)
        backlog = self._backlogs.setdefault(session, Backlog())
        backlog.positions += positions
        backlog.prompt = max(backlog.prompt, backlog.positions)
        backlog.stages_after = stages_after

    def retract(self, session: int, positions: int) -> None:
        """Remove `positions` from the backlog of a session: guesses that turned out to be wrong before they were computed."""
        backlog = self._backlogs[session]
        backlog.positions -= positions
        if backlog.positions <= 0:
            del self._backlogs[session]

    def drop(self, session: int) -> None:
        """Forget a session that has ended, with its waiting positions."""
        self._backlogs.pop(session, None)
        self._stepped_at.pop(session, None)
        self.shares.close(session)

    @property
    def _present(self) -> set[int]:
        return self._backlogs.keys() | self._stepped_at.keys()

    def next(self) -> dict[int, int]:
        """Return the number of positions by session for the next pass; empty if nothing waits."""
        if len(self._backlogs) == 1:
            ((session, backlog),) = self._backlogs.items()
            if backlog.positions <= self._longest_step:  # no other session waits
                self._prompts_next = True
                return {session: backlog.positions}
        waiting = [session for session, backlog in self._backlogs.items() if backlog.positions <= self._longest_step]
        turn = self.shares.steps(waiting, self._stepped_at)
        # All rows are filled up to the longest step. A step of several positions (drafts, the end of a prompt) is left to the
        # prompts if filling up would cost more than another pass.
        steps, longest = dict[int, int](), 0
        for count, session in sorted((self._backlogs[session].positions, session) for session in turn):
            if steps and len(steps) * (count - longest) * self.cost.position_s > self.cost.fixed_s:
                break
            steps[session] = longest = count
        out_of_turn = set(waiting).difference(turn)
        prompts = [session for session in self._backlogs if session not in steps and session not in out_of_turn]
        ahead_s = self.shares.ahead_s(prompts, self._present)
        prompts.sort(key=ahead_s.__getitem__)  # stable: owners with the same time keep their order of turns
        held_back = [session for session in prompts if self._stepped_at and ahead_s[session] > self.shares.allowed_s]
        prompts = [session for session in prompts if session not in held_back]
        self._prompts_next = bool(steps) and not (prompts and self._prompts_next)
        if self._prompts_next:
            return self._beside(steps, held_back[0]) if held_back else steps
        if self._stepped_at:  # not so many positions that decoding sessions wait too long
            # The last chunks tell what a position costs, as steps have logits. Half a position more lets chunks grow from 1.
            if self._prompts.mean_s and self._steps.mean_s:
                most = STALL * self._steps.mean_s * self._prompts.mean_positions / self._prompts.mean_s
            else:
                most = self.cost.positions(STALL * self.cost.seconds(len(self._stepped_at)))
            most = max(most + 0.5, self._least_beside)
        else:
            most = max(self.cost.positions(UNDISTURBED * self.cost.seconds(1)), USUAL_CHUNK)
        prompts, most = (prompts, most) if prompts else (held_back[:1], min(most, SHORTEST_CHUNK))
        return self._chunks(prompts, int(min(most, self._longest_chunk))) if prompts else {}

    def took(self, counts: Mapping[int, int]) -> None:
        """Record that a pass begins with `counts` positions by session, which may differ somewhat from the result of `next`."""
        self._passes += 1
        self._running = self._steps if self._prompts_next else self._prompts
        self.shares.charge(counts)
        for session, count in counts.items():
            backlog = self._backlogs.pop(session)
            if self._prompts_next and backlog.positions <= self._longest_step:  # it is a step, in a pass of steps
                self._stepped_at[session] = self._passes
            backlog.positions -= count
            if backlog.positions > 0:
                self._backlogs[session] = backlog
        oldest = self._passes - RECENT_PASSES
        self._stepped_at = {session: number for session, number in self._stepped_at.items() if number > oldest}

    def ran(self, positions: int, took_s: float) -> None:
        """Record that a pass over `positions` positions, counted with all rows filled up, took `took_s` seconds."""
        self.cost.record(positions, took_s)
        self._running.record(positions, took_s)

    def _beside(self, steps: Mapping[int, int], prompt: int) -> dict[int, int]:
        """Return the steps, and beside them as much of a prompt as lengthens the steps of other owners by half, with all rows
        filled up.

        That is at least as much as the longest step, and at most `longest_step` positions. If it would be less, and the
        owner of the prompt has a step in the pass, the prompt is left out.
        """
        longest, rows = max(steps.values()), len(steps) + 1
        others = self.shares.of_others(steps, prompt)
        fit = self.cost.positions(SLOWDOWN * self.cost.seconds(len(others) * longest)) / rows
        if fit < longest and len(others) < len(steps):
            return dict(steps)
        most = min(self._longest_step, self._backlogs[prompt].positions)
        return {**steps, prompt: int(min(max(fit, longest), most))}

    def _chunks(self, prompts: list[int], room: int) -> dict[int, int]:
        """Return the positions by session of a pass over prompts, at most `room` with all rows filled up.

        The first of `prompts` gets a chunk. Others join with more than half its length, as long as there is room.
        """
        longest = min(self._chunk(self._backlogs[prompts[0]]), room)
        chunks: dict[int, int] = {}
        for session in prompts:
            if (len(chunks) + 1) * longest > room:
                break
            count = min(self._backlogs[session].positions, longest)
            if 2 * count > longest:
                chunks[session] = count
        return chunks

    def _chunk(self, backlog: Backlog) -> int:
        """Return the length of a prompt's next chunk, short enough that the stages after this one are not idle for long.

        All chunks of a prompt are about equally long.
        """
        parallel_s, least_s = backlog.stages_after * backlog.prompt * self.cost.position_s, self.cost.seconds(1)
        chunks = max(1, round(math.sqrt(parallel_s / least_s))) if least_s else 1
        length = math.ceil(backlog.prompt / chunks)
        return min(max(length, SHORTEST_CHUNK), backlog.positions)
