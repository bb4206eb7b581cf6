"""Least kind of products of packed weights that a swarm's manifest asks of its nodes, and the number formats that nodes announce.

What a node announces is its own word: audits compare what it computes with nodes of the same number format.
"""

from __future__ import annotations

from swarmnode.config import EXACT, FAST
from swarmnode.errors import ProtocolError

LEAST = (EXACT, FAST)
FLOAT32 = "float32"  # number format of exact products, and of weights that were dequantised to it
ROUNDED = "-"  # before the second rounding of a number format, as in bfloat16-nf4
MEANINGS = {EXACT: "exact products (float32)", FAST: "weights that are not rounded again"}


def check_products(least: str, number_format: str) -> None:
    """Raise ProtocolError if a node that announces `number_format` computes less precisely than `least`, EXACT or FAST; any other
    text asks for nothing.

    EXACT asks for float32 throughout, FAST for packed weights or dequantised ones of any dtype.
    """
    enough = {EXACT: number_format == FLOAT32, FAST: number_format != "" and ROUNDED not in number_format}
    if not enough.get(least, True):
        raise ProtocolError(
            f"it computes in {number_format or 'an unknown format'}, and this swarm asks for {MEANINGS[least]}"
        )
