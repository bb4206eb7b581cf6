"""KV caches of all sessions of a span, and the budget of bytes for them.

A session reserves rows x max_length positions when it opens, so that it can never fail half-way for want of memory. For layers
with a sliding window (`cohort.py`) it reserves at most the size of their buffers. It also reserves the largest layer once more,
plain: for regrouping, and for reading a layer that is kept in 8 bits (`cohort.py`).

Buffers grow with the session. A cohort may hold padding beyond its members' reservations while there is room. Without room it is
dissolved into its sessions, which always fit.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import TypeVar

import torch

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.model.traced_model import LayerState
from swarmnode.compute.serving.cohort import (
    LONGEST_SHARED,
    MAX_LAG,
    STORES,
    CachedSession,
    Cohort,
    Window,
    Windows,
    copy_beginning,
    regroup,
    sliding_layers,
)
from swarmnode.compute.serving.states import KEPT_INPUTS, KV, SessionCopy, StateHistory
from swarmnode.config import PLAIN
from swarmnode.errors import ErrorCode, ProtocolError, SwarmnodeError
from swarmnode.ledger import Account, Full, MemoryLedger

GROW_COLUMNS = 64  # buffers grow by at least this and by a quarter
SMALL_COLUMNS = 128  # below it, padding costs less than another pass
MAX_PADDING = 0.25  # of all columns of a cohort
ANY_LENGTH = 1 << 20  # positions of a session whose memory does not grow with them
ID_BYTES = 8  # of a token
ROW_SIZES = 4096  # remembered results

TensorKind = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor"""
NO_TENSOR: TensorKind = ((0, 0, 0, 0), None)

SessionId = TypeVar("SessionId", bound=Hashable)


class OutOfCache(SwarmnodeError):
    """The cache budget has no room for the session. The caller decides when to ask again."""


class Claim(Enum):
    """Purpose of claimed memory. Claims overlap, so the largest one counts, not the sum.

    A promise is kept in buffers, and padding in some sessions' buffers makes room once others need their promised memory.
    """

    PROMISED = "promised"  # to admitted sessions, by the loop
    RESERVED = "reserved"  # by sessions that the pool has opened, on the compute thread
    ALLOCATED = "allocated"  # by buffers, padding included


