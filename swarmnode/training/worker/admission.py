"""Admission: the checks of a microbatch or its labels against the run, the route, the lease's seal, and the size of a
microbatch.

Seal of a lease: it proves to a hop that the coordinator gave this lease, for this microbatch and route, to this trainer.

The coordinator sends the key of its term to the stages with LEAD; no other peer knows it.

Label queue: the labels of microbatches that end at this node, from their arrival until their values are here, too.

A trainer sends labels directly to the last hop. They may arrive before or after the values, so each waits for the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import TensorInfo
from swarmnode.codec.training_messages import SEAL_BYTES, Forward, Labels
from swarmnode.errors import ErrorCode, PeerLost, PeerRefused
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.run import MAX_ROUTER_SUMS, Run


def seal_lease(
    key: bytes, run: bytes, term: int, lease: int, step: int, number: int, route: Sequence[HopSpec], feeder: PeerId
) -> bytes:
    """Return the seal, 16 bytes: BLAKE2b, keyed with the term's key, over the msgpack array of all other arguments."""
    sealed = msgspec.msgpack.encode((run, term, lease, step, number, tuple(route), feeder))
    return hashlib.blake2b(sealed, key=key, digest_size=SEAL_BYTES).digest()


def is_sealed(key: bytes, body: Forward | Labels) -> bool:
    """Return whether the seal of `body` is the one of its fields under `key`; False if the key is empty."""
    expected = seal_lease(key, body.run, body.term, body.lease, body.step, body.number, body.route, body.feeder)
    return bool(key) and hmac.compare_digest(expected, body.seal)


def refusal_of(body: Forward | Labels, sender: PeerId, here: PeerId, run: Run, key: bytes) -> ErrorCode | None:
    """Return the reason to refuse a microbatch or labels of the current term, or None to admit them. `key` is the term's."""
    if body.run != run.id:
        return ErrorCode.WRONG_RUN
    if body.number not in run.passes(body.step) or body.route[body.hop].peer != here:
        return ErrorCode.MALFORMED
    if sender != body.sender or not is_sealed(key, body):
        return ErrorCode.REFUSED
    return None if is_of_its_size(body.values, run) else ErrorCode.MALFORMED


def is_of_its_size(values: Sequence[TensorInfo], run: Run) -> bool:
    """Return whether the values have as many samples and tokens as the run demands, so that the holder of a lease cannot exhaust
    the memory. In a run that weighs labels, the share of a microbatch may end them, and in one with losses of routers their sums.
    Always True for modules that are not language models: only the graph knows their shapes."""
    sample, ends = (run.microbatch, run.sequence), values[-1].shape if len(values) > 1 else ()
    has_sums = run.known_recipe.watches_routers and len(ends) == 1 and ends[0] <= MAX_ROUTER_SUMS
    sized = values[:-1] if has_sums or (run.weighs_labels and ends == (1,)) else values
    return not run.sequence or (bool(sized) and all(info.shape[:2] == sample for info in sized))


MAX_LABELS = 64  # microbatches, those of the next step included
LABELS_S = 10.0  # after the values are here; at most half of the lease's time


class ReceivedLabels(NamedTuple):
    """Message with the labels of a microbatch, as a trainer sent it."""

    body: Labels
    payload: bytes | bytearray


@dataclass
class _Waiting:
    """Labels that arrived before their microbatch, with the memory that they take."""

    received: ReceivedLabels
    memory: Reservation


class LabelQueue:
    """Received labels by lease. If the sender ends the conversation that brought labels, they are forgotten."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._waiting: dict[int, _Waiting] = {}
        self._awaited: dict[int, asyncio.Future[ReceivedLabels]] = {}

    def __repr__(self) -> str:
        return f"<LabelQueue of {len(self._waiting)} waiting, {len(self._awaited)} awaited>"

    def put(self, body: Labels, payload: bytes | bytearray) -> ErrorCode | None:
        """Store labels, or give them to the microbatch that waits for them. Returns None, or BUSY if there is no room or
        the lease has some already."""
        received, awaited = ReceivedLabels(body, payload), self._awaited.pop(body.lease, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(received)
            return None
        if body.lease in self._waiting or len(self._waiting) >= MAX_LABELS:
            return ErrorCode.BUSY
        try:
            memory = self._reserve(len(payload))
        except Full:
            return ErrorCode.BUSY
        self._waiting[body.lease] = _Waiting(received, memory)
        return None

    def _reserve(self, size_bytes: int) -> Reservation:
        """Reserve memory for labels. The first are always let in, like the first microbatch. Raises Full if there is no
        room for others."""
        if self._waiting:
            return self._ledger.reserve(Account.MESSAGES, size_bytes)
        return self._ledger.count(Account.MESSAGES, size_bytes)

    async def labels_of(self, lease: int, within_s: float) -> ReceivedLabels:
        """Return the labels of a lease. If they have not arrived, waits for them, at most half the `within_s` seconds that the
        lease lasts (0: unknown). Raises PeerRefused if they do not arrive in time, PeerLost if the lease ends before."""
        waiting = self._waiting.pop(lease, None)
        if waiting is not None:
            waiting.memory.release()
            return waiting.received
        patience_s = min(LABELS_S, within_s / 2) if within_s else LABELS_S
        awaited = self._awaited[lease] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(awaited, patience_s)
        except asyncio.TimeoutError:
            raise PeerRefused(
                f"its trainer sent no labels within {patience_s:.0f} s", code=ErrorCode.NOT_FOUND
            ) from None
        finally:
            self._awaited.pop(lease, None)

    def drop(self, leases: Collection[int]) -> None:
        """Forget the labels of these leases, and stop waiting for any."""
        for lease in leases:
            waiting, awaited = self._waiting.pop(lease, None), self._awaited.pop(lease, None)
            if waiting is not None:
                waiting.memory.release()
            if awaited is not None and not awaited.done():
                awaited.set_exception(PeerLost("the microbatch was given up"))

    def clear(self) -> None:
        """Forget the labels of all leases."""
        self.drop([*self._waiting, *self._awaited])

    def next_step(self, step: int) -> None:
        """Forget the labels of steps before `step`."""
        self.drop([lease for lease, one in self._waiting.items() if one.received.body.step < step])
