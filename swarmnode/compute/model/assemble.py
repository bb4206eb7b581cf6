"""Builds the model of a span: the family's own class, cut down before it is filled.

The class is built on the meta device, cut to the layers, embedding and head of the span, and filled by transformers' own
loader, which handles renamed tensors and fused experts. Layers keep their numbers, so the config and the names of tensors stay
valid, and so does anything that the family computes from a layer's number.

Check of a checkpoint's tensors against its model: names, shapes and dtypes, from the headers alone, before a swarm uses it.

transformers' own loader compares them, as it handles renamed tensors and fused experts. It gets tensors with a shape and no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from swarmnode.compute.carried import Calls, Carrier, LeftOut, is_of_other_media
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import Family, own_name
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.stack import Absent, Stack, add_projections
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS, ONE_AT_A_TIME, build_on_meta
from swarmnode.compute.packing.packed_weight import PackedStack, PackedWeight, hold
from swarmnode.compute.packing.tensor_entry import packed_slices
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
    tied = {} if family.calls is None else family.calls.tied
    copies = {target: tensors[source] for target, source in tied.items() if source in tensors}
    held = dict(packed)
    model, info = _filled(_cut_class(family, start, end, held), family, {**tensors, **copies}, dtype)
    held.clear()  # the class is in a reference cycle, and would keep the weights of a closed span until a collection
    wrong = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"]), *info["error_msgs"]]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of the model are missing or misshapen "
            f"in the checkpoint: {wrong[0]}; fetch the checkpoint again"
        )
    if start > 0 and family.calls is None:
        _remove(model, family.input_embedding)  # was needed only for a tied head
    model.requires_grad_(False)
    return model


def _filled(
    model_class: Any, family: Family, tensors: Mapping[str, Any], dtype: torch.dtype | str
) -> tuple[Any, dict[str, Any]]:
    """Return a model that transformers' loader filled, and its report. Raises CheckpointError if the loader fails."""
    try:
        with ONE_AT_A_TIME, quiet_loader():
            model, report = model_class.from_pretrained(
                None,
                config=family.config,
                state_dict={own_name(name): tensor for name, tensor in tensors.items()},
                dtype=dtype,
                ignore_mismatched_sizes=True,  # the caller reports them
                output_loading_info=True,
            )
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{family.model_class.__name__} cannot be filled from the checkpoint: {error}; fetch the checkpoint again"
        ) from error
    return model, dict(report)


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
    for name in [name for name, _ in model.named_modules() if is_of_other_media(f"{name}.")]:
        if not is_of_other_media(f"{name.rpartition('.')[0]}."):
            model.set_submodule(name, LeftOut(model.get_submodule(name)))
    if family.calls is not None:
        _cut_calls(model, family, family.calls, start, end)
        hold(model, packed)
        return
    has_head = end == family.units
    absent = set[str]()
    if start > 0:
        absent |= family.front - ({family.input_embedding} if has_head and family.tied else set())
    if not has_head:
        absent |= family.back
    for name in sorted(absent):
        if not any(name.startswith(f"{other}.") for other in absent):  # else it goes with the module that it is part of
            _remove(model, name)
    layers: nn.ModuleList = model.get_submodule(family.stack_name)
    held = {number: layers[number] for number in family.layers_of(start, end)}
    stack = Stack(
        held,
        total=family.layer_count,
        tuple_length=family.tuple_length,
        layer_types=getattr(family.config, "layer_types", None),
        hidden=0 if family.bottleneck is None else int(family.config.hidden_size),
        block_types={
            number: str(layer.block_type) for number, layer in enumerate(layers) if hasattr(layer, "block_type")
        },
    )
    add_projections(held, family.config, stack)
    model.set_submodule(family.stack_name, stack)
    hold(model, packed)
    _keep_ties(model)


def _keep_ties(model: Any) -> None:
    """Forget the ties between parameters of which one is missing."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source for target, source in model.all_tied_weights_keys.items() if {target, source} <= names
    }


def _cut_calls(model: Any, family: Family, calls: Calls, start: int, end: int) -> None:
    """Cut a model down to the modules that the calls of units [start, end) run, and let its passes begin and end there."""
    has_head = end == family.units
    held = set(calls.held(max(start - 1, 0), end - 1)) | (calls.head if has_head else set())
    held |= calls.embedding if start == 0 else {family.input_embedding} if has_head and family.tied else set()
    for name in sorted((calls.names | calls.embedding | calls.head) - held):
        model.set_submodule(name, LeftOut(model.get_submodule(name)))
    _keep_ties(model)
    model.carrier = Carrier(model, calls)


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


with lean():
    from transformers.initialization import no_init_weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I32": torch.int32, "I64": torch.int64}


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
    plain = {
        name: entry
        for name, entry in entries.items()
        if not (entry.is_gguf or (quantised is not None and quantised.is_quantised(name)))
    }
    known = FLOATS
    if any(entry.dtype in INTEGERS for entry in plain.values()):  # a model may look up tables of whole numbers
        buffers = build_on_meta(family.model_class, family.config).named_buffers()
        tables = {name.rpartition(".")[2] for name, table in buffers if not table.is_floating_point()}
        known = FLOATS | INTEGERS
        plain = {
            name: entry for name, entry in plain.items() if entry.dtype in FLOATS or name.rpartition(".")[2] in tables
        }
    shapes = {name: (entry.shape, known[entry.dtype]) for name, entry in plain.items() if entry.dtype in known}
    packed: dict[str, Any] = dict(packed_slices({name: entry for name, entry in entries.items() if entry.is_gguf}))
    if quantised is not None:
        stored = checkpoint.open_slices(quantised.packed | quantised.beside)
        packed |= quantised.slices(stored, quantised.packed)
    shapes |= {name: (tuple(packed_slice.get_shape()), torch.float32) for name, packed_slice in packed.items()}
    outlines = {
        name: torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Outline)
        for name, (shape, dtype) in shapes.items()
    }
    whole = family.model_class if family.bottleneck is None else _cut_class(family, 0, family.units, {})
    with ONE_AT_A_TIME, no_init_weights():
        _, loading_info = _filled(whole, family, outlines, torch.bfloat16)
    integers = [name for name in entries if name not in outlines and name in loading_info["missing_keys"]]
    if integers:
        raise CheckpointError(
            f"{checkpoint.path}: {integers[0]} is {entries[integers[0]].dtype}, "
            "not floating-point numbers; fetch the checkpoint again"
        )
    if loading_info["missing_keys"]:
        lacking = sorted(loading_info["missing_keys"])
        raise CheckpointError(
            f"{checkpoint.path}: lacks {_count(lacking)} of the model, as {lacking[0]}; fetch the checkpoint again"
        )
    for name, stored, wanted in sorted(loading_info["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint.path}: {name} has the shape {tuple(stored)}, and by config.json the model's is {tuple(wanted)}"
            + (" (vocab_size)" if stored[:1] != wanted[:1] and wanted[0] == family.config.vocab_size else "")
        )
    for message in loading_info["error_msgs"]:
        raise CheckpointError(f"{checkpoint.path}: {message}")
    ignored = [
        name for name in sorted(loading_info["unexpected_keys"]) if name in outlines and _counts(family, name, outlines)
    ]
    if ignored:
        raise CheckpointError(
            f"{checkpoint.path}: has {_count(ignored)} that the model of its config.json "
            f"has no place for, as {ignored[0]}; check that the two belong together"
        )


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
