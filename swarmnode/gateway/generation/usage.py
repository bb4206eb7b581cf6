"""How many tokens a request was, whatever its API calls them."""

from __future__ import annotations

from typing import NamedTuple


class TokenUsage(NamedTuple):
    """`cached` is of the prompt's tokens those that were not computed again, `reasoning` of the completion's those before the
    answer."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0
