"""An adapter's two files: its config, and the matrices A and B of each layer that it changes, in safetensors.

DoRA's magnitudes and layers that the adapter replaces as a whole are in the second file, too.

The safetensors file may be a sparse copy that holds only the header and the wanted matrices, as a checkpoint's files may.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from swarmnode.compute.model.adapters.span_adapters import (
    REPLACEABLE,
    Change,
    Lora,
    dora,
    features_of,
    shapes_of,
    whole,
)
from swarmnode.compute.model.checkpoint import read_header
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.data.conversation import GREETING, ChatEnding, chosen_template, render_chat
from swarmnode.errors import CheckpointError
from swarmnode.files import read_bounded
from swarmnode.swarm.storage.own_adapters import (
    CONFIG_NAME,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    AdapterChat,
    chat_in,
    read_object,
)

if TYPE_CHECKING:
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.model.family import Family

T = TypeVar("T")

PREFIX = "base_model.model."
LORA = ".lora_"
BASE = "base"  # part of a tensor that belongs to the model itself
KEY = re.compile(r"base_model\.model\.(?P<module>[^\s]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
MAGNITUDE = re.compile(r"base_model\.model\.(?P<module>[^\s]+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
DTYPES = frozenset({"F32", "F16", "BF16"})
MAX_CONFIG_BYTES = 64 << 10
PIPELINE_NAME, MAX_PIPELINE_BYTES = "tokenizer.json", 1 << 28
MAX_RANK = 4096
MAX_ALPHA = 1e6
MAX_PATTERNS, MAX_PATTERN_CHARS = 4096, 256
PATTERN = re.compile(r"(?:[\w.^$-]|\\\.)+")
"""Names of layers in `rank_pattern` and `alpha_pattern`. Others are regular expressions, which may take any time to compare."""
NEUTRAL = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "task_type", "inference_mode", "lora_dropout", "target_modules", "exclude_modules"),
        *("fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "megatron_config"),
        *("eva_config", "runtime_config", "qalora_group_size", "velora_config", "bias", "init_lora_weights"),
        *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"),
    }
)
"""Config fields that do not affect the product of the two matrices, or that are checked separately.

`fan_in_fan_out` is among them: the model's own layer shows the orientation of its matrix.
"""


VARIANTS: Mapping[str, str] = {
    "lora_bias": "biases of its own",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "target_parameters": "changes to parameters that are no linear layers (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "a text that switches it on (aLoRA)",
    "use_qalora": "QA-LoRA",
    "ensure_weight_tying": "one change for the embedding and the head (ensure_weight_tying)",
}
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal"})
"""Initialisations of the matrices that keep the model's own weights; the others (PiSSA, OLoRA, LoftQ) change them."""


