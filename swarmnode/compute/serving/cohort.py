"""KV caches of several sessions side by side, written one column at a time.

A cohort keeps, per layer, keys and values as [rows, heads, capacity, dim], plain or in 8 bits. All rows end at
the same column, so a decode step of the whole cohort writes one column in place and copies nothing; shorter rows have masked
columns on their left. To the family this is left-padded batched generation, a contract that every family keeps: with sliding
windows, alibi or anything else that depends on the distance from the newest position.

Steps of sessions do not always arrive together, nor are they equally long. A pass is as long as its longest step. Shorter steps
are filled up at their end with stand-in inputs, and absent members get only these. Columns written by stand-ins do not count. The
rows then lag behind the cohort's end, as they do after their last positions are cut off. Before their next pass they are moved up
to it, which copies those rows alone.

Layers with a sliding window keep only the newest columns: their buffers begin at a later column than 0, and the
cache gives that column to the family's masks. Columns are counted alike for all layers.

Forms of the keys and values in a cohort: plain, or in 8 bits with a scale for each head and position.

Every buffer is (rows, heads, columns, X), so cohorts move, cut, reorder and copy all forms in the same way, and copied positions
have the same bytes.

A pass at position p of a layer with a window sees the `size` positions up to and including its own. So `size - 1` past positions
are kept, and `slack` more: for positions that are cut off again (rejected drafts), and for members of a cohort that lag behind its
newest column. After `room` written columns the kept ones move to the front of the buffer, so a step copies kept / room columns on
average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.traced_model import LayerState, PassStates, StateCache
from swarmnode.compute.serving.states import StateHistory
from swarmnode.config import INT8_KV, PLAIN

MAX_LAG = 16  # most steps that a cohort goes on with a stand-in for an absent member
LONGEST_SHARED = 8  # positions of a step that shares a pass: all steps are filled up to the longest
ROLLBACK = 48  # positions that a session may always go back
ROOM = 256
SLIDING = ("sliding_attention", "hybrid_sliding")


with lean():
    from transformers.cache_utils import Cache


class AttentionCache(StateCache, Cache):
    """Cache that keeps keys, values and recurrent states itself, not in transformers' layer objects.

    `windows` are those of layers that look back over some positions only; `capacity` is the number of columns of other layers'
    buffers. The code of a model family reads `is_sliding` (up to the layer after the last one with a window) to build masks, and
    `is_linear` and `is_dummy`: masks are made for layers with keys and values, whatever the first layers are.
    """

    is_sliding: Any = ()  # attributes in the places of transformers' properties
    is_linear: Any = ()
    is_dummy: Any = ()

    def __init__(self, windows: Windows, capacity: int) -> None:
        Cache.__init__(self, layers=[])
        self.windows, self.capacity = windows, capacity
        self.states = PassStates()
        self.is_sliding = [layer in windows for layer in range(max(windows, default=-1) + 2)]
        self.is_linear = self.is_dummy = [False] * len(self.is_sliding)

    def columns_in(self, layer: int) -> int:
        """Return the number of columns of a layer's buffers."""
        window = self.windows.get(layer)
        return self.capacity if window is None else min(self.capacity, window.columns)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no fixed length."""
        return -1


@dataclass(frozen=True)
class Window:
    """Columns (positions) that the cache of a layer with sliding-window attention keeps: the window's `size`, `slack` to go back,
    and `room` for new ones."""

    size: int
    slack: int = ROLLBACK + MAX_LAG
    room: int = ROOM

    @property
    def retained(self) -> int:
        """Number of columns that are kept when the window moves on."""
        return self.size - 1 + self.slack

    @property
    def columns(self) -> int:
        """Number of columns of a buffer."""
        return self.retained + self.room


Windows = Mapping[int, Window]
"""Windows by the layer's number in the whole model; a layer without one keeps everything"""


def sliding_layers(config: Any) -> dict[int, int]:
    """Return the window of each sliding layer of a transformers config, as transformers' own caches read it.

    Layers that see all positions are left out. A chunk of chunked attention (Llama 4) is no window: such a layer keeps everything.
    """
    size = getattr(config, "sliding_window", None)
    if not isinstance(size, int):
        return {}
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [SLIDING[0]] * count
    return {layer: size for layer, kind in enumerate(kinds[:count]) if kind in SLIDING}


Buffers = tuple[Tensor, ...]
"""Buffers of one layer, each (rows, heads, columns, X)"""

