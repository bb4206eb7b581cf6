"""Check of a checkpoint's tensors against its model: names, shapes and dtypes, from the headers alone, before a swarm uses it.

transformers' own loader compares them, as it handles renamed tensors and fused experts. It gets tensors with a shape and no values.
"""

from __future__ import annotations

from typing import Any

import torch

from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.packing.tensor_entry import packed_slices
from swarmnode.compute.model.trace import FOREIGN_ERRORS, ONE_AT_A_TIME
from swarmnode.errors import CheckpointError

with lean():
    from transformers.initialization import no_init_weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Outline(torch.Tensor):
    """Tensor on the meta device that stays there, whatever device the loader asks for."""

    def to(self, *_args: Any, **_settings: Any) -> _Outline:
        """Return the outline itself."""
        return self


@lean()
def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint's tensors do not make its model.

    That is so if tensors are missing, have other shapes than the config says or no floating-point numbers, or if the
    checkpoint has weights that the model would ignore.
    """
    family, entries, quantised = checkpoint.family, checkpoint.entries, checkpoint.quantised
    shapes = {
        name: (entry.shape, FLOATS[entry.dtype])
        for name, entry in entries.items()
        if entry.dtype in FLOATS and not (entry.is_gguf or (quantised is not None and quantised.is_quantised(name)))
    }
    packed: dict[str, Any] = dict(packed_slices({name: entry for name, entry in entries.items() if entry.is_gguf}))
    if quantised is not None:
        stored = checkpoint.open_slices(quantised.packed | quantised.beside)
        packed |= quantised.slices(stored, quantised.packed)
    shapes |= {name: (tuple(packed_slice.get_shape()), torch.float32) for name, packed_slice in packed.items()}
    outlines = {
        name: torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Outline)
        for name, (shape, dtype) in shapes.items()
    }
    found = _compare(family, outlines)
    whole = [name for name, entry in entries.items() if name not in outlines and name in found["missing_keys"]]
    if whole:
        raise CheckpointError(
            f"{checkpoint.path}: {whole[0]} is {entries[whole[0]].dtype}, "
            "not floating-point numbers; fetch the checkpoint again"
        )
    if found["missing_keys"]:
        lacking = sorted(found["missing_keys"])
        raise CheckpointError(
            f"{checkpoint.path}: lacks {_count(lacking)} of the model, as {lacking[0]}; fetch the checkpoint again"
        )
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
            f"{checkpoint.path}: has {_count(ignored)} that the model of its config.json "
            f"has no place for, as {ignored[0]}; check that the two belong together"
        )


def _compare(family: Family, outlines: dict[str, Any]) -> dict[str, Any]:
    """Return the report of transformers' loader on the tensors. Raises CheckpointError if the loader fails."""
    try:
        with ONE_AT_A_TIME, quiet_loader(), no_init_weights():
            _, found = family.model_class.from_pretrained(
                None,
                config=family.config,
                state_dict=outlines,
                dtype=torch.bfloat16,
                ignore_mismatched_sizes=True,  # the caller reports them
                output_loading_info=True,
            )
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{family.model_class.__name__} cannot be filled from the checkpoint: {error}; fetch the checkpoint again"
        ) from error
    return dict(found)


def _counts(family: Family, name: str, outlines: dict[str, Any]) -> bool:
    """Return whether ignoring a tensor would change the model: whether it is a weight or bias of a layer or an end.

    Buffers that older versions stored, such as masks and frequencies, would not.
    """
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