@dataclass(frozen=True)
class LoraConfig:
    """Settings of a LoRA adapter: `rank` and `alpha`, and the layers with others, by names or their ends.

    The first name that fits decides.
    """

    rank: int
    alpha: float
    stable: bool = False
    """Whether the adapter is scaled by the root of the rank (rsLoRA, arXiv 2312.03732), so that higher ranks learn as fast"""
    dora: bool = False
    whole: tuple[str, ...] = ()
    """Ends of the names of modules that are replaced as a whole (`modules_to_save`)"""
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest_rank(self) -> int:
        """The largest rank of any layer."""
        return max([self.rank, *self.ranks.values()])

    @property
    def scale(self) -> float:
        """Factor of the product in a layer that no pattern names."""
        return self._divided(self.alpha, self.rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of a layer's matrices."""
        return _first_fit(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a layer's product."""
        return self._divided(_first_fit(self.alphas, module, self.alpha), self.rank_of(module))

    def replaces(self, module: str) -> bool:
        """Return whether the adapter has a layer of this name itself, or as part of a larger module."""
        parts = module.split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(name.endswith(end) for name in names for end in self.whole)

    def _divided(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.stable else rank)


def _first_fit(patterns: Mapping[str, T], module: str, otherwise: T) -> T:
    """Return the value of the first pattern that fits the module's name, or its end behind a dot, as peft compares them."""
    fits = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(fits, otherwise)


def read_lora_config(file: Path) -> LoraConfig:
    """Read `adapter_config.json`. Raises CheckpointError if it is damaged, or asks for something that is not served."""
    return lora_config_of(file, read_fields(file))


def lora_config_of(file: Path | str, fields: Mapping[str, Any]) -> LoraConfig:
    """Return the settings in a config's `fields`; `file` names it in errors. Raises CheckpointError as `read_lora_config`."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: an adapter of type {kind!r}: only LORA is served; train a LoRA adapter")
    for name, value in fields.items():
        if name in VARIANTS and value:
            raise CheckpointError(
                f"{file}: the adapter has {VARIANTS[name]}: these are not served; train one without it"
            )
        if name not in NEUTRAL and name not in VARIANTS and _is_set(value):
            raise CheckpointError(
                f"{file}: the adapter sets {name[:64]!r}, which this version of "
                "swarmnode does not know; upgrade swarmnode, or train the adapter without it"
            )
    if fields.get("bias", "none") != "none":
        raise CheckpointError(
            f"{file}: the adapter has biases of its own: these are not served; train one without biases"
        )
    start = fields.get("init_lora_weights", True)
    if not (isinstance(start, bool | None) or (isinstance(start, str) and start in PLAIN_STARTS)):
        raise CheckpointError(
            f"{file}: the adapter began by changing the model's own weights (init_lora_weights {str(start)[:32]!r}): "
            "convert it to plain LoRA with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    rank = _rank(file, "r", fields.get("r"))
    alpha = _alpha(file, "lora_alpha", fields.get("lora_alpha"))
    whole = fields.get("modules_to_save") or []
    if not isinstance(whole, list) or not all(isinstance(name, str) and name for name in whole):
        raise CheckpointError(f"{file}: modules_to_save must be a list of names; save the adapter with peft again")
    return LoraConfig(
        rank,
        alpha,
        bool(fields.get("use_rslora")),
        bool(fields.get("use_dora")),
        tuple(whole),
        {name: _rank(file, "rank_pattern", value) for name, value in _patterns(file, fields, "rank_pattern")},
        {name: _alpha(file, "alpha_pattern", value) for name, value in _patterns(file, fields, "alpha_pattern")},
    )


def _patterns(file: Path | str, fields: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    """Return the entries of a field that maps names of layers. Raises CheckpointError for regular expressions."""
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise CheckpointError(f"{file}: {name} must map up to {MAX_PATTERNS} names of layers to numbers")
    for pattern in found:
        if len(pattern) > MAX_PATTERN_CHARS or PATTERN.fullmatch(pattern) is None:
            raise CheckpointError(
                f"{file}: {name} has the regular expression {pattern[:64]!r}; write the names of the layers, or their ends"
            )
    return list(found.items())


def _rank(file: Path | str, name: str, rank: object) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{file}: {name} must be a whole number from 1 to {MAX_RANK}")
    return rank


def _alpha(file: Path | str, name: str, alpha: object) -> float:
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{file}: {name} must be a number up to {MAX_ALPHA:g}")
    return alpha


def _is_set(value: object) -> bool:
    """Return whether a config field has an effect: not if it is off, empty, or holds only such values."""
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    return bool(value)


def read_fields(file: Path) -> dict[str, Any]:
    """Return the fields of an adapter's config. Raises CheckpointError if it is no JSON object of a few kB."""
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
    magnitude: str = ""
    """Name of DoRA's magnitudes; "" for plain LoRA"""

    @property
    def elements(self) -> int:
        """Number of elements of the entry's two matrices, A and B, and of DoRA's magnitudes."""
        return self.rank * (self.inputs + self.outputs) + (self.outputs if self.magnitude else 0)

    @property
    def names(self) -> list[str]:
        """Names of the entry's tensors in the file."""
        return [self.a, self.b, *([self.magnitude] if self.magnitude else [])]


@dataclass(frozen=True)
class WholeEntry:
    """Parameters of a layer that the adapter replaces: their names in the file by those in the layer, and their shapes."""

    parameters: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def names(self) -> list[str]:
        """Names of the entry's tensors in the file."""
        return list(self.parameters.values())


Entry = LoraEntry | WholeEntry


class AdapterFile:
    """Layers that an adapter changes, by their modules' names in the model.

    Raises CheckpointError, naming the file, if anything does not fit.
    """

    def __init__(self, config: Path, weights: Path) -> None:
        self.config: LoraConfig = read_lora_config(config)
        self.config_file = config
        self.weights = weights
        self.tensors: Mapping[str, TensorEntry] = read_header(weights)
        self.base_layers: dict[str, str] = {}  # tensors of the model itself in the file, and their modules
        self.layers: Mapping[str, Entry] = self._pair()

    def _pair(self) -> dict[str, Entry]:
        sides: dict[str, dict[str, str]] = {}
        replaced: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            module, part = self._place(name)
            if part == BASE:
                self.base_layers[name] = module
                continue
            dims = (1, 2) if part not in ("A", "B") else (2,)
            if tensor.dtype not in DTYPES or len(tensor.shape) not in dims:
                raise self._wrong(f"{name[:100]} is no matrix of floating-point numbers")
            parts = (sides if part in ("A", "B", "m") else replaced).setdefault(module, {})
            if parts.setdefault(part, name) != name:
                raise self._wrong(f"the layer {module[:100]} occurs twice")
        if not sides and not replaced:
            raise self._wrong("it changes nothing")
        if both := sides.keys() & replaced.keys():
            raise self._wrong(f"the layer {min(both)[:100]} is changed and replaced")
        return {module: self._layer(module, pair) for module, pair in sides.items()} | {
            module: WholeEntry(names, {part: self.tensors[name].shape for part, name in names.items()})
            for module, names in replaced.items()
        }

    def _place(self, name: str) -> tuple[str, str]:
        """Return a tensor's layer, and what it is there: "A", "B", "m" (DoRA's magnitudes), or the parameter that it replaces."""
        if (key := KEY.fullmatch(name)) is not None:
            return key["module"], key["side"]
        if self.config.dora and (key := MAGNITUDE.fullmatch(name)) is not None:
            return key["module"], "m"
        module, _, part = name.removeprefix(PREFIX).rpartition(".")
        if name.startswith(PREFIX) and part in REPLACEABLE and self.config.replaces(module):
            return module, part
        if name.startswith(PREFIX) and part in REPLACEABLE and LORA not in name:
            return module.removesuffix(".base_layer"), BASE  # served if it equals the model's own: `check_base_layers`
        raise self._wrong(f"{name[:100]} is no matrix A or B of a linear layer")

    def _layer(self, module: str, pair: Mapping[str, str]) -> LoraEntry:
        if not {"A", "B"} <= set(pair):
            raise self._wrong(f"the layer {module[:100]} lacks one of its two matrices")
        (rank, inputs), (outputs, inner) = self.tensors[pair["A"]].shape, self.tensors[pair["B"]].shape
        said = self.config.rank_of(module)
        if not rank == inner == said:
            raise self._wrong(f"the matrices of {module[:100]} have rank {rank} and {inner}, the config says {said}")
        if self.config.dora and ("m" not in pair or self.tensors[pair["m"]].shape != (outputs,)):
            raise self._wrong(
                f"the layer {module[:100]} lacks DoRA's magnitudes, one for each of its {outputs} outputs"
            )
        return LoraEntry(pair["A"], pair["B"], rank, inputs, outputs, pair.get("m", ""))

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.weights}: {what}: only LoRA of linear layers is served; save the adapter with peft again"
        )

    # -- of a span

    def layers_of(self, family: Family, start: int, end: int) -> dict[str, Entry]:
        """Return the adapter's layers in units [start, end) of the model."""
        return {
            module: layer
            for module, layer in self.layers.items()
            if any(start <= unit < end for unit in units_of_layer(family, module))
        }

    def tensors_of(self, family: Family, start: int, end: int) -> list[TensorEntry]:
        """Return the places in the file of the tensors for units [start, end)."""
        layers = self.layers_of(family, start, end).values()
        return [self.tensors[name] for layer in layers for name in layer.names]

    def bytes_of(self, family: Family, start: int, end: int, dtype: torch.dtype) -> int:
        """Return the bytes of memory that the matrices for units [start, end) take in `dtype`."""
        return dtype.itemsize * sum(layer.elements for layer in self.layers_of(family, start, end).values())

    def check(self, family: Family, model: nn.Module, start: int, end: int) -> None:
        """Check that all layers of the adapter exist, and those in units [start, end) against `model`, which may be on the
        meta device.

        Raises CheckpointError if the model lacks a layer of the adapter, or one in these units is not linear or has another
        shape.
        """
        for module in (*self.layers, *self.base_layers.values()):
            if not units_of_layer(family, module):
                raise self._of_another(f"the model has no layer {module[:100]}")
        for name, module in self.base_layers.items():
            self._check_vocabulary(module, self.tensors[name].shape, model)
        for module, layer in self.layers_of(family, start, end).items():
            try:
                submodule = model.get_submodule(module)
            except AttributeError:
                raise self._of_another(f"the model has no layer {module[:100]}") from None
            if isinstance(layer, LoraEntry):
                sizes = features_of(submodule)
                if sizes is None:
                    raise self._of_another(f"{module[:100]} is not a linear layer of the model")
                if sizes != (layer.inputs, layer.outputs):
                    raise self._of_another(
                        f"{module[:100]} maps {sizes[0]} values to {sizes[1]} in the model, "
                        f"and {layer.inputs} to {layer.outputs} in the adapter"
                    )
            elif shapes_of(submodule) != layer.shapes:
                self._check_vocabulary(module, layer.shapes.get("weight", ()), model)
                raise self._of_another(
                    f"{module[:100]} is no layer of the model that can be replaced, or has parameters of other shapes"
                )

    def base_tensors(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return the tensors of the model itself that the file has, and their names in the model's checkpoint. A tied head is its
        embedding there. Empty for most adapters. Raises CheckpointError if the checkpoint has no such tensor."""
        family, own_names = checkpoint.family, {}
        for name, module in self.base_layers.items():
            part = name.rpartition(".")[2]
            wanted = [f"{module}.{part}"]
            if family.tied and units_of_layer(family, module) != (0,):
                wanted.append(f"{family.input_embedding}.{part}")
            # Checkpoints of some families have no prefix, or an older one.
            fits = (own for one in wanted for own in checkpoint.entries if f".{one}".endswith(f".{own}"))
            if (own := next(fits, None)) is None:
                raise self._wrong(f"the model has no tensor {name[:100]} of its own")
            own_names[name] = own
        return own_names

    def check_base_layers(self, checkpoint: Checkpoint) -> None:
        """Check that tensors of the model itself equal the checkpoint's, whose files must hold them; the adapter is then served
        without them. peft saves them beside LoRA of embeddings or of the head (`save_embedding_layers`).

        Another precision of the same numbers counts as equal. Raises CheckpointError if one differs, or if the model's own is
        quantised, so that a trained one cannot be told from it.
        """
        own_names = self.base_tensors(checkpoint)
        with _opened(self.weights) as read:
            for name, own_name in own_names.items():
                place, advice = (
                    f"{name[:100]} is a layer of the model itself",
                    "save it with save_embedding_layers=False",
                )
                if checkpoint.entries[own_name].dtype not in DTYPES:
                    raise CheckpointError(f"{self.weights}: {place}, which is quantised in this swarm: {advice}")
                saved, own = read(name), checkpoint.read([own_name])[own_name]
                if saved.shape != own.shape:
                    raise self._of_another(
                        f"{place}, and has the shape {list(saved.shape)} instead of {list(own.shape)}"
                    )
                if torch.equal(saved, own.to(saved.dtype)) or torch.equal(saved.to(own.dtype), own):
                    continue
                rows = int((saved != own.to(saved.dtype)).reshape(len(own), -1).any(dim=1).sum())
                raise CheckpointError(
                    f"{self.weights}: {place}, and differs from it in {rows:,} of {len(own):,} rows: if it was trained, train the "
                    f"adapter with modules_to_save; else use the adapter's own base model, or {advice}"
                )

    def _check_vocabulary(self, module: str, shape: tuple[int, ...], model: nn.Module) -> None:
        """Raise CheckpointError if a layer of that shape has more rows than the model's own one: tokens were added."""
        try:
            weight = getattr(model.get_submodule(module), "weight", None)
        except AttributeError:
            return
        own = tuple(getattr(weight, "shape", ()))
        if len(own) == len(shape) == 2 and own[1] == shape[1] and own[0] < shape[0]:
            raise self._of_another(
                f"its {module[:100]} has {shape[0] - own[0]} more tokens than the base ({shape[0]:,} instead of {own[0]:,}); "
                "train without added tokens, or found the swarm from the merged model"
            )

    def _of_another(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.weights}: {what}; use an adapter of this model")

    def check_numbers(self) -> None:
        """Read all matrices. Raises CheckpointError if a number is NaN or infinite."""
        with _opened(self.weights) as read:
            for name in self.tensors:
                self._check_finite(name, read(name))

    def load(
        self, family: Family, model: nn.Module, start: int, end: int, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Change]:
        """Load the layers of units [start, end), for those of `model`. Raises CheckpointError."""
        self.check(family, model, start, end)
        changes: dict[str, Change] = {}
        with _opened(self.weights) as read, torch.inference_mode():
            for module, layer in self.layers_of(family, start, end).items():
                of_model = model.get_submodule(module)
                if isinstance(layer, LoraEntry):
                    a_RI, b_OR = read(layer.a), read(layer.b).float() * self.config.scale_of(module)
                    gain_O = bias_O = None
                    if layer.magnitude:
                        gain_O, b_OR = dora(of_model, a_RI, b_OR, read(layer.magnitude))
                        gain_O, bias_O = gain_O.to(dtype), getattr(of_model, "bias", None)
                        self._check_finite(layer.magnitude, gain_O)
                    # The scale is applied once, before the rounding.
                    a_RI, b_OR = a_RI.to(dtype), b_OR.to(dtype)
                    self._check_finite(layer.a, a_RI)
                    self._check_finite(layer.b, b_OR)
                    changes[module] = Lora(a_RI, b_OR, gain_O, bias_O).to(device)
                else:
                    tensors = {part: read(name).to(dtype) for part, name in layer.parameters.items()}
                    for part, tensor in tensors.items():
                        self._check_finite(layer.parameters[part], tensor)
                    changes[module] = whole(of_model, {part: tensor.to(device) for part, tensor in tensors.items()})
        return changes

    def _check_finite(self, name: str, matrix: Tensor) -> None:
        if not bool(matrix.isfinite().all()):
            kind = str(matrix.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.weights}: {name[:100]} holds NaN or infinity in {kind}; train the adapter again"
            )


