"""Paths between the peers of a fake world: latency, rate and loss, and peers that hang."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId, Record
from swarmnode.net.memory.stream import Pipe

RETRANSMISSION_S = 0.2  # TCP's minimum (Linux)


class Island:
    """Peers that have found one another, and their shared records. A client uses the records without being one of the peers."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.peers = set(peers)
        self.records: dict[bytes, dict[bytes, Record]] = {}

    def __repr__(self) -> str:
        return f"<Island of {len(self.peers)} peers, {len(self.records)} keys>"

    def keep(self, key: bytes, subkey: bytes, record: Record) -> bool:
        """Keep a record; return False, changing nothing, if one that expires later, or at the same time, is there."""
        known = self.records.setdefault(key, {}).get(subkey)
        if known is not None and known.expires_at >= record.expires_at:
            return False
        self.records[key][subkey] = record
        return True

    def absorb(self, other: Island) -> None:
        """Take the peers and records of another island."""
        self.peers |= other.peers
        for key, records in other.records.items():
            for subkey, record in records.items():
                self.keep(key, subkey, record)


@dataclass(frozen=True)
class Path:
    """Direction from one peer to another. `loss` is the share of writes that are lost once and arrive by retransmission. Directions
    with the same `line` share it: they send one after another."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    loss: float = 0.0
    line: str = ""


class Medium:
    """Transport of bytes from pipe to pipe in the event loop's time. `random` draws the losses."""

    def __init__(self, random: random.Random) -> None:
        self.default_path = Path()
        self._random = random
        self._paths: dict[tuple[PeerId, PeerId], Path] = {}
        self._free_at: dict[object, float] = {}  # when a direction, or the line of several, has sent all its bytes
        self._hanging: dict[PeerId, asyncio.Event] = {}
        self._held: list[Pipe] = []  # one entry for each arrival that waits for a hanging peer

    def __repr__(self) -> str:
        return f"<Medium with {len(self._paths)} paths of their own, {len(self._hanging)} peers hang>"

    def path(self, source: PeerId, target: PeerId) -> Path:
        """Return the latency, rate and loss from `source` to `target`: the set path, else the default one."""
        return self._paths.get((source, target), self.default_path)

    def set_path(self, one: PeerId, other: PeerId, path: Path, back: Path | None = None) -> None:
        """Set the path from `one` to `other`, and `back` (by default the same) in the other direction."""
        self._paths[one, other], self._paths[other, one] = path, back or path

    def hang(self, peer: PeerId) -> None:
        """Let a peer hang as by SIGSTOP, seen from outside: data to and from it stays on the way, and its own timers continue."""
        self._hanging.setdefault(peer, asyncio.Event())

    def wake(self, peer: PeerId) -> None:
        """End the hang of `peer`: its data that was held back arrives."""
        awake = self._hanging.pop(peer, None)
        if awake is not None:
            awake.set()
            held, self._held = self._held, []
            for pipe in held:
                self._arrive(pipe)

    async def travel(self, source: PeerId, target: PeerId) -> None:
        """Wait for the time of a very small message, and until neither peer hangs."""
        await asyncio.sleep(self.path(source, target).latency_s)
        for peer in (source, target):
            await self.awake(peer)

    async def awake(self, peer: PeerId) -> None:
        """Wait until `peer` does not hang any more."""
        while (hanging := self._hanging.get(peer)) is not None:
            await hanging.wait()

    def deliver(self, pipe: Pipe, size_bytes: int) -> None:
        """Schedule the arrival of `size_bytes` that the pipe was given."""
        loop = asyncio.get_running_loop()
        direction = (pipe.source, pipe.target)
        path = self.path(*direction)
        line = path.line or direction
        sent_at = max(loop.time(), self._free_at.get(line, 0.0)) + size_bytes / path.bytes_per_s
        self._free_at[line] = sent_at
        lost = path.loss > 0 and self._random.random() < path.loss
        delay_s = path.latency_s + (max(RETRANSMISSION_S, 2 * path.latency_s) if lost else 0.0)
        pipe.last_arrival_s = max(pipe.last_arrival_s, sent_at + delay_s)
        loop.call_at(pipe.last_arrival_s, self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        if pipe.source in self._hanging or pipe.target in self._hanging:
            self._held.append(pipe)
        elif not pipe.broken:
            pipe.arrive()