class CacheBudget:
    """Budget of at most `limit_bytes` for caches. May be used from any thread; each claim belongs to one thread."""

    def __init__(self, limit_bytes: int, ledger: MemoryLedger | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.ledger = ledger or MemoryLedger()
        self._reservation = self.ledger.count(Account.KV_CACHE)
        self._claims = dict.fromkeys(Claim, 0)
        self._lock = threading.Lock()

    def claimed(self, claim: Claim) -> int:
        """Return the bytes that are claimed for this purpose."""
        return self._claims[claim]

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be promised."""
        most_bytes = max(self._claims.values())
        spare_bytes = most_bytes - self._claims[Claim.PROMISED]  # in the ledger already
        left_bytes = self.limit_bytes - self._claims[Claim.PROMISED]
        in_ledger_bytes = spare_bytes + self.ledger.free_bytes
        return max(0, int(min(left_bytes, in_ledger_bytes)))

    def claim(self, claim: Claim, size_bytes: int) -> None:
        """Set a claim to `size_bytes`. Raises OutOfCache, and changes nothing, if the budget or the ledger has no room for it."""
        with self._lock:
            before = self._claims[claim]
            if size_bytes > max(before, self.limit_bytes):
                raise OutOfCache(
                    f"{size_bytes / 1e6:.1f} MB of cache would be {claim.value}; the limit is {self.limit_bytes / 1e6:.1f} MB"
                )
            self._claims[claim] = size_bytes
            most_bytes = max(self._claims.values())
            try:
                self._reservation.resize(most_bytes)
            except Full as error:
                self._claims[claim] = before
                raise OutOfCache(str(error)) from None

    def close(self) -> None:
        """Release all claims."""
        with self._lock:
            self._claims = dict.fromkeys(Claim, 0)
            self._reservation.release()


class CachePool:
    """KV caches of the sessions in one node's layers. Used from the compute thread only."""

    def __init__(
        self,
        span: ModelSpan,
        limit_bytes: int,
        ledger: MemoryLedger | None = None,
        *,
        windows: Windows | None = None,
        kv: str = PLAIN,
    ) -> None:
        self.span = span
        self.kv = kv
        self.store = STORES[kv]
        self.windows = windows_of(span) if windows is None else windows
        self.sessions: dict[Hashable, CachedSession] = {}
        self._row_bytes = lru_cache(ROW_SIZES)(self._count_row_bytes)
        self.budget = CacheBudget(limit_bytes, ledger)

    def __repr__(self) -> str:
        return (
            f"CachePool({len(self.sessions)} sessions, {self.reserved_bytes / 1e6:.1f} of "
            f"{self.budget.limit_bytes / 1e6:.1f} MB reserved, {self.allocated_bytes / 1e6:.1f} MB allocated)"
        )

    @property
    def cohorts(self) -> list[Cohort]:
        """Groups of sessions that are computed together, each once."""
        return _cohorts_of(self.sessions.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the caches keep of one token of one row, over all layers of the span."""
        return self.span.kv_bytes_per_token(self.kv)

    def positions_in(self, free_bytes: int) -> int:
        """Return the most positions that a new session of one row may have in `free_bytes`. Recurrent states take the same room at
        any length."""
        layers = self.span.layers_of(self.span.start, self.span.end)
        left_bytes = free_bytes - self.bytes_of(layers, 1, 0)
        if left_bytes < 0:
            return 0
        if not self.bytes_per_token and left_bytes < free_bytes:
            return ANY_LENGTH
        return left_bytes // max(1, self.bytes_per_token)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the open sessions may need at most."""
        return sum(self.bytes_of(s.layers, s.rows, s.max_length) for s in self.sessions.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the KV caches take, with the reserve for regrouping sessions."""
        return sum(self._bytes(cohort.members, cohort.capacity) for cohort in self.cohorts)

    def open(
        self, session_id: Hashable, *, rows: int, max_length: int, padding: Sequence[int] = (), layers: range
    ) -> CachedSession:
        """Reserve KV cache for a new session of `rows` rows and at most `max_length` positions in `layers`. Raises OutOfCache if
        the budget has no room."""
        session = CachedSession(rows, max_length, padding, layers)
        if any(self.span.family.state_shapes[layer] for layer in layers):
            session.history = StateHistory(self.span.family.snapshots)
        self.budget.claim(Claim.RESERVED, self.reserved_bytes + self.bytes_of(layers, rows, max_length))
        self.sessions[session_id] = session
        return session

    def extend(self, session_id: Hashable, max_length: int) -> None:
        """Reserve room for `max_length` positions of a session. Raises OutOfCache, and changes nothing, if the budget has none."""
        session = self.sessions[session_id]
        before, session.max_length = session.max_length, max(session.max_length, max_length)
        try:
            self.budget.claim(Claim.RESERVED, self.reserved_bytes)
        except OutOfCache:
            session.max_length = before
            raise

    def close(self, session_id: Hashable) -> None:
        """Free a session; no error if it is unknown."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        cohort, session.cohort = session.cohort, None
        rest = [] if cohort is None else [member for member in cohort.members if member is not session]
        if cohort is not None and rest:
            regroup([(rest, min(cohort.capacity, capacity_for(rest, 1)))], self.span.device, self.windows, self.store)
        self.budget.claim(Claim.RESERVED, self.reserved_bytes)
        self.budget.claim(Claim.ALLOCATED, self.allocated_bytes)

    def close_all(self) -> None:
        """Free the KV caches of all sessions and release their memory."""
        for cohort in self.cohorts:
            cohort.give_up()
            cohort.buffers.clear()
        self.sessions.clear()
        self.budget.close()

    def fork(self, source_id: Hashable, session_id: Hashable, length: int) -> None:
        """Copy the first `length` positions of a session into an empty one with room for them, and the same rows and layers.

        Raises ProtocolError if the source does not hold these positions (any more), OutOfCache.
        """
        source, session = self.sessions[source_id], self.sessions[session_id]
        history = source.history
        if history is not None and length == source.length:
            self.take_snapshot(source)
        base = length if history is None else history.base(length)
        is_here = history is None or history.reachable(length) == length
        if (
            source.cohort is None
            or source.lost
            or not source.floor <= base <= source.length
            or not length
            or not is_here
        ):
            raise ProtocolError(f"{source!r} does not hold the first {length} positions", code=ErrorCode.NO_SESSION)
        if not base:  # the latest inputs are all of them
            session.history = None if history is None else history.fork(length)
            return
        capacity = min(session.max_length, base + max(GROW_COLUMNS, base // 4))
        try:
            self.budget.claim(Claim.ALLOCATED, self.allocated_bytes + self._bytes([session], capacity))
        except OutOfCache:
            self.dissolve()
            self.budget.claim(Claim.ALLOCATED, self.allocated_bytes + self._bytes([session], capacity))
        copied = None if history is None else history.fork(length)
        copy_beginning(source, session, base, capacity, {} if copied is None else copied.snapshots[-1].states)
        session.history = copied

    def take_snapshot(self, session: CachedSession, *, is_guessed: bool = False) -> None:
        """Keep a copy of a session's recurrent states as they are now, if it has any. One before a pass with guesses takes
        the place of the one before the last such pass."""
        cohort, history = session.cohort, session.history
        if cohort is not None and history is not None:
            if is_guessed:
                history.drop_newest_if_near(session.length)
            history.add(session.length, lambda: cohort.states.copy_rows(session.row_slice))

    def copy_out(self, session_id: Hashable, most: int, layers: range) -> SessionCopy | None:
        """Return a copy of what a session keeps of `layers` at its newest position up to `most` that is whole: if it has recurrent
        states, one with a snapshot. None if there is none, or the session is unknown."""
        session = self.sessions.get(session_id)
        if session is None or session.cohort is None or session.lost:
            return None
        history = session.history
        if session.length <= most:
            self.take_snapshot(session)
        length = min(most, session.length) if history is None else history.base(most)
        if not max(1, session.floor) <= length:
            return None
        kept = [] if history is None else [each.states for each in history.snapshots if each.length == length]
        parts = {key: state for states in kept for key, state in states.items() if key[0] in layers}
        for layer, buffers in session.cohort.buffers.items():
            held = session.cohort.held(session, layer)
            columns = slice(held.start, held.stop - (session.length - length))
            for index, buffer in enumerate(buffers if layer in layers else ()):
                parts[layer, (KV, index)] = buffer[session.row_slice, :, columns].clone()
        return SessionCopy(length, parts)

    def copy_bytes(self, layers: range, length: int) -> int:
        """Return the most bytes of a copy of one row with `length` positions of `layers`."""
        family, size = self.span.family, self.span.dtype.itemsize
        held = {layer: min(length, w.columns) if (w := self.windows.get(layer)) else length for layer in layers}
        return sum(
            family.layer_state_bytes(layer, size) + held[layer] * family.layer_cache_bytes(layer, size, self.kv)
            for layer in layers
        )

    def check_copy(self, layers: range, length: int, parts: Mapping[LayerState, TensorKind]) -> None:
        """Raise ProtocolError, with the name of a layer and its part, unless `parts` are all that one row keeps of `layers` after
        `length` positions here."""
        states_of, family = {torch.float32, self.span.dtype}, self.span.family
        due: set[LayerState] = set()
        for layer in layers:
            window, places = self.windows.get(layer), family.cache_shapes[layer]
            forms = [(self.span.dtype, dim) for _, dim in places]
            if self.kv != PLAIN:
                places = tuple(place for place in places for _ in range(2))
                forms = [form for _, dim in forms for form in ((torch.int8, dim), (torch.bfloat16, 1))]
            for index, ((heads, _), (dtype, dim)) in enumerate(zip(places, forms, strict=True)):
                least = length if window is None else min(length, window.size - 1)
                due.add(key := (layer, (KV, index)))
                shape, of = parts.get(key, NO_TENSOR)
                if (*shape[:2], *shape[3:]) != (1, heads, dim) or not least <= shape[2] <= length or of != dtype:
                    raise ProtocolError(
                        f"layer {layer}: keys and values {index} are {of} {shape} at {length} positions"
                    )
            for state_key, form in zip(family.state_keys[layer], family.state_shapes[layer], strict=True):
                due.add(key := (layer, state_key))
                shape, of = parts.get(key, NO_TENSOR)
                if shape != (1, *form) or of not in states_of:
                    raise ProtocolError(
                        f"layer {layer}: the {state_key[0]} state is {of} {shape}, and not {(1, *form)}"
                    )
        if unknown := parts.keys() - due:
            layer, (kind, index) = min(unknown)
            raise ProtocolError(f"layer {layer} keeps no {kind} state {index} here")

    def copy_in(self, session_id: Hashable, copy: SessionCopy) -> None:
        """Let an empty session begin with a copy that `check_copy` has accepted. Raises OutOfCache if there is no room."""
        session, length = self.sessions[session_id], copy.length
        capacity = min(session.max_length, length + max(GROW_COLUMNS, length // 4))
        self.budget.claim(Claim.ALLOCATED, self.allocated_bytes + self._bytes([session], capacity))
        session.length = session.floor = length
        cohort = session.cohort = Cohort([session], capacity, self.span.device, self.windows, self.store)
        for layer in {layer for layer, (kind, _) in copy.parts if kind == KV}:
            columns, end, buffers = cohort.columns_in(layer), length - cohort.first_kept(layer), []
            for index in range(sum(key[0] == layer and key[1][0] == KV for key in copy.parts)):
                part = copy.parts[layer, (KV, index)].to(self.span.device)[:, :, -end:]
                buffers.append(part.new_zeros(*part.shape[:2], columns, part.shape[3]))
                buffers[-1][:, :, end - part.shape[2] : end] = part
            cohort.buffers[layer] = tuple(buffers)
        states = {key: part for key, part in copy.parts.items() if key[1][0] != KV}
        cohort.states.committed = {key: part.to(self.span.device, copy=True) for key, part in states.items()}
        if session.history is not None:
            session.history.first_input = length
        self.take_snapshot(session)
        cohort.refresh_rows()

    def reachable(self, session_id: Hashable, held: int, length: int) -> int:
        """Return the greatest length up to `length` to which a session of at most `held` positions can surely be cut; 0 if it must
        begin anew. May be called from another thread while the session computes nothing."""
        session = self.sessions.get(session_id)
        history = None if session is None else session.history
        base = length if history is None else history.base(length)
        reachable = length if history is None else history.reachable(length)
        return reachable if self.retains(held, base) else 0

    def retains(self, held: int, length: int) -> bool:
        """Return whether a session of at most `held` positions surely has the first `length` whole, wherever its windows stand."""
        return all(
            held + MAX_LAG <= window.retained or held - length <= window.slack - MAX_LAG
            for window in self.windows.values()
        )

    def truncate(self, session_id: Hashable, length: int) -> None:
        """Forget the positions from `length` on.

        Raises ProtocolError if a window has moved past positions that would be visible again, ValueError if the session has fewer.
        """
        session = self.sessions[session_id]
        if not 0 <= length <= session.end:
            raise ValueError(f"cannot truncate {session.end} positions to {length}")
        if length == session.end:
            return
        if session.history is not None:
            length = self._cut_states(session, session.history, length)
        if length < session.floor:
            text = f"{session.length} positions can be cut down to {session.floor}, and not to {length}: windows have moved on"
            raise ProtocolError(text, code=ErrorCode.NO_SESSION)
        if session.cohort is not None:
            session.cohort.truncate(session, length)
        else:
            session.length = length

    def _cut_states(self, session: CachedSession, history: StateHistory, length: int) -> int:
        """Let the states of a session go back to `length`, or to a position before it whose successors are then owed. Returns that
        position. Raises ProtocolError, and changes nothing, if no snapshot leads there."""
        if not length:
            session.history = StateHistory(self.span.family.snapshots)
            return 0
        base = min(session.length, length) if length >= session.length else history.base(length)
        if base < session.floor or (length < session.length and history.reachable(length) < length):
            text = f"{session.length} positions cannot be cut down to {length}: no recurrent state from there is kept"
            raise ProtocolError(text, code=ErrorCode.NO_SESSION)
        states = history.cut(length, session.length)
        if session.cohort is not None:
            session.cohort.states.put_rows(session.row_slice, states)
        return base

    def reorder(self, session_id: Hashable, indices: Sequence[int]) -> None:
        """Make row r of the session what row `indices[r]` was (beam search).

        Raises ValueError unless there is an index of a row for each row.
        """
        session = self.sessions[session_id]
        if len(indices) != session.rows or not all(0 <= index < session.rows for index in indices):
            raise ValueError(f"{list(indices)} does not reorder {session.rows} rows")
        session.padding = [session.padding[index] for index in indices]
        cohort = session.cohort
        if cohort is None:
            return
        order = torch.tensor(indices, device=cohort.device)
        cohort.states.reorder(session.row_slice, order)
        if session.history is not None:
            session.history.reorder(order)
        for layer, buffers in cohort.buffers.items():
            for buffer in buffers:
                rows = buffer[session.row_slice, :, : cohort.end - cohort.first_kept(layer)]
                rows.copy_(rows.index_select(0, order))
        cohort.refresh_rows()

    def prepare(self, sessions: Sequence[CachedSession], count: int) -> Iterator[Cohort]:
        """Yield cohorts for the next passes of these sessions, with room for `count` more columns. Run each before taking the next.

        Sessions may have fewer new positions than `count`, and must use the same layers. There is more than one cohort if lengths
        differ so much that padding would cost more than another pass, or if the budget has no room for padding.
        """
        for members in partition_by_length(sessions):
            known = members[0].cohort
            if known is not None and not _may_share_a_pass(known, members, count):
                known = None
            group = members if known is None else known.members
            if known is not None and known.end + count <= known.capacity:
                known.call(members)
                cohorts = [known]
            elif self._fits(group, capacity := capacity_for(group, count)):
                cohorts = [self._regroup(group, capacity)]
                if known is not None:
                    cohorts[0].call(members)
            else:  # each member in a cohort of its own: without padding all reservations fit
                self.dissolve()
                cohorts = [self._regroup([member], capacity_for([member], count)) for member in members]
                self.budget.claim(Claim.ALLOCATED, self.allocated_bytes)
            for cohort in cohorts:
                cohort.make_room(count)
                yield cohort

    def dissolve(self) -> None:
        """Put each session into a cohort (sessions computed together) of its own, without room for more positions."""
        for cohort in self.cohorts:
            if len(cohort.members) > 1:
                regroup(
                    [([member], member.length) for member in cohort.members], self.span.device, self.windows, self.store
                )

    def _fits(self, members: Sequence[CachedSession], capacity: int) -> bool:
        """Claim memory for one cohort of `members` with `capacity` positions, and for the rest of the cohorts that they come
        from. Returns whether there is room."""
        before = sum(self._bytes(old.members, old.capacity) for old in _cohorts_of(members))
        after = self._bytes(members, capacity)
        for rest in self._left_behind(members):
            after += self._bytes(rest, capacity_for(rest, 1))
        try:
            self.budget.claim(Claim.ALLOCATED, self.allocated_bytes - before + after)
        except OutOfCache:
            return False
        return True

    def _left_behind(self, members: Sequence[CachedSession]) -> list[list[CachedSession]]:
        """Return the other members of the cohorts that these members leave, per cohort."""
        chosen = set(members)
        rests = ([other for other in cohort.members if other not in chosen] for cohort in _cohorts_of(members))
        return [rest for rest in rests if rest]

    def _regroup(self, group: Sequence[CachedSession], capacity: int) -> Cohort:
        """Make a new cohort of this group. The members that it leaves behind stay together in cohorts of their own."""
        rests = self._left_behind(group)
        sized = [(group, capacity), *((rest, capacity_for(rest, 1)) for rest in rests)]
        return regroup(sized, self.span.device, self.windows, self.store)[0]

    def _bytes(self, members: Sequence[CachedSession], columns: int) -> int:
        return self.bytes_of(members[0].layers, sum(member.rows for member in members), columns)

    def bytes_of(self, layers: range, rows: int, columns: int) -> int:
        """Return the bytes of buffers of `columns` columns over these layers, and of the largest layer once more, plain."""
        return rows * self._row_bytes(layers, columns)

    def _count_row_bytes(self, layers: range, columns: int) -> int:
        """Return the bytes of one row. Cached, since it is needed for every open or kept session whenever one comes or goes."""
        kept = largest = 0
        family, size = self.span.family, self.span.dtype.itemsize
        if family.computes_again:  # the inputs of the first layer are kept, and copied as a whole
            return 2 * columns * max(family.width * size, ID_BYTES)
        stored, plain = (
            {layer: family.layer_cache_bytes(layer, size, kv) for layer in layers}
            | family.received_bytes(layers.start, size, kv)
            for kv in (self.kv, PLAIN)
        )
        for layer, token_bytes in stored.items():
            window = self.windows.get(layer)
            held = columns if window is None else min(columns, window.columns)
            kept, largest = kept + held * token_bytes, max(largest, held * plain[layer])
        kept += family.state_copies * sum(family.layer_state_bytes(layer, size) for layer in layers)
        if any(family.state_shapes[layer] for layer in layers):
            kept += KEPT_INPUTS * self.span.width * size
        return kept + largest


def windows_of(span: ModelSpan) -> dict[int, Window]:
    """Return the windows by layer, of all layers of the span's model, also of those that the span does not hold. Layers without a
    window are left out; empty if no layer has one."""
    return {layer: Window(size) for layer, size in sliding_layers(span.config).items()}


def _cohorts_of(sessions: Iterable[CachedSession]) -> list[Cohort]:
    """Return the cohorts (groups computed together) of the sessions, each once."""
    return list(dict.fromkeys(session.cohort for session in sessions if session.cohort is not None))


def _may_share_a_pass(cohort: Cohort, members: Sequence[CachedSession], count: int) -> bool:
    """Return whether a pass over these members may go over the whole cohort: all of it, or for a short step at least half.

    False if an absent member would lag too far, so that it is left behind.
    """
    if not all(member.cohort is cohort for member in members):
        return False
    if len(members) == len(cohort.members):
        return True
    if count > LONGEST_SHARED:
        return False
    is_most = 2 * sum(member.rows for member in members) >= cohort.rows
    present = set(members)
    return is_most and all(member.lag + count <= MAX_LAG for member in cohort.members if member not in present)


def partition_by_length(sessions: Sequence[CachedSession]) -> list[list[CachedSession]]:
    """Return groups of sessions, the longest first, with at most MAX_PADDING of all columns as padding.

    A row shorter than SMALL_COLUMNS counts as that long.
    """
    parts: list[list[CachedSession]] = []
    longest = rows = held = 0
    for session in sorted(sessions, key=lambda session: -session.length):
        columns = max(session.length, SMALL_COLUMNS)
        rows, held = rows + session.rows, held + session.rows * columns
        if parts and held >= (1 - MAX_PADDING) * rows * longest:
            parts[-1].append(session)
        else:
            parts.append([session])
            longest, rows, held = columns, session.rows, session.rows * columns
    return parts


def capacity_for(members: Sequence[CachedSession], count: int) -> int:
    """Return the columns for a cohort that is about to write `count` more: with slack, but none beyond its members' limits."""
    end = max(member.length for member in members) + count
    most = max(member.length for member in members) + max(member.max_length - member.length for member in members)
    return max(end, min(most, end + max(GROW_COLUMNS, end // 4)))
