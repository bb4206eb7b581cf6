"""Token history: the token ids of a session's text, as far as the hop that draws its tokens knows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

UNKNOWN = -1


class TokenHistory:
    """Ids by position. What is told and what is drawn may be set in any order and again: a position always has the same token."""

    def __init__(self, prompt_length: int, max_length: int) -> None:
        """The last token of a session lies behind its last position."""
        self._prompt_length = prompt_length
        self._ids_T = torch.full((max_length + 1,), UNKNOWN, dtype=torch.int32)

    def __repr__(self) -> str:
        return f"<TokenHistory of up to {len(self._ids_T)} tokens, {self._prompt_length} of them the prompt's>"

    def set(self, start: int, ids: Sequence[int]) -> None:
        """The tokens from position `start` on."""
        ids = ids[: max(0, len(self._ids_T) - start)]
        self._ids_T[start : start + len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def prompt(self) -> Tensor:
        """ids_N (int64) of the prompt, where they are known."""
        return _known(self._ids_T[: self._prompt_length])

    def drawn(self, position: int) -> Tensor:
        """ids_N (int64) of those that were drawn for the positions before this one."""
        return _known(self._ids_T[self._prompt_length : position])


def _known(ids_T: Tensor) -> Tensor:
    return ids_T[ids_T != UNKNOWN].long()
