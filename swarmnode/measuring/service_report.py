"""News of a node's work for its owner, in a line a minute, and the record of all that a machine has given."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.counting import counted, layers
from swarmnode.errors import LocalError
from swarmnode.lending.cards import JOULES_PER_KWH, energy_used
from swarmnode.measuring.meters import DECODE
from swarmnode.metrics import table
from swarmnode.metrics.metric import Figures, Readings, Source
from swarmnode.net.addressing.reachability import Reachability
from swarmnode.net.identity import identities, verify
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.receipt import LIFE_S, RECEIPTS, Receipt, counts, read_receipts, receipts_of
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep
from swarmnode.swarm.storage.swarmfile import Swarm

FAULTS = {
    "peer_lost": "the next machine was lost",
    "not_finite": "numbers became too large for this device",
    "internal": "this machine failed; its log says why",
}
SPEED_CHANGE = 1.25  # least factor between two speeds that makes the second news
LEAST_TOKENS = 20  # of a measured speed
MOST_NAMES = 3
FOLDER = "given"
MAX_FILE_BYTES = 4096
PEOPLE_DAYS = LIFE_S // 86_400


@dataclass(frozen=True)
class ServiceReport:
    """News about a node's work since the last news.

    Attributes:
        news: Sentences for the owner.
        answers: Texts that the node has worked on since it started.
        tokens_per_s: Speed of the node's own layers, one token after another; 0 if it was not measured.
        sessions: Texts that it works on now.
        reachability: How others reach the machine.
    """

    news: tuple[str, ...]
    answers: int
    tokens_per_s: float
    sessions: int
    reachability: Reachability

    def __str__(self) -> str:
        return " ".join(f"{one[0].upper()}{one[1:]}." for one in self.news)


class ServiceReporter:
    """Maker of a node's news for its owner (answers, speed, peers that joined or left), from the node's metrics and known peers."""

    def __init__(self, readings: Source) -> None:
        self._readings = readings
        self._now = _Counts()
        self._peers: dict[PeerId, str] | None = None  # names; None before the first report
        self._speed = 0.0  # that the owner knows
        self._reachability = Reachability.UNKNOWN

    def report(
        self, reachability: Reachability, peers: Mapping[PeerId, Announcement], since: float = 0.0
    ) -> ServiceReport | None:
        """Return the news since the last call; None if there are none.

        `peers` are the known peers; those without layers do not count. In the first call, those that started later than `since`
        (unix time) have joined.
        """
        before, figures = self._now, Figures(self._readings())
        now = self._now = _Counts(
            answers=int(figures.sum(table.ANSWERS)),
            decoded=figures.sum(table.TOKENS, phase=DECODE),
            decode_s=figures.sum(table.PASS_SECONDS, phase=DECODE),
            faults=figures.by(table.FAULTS, "cause"),
        )
        # After a move a stage counts from 0. A speed of a few tokens says nothing.
        begun = before if now.decoded >= before.decoded and now.decode_s >= before.decode_s else _Counts()
        tokens, seconds = now.decoded - begun.decoded, now.decode_s - begun.decode_s
        speed = tokens / seconds if tokens >= LEAST_TOKENS and seconds > 0 else 0.0
        named = {peer: one.name or peer[-8:] for peer, one in peers.items() if one.span[1] > one.span[0]}
        known = {peer for peer, one in peers.items() if one.started_at <= since} if self._peers is None else self._peers
        came = [f"{named[peer]} ({layers(*peers[peer].span)})" for peer in named if peer not in known]
        left = [name for peer, name in (self._peers or {}).items() if peer not in named]
        self._peers = named
        news = []
        # The first answer, and then each tenfold number
        if not before.answers and now.answers:
            self._speed = speed
            news.append("first answer served" + (f", at {speed:,.1f} tokens/s" if speed else ""))
        elif now.answers and len(str(now.answers)) > len(str(before.answers)):
            news.append(f"{10 ** (len(str(now.answers)) - 1):,} answers served so far")
        # A speed that is new, or far from the one that the owner knows
        told = self._speed
        if speed and not (told and max(speed, told) <= SPEED_CHANGE * min(speed, told)):
            news += [f"now {speed:,.1f} tokens/s instead of {told:,.1f}"] if told else []
            self._speed = speed
        news += [f"joined: {_listed(came)}"] if came else []
        news += [f"left: {_listed(left)}"] if left else []
        if reachability is not self._reachability:
            self._reachability = reachability
            news.append(reachability.in_words)
        for cause, count in (now.faults - before.faults).items():
            why = FAULTS.get(cause, "another machine could not go on")
            news.append(f"{counted(count, 'text')} broke off here: {why}")
        sessions = int(figures.sum(table.SESSIONS))
        return ServiceReport(tuple(news), now.answers, speed, sessions, reachability) if news else None


@dataclass(frozen=True)
class _Counts:
    """Counts of a node so far. `decoded` and `decode_s` are of single tokens: their number and their seconds."""

    answers: int = 0
    decoded: float = 0.0
    decode_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


def _listed(names: Collection[str]) -> str:
    """Return the first `MOST_NAMES` names, and the number of the others."""
    shown, more = list(names)[:MOST_NAMES], len(names) - MOST_NAMES
    return f"{', '.join(shown)} and {more:,} more" if more > 0 else ", ".join(shown)


@dataclass(frozen=True)
class Donation:
    """All that the nodes of a home have given.

    Attributes:
        answers: Texts that they have worked on.
        lent_s: Seconds of lending, of all nodes together.
        people: Distinct members of private swarms that signed receipts in the last `PEOPLE_DAYS` days, without those of this home.
        visits: Distinct clients of other swarms that did; a client of those is a new one each time.
        energy_j: Joules that the cards drew while nodes ran, as the driver measures; None if no card reports it.
    """

    answers: int
    lent_s: float
    people: int
    visits: int
    energy_j: float | None

    @property
    def any(self) -> bool:
        """Whether anything was given that is worth a sentence."""
        return self.answers > 0 or self.lent_s >= 60

    def __str__(self) -> str:
        hours = (
            f"{self.lent_s / 3600:,.1f} hours" if self.lent_s >= 3600 else counted(round(self.lent_s / 60), "minute")
        )
        parts = [f"{counted(self.answers, 'answer')} in {hours}" if self.answers else hours]
        served = [f"{self.people:,} {'person' if self.people == 1 else 'people'}"] if self.people else []
        served += [f"{counted(self.visits, 'visit')} to open swarms"] if self.visits else []
        if served:
            parts.append(f"in the last {PEOPLE_DAYS} days for {' and '.join(served)}")
        if self.energy_j is not None:
            parts.append(f"{self.energy_j / JOULES_PER_KWH:,.2f} kWh drawn by its GPUs")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the donation as a dict that JSON can hold, with the energy in kWh."""
        kwh = None if self.energy_j is None else self.energy_j / JOULES_PER_KWH
        told = {name: value for name, value in asdict(self).items() if name != "energy_j"}
        return {**told, "people_days": PEOPLE_DAYS, "kwh": kwh}


