"""Builds the model of a span: the family's own class, cut down before it is filled.

The class is built on the meta device, cut to the layers, embedding and head of the span, and filled by transformers' own
loader, which handles renamed tensors and fused experts. Layers keep their numbers, so the config and the names of tensors stay
valid, and so does anything that the family computes from a layer's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from swarmnode.compute.model.family import Family
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.packing.packed_weight import PackedStack, PackedWeight, hold
from swarmnode.compute.model.stack import Absent, Stack
from swarmnode.compute.model.trace import FOREIGN_ERRORS, ONE_AT_A_TIME, build_on_meta
from swarmnode.errors import CheckpointError

with lean():
    from transformers.utils import logging as transformers_logging


Packed = Mapping[str, PackedWeight | PackedStack]
"""Weights that stay packed, by the names of the parameters that they replace"""


def assemble(
    family: Family,
    tensors: Mapping[str, Any],
    start: int,
    end: int,
    *,
    dtype: torch.dtype | str,
    packed: Packed = MappingProxyType({}),
) -> Any:
    """Build the family's class with only the units [start, end), and fill it from `tensors` (the span's, by checkpoint name).

    `packed` are the other weights of the span.

    Raises CheckpointError if tensors are missing or misshapen, or transformers cannot fill the model.
    """
    model_class = _cut_class(family, start, end, packed)
    try:
        with ONE_AT_A_TIME, quiet_loader():
            model, info = model_class.from_pretrained(
                None,
                config=family.config,
                state_dict=dict(tensors),
                dtype=dtype,
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
            )
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{family.model_class.__name__} cannot be filled from the checkpoint: {error}; fetch the checkpoint again"
        ) from error
    wrong = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"]), *info["error_msgs"]]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of the model are missing or misshapen "
            f"in the checkpoint: {wrong[0]}; fetch the checkpoint again"
        )
    if start > 0:
        _remove(model, family.input_embedding)  # was needed only for a tied head
    model.requires_grad_(False)
    return model


def outline(family: Family, start: int, end: int, *, dtype: torch.dtype, packed: Packed = MappingProxyType({})) -> Any:
    """Build the same model without weights, on the meta device. Raises CheckpointError if its class refuses the config."""
    return build_on_meta(_cut_class(family, start, end, packed), family.config).to(dtype)


def _cut_class(family: Family, start: int, end: int, packed: Packed) -> type[Any]:
    """Return a subclass of the family's class whose instances lack the modules of other units from their construction on."""

    def __init__(self: Any, config: Any) -> None:
        family.model_class.__init__(self, config)
        _cut(self, family, start, end, packed)

    name = family.model_class.__name__  # the loader finds conversions by class name
    return type(name, (family.model_class,), {"__init__": __init__, "__module__": family.model_class.__module__})


def _cut(model: Any, family: Family, start: int, end: int, packed: Packed) -> None:
    has_head = end == family.units
    absent = set[str]()
    if start > 0:
        absent |= family.front - ({family.input_embedding} if has_head and family.tied else set())
    if not has_head:
        absent |= family.back
    for name in absent:
        _remove(model, name)
    layers: nn.ModuleList = model.get_submodule(family.stack_name)
    held = {number: layers[number] for number in range(max(start - 1, 0), min(end - 1, family.layer_count))}
    stack = Stack(
        held,
        total=family.layer_count,
        returns_tuple=family.returns_tuple,
        layer_types=getattr(family.config, "layer_types", None),
    )
    model.set_submodule(family.stack_name, stack)
    hold(model, packed)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source for target, source in model.all_tied_weights_keys.items() if {target, source} <= names
    }


def _remove(model: Any, name: str) -> None:
    model.set_submodule(name, Absent(model.get_submodule(name)))


@contextmanager
def quiet_loader() -> Iterator[None]:
    """Silence the progress bar and the report of transformers' loader: exceptions report the problems here."""
    logging: Any = transformers_logging  # untyped
    had_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
