"""Admission: the checks of a microbatch or its labels against the run, the route, the lease's seal, and the size of a
microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.codec.tensors import TensorInfo
from swarmnode.codec.training_messages import Forward, Labels
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.run import MAX_ROUTER_SUMS, Run
from swarmnode.training.coordinator.seal import is_sealed


def refusal_of(body: Forward | Labels, sender: PeerId, here: PeerId, run: Run, key: bytes) -> ErrorCode | None:
    """Return the reason to refuse a microbatch or labels of the current term, or None to admit them. `key` is the term's."""
    if body.run != run.id:
        return ErrorCode.WRONG_RUN
    if body.number not in run.passes(body.step) or body.route[body.hop].peer != here:
        return ErrorCode.MALFORMED
    if sender != body.sender or not is_sealed(key, body):
        return ErrorCode.REFUSED
    return None if is_of_its_size(body.values, run) else ErrorCode.MALFORMED


def is_of_its_size(values: Sequence[TensorInfo], run: Run) -> bool:
    """Return whether the values have as many samples and tokens as the run demands, so that the holder of a lease cannot exhaust
    the memory. In a run that weighs labels, the share of a microbatch may end them, and in one with losses of routers their sums.
    Always True for modules that are not language models: only the graph knows their shapes."""
    sample, ends = (run.microbatch, run.sequence), values[-1].shape if len(values) > 1 else ()
    has_sums = run.known_recipe.watches_routers and len(ends) == 1 and ends[0] <= MAX_ROUTER_SUMS
    sized = values[:-1] if has_sums or (run.weighs_labels and ends == (1,)) else values
    return not run.sequence or (bool(sized) and all(info.shape[:2] == sample for info in sized))
