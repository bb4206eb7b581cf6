"""Places at a keeper of backups: how many states are on their way at once, and whose turn it is.

A state takes as long as its writer lets it take, which may be days. So a place is for a turn: where others wait, who has had one
gives way to who has waited longest, and brings the rest when it is its turn again. Owners are peers, of the open internet
address groups; who has several places has one turn alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import Busy
from swarmnode.net.limits.address_group import Claimant, owner_of

AT_ONCE = 4
TURN_S = 60.0
RETRY_S = 10.0  # for who waits
WAITS_S = 120.0  # since an owner asked last: then it is not waited for any more
MAX_WAITING = 256


@dataclass(eq=False)
class BackupTurn:
    """Of somebody who has a place. `give_way` is called when it is another one's: then it is `over`."""

    owner: str
    since_s: float
    give_way: Callable[[], object] = bool
    over: bool = False


class BackupPlaces:
    """`clock`: in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: list[BackupTurn] = []  # in the order in which they began
        self._waiting: dict[str, float] = {}  # when an owner asked last; who waits longest stands first

    def __repr__(self) -> str:
        return f"<BackupPlaces, {len(self._turns)} of {AT_ONCE} taken, {len(self._waiting)} owners wait>"

    def take(self, claimant: Claimant) -> BackupTurn:
        """A place, which another one may have to give up. Raises Busy where nobody's turn is over, or others have waited longer."""
        now_s, owner = self._clock(), owner_of(claimant)
        self._waiting = {other: asked_s for other, asked_s in self._waiting.items() if asked_s + WAITS_S > now_s}
        ready = [*[None] * (AT_ONCE - len(self._turns)), *self._due(owner, now_s)]
        ahead = list(self._waiting).index(owner) if owner in self._waiting else len(self._waiting)
        if ahead >= len(ready):
            if owner in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[owner] = now_s
            raise Busy("states of other peers are on their way here", retry_s=RETRY_S)
        self._waiting.pop(owner, None)
        leaving = ready[0]
        if leaving is not None:
            self.leave(leaving)
            leaving.over = True
            leaving.give_way()
        turn = BackupTurn(owner, now_s)
        self._turns.append(turn)
        return turn

    def leave(self, turn: BackupTurn) -> None:
        """Free a place; no error where it was given up before."""
        if turn in self._turns:
            self._turns.remove(turn)

    def _due(self, owner: str, now_s: float) -> list[BackupTurn]:
        """Turns that give way to this owner: none, where it has one itself."""
        owners = [turn.owner for turn in self._turns]
        return [
            turn
            for number, turn in enumerate(self._turns)
            if owner not in owners and (turn.since_s + TURN_S <= now_s or turn.owner in owners[:number])
        ]
