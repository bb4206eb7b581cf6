"""Send queue of one link: frames of one turn of the event loop leave in one write, and unsent bytes are bounded.

They count in the ledger, together with the stream's buffers for receiving.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.codec.frames import LARGE_BYTES, MAX_PAYLOAD_BYTES
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.net.interfaces import Buffer, Stream

MAX_UNSENT_BYTES = MAX_PAYLOAD_BYTES  # before the last frame: a peer that takes too little is not waited for
SMALL_BYTES = LARGE_BYTES  # always counted, so that the small frames of sessions need no counting


class SendQueue:
    """Buffers for a stream, between `put` and the network. They must not change before they have left."""

    def __init__(self, stream: Stream, ledger: MemoryLedger) -> None:
        self.sent_bytes = 0  # handed to the stream
        self._stream = stream
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._reservation = ledger.count(Account.MESSAGES)
        self.count()

    def __repr__(self) -> str:
        return f"<SendQueue {self.unsent_bytes} bytes to go, {self.sent_bytes} sent>"

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes ever put."""
        return self.sent_bytes + self._waiting_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were queued for the stream and that this process has not sent yet."""
        return self._waiting_bytes + self._stream.unsent_bytes

    @property
    def full(self) -> bool:
        """Whether the queue holds more than MAX_UNSENT_BYTES, so that nothing more should be put."""
        return self.unsent_bytes > MAX_UNSENT_BYTES

    def put(self, buffers: Sequence[Buffer], size_bytes: int) -> bool:
        """Add buffers of `size_bytes` together. Returns whether they are the first since the last `flush`, so that the caller must
        schedule one."""
        first = not self._waiting
        self._waiting += buffers
        self._waiting_bytes += size_bytes
        return first

    def flush(self) -> int:
        """Hand everything to the stream and return the number of bytes. Raises PeerLost if the stream is closed."""
        waiting, self._waiting = self._waiting, []
        size_bytes, self._waiting_bytes = self._waiting_bytes, 0
        if waiting:
            self.sent_bytes += size_bytes
            self._stream.write(waiting)
            self.count()
        return size_bytes

    def count(self) -> None:
        """Update the ledger's reservation: the stream's buffers for receiving, and the unsent bytes, at least `SMALL_BYTES`."""
        held_bytes = self._stream.receive_bytes + max(SMALL_BYTES, self.unsent_bytes)
        if held_bytes != self._reservation.size_bytes:
            self._reservation.count(held_bytes)

    def give_up(self) -> None:
        """Drop all queued frames and release their memory."""
        self._waiting, self._waiting_bytes = [], 0
        self._reservation.release()
