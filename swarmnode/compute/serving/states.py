"""Snapshots of a session's recurrent states.

Layers of linear attention, state-space layers and convolutions keep a state of fixed size for each row, which holds all earlier
positions. A state cannot be cut back. So a session keeps snapshots: copies of its rows' states at a few earlier positions. To
forget positions, the nearest snapshot before them takes the states' place, and the inputs between that snapshot and the new end
are computed again with the next pass. The session keeps the latest inputs for that (`KEPT_INPUTS`).

Single steps of convolutions and state-space layers on a CPU: transformers' references take three times as long, since they expand
what is alike in all places of a head, and convolve a single position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from swarmnode.compute.model.traced_model import States

KEPT_INPUTS = 256  # positions whose inputs a session keeps at most
KV = "kv"  # kind of a part that attention keeps, beside the kinds of states


@dataclass(frozen=True)
class Snapshot:
    """States of a session's rows after its first `length` positions."""

    length: int
    states: States


@dataclass(frozen=True)
class SessionCopy:
    """All that some layers keep of a session after its first `length` positions: recurrent states, and under KV the buffers of
    attention, each (rows, heads, columns, X), which end at position `length`."""

    length: int
    parts: States


class StateHistory:
    """Snapshots of one session's states, and its latest inputs.

    `inputs` are those of the positions [first_input, first_input + n) before the session's end, each of shape (rows, T, ...).
    `lengths` are the lengths of the snapshots. It is replaced, never changed, so that another thread may read it. At most `most`
    snapshots are kept; fewer of them lie farther apart.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.distance = KEPT_INPUTS // most  # positions between snapshots of a session that takes single steps
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
        """Take a snapshot at the session's present length, unless there is one. Beyond `most` another one goes."""
        if not length or length in self.lengths:
            return
        if len(self.snapshots) == self.most:
            del self.snapshots[self._least_needed(length)]
        self._set([*self.snapshots, Snapshot(length, copy())])

    def _least_needed(self, end: int) -> int:
        """Return the place of the snapshot whose neighbours are nearest to each other, measured by their distance to `end`; that of
        the newest only if there are two."""
        places = [0, *self.lengths, end]
        return min(
            range(max(2, len(self.lengths) - 1)),
            key=lambda at: (places[at + 2] - places[at]) / (end - places[at + 1] + self.distance),
        )

    def drop_newest_if_near(self, length: int) -> None:
        """Drop the newest snapshot if the one before it is near enough to `length` to take its place."""
        if len(self.lengths) > 1 and length - self.lengths[-2] < self.distance:
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
        base, copy = self.base(length), StateHistory(self.most)
        copy._set([each for each in self.snapshots if each.length == base])
        copy.first_input = base
        if length > base:
            inputs = torch.cat(self._inputs, dim=1)
            copy._owe(inputs[:, base - self.first_input : length - self.first_input])
        return copy

    def _set(self, snapshots: list[Snapshot]) -> None:
        self.snapshots = snapshots
        self.lengths = tuple(each.length for each in snapshots)


def quicken_steps(model_class: type[Any]) -> None:
    """Let the family's code use `STEPS` in place of its own functions of these names, if it has such."""
    module = sys.modules[model_class.__module__]
    for name, step in STEPS.items():
        reference = getattr(module, name, None)
        if reference is not None and not hasattr(reference, "is_quick"):
            setattr(module, name, _with_quick_step(reference, step))


def _with_quick_step(reference: Callable[..., Tensor], step: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """Return a function that computes `step` in passes of a span, and `reference` elsewhere or if `step` returns None."""

    @wraps(reference)
    def compute(*args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        is_own = torch.is_inference_mode_enabled() and all(
            x.dtype == torch.float32 and x.device.type == "cpu" for x in given if isinstance(x, Tensor)
        )
        y = step(*args, **kwargs) if is_own else None
        return reference(*args, **kwargs) if y is None else y

    compute.is_quick = True  # type: ignore[attr-defined]
    return compute


def convolve_step(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor | None:
    """Return the next output (rows, channels, 1) of a convolution by channel, and move its state on. None for several positions, or
    another activation than SiLU."""
    if hidden_states.shape[-1] != 1 or activation not in (None, "silu", "swish"):
        return None
    columns = torch.cat([conv_state, hidden_states], dim=-1)
    conv_state.copy_(columns[..., 1:])
    y = (columns[..., -weight.shape[-1] :] * weight).sum(-1)
    y = y if bias is None else y + bias
    return (y if activation is None else silu(y))[..., None]


def scan_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the next output (rows, heads, dim) of a state-space layer, and move `state` (rows, heads, dim, N) on. None unless all
    places of a head have one time step and one decay."""
    per_head = [dt, A, *([] if dt_bias is None else [dt_bias])]
    is_plain = A.dim() == B.dim() == 3 and A.stride(1) == 0 and state.is_contiguous()
    if not is_plain or any(one.stride(-1) for one in per_head):
        return None
    rows, heads, dim = hidden_states.shape
    dt_BH1 = dt[..., :1] if dt_bias is None else dt[..., :1] + dt_bias[..., :1]
    dt_BH1 = softplus(dt_BH1) if dt_softplus else dt_BH1
    repeats = heads // B.shape[1]
    B, C = (one if repeats == 1 else one.repeat_interleave(repeats, dim=1) for one in (B, C))
    state.mul_(torch.exp(dt_BH1 * A[:, :1, 0])[..., None])
    flat = state.view(rows * heads, dim, -1)
    flat.baddbmm_(hidden_states.reshape(-1, dim, 1), (dt_BH1 * B).view(rows * heads, 1, -1))
    y = torch.bmm(flat, C.reshape(rows * heads, -1, 1)).view(rows, heads, dim)
    y = y if D is None else y + hidden_states * D
    return y if z is None else y * silu(z)


STEPS: dict[str, Callable[..., Tensor | None]] = {
    "causal_conv1d_update": convolve_step,
    "mamba2_selective_state_update": scan_step,
}
"""Single steps by the names that transformers' families give them"""
