"""Do a checkpoint's tensors make its model: names, shapes and dtypes, by the headers alone, before a swarm is founded on it.

transformers' own loader compares them, which knows renames and fused experts; it is given tensors that have a shape and no content.
"""

from __future__ import annotations

from typing import Any

import torch

from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS, ONE_AT_A_TIME
from swarmnode.errors import CheckpointError

with lean():
    from transformers.initialization import no_init_weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Outline(torch.Tensor):
    """A tensor on the meta device that stays there, wherever the loader wants it."""

    def to(self, *_args: Any, **_settings: Any) -> _Outline:
        """Return the outline itself."""
        return self


@lean()
def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if tensors of the model are missing, have other shapes than its config says, are no floating-point
    numbers, or if the checkpoint has some that the model would ignore."""
    family, entries = checkpoint.family, checkpoint.entries
    outlines = {
        name: torch.empty(entry.shape, dtype=FLOATS[entry.dtype], device="meta").as_subclass(_Outline)
        for name, entry in entries.items()
        if entry.dtype in FLOATS
    }
    found = _compare(family, outlines)
    whole = [name for name, entry in entries.items() if entry.dtype not in FLOATS and name in found["missing_keys"]]
    if whole:
        raise CheckpointError(f"{checkpoint.path}: {whole[0]} is {entries[whole[0]].dtype}, not floating-point numbers")
    if found["missing_keys"]:
        lacking = sorted(found["missing_keys"])
        raise CheckpointError(f"{checkpoint.path}: lacks {_count(lacking)} of the model, as {lacking[0]}")
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint.path}: {name} has the shape {tuple(stored)}, and by config.json the model's is {tuple(wanted)}"
            + (" (vocab_size)" if stored[:1] != wanted[:1] and wanted[0] == family.config.vocab_size else "")
        )
    for message in found["error_msgs"]:
        raise CheckpointError(f"{checkpoint.path}: {message}")
    ignored = [
        name for name in sorted(found["unexpected_keys"]) if name in outlines and _counts(family, name, outlines)
    ]
    if ignored:
        raise CheckpointError(
            f"{checkpoint.path}: has {_count(ignored)} that the model of its config.json has no place for, as {ignored[0]}"
        )


def _compare(family: Family, outlines: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers' loader says of the tensors."""
    try:
        with ONE_AT_A_TIME, quiet_loader(), no_init_weights():
            _, found = family.model_class.from_pretrained(
                None,
                config=family.config,
                state_dict=outlines,
                dtype=torch.bfloat16,
                ignore_mismatched_sizes=True,  # they are told by the caller
                output_loading_info=True,
            )
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{family.model_class.__name__} cannot be filled from the checkpoint: {error}") from error
    return dict(found)


def _counts(family: Family, name: str, outlines: dict[str, Any]) -> bool:
    """Return whether an ignored tensor would have changed the model: a weight or bias in a layer or an end. Buffers that older
    versions kept, as masks and frequencies, would not."""
    module, _, kind = name.rpartition(".")
    ends = (family.front | family.back) - {family.stack_name}
    in_stack = any(
        f".{name}".startswith(f".{stack}.") for stack in (family.stack_name, family.stack_name.partition(".")[2])
    )
    at_end = any(module == end or end.endswith(f".{module}") for end in ends)
    is_weight = kind in ("weight", "bias") and outlines[name].ndim < 4  # masks have four dimensions
    return is_weight and bool(family.units_of_tensor(name)) and (in_stack or at_end)


def _count(names: list[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