class _WorkSums(msgspec.Struct, frozen=True):
    """Answers and lent seconds of one node, over all its runs, and the private swarms in them by the beginning of their ids."""

    answers: int = 0
    lent_s: float = 0.0
    private: tuple[str, ...] = ()


class WorkRecord:
    """Record of the answers and hours of one node over all its runs, in a file of the home."""

    def __init__(self, home: Path, peer: PeerId, swarm: Swarm, readings: Source) -> None:
        self._home = home
        self._private = {receipts_of(home, swarm.id).name} if swarm.private else set()
        self._path = home / FOLDER / f"{peer}.json"
        self._readings = readings
        self._before = read_stored(self._path, _WorkSums, max_bytes=MAX_FILE_BYTES) or _WorkSums()
        self._receipts = _Receipts()

    def run_sums(self) -> _WorkSums:
        """Return the answers and the lent seconds of this run."""
        figures = Figures(self._readings())
        return _WorkSums(int(figures.sum(table.ANSWERS)), float(figures.sum(table.LENT_SECONDS)))

    def store(self, run: _WorkSums) -> Donation:
        """Write the sums of this run, `run`, and all earlier ones. Returns the home's donation. Blocks for some milliseconds."""
        private = tuple(sorted(self._private.union(self._before.private)))
        sums = _WorkSums(self._before.answers + run.answers, self._before.lent_s + run.lent_s, private)
        if sums != _WorkSums():
            try_to_keep(self._path, sums, "the record of this machine's work is")
        return donation(self._home, receipts=self._receipts)


def donation(home: Path, now: Callable[[], float] = time.time, *, receipts: _Receipts | None = None) -> Donation:
    """Return all that the nodes of this home have given. Damaged files count as empty. `receipts` are those of the last call."""
    receipts = receipts or _Receipts()
    kept = [
        read_stored(path, _WorkSums, max_bytes=MAX_FILE_BYTES) or _WorkSums() for path in (home / FOLDER).glob("*.json")
    ]
    energy, private = energy_used(home), {swarm for one in kept for swarm in one.private}
    members, visitors = set[PeerId](), set[PeerId]()
    for folder in (home / RECEIPTS).glob("*"):
        (members if folder.name in private else visitors).update(receipts.clients(folder, now()))
    own = {identity.peer_id for identity in identities(home)}
    return Donation(
        sum(one.answers for one in kept),
        sum(one.lent_s for one in kept),
        len(members - own),
        len(visitors - own),
        None if energy is None else energy.total_j,
    )


class _Receipts:
    """The receipts of a home. Those of a node are read and verified again only if its folder has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[int, list[Receipt]]] = {}

    def clients(self, folder: Path, now: float) -> set[PeerId]:
        """Return the clients whose receipts in a swarm's `folder` count; empty if it cannot be read."""
        found = set[PeerId]()
        for node in folder.glob("*"):
            with contextlib.suppress(LocalError, OSError):
                changed_ns = node.stat().st_mtime_ns
                if self._read.get(node, (None,))[0] != changed_ns:
                    self._read[node] = changed_ns, list(read_receipts(node, None, verify))
                found |= {receipt.client for receipt in self._read[node][1] if counts(receipt, now)}
        return found


def work_sums(readings: Readings) -> dict[str, Any]:
    """Return the sums of a node's work for its owner's page: positions computed for others, positions times units, bytes on links;
    and step and loss if it trains."""
    figures = Figures(readings)
    step, loss = int(figures.sum(table.TRAINING_STEP)), float(figures.sum(table.TRAINING_LOSS))
    return {
        "tokens": int(figures.sum(table.POSITIONS_FOR_OTHERS)),
        "unit_tokens": int(figures.sum(table.UNIT_TOKENS)),
        "link_bytes": {way: int(figures.sum(table.LINK_BYTES, direction=way)) for way in ("sent", "received")},
        "training": {"step": step, "loss": loss} if figures.values(table.TRAINING_LOSS) else None,
    }
