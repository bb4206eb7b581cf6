"""A cohort's buffers as a cache of one shape, for passes that are recorded and replayed.

Where a step writes is a number on the device, and every step reads all columns of the buffers; those that do not count are masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.serving.attention_cache import AttentionCache
from swarmnode.compute.serving.cohort import Cohort


class StaticColumns(AttentionCache):
    """The buffers of a cohort, which it does not keep alive: where a regrouped cohort gives its buffers up, they are gone here too.

    `column` (a scalar, int64) is where the next step writes. It fits for as long as the cohort's windows stand where they stood.
    """

    def __init__(self, cohort: Cohort) -> None:
        super().__init__(cohort.windows)
        self.column = torch.tensor(cohort.end, device=cohort.device)
        self._buffers = cohort.buffers
        self._first_kept = first_kept(cohort)
        self._columns = {layer: cohort.columns_in(layer) for layer in cohort.buffers}

    def __repr__(self) -> str:
        return f"StaticColumns({len(self._buffers)} layers of up to {self.get_max_length()} columns)"

    def fits(self, cohort: Cohort) -> bool:
        """Whether the cohort's windows have not moved on."""
        return self._first_kept == first_kept(cohort)

    def begin(self, cohort: Cohort) -> None:
        """The cohort's next step writes behind its end. What lies further behind meets a weight of zero: it must be finite."""
        cohort.zero_from(cohort.end + 1)
        self.column.fill_(cohort.end)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by attention: write keys and values (rows, heads, 1, dim), return all columns of the layer."""
        keys, values = self._buffers[layer_idx]
        place_1 = (self.column - self._first_kept.get(layer_idx, 0)).view(1)
        keys.index_copy_(2, place_1, key_states)
        values.index_copy_(2, place_1, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Columns in use, on the device, as transformers' own static cache tells them."""
        return self.column

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns in the buffers, the first of them)."""
        return self._columns[layer_idx], self._first_kept.get(layer_idx, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Columns in the buffers."""
        return max(self._columns.values())

    @property
    def is_compileable(self) -> bool:
        """transformers makes a mask without looking at what is in it."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Positions are held."""
        return True


def first_kept(cohort: Cohort) -> dict[int, int]:
    """The first column of the buffers of each layer that slides."""
    return {layer: cohort.first_kept(layer) for layer in cohort.windows}
