"""Guesses that the last hop tells with a token: those that a grammar forces, and those of the layer beside the head."""

from __future__ import annotations

from collections.abc import Sequence


class ToldDrafter:
    """Drafter of tokens that the last hop told. A suggestion holds for as long as the text goes on with it."""

    name = "told"

    def __init__(self) -> None:
        self._length = 0  # of the text
        self._begin = 0  # length of the text before the suggested tokens
        self._suggested: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._suggested)} tokens after {self._begin}>"

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


class ForcedDrafter(ToldDrafter):
    """Drafter of the tokens that must follow by the session's grammar, which only the last hop has."""

    name = "forced"


class MtpDrafter(ToldDrafter):
    """Drafter of the tokens that the model's own prediction layer (MTP), or an EAGLE head, at the last hop expects."""

    name = "mtp"
