"""Bodies of `/swarmnode/state/1`, the training states of a peer, and of `/swarmnode/backup/1`, backups for other peers
(`protocol/frames.md`). The bytes travel as chunks.

LIST_STATES                 the question
STATES, STATES, ... END     the answer, in as many frames as its entries need
GET_CHUNKS, CHUNK           as for the files of a manifest; the root is an entry's
BACK_UP, END                on the other protocol: a request to keep a state, and the answer once it is on the disk
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_RATE_BPS, ROOT_BYTES, Block, Body, Root, RunBytes, Step
from swarmnode.codec.frames import FrameKind

MAX_STATE_BLOCKS = 4097
MAX_STATE_BYTES = 1 << 37
MAX_ENTRIES = 1024  # in one frame
MAX_LISTED = 12 * MAX_ENTRIES  # in one answer


class ListStates(Body, frozen=True):
    """Question for the stored steps of these blocks (empty: of all) of the run with this id (empty: of the peer's current run).

    If no step is as late as `at_least`, the peer first stores its current step.
    """

    at_least: Step = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_STATE_BLOCKS)] = ()
    run: Annotated[bytes, Meta(max_length=ROOT_BYTES)] = b""


class StateEntry(Body, frozen=True):
    """State of one block at the beginning of a step: a safetensors file of `size` bytes with this root. `backup`: it is kept for
    another peer."""

    step: Step
    block: Block
    size: Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)]
    root: Root
    backup: bool = False


class States(Body, frozen=True):
    """Part of the answer to LIST_STATES: the run, and some of its states."""

    run: RunBytes
    entries: Annotated[tuple[StateEntry, ...], Meta(max_length=MAX_ENTRIES)] = ()


class BackUp(Body, frozen=True):
    """Request to keep a state of the sender. The receiver fetches it by GET_CHUNKS, at most at `rate_bps` (0: without limit)."""

    run: RunBytes
    state: StateEntry
    rate_bps: Annotated[float, Meta(ge=0, le=MAX_RATE_BPS)] = 0.0


STATE_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.LIST_STATES: ListStates,
    FrameKind.STATES: States,
    FrameKind.BACK_UP: BackUp,
}
