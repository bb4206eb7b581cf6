"""Common part of the attacks by a peer that computes falsely: two stages with three replicas each, and a client that audits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from attack import Outcome

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from tests.node.audited_swarm import generate_until_shunned, hop_in_use, span_of, three_by_two
from tests.node.virtual_swarm import VirtualMember
from tests.tiny import PROMPT, TinyModel

MOST_SESSIONS = 20  # limit for finding the liar


async def found_out(
    lie: Callable[[VirtualMember, Checkpoint], None], *, dtype: str = "float32", within: int = MOST_SESSIONS
) -> Outcome:
    """Let the peer in use for the first units lie as `lie` makes it. The outcome is held if the client leaves out this peer and
    no other within this number of sessions."""
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel.save(Path(folder, "model")).folder
        async with three_by_two(lambda swarm: swarm.create(model), Path(folder), dtype=dtype) as (swarm, client):
            liar = await hop_in_use(swarm, client, 0)
            lie(liar, Checkpoint(model))
            sessions = await generate_until_shunned(client, within)
            shunned = client.auditor.standing.shunned
            after = {hop.peer for hop in (await client.generate(PROMPT, max_new_tokens=4)).route}
            return Outcome(
                shunned == {liar.peer} and liar.peer not in after,
                f"the liar is left out after {sessions} of its sessions, and {len(shunned - {liar.peer})} honest peers",
            )


def compute_with(member: VirtualMember, other: ModelSpan) -> None:
    """Let the node `member` compute with `other` instead of the span that it announced."""
    span_of(member).forward = other.forward


def first_units(checkpoint: Checkpoint, dtype: str = "auto", quantize: str = "none") -> ModelSpan:
    """Load the units of the first stage anew."""
    return load_span(checkpoint, 0, 3, dtype=dtype, quantize=quantize)
