"""Which identity a process takes, where several run with one home."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from swarmnode.errors import LocalError
from swarmnode.files.file_lock import lock_alone
from swarmnode.files.permissions import existing, may_write

MAX_SLOTS = 64


def check_home(home: Path) -> None:
    """Raises LocalError where a node could not keep its state there. Leaves nothing behind."""
    place = existing(home)
    if not place.is_dir() or not may_write(place):
        raise LocalError(
            f"cannot keep state in {home}: {place} is no folder that can be written; choose another --home"
        )


class IdentitySlot:
    """An identity file that no other running process uses. Several nodes may share a home: each takes the next free slot."""

    def __init__(self, home: Path, role: str) -> None:
        self._lock: IO[bytes] | None = None
        try:
            home.mkdir(parents=True, exist_ok=True)
            for slot in range(1, MAX_SLOTS + 1):
                self.path = home / (f"{role}.key" if slot == 1 else f"{role}-{slot}.key")
                self._lock = lock_alone(self.path.with_suffix(".lock"))
                if self._lock is not None:
                    return
        except OSError as error:
            raise LocalError(
                f"cannot keep state in {home}: {error.strerror or error}; choose another --home"
            ) from error
        raise LocalError(f"{MAX_SLOTS} nodes already use {home}; give this one another --home")

    def __repr__(self) -> str:
        return f"<IdentitySlot {self.path.name}>"

    def release(self) -> None:
        """Let another process use the identity."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
