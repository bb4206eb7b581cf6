"""Receipts, which a client signs for the work of a worker, and vouchers, which a worker signs to pass its credit to a
client.

Format: `protocol/records.md`. The client counts by itself and names the worker. So no peer can make a receipt for its
own work, raise one, or claim another worker's. A batch of work has one receipt: a later receipt with more work replaces
the earlier one.

Receipts of one worker in one swarm: one file each, so that anyone with the folder can verify and add them up.

A receipt is on the disk, named by its batch, before it counts. A torn or foreign file is ignored. The number of
receipts is bounded, in total and per client: a client that keeps signing new batches pushes out only its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.messages import MAX_RECEIPT_BYTES
from swarmnode.codec.training_messages import Peer
from swarmnode.errors import ErrorCode, LocalError, ProtocolError
from swarmnode.files import read_bounded, write_private
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.signed import PeerSigned, Signable, Verify

DOMAIN = b"swarmnode receipt 1\n"
VOUCHER_DOMAIN = b"swarmnode voucher 1\n"
MAX_UNIT_TOKENS = 1 << 53
MAX_BATCH_S = 86_400  # longest span of work on one receipt
MAX_VOUCHER_S = 86_400
MAX_TIME_S = 1 << 40

UnitTokens = Annotated[int, Meta(ge=0, le=MAX_UNIT_TOKENS)]


class Voucher(Signable, frozen=True):
    """Statement that the credit of `worker` counts for `client` until `until` (unix time, seconds)."""

    swarm: bytes
    worker: Peer
    client: Peer
    until: Annotated[int, Meta(gt=0)]

    def __repr__(self) -> str:
        return f"<Voucher of {self.worker[-8:]} for {self.client[-8:]}>"


_VOUCHER_KIND = PeerSigned("voucher", Voucher, domain=VOUCHER_DOMAIN, max_bytes=MAX_RECEIPT_BYTES, author="worker")
sign_voucher = _VOUCHER_KIND.sign


def open_voucher(raw: bytes, swarm: bytes, verify: Verify, now: float) -> Voucher:
    """Open a voucher. Raises ProtocolError if its worker did not sign it, or `until` is past or more than a day after
    `now`."""
    voucher = _VOUCHER_KIND.open(raw, swarm, verify)
    if not 0 <= voucher.until - now <= MAX_VOUCHER_S:
        raise ProtocolError(
            "its voucher has expired, or is valid for too long", code=ErrorCode.REFUSED, peer=voucher.client
        )
    return voucher


class Receipt(Signable, frozen=True):
    """Work from `since` to `until` (unix time, seconds), in layers times tokens (samples, if a model has no tokens)."""

    swarm: bytes
    client: Peer
    worker: Peer
    since: int
    until: int
    served: UnitTokens
    trained: UnitTokens = 0

    def __repr__(self) -> str:
        return f"<Receipt of {self.client[-8:]} for {self.worker[-8:]}: {self.served} served, {self.trained} trained>"

    @property
    def batch(self) -> tuple[PeerId, PeerId, int]:
        """Key of the batch: of two receipts with the same key, one replaces the other."""
        return self.worker, self.client, self.since

    def replaces(self, other: Receipt | None) -> bool:
        """Return whether this receipt counts more work than another one of its batch, or as much until a later time.
        True if `other` is None."""
        return other is None or (self.served + self.trained, self.until) > (other.served + other.trained, other.until)

    def rules(self) -> dict[str, bool]:
        return {
            "worker": self.worker != self.client,
            "times": 0 < self.since <= self.until <= min(self.since + MAX_BATCH_S, MAX_TIME_S),
            "work": self.served > 0 or self.trained > 0,
        }


_KIND = PeerSigned("receipt", Receipt, domain=DOMAIN, max_bytes=MAX_RECEIPT_BYTES, author="client")
sign_receipt, open_receipt = _KIND.sign, _KIND.open


RECEIPTS = "receipts"
SUFFIX = ".receipt"
LIFE_S = 30 * 86_400  # after this time work is forgotten
SKEW_S = 600  # a client's clock may be ahead by this
STORED_RECEIPTS = 4096
STORED_PER_CLIENT = 64


def receipts_of(home: Path, swarm: bytes) -> Path:
    """Return the folder for the receipts of a swarm in this home, with a folder for each of its nodes."""
    return home / RECEIPTS / swarm.hex()[:16]


def read_receipts(folder: Path, swarm: bytes | None, verify: Verify) -> Iterator[Receipt]:
    """Yield all valid receipts of this swarm (None: of any) in a folder and its subfolders. Raises LocalError if it
    cannot be read."""
    return (receipt for receipt, _ in signed_receipts(folder, swarm, verify))


def signed_receipts(folder: Path, swarm: bytes | None, verify: Verify) -> Iterator[tuple[Receipt, bytes]]:
    """Yield all valid receipts with their signed bytes, as `read_receipts` does. Raises LocalError if the folder cannot
    be read."""
    try:
        paths = sorted(folder.rglob(f"*{SUFFIX}"))
    except OSError as error:
        raise LocalError(f"cannot read {folder}: {error.strerror or error}; check its permissions") from error
    for path in paths:
        with contextlib.suppress(OSError, ProtocolError):
            raw = read_bounded(path, MAX_RECEIPT_BYTES)
            if raw is not None:
                yield open_receipt(raw, swarm, verify), raw


def counts(receipt: Receipt, now: float) -> bool:
    """Return whether a receipt is recent enough to count. `now` is unix time in seconds."""
    return -LIFE_S <= receipt.until - now <= SKEW_S


class ReceiptFolder:
    """Receipts for the peer `worker`. `now` returns unix time in seconds."""

    def __init__(self, folder: Path, swarm: bytes, worker: PeerId, verify: Verify, now: Callable[[], float]) -> None:
        self._folder = folder / worker
        self._swarm = swarm
        self._worker = worker
        self._verify = verify
        self._now = now
        self._receipts: dict[tuple[PeerId, int], Receipt] = {}
        for receipt in read_receipts(self._folder, swarm, verify):
            if receipt.worker == worker and receipt.replaces(self.last(receipt)):
                self._receipts[receipt.client, receipt.since] = receipt
        self._bound()

    @property
    def receipts(self) -> list[Receipt]:
        """Receipts that are recent enough to count now."""
        return [receipt for receipt in self._receipts.values() if counts(receipt, self._now())]

    def last(self, receipt: Receipt) -> Receipt | None:
        """Return the kept receipt of the same batch; None if there is none."""
        return self._receipts.get((receipt.client, receipt.since))

    def open(self, raw: bytes) -> Receipt:
        """Open a receipt that may be kept. Raises ProtocolError if it is invalid, for another worker, or of another
        time."""
        receipt = open_receipt(raw, self._swarm, self._verify)
        if receipt.worker != self._worker:
            raise ProtocolError("its receipt is for another worker", code=ErrorCode.REFUSED, peer=receipt.client)
        if not counts(receipt, self._now()):
            raise ProtocolError(
                "its receipt is too old, or from the future", code=ErrorCode.REFUSED, peer=receipt.client
            )
        return receipt

    def store(self, receipt: Receipt, raw: bytes) -> None:
        """Write a receipt that `open` accepted, in place of the earlier one of its batch. Raises LocalError, and then
        nothing has changed."""
        write_private(self._path(receipt), raw, make_folder=True)
        is_new = self.last(receipt) is None
        self._receipts[receipt.client, receipt.since] = receipt
        if is_new:
            self._bound()

    def _bound(self) -> None:
        """Remove receipts that are too old or too many: of each client the oldest, of all the ones with the least work."""
        gone = {key for key, receipt in self._receipts.items() if not counts(receipt, self._now())}
        by_client: dict[PeerId, list[Receipt]] = {}
        for receipt in self._receipts.values():
            by_client.setdefault(receipt.client, []).append(receipt)
        for own in by_client.values():
            gone.update((one.client, one.since) for one in sorted(own, key=lambda one: -one.since)[STORED_PER_CLIENT:])
        left = [receipt for key, receipt in self._receipts.items() if key not in gone]
        left.sort(key=lambda one: -(one.served + one.trained))
        gone.update((one.client, one.since) for one in left[STORED_RECEIPTS:])
        for key in gone:
            with contextlib.suppress(OSError):
                self._path(self._receipts.pop(key)).unlink(missing_ok=True)

    def _path(self, receipt: Receipt) -> Path:
        name = hashlib.sha256(f"{receipt.client} {receipt.since}".encode()).hexdigest()[:32]
        return self._folder / f"{name}{SUFFIX}"