def units_of_layer(family: Family, module: str) -> tuple[int, ...]:
    """Return the units that hold a layer. A tied matrix is two layers: the adapter's is the one that it names."""
    return (0,) if module == family.input_embedding else family.units_of_tensor(f"{module}.weight")


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


def chat_of(folder: Path, base: Path) -> AdapterChat | None:
    """Return the chat template and tokens of the adapter that was saved into `folder` with its tokenizer; None if there are none,
    or they are those of the model in the folder `base`.

    Raises CheckpointError if the template cannot be used, or the tokenizer has tokens that the model's lacks, other than for
    padding.
    """
    chat = chat_in(folder)
    _check_tokens(folder, base)
    if chat is None or chat == chat_in(base):
        return None
    template = chosen_template(chat.template, with_tools=False)
    try:
        render_chat(template or "", [GREETING], (), {**chat.tokens, **ChatEnding.ANSWER.value})
    except Exception as error:  # any of Jinja's, or of the template's own operations
        raise CheckpointError(
            f"{folder}: the adapter's chat template cannot be used: {error}; correct it, or remove it to use the model's own"
        ) from None
    chat.encode()  # checks its size
    return chat


def _check_tokens(folder: Path, base: Path) -> None:
    """Raise CheckpointError if the tokenizer in `folder` has added tokens that the one in `base` lacks or has under other ids. Such
    tokens would be cut into pieces. Passes if `base` has no tokenizer.json, or if the token only fills rows."""
    if not (base / PIPELINE_NAME).is_file():
        return
    from tokenizers import Tokenizer as Pipeline

    config = read_object(folder / TOKENIZER_NAME, MAX_TOKENIZER_BYTES)
    tokens: dict[str, Any] = dict(read_object(folder / "added_tokens.json", MAX_TOKENIZER_BYTES))
    listed = config.get("added_tokens_decoder")
    for token, entry in listed.items() if isinstance(listed, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else entry
        tokens[str(content)] = int(token) if token.isdigit() else token
    added = read_object(folder / PIPELINE_NAME, MAX_PIPELINE_BYTES).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            tokens[str(entry.get("content"))] = entry.get("id")
    pads = [config.get("pad_token")]
    padding = {one.get("content") if isinstance(one, dict) else one for one in pads} - {config.get("eos_token")}
    pipeline = Pipeline.from_file(str(base / PIPELINE_NAME)) if tokens else None
    missing = [token for token in tokens if token not in padding and pipeline and pipeline.token_to_id(token) is None]
    if missing:
        shown = ", ".join(repr(token[:32]) for token in missing[:4])
        raise CheckpointError(
            f"{folder}: its tokenizer has {len(missing)} more tokens than the base ({shown}); train without added tokens, or found "
            "the swarm from the merged model"
        )
    for token, number in tokens.items():
        own = None if pipeline is None else pipeline.token_to_id(token)
        if own is not None and own != number:
            raise CheckpointError(
                f"{folder}: its tokenizer has {token[:32]!r} as {str(number)[:16]}, the base as {own}; use an adapter of this model"
            )


def adapter_in(folder: Path) -> AdapterFile:
    """Open the adapter that peft saved into `folder`. Raises CheckpointError if a file is missing or does not fit."""
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; save the adapter with peft (save_pretrained)")
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_NAME}; save the adapter with safe_serialization (pickles are never read)"
        )
    return AdapterFile(folder / CONFIG_NAME, folder / WEIGHTS_NAME)
