"""An adapter's two files: its config, and the matrices A and B of each layer that it changes, in safetensors.

The safetensors file may be a sparse copy that holds only the header and the wanted matrices, as a checkpoint's files may.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.model.checkpoint import read_header
from swarmnode.compute.model.packing.tensor_entry import TensorEntry
from swarmnode.errors import CheckpointError
from swarmnode.files import read_bounded

if TYPE_CHECKING:
    from swarmnode.compute.model.family import Family

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # peft's own names
KEY = re.compile(r"base_model\.model\.(?P<module>[^\s]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
DTYPES = frozenset({"F32", "F16", "BF16"})
MAX_CONFIG_BYTES = 64 << 10
MAX_RANK = 4096
MAX_ALPHA = 1e6
NEUTRAL = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "task_type", "inference_mode", "lora_dropout", "target_modules", "exclude_modules"),
        *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "megatron_config"),
        *("eva_config", "runtime_config", "qalora_group_size", "velora_config", "bias", "init_lora_weights"),
    }
)
"""Config fields that do not affect the product of the two matrices, or that are checked separately.

`fan_in_fan_out` is among them: the model's own layer shows the orientation of its matrix.
"""


@dataclass(frozen=True)
class Lora:
    """Low-rank matrices `a_RI` and `b_OR` for one layer. The adapter's scale is already in `b_OR`."""

    a_RI: Tensor
    b_OR: Tensor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), with the adapter's product added, in the dtype of `y`."""
        low = functional.linear(x.to(self.a_RI.dtype), self.a_RI)
        return y + functional.linear(low, self.b_OR).to(y.dtype)


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return a linear layer's numbers of inputs and outputs; None for other modules.

    Packed and quantised layers have the same attributes as torch's own. transformers' Conv1D (GPT-2's) keeps its matrix
    transposed, which changes nothing here: an adapter never reads it.
    """
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        found = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(found[0], int) and isinstance(found[1], int):
            return found[0], found[1]
    return None


VARIANTS: Mapping[str, str] = {
    "use_dora": "DoRA, which scales the weights' columns",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole layers of its own (modules_to_save)",
    "rank_pattern": "ranks that differ by layer (rank_pattern)",
    "alpha_pattern": "scales that differ by layer (alpha_pattern)",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "target_parameters": "changes to parameters that are no linear layers (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "a text that switches it on (aLoRA)",
    "use_qalora": "QA-LoRA",
}
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal"})
"""Initialisations of the matrices that keep the model's own weights; the others (PiSSA, OLoRA, LoftQ) change them."""


@dataclass(frozen=True)
class LoraConfig:
    """Settings of a plain LoRA adapter: its `rank`, and the `scale` of its product."""

    rank: int
    scale: float


def read_lora_config(file: Path) -> LoraConfig:
    """Read `adapter_config.json`. Raises CheckpointError if it is damaged, or asks for anything but plain LoRA."""
    fields = _read(file)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: an adapter of type {kind!r}: only LORA is served; train a LoRA adapter")
    for name, value in fields.items():
        if name in VARIANTS and value:
            raise CheckpointError(
                f"{file}: the adapter has {VARIANTS[name]}: only plain LoRA is served; train one without it"
            )
        if name not in NEUTRAL and name not in VARIANTS and _is_set(value):
            raise CheckpointError(
                f"{file}: the adapter sets {name[:64]!r}, which this version of "
                "swarmnode does not know; upgrade swarmnode, or train a plain LoRA adapter"
            )
    if fields.get("bias", "none") != "none":
        raise CheckpointError(
            f"{file}: the adapter has biases of its own: only plain LoRA is served; train one without biases"
        )
    start = fields.get("init_lora_weights", True)
    if not (isinstance(start, bool | None) or (isinstance(start, str) and start in PLAIN_STARTS)):
        raise CheckpointError(
            f"{file}: the adapter began by changing the model's own weights (init_lora_weights {str(start)[:32]!r}): "
            "convert it to plain LoRA with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{file}: r must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{file}: lora_alpha must be a number up to {MAX_ALPHA:g}")
    # rsLoRA (arXiv 2312.03732) divides by the root of the rank, so that higher ranks learn as fast.
    return LoraConfig(rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def _is_set(value: object) -> bool:
    """Return whether a config field has an effect: not if it is off, empty, or holds only such values."""
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    return bool(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = read_bounded(file, MAX_CONFIG_BYTES)
        if raw is None:
            raise CheckpointError(
                f"{file}: over {MAX_CONFIG_BYTES} bytes, which no "
                "adapter's config needs; save the adapter with peft again"
            )
        fields = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}; check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}; save the adapter with peft again") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: not a JSON object; save the adapter with peft again")
    return fields


@dataclass(frozen=True)
class LoraEntry:
    """Names in the file and sizes of a layer's two matrices: A of shape (rank, inputs), B of shape (outputs, rank)."""

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int

    @property
    def elements(self) -> int:
        """Number of elements of the entry's two matrices, A and B."""
        return self.rank * (self.inputs + self.outputs)


