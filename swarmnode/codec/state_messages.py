"""Bodies of `/swarmnode/state/1`: which training states a peer has (`protocol/frames.md`). The bytes travel as chunks.

LIST_STATES                 asks
STATES, STATES, ... END     the answer, in as many frames as its entries need
GET_CHUNKS, CHUNK           as for the files of a manifest; the root is an entry's
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import Block, Body, Root, RunBytes, Step
from swarmnode.codec.frames import FrameKind

MAX_STATE_BLOCKS = 4097
MAX_STATE_BYTES = 1 << 37
MAX_ENTRIES = 1024  # in one frame
MAX_LISTED = 12 * MAX_ENTRIES  # in one answer


class ListStates(Body, frozen=True):
    """Asks which steps of these blocks (none: of all) are there. Where none is as late as `at_least`, the peer first
    writes down the step that it is at."""

    at_least: Step = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_STATE_BLOCKS)] = ()


class StateEntry(Body, frozen=True):
    """The state of one block at the beginning of a step: a safetensors file of `size` bytes with this root."""

    step: Step
    block: Block
    size: Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)]
    root: Root


class States(Body, frozen=True):
    """A part of the answer to LIST_STATES: the run, and some of its states."""

    run: RunBytes
    entries: Annotated[tuple[StateEntry, ...], Meta(max_length=MAX_ENTRIES)] = ()


STATE_BODIES: dict[FrameKind, type[Body]] = {FrameKind.LIST_STATES: ListStates, FrameKind.STATES: States}
