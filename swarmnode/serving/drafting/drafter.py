"""Interfaces of drafting: the proposer of tokens that may follow, and the budget of how many of them are sent ahead.

The first hop of a route owns one of each for a session. A guess never changes the text: the last hop draws each position as it
would have drawn it alone, and a guess only lets the hops compute the next position before its token is known.

Guesses that the last hop tells with a token: those that a grammar forces, and those of the layer beside the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from swarmnode.codec.messages import Open


class Drafter(Protocol):
    """Proposer of tokens that may follow a text.

    Attributes:
        name: Name of the proposer in metrics and traces: "lookup", "forced", "model", "mtp".
    """

    name: str

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow the accepted tokens and then `guessed`, the guesses in flight.

        Returns an empty list if nothing is likely enough to follow.
        """
        ...


class Weighed(NamedTuple):
    """Guess with the probability that it and all guesses before it in its proposal are right."""

    id: int
    likely: float


@runtime_checkable
class WeighingDrafter(Drafter, Protocol):
    """Drafter that knows how likely each of its guesses is."""

    def weigh(self, guessed: Sequence[int], count: int) -> list[Weighed]:
        """Return what `propose` would return, each guess with its probability."""
        ...


@runtime_checkable
class LiveDrafter(Drafter, Protocol):
    """Drafter that computes in the background: guesses become ready between two calls."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` on the loop whenever more guesses are ready."""

    def close(self) -> None:
        """Stop computing and free what the session holds. Calling it again changes nothing."""


@runtime_checkable
class SuggestedDrafter(Drafter, Protocol):
    """Drafter of tokens that the last hop tells."""

    def suggest(self, ids: Sequence[int]) -> None:
        """Take the tokens that the last hop expects after the text, which may be none."""


class DraftBudget(Protocol):
    """Controller of how many guessed positions a session keeps in flight."""

    def count(self, in_flight: int) -> int:
        """Return the number of guesses that may be sent now, while `in_flight` guesses have no verdict; 0 for none."""
        ...

    def verdict(self, proposer: str, accepted: int, rejected: int) -> None:
        """Record that the last hop drew `accepted` guesses of `proposer`, and that `rejected` ones were computed in vain."""

    def turn(self, took_s: float) -> None:
        """Record that the token of a position came back `took_s` seconds after the position was sent."""


Drafting = Callable[[Open], tuple[Drafter, DraftBudget] | None]
"""Function from the OPEN of a session, at its first hop, to a new proposer and its budget; None if the session shall not guess"""


def no_drafting(_opened: Open) -> None:
    """Return None: no session guesses."""


class RemoteDrafter:
    """Drafter of tokens that the last hop told. A suggestion holds for as long as the text goes on with it."""

    name = "told"

    def __init__(self) -> None:
        self._length = 0  # of the text
        self._begin = 0  # length of the text before the suggested tokens
        self._suggested: tuple[int, ...] = ()

    def suggest(self, ids: Sequence[int]) -> None:
        """Take the tokens that follow the text by the word of the last hop."""
        self._begin, self._suggested = self._length, tuple(ids)

    def push(self, ids: Sequence[int]) -> None:
        """Append accepted tokens to the text; the prompt comes first."""
        passed = self._length - self._begin
        self._length += len(ids)
        if self._suggested[passed : passed + len(ids)] != tuple(ids):
            self._suggested = ()

    def cut(self, length: int) -> None:
        """Forget all but the first `length` accepted tokens."""
        self._length = min(self._length, length)
        if self._length < self._begin:
            self._suggested = ()

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Return at most `count` of the suggested tokens behind `guessed`; none if the guesses differ from them."""
        left = self._suggested[self._length - self._begin :]
        if left[: len(guessed)] != tuple(guessed)[: len(left)]:
            return []
        return list(left[len(guessed) : len(guessed) + count])


class ForcedDrafter(RemoteDrafter):
    """Drafter of the tokens that must follow by the session's grammar, which only the last hop has."""

    name = "forced"


class MtpDrafter(RemoteDrafter):
    """Drafter of the tokens that the model's own prediction layer (MTP), or an EAGLE head, at the last hop expects."""

    name = "mtp"