LEVELS = 127  # of int8 on each side of zero: with a scale in bfloat16, which is off by 2^-8 at most, no quotient rounds to 128
SMALLEST = 1e-30  # scale: of a vector of zeros, too


class KvStore(Protocol):
    """Form of the keys and values in a cohort's buffers. `keys` and `values` are (rows, heads, T, dim), in any float dtype."""

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return uninitialised buffers of `rows` rows and `columns` columns for keys and values like these."""

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write T columns from column `start` on, and return the keys and values of all columns up to them."""

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Write T columns at `places_T` (int64), and return the keys and values of all columns of the buffers."""


class PlainStore(KvStore):
    """Keys and values as they come: attention reads the buffers themselves."""

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return a buffer for the keys and one for the values, in their dtypes."""
        return tuple(like.new_empty(rows, like.shape[1], columns, like.shape[3]) for like in (keys, values))

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write T columns from column `start` on, and return views of all columns up to them."""
        kept_keys, kept_values = buffers
        count = keys.shape[2]
        kept_keys.narrow(2, start, count).copy_(keys)
        kept_values.narrow(2, start, count).copy_(values)
        return kept_keys.narrow(2, 0, start + count), kept_values.narrow(2, 0, start + count)

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Write T columns at `places_T`, and return the buffers."""
        kept_keys, kept_values = buffers
        kept_keys.index_copy_(2, places_T, keys)
        kept_values.index_copy_(2, places_T, values)
        return kept_keys, kept_values


