"""Contribution sketch: what another member contributes to a sum of gradients, in the tiles of `gradient_sketch.py`.

Members send values to the owners of parts, so each owner sees a share of the vector, and of that whole tiles. Sketches add up:
those of a member's microbatches, which it has signed for, have to come to what it contributes.

Shape letters: M elements of a part, T of a tile, S tiles of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.compute.training.gradient_sketch import signs, tile_count, tile_length


@dataclass(frozen=True)
class _Tiles:
    """Of one block with so many `elements`: what came, its squares, and how much of each tile."""

    elements: int
    sums_S: Tensor
    squares_S: Tensor
    came_S: Tensor

    @property
    def whole_S(self) -> Tensor:
        """bool: which have come whole."""
        tile = tile_length(self.elements)
        sizes_S = torch.full_like(self.came_S, tile)
        sizes_S[-1] = self.elements % tile
        return (self.came_S == sizes_S) & (sizes_S > 0)


class ContributionSketch:
    """Of one member. `lengths`: of each block its elements in the vector, and how many of them, the first, are gradients."""

    def __init__(self, peer: str, lengths: Mapping[int, tuple[int, int]], seed: bytes) -> None:
        self.peer = peer
        self._lengths = lengths
        self._seed = seed
        self._tiles: dict[int, _Tiles] = {}

    def __repr__(self) -> str:
        return f"<ContributionSketch of {self.peer[-8:]}, {len(self._tiles)} blocks>"

    @torch.no_grad()
    def hear(self, blocks: Sequence[int], peer: str, place: slice, values_M: Tensor) -> None:
        """What a member contributes to elements `place` of the vector of these blocks; nothing, where it is another one."""
        if peer != self.peer:
            return
        start = 0
        for block in blocks:
            length, elements = self._lengths[block]
            first, last = max(place.start, start), min(place.stop, start + elements)
            if first < last:
                self._add(block, first - start, values_M[first - place.start : last - place.start])
            start += length

    def _add(self, block: int, first: int, values_M: Tensor) -> None:
        _, elements = self._lengths[block]
        tile = tile_length(elements)
        if block not in self._tiles:
            count = tile_count(elements)
            self._tiles[block] = _Tiles(elements, torch.zeros(count), torch.zeros(count), torch.zeros(count))
        tiles, edges = self._tiles[block], (first % tile, -(first + len(values_M)) % tile)
        signs_T = signs(self._seed)[:tile]
        values_ST = pad(values_M, edges).view(-1, tile)
        place = slice(first // tile, first // tile + len(values_ST))
        tiles.sums_S[place] += (values_ST @ signs_T.to(values_M.device)).cpu()
        tiles.squares_S[place] += values_ST.square().sum(dim=1).cpu()
        tiles.came_S[place] += pad(torch.ones(len(values_M)), edges).view(-1, tile).sum(dim=1)

    @property
    def blocks(self) -> list[int]:
        """Of which something has come."""
        return sorted(self._tiles)

    def beside(self, sums: Mapping[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(What came, what `sums`, the whole sketch_S of these blocks, have there, the squares of what came) of the tiles that came
        whole, one block after another."""
        whole = {block: tiles.whole_S for block, tiles in sorted(self._tiles.items())}
        came = [self._tiles[block].sums_S[found] for block, found in whole.items()]
        due = [sums[block][found] for block, found in whole.items()]
        squares = [self._tiles[block].squares_S[found] for block, found in whole.items()]
        return (
            torch.cat([torch.empty(0), *came]),
            torch.cat([torch.empty(0), *due]),
            torch.cat([torch.empty(0), *squares]),
        )