class AdapterFile:
    """Layers that an adapter changes, by their modules' names in the model.

    Raises CheckpointError, naming the file, if anything does not fit.
    """

    def __init__(self, config: Path, weights: Path) -> None:
        self.config: LoraConfig = read_lora_config(config)
        self.config_file = config
        self.weights = weights
        self.tensors: Mapping[str, TensorEntry] = read_header(weights)
        self.layers: Mapping[str, LoraEntry] = self._pair()

    def __repr__(self) -> str:
        return f"<AdapterFile {self.weights} of rank {self.config.rank}, {len(self.layers)} layers>"

    def _pair(self) -> dict[str, LoraEntry]:
        sides: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            key = KEY.fullmatch(name)
            if name.endswith(("base_layer.weight", "embed_tokens.weight")):
                raise self._wrong(
                    f"{name[:100]} is a layer of the model itself (save_pretrained with save_embedding_layers=False)"
                )
            if key is None:
                raise self._wrong(f"{name[:100]} is no matrix A or B of a linear layer")
            if tensor.dtype not in DTYPES or len(tensor.shape) != 2:
                raise self._wrong(f"{name[:100]} is no matrix of floating-point numbers")
            if sides.setdefault(key["module"], {}).setdefault(key["side"], name) != name:
                raise self._wrong(f"the layer {key['module'][:100]} occurs twice")
        if not sides:
            raise self._wrong("it changes nothing")
        return {module: self._layer(module, pair) for module, pair in sides.items()}

    def _layer(self, module: str, pair: Mapping[str, str]) -> LoraEntry:
        if set(pair) != {"A", "B"}:
            raise self._wrong(f"the layer {module[:100]} lacks one of its two matrices")
        (rank, inputs), (outputs, inner) = self.tensors[pair["A"]].shape, self.tensors[pair["B"]].shape
        if not rank == inner == self.config.rank:
            raise self._wrong(
                f"the matrices of {module[:100]} have rank {rank} and {inner}, the config says {self.config.rank}"
            )
        return LoraEntry(pair["A"], pair["B"], rank, inputs, outputs)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.weights}: {what}: only plain LoRA of linear layers is served; save the adapter with peft again"
        )

    # -- of a span

    def layers_of(self, family: Family, start: int, end: int) -> dict[str, LoraEntry]:
        """Return the adapter's layers in units [start, end) of the model."""
        return {
            module: layer
            for module, layer in self.layers.items()
            if any(start <= unit < end for unit in family.units_of_tensor(f"{module}.weight"))
        }

    def tensors_of(self, family: Family, start: int, end: int) -> list[TensorEntry]:
        """Return the places in the file of the matrices for units [start, end)."""
        layers = self.layers_of(family, start, end).values()
        return [self.tensors[name] for layer in layers for name in (layer.a, layer.b)]

    def bytes_of(self, family: Family, start: int, end: int, dtype: torch.dtype) -> int:
        """Return the bytes of memory that the matrices for units [start, end) take in `dtype`."""
        return dtype.itemsize * sum(layer.elements for layer in self.layers_of(family, start, end).values())

    def check(self, family: Family, model: nn.Module, start: int, end: int) -> None:
        """Check that all layers of the adapter exist, and those in units [start, end) against `model`, which may be on the
        meta device.

        Raises CheckpointError if the model lacks a layer of the adapter, or one in these units is not linear or has another
        shape.
        """
        for module in self.layers:
            if not family.units_of_tensor(f"{module}.weight"):
                raise CheckpointError(
                    f"{self.weights}: the model has no layer {module[:100]}; use an adapter of this model"
                )
        for module, layer in self.layers_of(family, start, end).items():
            try:
                found = features_of(model.get_submodule(module))
            except AttributeError:
                raise CheckpointError(
                    f"{self.weights}: the model has no layer {module[:100]}; use an adapter of this model"
                ) from None
            if found is None:
                raise CheckpointError(
                    f"{self.weights}: {module[:100]} is not a linear layer of the model; use an adapter of this model"
                )
            if found != (layer.inputs, layer.outputs):
                raise CheckpointError(
                    f"{self.weights}: {module[:100]} maps {found[0]} values to {found[1]} in the model, "
                    f"and {layer.inputs} to {layer.outputs} in the adapter; use an adapter of this model"
                )

    def check_numbers(self) -> None:
        """Read all matrices. Raises CheckpointError if a number is NaN or infinite."""
        with _opened(self.weights) as read:
            for name in self.tensors:
                self._check_finite(name, read(name))

    def load(
        self, family: Family, model: nn.Module, start: int, end: int, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Lora]:
        """Load the layers of units [start, end), to be added to those of `model`. Raises CheckpointError."""
        self.check(family, model, start, end)
        loras: dict[str, Lora] = {}
        with _opened(self.weights) as read:
            for module, layer in self.layers_of(family, start, end).items():
                # The scale is applied once, before the rounding.
                a_RI, b_OR = read(layer.a).to(dtype), (read(layer.b).float() * self.config.scale).to(dtype)
                for name, matrix in ((layer.a, a_RI), (layer.b, b_OR)):
                    self._check_finite(name, matrix)
                loras[module] = Lora(a_RI.to(device), b_OR.to(device))
        return loras

    def _check_finite(self, name: str, matrix: Tensor) -> None:
        if not bool(matrix.isfinite().all()):
            kind = str(matrix.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.weights}: {name[:100]} holds NaN or infinity in {kind}; train the adapter again"
            )


@contextmanager
def _opened(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that returns a tensor of the safetensors file by its name. Raises CheckpointError if that fails."""
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(file, framework="pt")
        with handle:
            yield handle.get_tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; save the adapter with peft again") from error


def adapter_in(folder: Path) -> AdapterFile:
    """Open the adapter that peft saved into `folder`. Raises CheckpointError if a file is missing or does not fit."""
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; save the adapter with peft (save_pretrained)")
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_NAME}; save the adapter with safe_serialization (pickles are never read)"
        )
    return AdapterFile(folder / CONFIG_NAME, folder / WEIGHTS_NAME)
