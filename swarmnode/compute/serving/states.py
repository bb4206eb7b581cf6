"""Recurrent states of the rows of a pass, and snapshots of them.

Layers of linear attention, state-space layers and convolutions keep a state of fixed size for each row, which holds all earlier
positions. A state cannot be cut back. So a session keeps snapshots: copies of its rows' states at a few earlier positions. To
forget positions, the nearest snapshot before them takes the states' place, and the inputs between that snapshot and the new end
are computed again with the next pass. The session keeps the latest inputs for that (`KEPT_INPUTS`).

A family's code changes states in place. So a pass works on copies, which take the states' place only when the pass has succeeded,
and only for the rows that it was for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.compute.model.family import SNAPSHOTS
from swarmnode.compute.model.traced_model import CONV, RECURRENT, StateKey

SNAPSHOT_DISTANCE = 64  # positions between snapshots of a session that takes single steps
KEPT_INPUTS = 4 * SNAPSHOT_DISTANCE  # positions whose inputs a session keeps at most

LayerState = tuple[int, StateKey]
"""A layer's number, and which of its states"""
States = dict[LayerState, Tensor]
"""States by layer, each of shape (rows, ...)"""


class PassStates:
    """States of all rows of a cohort (sessions computed together), and the copies that the present pass changes."""

    def __init__(self) -> None:
        self.committed: States = {}
        self._changed: States = {}
        self._is_first = True

    def begin(self, is_first: bool) -> None:
        """Begin a pass. What a failed pass left is forgotten. If `is_first`, the rows of the pass have no positions yet."""
        self._changed = {}
        self._is_first = is_first

    def has(self, layer: int) -> bool:
        """Return whether the pass has a state of this layer: of earlier positions, or of its own."""
        return any(
            key[0] == layer for key in (self._changed if self._is_first else {**self.committed, **self._changed})
        )

    def get(self, layer: int, kind: StateKey) -> Tensor | None:
        """Return the pass's own copy of a state; None if no position came before."""
        key = layer, kind
        if key not in self._changed and not self._is_first and key in self.committed:
            self._changed[key] = self.committed[key].clone()
        return self._changed.get(key)

    def set(self, layer: int, kind: StateKey, state: Tensor) -> Tensor:
        """Set the pass's state to `state`, in the dtype of the earlier one, and return it."""
        before = self.get(layer, kind)
        if before is not None and before.shape != state.shape:
            raise ValueError(
                f"layer {layer}: the {kind[0]} state has shape {(*before.shape,)}, and not {(*state.shape,)}"
            )
        if state is not before:
            # A part of a larger tensor would keep all of it in memory.
            own = state if before is None else state.to(before.dtype)
            is_part = own.untyped_storage().nbytes() > own.nbytes
            self._changed[layer, kind] = own.clone() if is_part or own is state else own
        return self._changed[layer, kind]

    def commit(self, rows: int, written: Sequence[slice]) -> None:
        """Let the pass's states count for the rows `written`. Other rows of all `rows` keep theirs."""
        is_whole = sum(part.stop - part.start for part in written) == rows
        for key, state in self._changed.items():
            if is_whole:
                self.committed[key] = state
                continue
            kept = self.committed.setdefault(key, torch.zeros_like(state))
            for part in written:
                kept[part] = state[part]
        self._changed = {}

    def copy_rows(self, rows: slice) -> States:
        """Return copies of the states of some rows."""
        return {key: state[rows].clone() for key, state in self.committed.items()}

    def put_rows(self, rows: slice, states: Mapping[LayerState, Tensor]) -> None:
        """Set the states of some rows."""
        for key, state in states.items():
            self.committed[key][rows] = state

    def reorder(self, rows: slice, order: Tensor) -> None:
        """Let row r of `rows` have the states of their row `order[r]`."""
        for state in self.committed.values():
            state[rows] = state[rows].index_select(0, order)

    def update_conv(self, new: Tensor, layer: int, index: int, size: int | None) -> Tensor:
        """Keep the last `size` columns of a convolution's inputs (rows, channels, T), and return them behind the earlier ones."""
        before = self.get(layer, (CONV, index))
        if before is None:
            size = size or new.shape[-1]
            whole = pad(new, (max(0, size - new.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, new], dim=-1)
        self.set(layer, (CONV, index), whole[..., whole.shape[-1] - size :])
        return whole


@dataclass(frozen=True)
class Snapshot:
    """States of a session's rows after its first `length` positions."""

    length: int
    states: States


class StateHistory:
    """Snapshots of one session's states, and its latest inputs.

    `inputs` are those of the positions [first_input, first_input + n) before the session's end, each of shape (rows, T, ...).
    `lengths` are the lengths of the snapshots. It is replaced, never changed, so that another thread may read it.
    """

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.lengths: tuple[int, ...] = ()
        self.first_input = 0
        self._inputs: list[Tensor] = []
        self.owed: Tensor | None = None  # inputs that come before those of the next pass
        self.owed_count = 0

    def base(self, length: int) -> int:
        """Return the length of the last snapshot within the first `length` positions; 0 if there is none."""
        return max((each for each in self.lengths if each <= length), default=0)

    def reachable(self, length: int) -> int:
        """Return the greatest length up to `length` to which the session can be cut; 0 if it must begin anew."""
        base = self.base(length)
        return length if base >= self.first_input else base

    def record_inputs(self, x: Tensor, end: int) -> None:
        """Keep the inputs of a pass that ended at position `end`, and forget those that no snapshot needs."""
        count = x.shape[1]
        if count > KEPT_INPUTS:
            self._inputs, self.first_input = [], end
            return
        self._inputs.append(x.clone())
        if end - self.first_input > KEPT_INPUTS:
            first = next((each for each in self.lengths if each >= end - KEPT_INPUTS), end)
            self._inputs = [torch.cat(self._inputs, dim=1)[:, first - self.first_input :].clone()]
            self.first_input = first

    def add(self, length: int, copy: Callable[[], States]) -> None:
        """Take a snapshot at the session's present length, unless there is one. Beyond `SNAPSHOTS` an old one goes."""
        if not length or length in self.lengths:
            return
        if len(self.snapshots) == SNAPSHOTS:
            del self.snapshots[self._least_needed(length)]
        self._set([*self.snapshots, Snapshot(length, copy())])

    def _least_needed(self, end: int) -> int:
        """Return the place of the snapshot whose neighbours are nearest to each other, measured by their distance to `end`; never
        that of the newest."""
        places = [0, *self.lengths]
        return min(
            range(len(self.lengths) - 1),
            key=lambda at: (places[at + 2] - places[at]) / (end - places[at + 1] + SNAPSHOT_DISTANCE),
        )

    def drop_newest_if_near(self, length: int) -> None:
        """Drop the newest snapshot if the one before it is near enough to `length` to take its place."""
        if len(self.lengths) > 1 and length - self.lengths[-2] < SNAPSHOT_DISTANCE:
            self._set(self.snapshots[:-1])

    def cut(self, length: int, end: int) -> States:
        """Forget the positions of a session from `length` on; `end` positions have been computed, and `length` is reachable.

        Returns the states at `base(length)`, to which the session's have to go back; empty at position 0, or if they need not
        change. The inputs from there to `length` are owed from then on.
        """
        if length >= end:
            assert self.owed is not None
            self._owe(self.owed[:, : length - end])
            return {}
        base = self.base(length)
        inputs = torch.cat(self._inputs, dim=1) if self._inputs and base >= self.first_input else None
        self._owe(None if inputs is None else inputs[:, base - self.first_input : length - self.first_input])
        self._inputs = [] if inputs is None else [inputs[:, : base - self.first_input]]
        self.first_input = base if inputs is None else self.first_input
        self._set([each for each in self.snapshots if each.length <= base])
        return self.snapshots[-1].states if base else {}

    def _owe(self, inputs: Tensor | None) -> None:
        self.owed = None if inputs is None or not inputs.shape[1] else inputs.clone()
        self.owed_count = 0 if self.owed is None else self.owed.shape[1]

    def settle(self) -> None:
        """Record that the owed inputs have been computed."""
        self._owe(None)

    def reorder(self, order: Tensor) -> None:
        """Let row r have the history of row `order[r]`."""
        self._set(
            [
                Snapshot(each.length, {key: state.index_select(0, order) for key, state in each.states.items()})
                for each in self.snapshots
            ]
        )
        self._inputs = [x.index_select(0, order.to(x.device)) for x in self._inputs]
        if self.owed is not None:
            self.owed = self.owed.index_select(0, order.to(self.owed.device))

    def fork(self, length: int) -> StateHistory:
        """Return the history of a session that begins with the first `length` positions of this one, a reachable length, at the
        only snapshot of the new history."""
        base, copy = self.base(length), StateHistory()
        copy._set([each for each in self.snapshots if each.length == base])
        copy.first_input = base
        if length > base:
            inputs = torch.cat(self._inputs, dim=1)
            copy._owe(inputs[:, base - self.first_input : length - self.first_input])
        return copy

    def _set(self, snapshots: list[Snapshot]) -> None:
        self.snapshots = snapshots
        self.lengths = tuple(each.length for each in snapshots)


class StateCache:
    """Methods of transformers' caches for layers with recurrent states. `states` are those of the rows in the pass."""

    states: PassStates

    def __len__(self) -> int:
        return 0

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's state in MiniMax's own cache; None if no position came before."""
        return self.states.get(layer_idx, (RECURRENT, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep a layer's state in MiniMax's own cache."""
        self.states.set(layer_idx, (RECURRENT, 0), linear_cache)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a layer's convolution; None if no position came before."""
        return self.states.get(layer_idx, (CONV, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Keep the last inputs (rows, channels, T) of a convolution, and return all behind the earlier ones."""
        return self.states.update_conv(conv_states, layer_idx, state_idx, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state; None if no position came before."""
        return self.states.get(layer_idx, (RECURRENT, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> Tensor:
        """Keep a layer's recurrent state, and return it."""
        return self.states.set(layer_idx, (RECURRENT, state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer, or any layer, has a state."""
        return any(
            map(self.states.has, [layer_idx] if layer_idx is not None else {key[0] for key in self.states.committed})
        )

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: a pass keeps only its newest states."""
        return False
