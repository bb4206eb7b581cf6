"""The receipts of one worker in one swarm: a file each, so that whoever has the folder can check and add them up.

A receipt is on the disk, and named by its batch, before it counts. A torn or strange file counts for nothing. The folder is bounded
in all and by client: who signs for ever new batches pushes out its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmnode.codec.credit_messages import MAX_RECEIPT_BYTES
from swarmnode.errors import ErrorCode, LocalError, ProtocolError
from swarmnode.files import read_bounded, write_private
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.receipt import Receipt, open_receipt
from swarmnode.swarm.records.signed import Verify

RECEIPTS = "receipts"
SUFFIX = ".receipt"
LIFE_S = 30 * 86_400  # after which work is forgotten
SKEW_S = 600  # by which a client's clock may be ahead
MAX_RECEIPTS = 4096
MAX_PER_CLIENT = 64


def receipts_of(home: Path, swarm: bytes) -> Path:
    """Where a home keeps the receipts of a swarm, a folder for each of its nodes."""
    return home / RECEIPTS / swarm.hex()[:16]


def read_receipts(folder: Path, swarm: bytes | None, verify: Verify) -> Iterator[Receipt]:
    """All that hold, of this swarm (None: of any), in a folder and those below it. Raises LocalError where it cannot be read."""
    return (receipt for receipt, _ in signed_receipts(folder, swarm, verify))


def signed_receipts(folder: Path, swarm: bytes | None, verify: Verify) -> Iterator[tuple[Receipt, bytes]]:
    """As `read_receipts`, with the bytes that were signed."""
    try:
        paths = sorted(folder.rglob(f"*{SUFFIX}"))
    except OSError as error:
        raise LocalError(f"cannot read {folder}: {error.strerror or error}") from error
    for path in paths:
        with contextlib.suppress(OSError, ProtocolError):
            raw = read_bounded(path, MAX_RECEIPT_BYTES)
            if raw is not None:
                yield open_receipt(raw, swarm, verify), raw


def counts(receipt: Receipt, now: float) -> bool:
    """Whether it is of the time that is remembered; `now` is unix time in seconds."""
    return -LIFE_S <= receipt.until - now <= SKEW_S


class ReceiptFolder:
    """Of the peer `worker`. `now` is unix time in seconds."""

    def __init__(self, folder: Path, swarm: bytes, worker: PeerId, verify: Verify, now: Callable[[], float]) -> None:
        self._folder = folder / worker
        self._swarm = swarm
        self._worker = worker
        self._verify = verify
        self._now = now
        self._kept: dict[tuple[PeerId, int], Receipt] = {}
        for receipt in read_receipts(self._folder, swarm, verify):
            if receipt.worker == worker and receipt.replaces(self.last(receipt)):
                self._kept[receipt.client, receipt.since] = receipt
        self._bound()

    def __repr__(self) -> str:
        return f"<ReceiptFolder of {len(self._kept)} receipts for {self._worker[-8:]}>"

    @property
    def receipts(self) -> list[Receipt]:
        """All that count."""
        return [receipt for receipt in self._kept.values() if counts(receipt, self._now())]

    def last(self, receipt: Receipt) -> Receipt | None:
        """What is kept of the same batch."""
        return self._kept.get((receipt.client, receipt.since))

    def open(self, raw: bytes) -> Receipt:
        """The receipt in these bytes, which may be kept. Raises ProtocolError where it is not for this worker, or not of now."""
        receipt = open_receipt(raw, self._swarm, self._verify)
        if receipt.worker != self._worker:
            raise ProtocolError("a receipt for somebody else", code=ErrorCode.REFUSED, peer=receipt.client)
        if not counts(receipt, self._now()):
            raise ProtocolError("a receipt of another time", code=ErrorCode.REFUSED, peer=receipt.client)
        return receipt

    def keep(self, receipt: Receipt, raw: bytes) -> None:
        """Write what `open` took, in the place of what is here of its batch. Raises LocalError; then nothing has changed."""
        write_private(self._path(receipt), raw, make_folder=True)
        is_new = self.last(receipt) is None
        self._kept[receipt.client, receipt.since] = receipt
        if is_new:
            self._bound()

    def _bound(self) -> None:
        """Let go of what is too old or too much: of a client's its oldest, of all those that say least."""
        gone = {key for key, receipt in self._kept.items() if not counts(receipt, self._now())}
        by_client: dict[PeerId, list[Receipt]] = {}
        for receipt in self._kept.values():
            by_client.setdefault(receipt.client, []).append(receipt)
        for own in by_client.values():
            gone.update((one.client, one.since) for one in sorted(own, key=lambda one: -one.since)[MAX_PER_CLIENT:])
        left = [receipt for key, receipt in self._kept.items() if key not in gone]
        left.sort(key=lambda one: -(one.served + one.trained))
        gone.update((one.client, one.since) for one in left[MAX_RECEIPTS:])
        for key in gone:
            with contextlib.suppress(OSError):
                self._path(self._kept.pop(key)).unlink(missing_ok=True)

    def _path(self, receipt: Receipt) -> Path:
        name = hashlib.sha256(f"{receipt.client} {receipt.since}".encode()).hexdigest()[:32]
        return self._folder / f"{name}{SUFFIX}"
