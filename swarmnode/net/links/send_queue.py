"""What leaves on one link: frames of one turn of the loop go out in one write, and what the peer has not taken yet is bounded.

It is in the ledger, with what the stream holds of the other direction."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.codec.frames import LARGE_BYTES, MAX_PAYLOAD_BYTES
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.net.interfaces import Buffer, Stream

MAX_UNSENT_BYTES = MAX_PAYLOAD_BYTES  # before the last frame: who takes less than it asks for is not waited for
SMALL_BYTES = LARGE_BYTES  # counted from the start, so that steps of sessions, which leave at once, need not be


class SendQueue:
    """Buffers for a stream, between `put` and the network; nobody changes them before they have left."""

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
        """Ever put."""
        return self.sent_bytes + self._waiting_bytes

    @property
    def unsent_bytes(self) -> int:
        """Put, and still held by this process."""
        return self._waiting_bytes + self._stream.unsent_bytes

    @property
    def full(self) -> bool:
        """Whether more must not be put."""
        return self.unsent_bytes > MAX_UNSENT_BYTES

    def put(self, buffers: Sequence[Buffer], size_bytes: int) -> bool:
        """Add buffers of so many bytes together. Whether they are the first ones since the last `flush`, which is due then."""
        first = not self._waiting
        self._waiting += buffers
        self._waiting_bytes += size_bytes
        return first

    def flush(self) -> int:
        """Hand everything to the stream; how many bytes. Raises PeerLost."""
        waiting, self._waiting = self._waiting, []
        size_bytes, self._waiting_bytes = self._waiting_bytes, 0
        if waiting:
            self.sent_bytes += size_bytes
            self._stream.write(waiting)
            self.count()
        return size_bytes

    def count(self) -> None:
        """Write into the ledger what is held now."""
        held_bytes = self._stream.receive_bytes + max(SMALL_BYTES, self.unsent_bytes)
        if held_bytes != self._reservation.size_bytes:
            self._reservation.count(held_bytes)

    def give_up(self) -> None:
        """Nothing leaves any more."""
        self._waiting, self._waiting_bytes = [], 0
        self._reservation.release()
