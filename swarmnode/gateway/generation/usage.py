"""How many tokens a request was, whatever its API calls them."""

from __future__ import annotations

from typing import NamedTuple


class TokenUsage(NamedTuple):
    """`cached` is of the prompt's tokens those that were not computed again."""

    prompt: int
    completion: int
    cached: int