class Int8Store(KvStore):
    """Keys and values in 8 bits: per head and position `dim` values of int8 and the scale of their largest in bfloat16.

    Attention gets a copy of one layer at a time, in the dtype of the new keys. The newest positions are read back, too, so that a
    position of a prompt sees what a decoded one sees.
    """

    def allocate(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> Buffers:
        """Return buffers for the keys, their scales, the values and their scales."""
        shapes = [(rows, like.shape[1], columns, like.shape[3]) for like in (keys, values)]
        return tuple(
            keys.new_empty((*shape[:3], width), dtype=dtype)
            for shape in shapes
            for width, dtype in ((shape[3], torch.int8), (1, torch.bfloat16))
        )

    def write(self, buffers: Buffers, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Quantise T columns into the columns from `start` on, and return copies of all columns up to them."""
        count = keys.shape[2]
        for buffer, new in zip(buffers, _quantised(keys, values), strict=True):
            buffer.narrow(2, start, count).copy_(new)
        return _restored([buffer.narrow(2, 0, start + count) for buffer in buffers], keys, values)

    def write_at(self, buffers: Buffers, keys: Tensor, values: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise T columns into those at `places_T`, and return copies of all columns of the buffers."""
        for buffer, new in zip(buffers, _quantised(keys, values), strict=True):
            buffer.index_copy_(2, places_T, new)
        return _restored(buffers, keys, values)


STORES: dict[str, KvStore] = {PLAIN: PlainStore(), INT8_KV: Int8Store()}
"""Forms by the name of `StageConfig.kv`"""


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return (..., dim) states as int8 and their scales (..., 1) in bfloat16: each vector's largest value becomes 127 or -127.

    Vectors with a NaN or an infinity get a scale that is none, so that reading them gives no finite number.
    """
    states = states.float()
    scales = (states.abs().amax(-1, keepdim=True) * (1 / LEVELS)).clamp_(min=SMALLEST).to(torch.bfloat16)
    return (states / scales.float()).round_().to(torch.int8), scales


def _quantised(keys: Tensor, values: Tensor) -> Buffers:
    """Return int8 and scales of the keys and of the values, in the order of the buffers."""
    if keys.shape != values.shape:
        return *quantise(keys), *quantise(values)
    levels, scales = quantise(torch.cat([keys, values], 1))  # a third less time for a single position
    heads = keys.shape[1]
    return levels[:, :heads], scales[:, :heads], levels[:, heads:], scales[:, heads:]


def _restored(buffers: Buffers | list[Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of quantised columns in the dtypes of `keys` and `values`."""
    key_levels, key_scales, value_levels, value_scales = buffers
    return (
        key_levels.to(keys.dtype).mul_(key_scales.to(keys.dtype)),
        value_levels.to(values.dtype).mul_(value_scales.to(values.dtype)),
    )


PLAIN_STORE = PlainStore()


class CachedSession:
    """Place of one session in the caches: `rows` rows that hold `length` positions, and room for `max_length`.

    `padding[r]` of the first positions of row r are left padding. `layers` are the numbers of the layers that it uses here.
    In its cohort its rows begin at `first_row` and end `lag` columns before the cohort's end. It may be cut down to `floor`
    positions: below that, sliding windows no longer keep positions that would be visible again. `lost` says that its cache was lost
    when a copy failed half-way.
    """

    def __init__(self, rows: int, max_length: int, padding: Sequence[int], layers: range) -> None:
        self.rows = rows
        self.max_length = max_length
        self.padding = list(padding) or [0] * rows
        self.layers = layers
        self.length = 0
        self.floor = 0
        self.lost = False
        self.history: StateHistory | None = None  # of a session with recurrent states
        self.ways: set[bool] = set()  # whether its passes were graphs of ggml: torch's way may give other bits
        self.cohort: Cohort | None = None
        self.first_row = 0
        self.lag = 0

    @property
    def end(self) -> int:
        """Number of the session's positions, with those whose states have to be computed again (`StateHistory.owed`)."""
        return self.length + (self.history.owed_count if self.history is not None else 0)

    def __repr__(self) -> str:
        return f"CachedSession({self.rows} rows, {self.length} of {self.max_length} positions)"

    @property
    def row_slice(self) -> slice:
        """Rows of the session in the buffers of its cohort (sessions computed together)."""
        return slice(self.first_row, self.first_row + self.rows)


class Cohort(AttentionCache):
    """Cache that one forward pass over its members reads and writes.

    A pass writes at column `end`, and `advance` makes the columns count, so a pass that failed leaves no trace. `present` are the
    members that the next pass is for.
    """

    def __init__(
        self,
        members: Sequence[CachedSession],
        capacity: int,
        device: torch.device,
        windows: Windows,
        store: KvStore = PLAIN_STORE,
    ) -> None:
        super().__init__(windows, capacity)
        self.store = store
        self.members = list(members)
        self.present = set(members)
        self.buffers: dict[int, Buffers] = {}
        self.device = device
        self.rows = sum(member.rows for member in members)
        self.end = max(member.length for member in members)
        self.dirty_end = capacity  # columns from here on are zero
        self._first_kept = {
            window: max(0, self.end - window.retained) if capacity > window.columns else 0
            for window in windows.values()
        }
        self.first_columns: list[int] = []
        self.when_given_up: list[Callable[[], None]] = []
        self._mask_RC: Tensor | None = None
        self._first_R1: Tensor | None = None

    def __repr__(self) -> str:
        return f"Cohort({len(self.members)} sessions, {self.rows} rows, columns {self.end} of {self.capacity})"

    def give_up(self) -> None:
        """Tell all that know the buffers (`when_given_up`) that they are about to be freed."""
        for told in self.when_given_up:
            told()
        self.when_given_up.clear()
        self.states.begin(is_first=True)

    def columns_of(self, member: CachedSession) -> slice:
        """Return the columns of the cache that hold the positions of a member of the cohort."""
        end = self.end - member.lag
        return slice(end - member.length, end)

    def first_kept(self, layer: int) -> int:
        """Return the column at which the buffers of a layer begin."""
        window = self.windows.get(layer)
        return 0 if window is None else self._first_kept[window]

    def make_room(self, count: int) -> None:
        """Prepare a pass over `count` more columns. Drops the oldest columns of the layers with a limited window whose buffers have
        no room for them."""
        self.states.begin(not any(member.length for member in self.present))
        for window, first in self._first_kept.items():
            if self.end + count - first > min(self.capacity, window.columns):
                moved = max(first, self.end - window.retained)
                by, held = moved - first, self.end - moved
                for layer in [layer for layer in self.buffers if self.windows.get(layer) == window]:
                    for buffer in self.buffers[layer]:
                        buffer[:, :, :held] = buffer[:, :, by : by + held].clone()
                self._first_kept[window] = moved
                self.dirty_end = self.capacity
                self.raise_floors()

    def zero_from(self, column: int) -> None:
        """Set the columns from `column` on, which are not in use, to zero."""
        for layer, buffers in self.buffers.items() if column < self.dirty_end else ():
            first = self.first_kept(layer)
            # A window's buffer may end behind the cohort's capacity; large values there overflow in products with queries.
            end = None if self.dirty_end >= self.capacity else self.dirty_end - first
            for buffer in buffers:
                buffer[:, :, column - first : end] = 0
        self.dirty_end = column

    def raise_floors(self) -> None:
        """Raise the members' `floor`, the least length that they can be cut down to, to fit the windows' places."""
        for window, first in self._first_kept.items():
            for member in self.members:
                columns = self.columns_of(member)
                if columns.start < first:
                    member.floor = max(member.floor, first + window.size - 1 - columns.start)

    def call(self, members: Sequence[CachedSession]) -> None:
        """Prepare a pass over `members` of the cohort (sessions computed together): align the cached positions of members that
        lag behind."""
        is_changed = len(members) < len(self.members) or len(self.present) < len(self.members)
        self.present = set(members)
        for member in self.members:
            if member.lag and member in self.present:
                for layer, buffers in self.buffers.items():
                    old = self.held(member, layer)
                    new = slice(old.start + member.lag, old.stop + member.lag)
                    for buffer in buffers:
                        rows = buffer[member.row_slice]
                        rows[:, :, new] = rows[:, :, old].clone()
                member.lag = 0
                is_changed = True
        if is_changed:
            self.refresh_rows()

    def truncate(self, member: CachedSession, length: int) -> None:
        """Forget the positions of a session from `length` on."""
        member.lag += member.length - length
        member.length = length
        self._draw_in()

    def _draw_in(self) -> None:
        """Move the end back to the newest column that counts for some member."""
        lag = min(member.lag for member in self.members)
        if lag:
            self.end -= lag
            for member in self.members:
                member.lag -= lag

    def held(self, member: CachedSession, layer: int) -> slice:
        """Return the columns of a member's kept positions within the buffers of a layer."""
        first, columns = self.first_kept(layer), self.columns_of(member)
        return slice(max(columns.start - first, 0), columns.stop - first)

    def refresh_rows(self) -> None:
        """Find the first column that counts in each row, which stays as columns are added. For stand-ins only the newest counts."""
        self.first_columns = [
            self.columns_of(member).start + padding if member in self.present else self.end
            for member in self.members
            for padding in member.padding
        ]
        self._mask_RC = self._first_R1 = None

    def attention_mask(self, count: int) -> Tensor | None:
        """Return the mask (rows, end + count) for a pass over `count` new columns: 1 if a column counts. None if all do."""
        if not any(self.first_columns):
            return None
        if self._mask_RC is None or self._mask_RC.shape[1] < self.end + count:
            columns_C = torch.arange(max(self.capacity, self.end + count), device=self.device)
            self._mask_RC = (columns_C >= self._first_columns_R1()).to(torch.int64)
        return self._mask_RC[:, : self.end + count]

    def position_ids(self, count: int) -> Tensor:
        """Return the positions (rows, count) of the next `count` columns, counted from each row's first token."""
        columns_T = torch.arange(self.end, self.end + count, device=self.device)
        if not any(self.first_columns):
            return columns_T.expand(self.rows, count)
        return (columns_T - self._first_columns_R1()).clamp_(min=0)

    def _first_columns_R1(self) -> Tensor:
        if self._first_R1 is None:
            self._first_R1 = torch.tensor(self.first_columns, device=self.device)[:, None]
        return self._first_R1

    def advance(self, counts: Mapping[CachedSession, int]) -> None:
        """Record the last pass: it wrote as many columns as the longest step in `counts`, and each member's first ones count."""
        written = max(counts.values())
        self.end += written
        self.states.commit(self.rows, [member.row_slice for member in counts])
        for member in self.members:
            count = counts.get(member, 0)
            member.length += count
            member.lag += written - count
        self._draw_in()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (rows, heads, T, dim) and return all of the layer up to them. Called by attention."""
        count = key_states.shape[2]
        if layer_idx not in self.buffers:
            columns = self.columns_in(layer_idx)
            self.buffers[layer_idx] = self.store.allocate(key_states, value_states, self.rows, columns)
        self.dirty_end = max(self.dirty_end, self.end + count)
        held = self.end - self.first_kept(layer_idx)
        return self.store.write(self.buffers[layer_idx], key_states, value_states, held)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns in use, for the family's masks and positions."""
        return self.end

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (columns in the buffers, the first of them). The family masks columns that a layer keeps beyond its window."""
        first = self.first_kept(layer_idx)
        return self.end + query_length - first, first

    @property
    def is_compileable(self) -> bool:
        """Whether some row is padded. transformers reads this property of a cache: if it is true, transformers makes the mask of
        a step without waiting for the device."""
        return any(self.first_columns)

    @property
    def is_initialized(self) -> bool:
        """Whether the cohort holds positions."""
        return self.end > 0


def regroup(
    groups: Sequence[tuple[Sequence[CachedSession], int]],
    device: torch.device,
    windows: Windows,
    store: KvStore = PLAIN_STORE,
) -> list[Cohort]:
    """Copy sessions into new cohorts, given as (members, capacity). Other members of their old cohorts lose their positions.

    Goes layer by layer and frees the old layer before the next, so that at most one layer exists twice. If that fails, all members
    of the old cohorts are marked `lost`.
    """
    cohorts = [Cohort(members, capacity, device, windows, store) for members, capacity in groups]
    olds = {id(old): old for cohort in cohorts for old in _cohorts_of(cohort.members)}
    for old in olds.values():
        old.give_up()
    try:
        for layer in sorted({layer for old in olds.values() for layer in old.buffers}):
            for cohort in cohorts:
                _copy_layer(cohort, layer)
            for old in olds.values():
                old.buffers.pop(layer, None)
        for key in {key: None for old in olds.values() for key in old.states.committed}:
            for cohort in cohorts:
                _copy_state(cohort, key)
            for old in olds.values():
                old.states.committed.pop(key, None)
    except BaseException:  # no memory: the old cohorts have lost some layers, and the new ones are incomplete
        for member in (member for old in olds.values() for member in old.members):
            member.lost = True
        raise
    for cohort in cohorts:
        row = 0
        for member in cohort.members:
            member.cohort, member.first_row, member.lag = cohort, row, 0
            row += member.rows
        cohort.raise_floors()
        cohort.refresh_rows()  # only now: the members' lags were those of their old cohorts
    return cohorts


def copy_beginning(
    source: CachedSession, session: CachedSession, length: int, capacity: int, states: Mapping[LayerState, Tensor]
) -> None:
    """Copy the first `length` positions of `source` into the empty `session`, in a new cohort of `capacity` columns. `states` are
    the recurrent states of its rows there.

    The source does not change.
    """
    cohort = source.cohort
    assert cohort is not None and session.length == 0
    # Looks like another member with its last positions cut off, in the source's rows, so that it is copied like any member.
    session.length, session.floor = length, source.floor
    session.cohort, session.first_row, session.lag = cohort, source.first_row, source.lag + source.length - length
    try:
        copy = Cohort([session], capacity, cohort.device, cohort.windows, cohort.store)
        for layer in cohort.buffers:
            _copy_layer(copy, layer)
        copy.states.committed = {key: state.clone() for key, state in states.items()}
    except BaseException:  # no memory
        session.length, session.floor, session.cohort, session.lag = 0, 0, None, 0
        raise
    session.cohort, session.first_row, session.lag = copy, 0, 0
    copy.raise_floors()
    copy.refresh_rows()


def _cohorts_of(members: Sequence[CachedSession]) -> Iterator[Cohort]:
    return (member.cohort for member in members if member.cohort is not None)


def _copy_state(cohort: Cohort, key: LayerState) -> None:
    """Fill one recurrent state of a new cohort with its members' rows; members without positions get zeros."""
    olds = [
        (None if member.cohort is None else member.cohort.states.committed.get(key), member)
        for member in cohort.members
    ]
    like = next((state for state, _ in olds if state is not None), None)
    if like is not None:
        rows = [
            like.new_zeros(member.rows, *like.shape[1:]) if state is None else state[member.row_slice]
            for state, member in olds
        ]
        cohort.states.committed[key] = torch.cat(rows)


def _copy_layer(cohort: Cohort, layer: int) -> None:
    """Fill one layer of a new cohort with its members' old columns, each ending at the cohort's last column.

    Columns left of a member are zeroed: masked, they still get a weight of zero, and zero times infinity or NaN is not zero.
    """
    source = next((old.buffers[layer] for old in _cohorts_of(cohort.members) if layer in old.buffers), None)
    if source is None:
        return
    targets = []
    end = cohort.end - cohort.first_kept(layer)
    for index, like in enumerate(source):
        target = like.new_empty(cohort.rows, like.shape[1], cohort.columns_in(layer), like.shape[3])
        row = 0
        for member in cohort.members:
            rows = target[row : row + member.rows]
            begin = end
            if member.cohort is not None and member.length:
                old = member.cohort.held(member, layer)
                begin = max(0, end - (old.stop - old.start))
                kept = slice(old.stop - (end - begin), old.stop)
                rows[:, :, begin:end] = member.cohort.buffers[layer][index][member.row_slice, :, kept]
            rows[:, :, :begin] = 0
            row += member.rows
        targets.append(target)
    cohort.buffers[layer] = tuple(targets)
