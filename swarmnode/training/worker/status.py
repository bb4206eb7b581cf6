"""Masks of counted microbatches as a STATUS carries them: runs of layers with the same mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from swarmnode.codec.training_fields import packed_mask
from swarmnode.codec.training_messages import Counted
from swarmnode.errors import ProtocolError


def counted_of(masks: Mapping[int, int]) -> tuple[Counted, ...]:
    """Return the masks by layer as runs of adjoining layers; layers with an empty mask are left out."""
    runs: list[Counted] = []
    for _, run in groupby(sorted(masks.items()), key=lambda item: (item[1], item[0] - sorted(masks).index(item[0]))):
        units = list(run)
        mask = units[0][1]
        if mask:
            runs.append(Counted(units[0][0], units[-1][0] + 1, packed_mask(mask)))
    return tuple(runs)


def masks_of(counted: Iterable[Counted], everything: int) -> dict[int, int]:
    """Return the masks by layer. Raises ProtocolError if one contains a microbatch that is not in `everything`."""
    masks: dict[int, int] = {}
    for entry in counted:
        mask = int.from_bytes(entry.mask, "little")
        if mask & ~everything:
            raise ProtocolError("it reports microbatches that the step does not have")
        masks.update(dict.fromkeys(range(entry.start, entry.end), mask))
    return masks
