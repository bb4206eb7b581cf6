"""How many times fewer elements top-k sends over a link, by how slow the link is among all of the swarm.

AdaTopK (FusionLLM, arXiv 2410.12707, section 5) sends 1 / (3 r) of the elements over the slowest link and more, in proportion, over
faster ones. The 3 is for its format, in which a kept element takes 12 bytes; here it takes 4, as many as it had: a ratio of
elements is one of bytes, or less than that (`protocol/tensors.md`).

For comparison: the same ratio on every link, and on the slowest one alone. What each costs in loss is in
`docs/decisions/compression.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarmnode.codec.tensors import Codec
from swarmnode.swarm.records.run import AUTO

TOPK, ADATOPK, SLOWEST = "topk", "adatopk", "slowest"
SPARSE_RULES = (TOPK, ADATOPK, SLOWEST)
AS_SLOW = 0.9  # of the slowest link's seconds: measurements of one link waver by so much


def codec_of(rule: str) -> Codec:
    """The codec that a rule but `auto` may choose."""
    return Codec.TOPK if rule in SPARSE_RULES else Codec[rule.upper()]


def is_allowed(rule: str, codecs: Collection[int]) -> bool:
    """Whether a swarm of these codecs allows all that a rule may choose."""
    return rule == AUTO or codec_of(rule) in (Codec.NONE, *codecs)


def topk_ratio(rule: str, link_s: float, slowest_s: float, largest: float) -> float:
    """By what to divide the elements on a link that takes `link_s` seconds for them uncompressed, where the slowest link of all
    takes `slowest_s`: from 1, which is all of them, to `largest`."""
    if rule == TOPK:
        return largest
    slowness = link_s / slowest_s if slowest_s > 0 else 0.0
    if rule == SLOWEST:
        return largest if slowness >= AS_SLOW else 1.0
    return min(max(largest * slowness, 1.0), largest)


def slowest_link_s(told: Iterable[float]) -> float:
    """The seconds of the slowest link, from what each peer tells of its own slowest one; 0 where fewer than two know of any.

    The second longest: a link has two ends, and both have measured it. So one peer alone makes no link the slowest that is not, and
    hides none but its own.
    """
    longest = sorted(told, reverse=True)[:2]
    return longest[1] if len(longest) == 2 else 0.0
