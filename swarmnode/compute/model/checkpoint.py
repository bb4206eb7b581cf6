"""A model's files in a local folder: config.json and safetensors, whole or sharded, checked before they are used.

The folder may be a sparse copy that holds only the bytes of the wanted tensors. Headers and sizes are checked at once, contents
are read only when asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmnode.compute.model.family import Family, family_of, language_config, plain_config, settings_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.quantised_weights import QuantisedTensors
from swarmnode.compute.packing.tensor_entry import (
    MAX_TOLD_CHARS,
    TensorEntry,
    file_slice,
    packed_entries,
    packed_slices,
    read_json,
)
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit
MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCABULARY = 4096, 1 << 16, 1 << 20, 1 << 24
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), MAX_HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), MAX_WIDTH),
    "vocab_size": MAX_VOCABULARY,
}  # upper limits by the families' names for their sizes
OPTIONAL = {
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), MAX_HEADS),
    **dict.fromkeys(("head_dim", "intermediate_size", "ffn_dim", "n_inner"), MAX_VOCABULARY),
}
"""Upper limits of sizes that a config may leave out, or leave to its family (null)"""
_COUNTED = re.compile(r"(num|n)_.*(layers?|experts?)(_|$)")  # modules of a model: each is built
MAX_DIMENSIONS = 8
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_OF_NO_USER = ("_token_id must be `None` or", "This is a legacy value of the official releases")


def _is_for_users(record: logging.LogRecord) -> bool:
    """Return whether a warning of transformers about a config is for users of the model. Special tokens outside the vocabulary
    are often a family's defaults, and founding reports the others; each process of a swarm would repeat the warning."""
    return not any(part in record.getMessage() for part in _OF_NO_USER)


for _name in ("configuration_utils", "models.gemma.configuration_gemma"):
    logging.getLogger(f"transformers.{_name}").addFilter(_is_for_users)


class Checkpoint:
    """The tensors of a model, by name and by unit. `quantised` has those of a quantised checkpoint of safetensors, else it is None.

    Raises CheckpointError, naming the file, if anything does not fit.
    """

    quantised: QuantisedTensors | None = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder; check its name")
        self._set_entries(read_entries(self.path))

    def _set_entries(self, entries: dict[str, TensorEntry]) -> None:
        """Set the tensors. Raises CheckpointError if they are quantised in a way that is not supported."""
        file = self.path / CONFIG_FILE
        settings = settings_of(SimpleNamespace(**read_json(file))) if file.is_file() else None
        if settings is not None:
            self.quantised = QuantisedTensors(self.path, settings, entries)
            entries = self.quantised.marked
        self.entries = entries

    def __repr__(self) -> str:
        return f"Checkpoint({self.path}, {len(self.entries)} tensors)"

    @cached_property
    def config(self) -> Any:
        """Transformers config of the model; its own code is never run. Raises CheckpointError if it is missing or invalid."""
        return load_config(self.path / CONFIG_FILE)

    @cached_property
    def family(self) -> Family:
        """Anatomy of the model and its cut into units. Raises CheckpointError with the reason if the model cannot be cut."""
        check_layer_count(self.config, len(self.entries), self.path)
        if self.quantised is None:
            return family_of(self.config)
        return family_of(plain_config(self.config))

    @property
    def units(self) -> int:
        """Number of units: embedding, layers, head."""
        return self.family.units

    @cached_property
    def dtype(self) -> Any:
        """Torch dtype that holds most of the weights; bfloat16 unless that is float32 or float16.

        Of a quantised checkpoint it is the one that the config names. Raises CheckpointError if there are no tensors.
        """
        import torch

        if self.quantised is not None:
            named = str(self.config.dtype).removeprefix("torch.")
            return {"float32": torch.float32, "float16": torch.float16}.get(named, torch.bfloat16)

        sizes: dict[str, int] = {}
        for entry in self.entries.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.elements
        if not sizes:
            raise CheckpointError(f"{self.path}: holds no tensors; fetch the checkpoint again")
        return {"F32": torch.float32, "F16": torch.float16}.get(max(sizes, key=sizes.__getitem__), torch.bfloat16)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the files."""
        return tuple(self.entries)

    def small_file(self, name: str) -> Path | None:
        """Return the path of a file beside the weights; None if there is no such file."""
        return self.path / name if (self.path / name).is_file() else None

    @property
    def packed_file(self) -> Path | None:
        """The GGUF file with packed weights; None if there is none."""
        return next((entry.file for entry in self.entries.values() if entry.is_gguf), None)

    @property
    def is_packed(self) -> bool:
        """Whether most of the weights are packed: in a format of GGUF, or quantised."""
        packed = sum(entry.elements for entry in self.entries.values() if entry.is_packed)
        return 2 * packed > sum(entry.elements for entry in self.entries.values())

    def tensors_of(self, start: int, end: int) -> list[str]:
        """Return the names of the tensors that a span [start, end) of units needs."""
        return [name for name in self.entries if any(start <= unit < end for unit in self.family.units_of_tensor(name))]

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the named tensors on the CPU, mapped from the files: pages are read when touched. Raises CheckpointError."""
        return {name: entry[...] for name, entry in self.open_slices(names).items()}

    def open_slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the named tensors as slices, nothing read yet; `slice[...]` makes a tensor of one, in float32 of a packed one.

        Raises CheckpointError if a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        names = list(names)
        slices: dict[str, Any] = packed_slices({n: e for n in names if (e := self.entries[n]).is_gguf})
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if not self.entries[name].is_gguf:
                by_file.setdefault(self.entries[name].file, []).append(name)
        for file, wanted in by_file.items():
            try:
                handle: Any = safe_open(file, framework="pt")
                slices.update({name: handle.get_slice(name) for name in wanted})
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}; check its permissions") from error
        return slices

    def read_slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the named tensors as slices like `open_slices`. Those of a quantised checkpoint are read when asked for, not
        mapped. Raises CheckpointError if a file cannot be read."""
        if self.quantised is None:
            return self.open_slices(names)
        return {name: file_slice(self.entries[name]) for name in names}


@lean()
def load_config(file: Path) -> Any:
    """Read the transformers config in `file`. Raises CheckpointError if it is missing or invalid, or needs code of its own."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; a checkpoint needs its config; copy it into the folder")
    values = _with_special_floats(read_json(file))
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in values:
            raise CheckpointError(
                f"{file}: model type {model_type!r} needs its own code, which "
                "is never run here; choose a model that transformers knows"
            )
        raise CheckpointError(
            f"{file}: model type {model_type!r} is unknown to this version of transformers; upgrade transformers"
        )
    for part in (values, values.get("text_config")):
        _check_sizes(file, part if isinstance(part, dict) else {})
    try:
        return language_config(CONFIG_MAPPING[model_type].from_dict(_without_kernels(values)))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(
            f"{file}: not a config of {model_type}: {' '.join(str(error).split())}; fetch it again"
        ) from error


def _with_special_floats(values: Any) -> Any:
    """Return the config with its infinities and NaN, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(values, dict):
        text = values.get("__float__")
        if len(values) == 1 and text in ("Infinity", "-Infinity", "NaN"):
            return float(text)
        return {key: _with_special_floats(value) for key, value in values.items()}
    return list(map(_with_special_floats, values)) if isinstance(values, list) else values


def _check_sizes(file: Path, values: dict[str, Any]) -> None:
    """Check the sizes that are used before any tensor is looked at. Raises CheckpointError if one is not a whole number in range.

    Lists (a size for each layer) are left to the family.
    """
    given = {name: values[name] for name in OPTIONAL if values.get(name) is not None}
    for name, most in {**LARGEST, **{name: OPTIONAL[name] for name in given}}.items():
        value = values.get(name, 1)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, list) and not (whole and 1 <= value <= most):
            raise CheckpointError(
                f"{file}: {name} is {str(value)[:MAX_TOLD_CHARS]}, not "
                f"a whole number from 1 to {most:,}; correct the file"
            )
    for name, value in values.items():
        if _COUNTED.match(str(name)) and isinstance(value, int | float) and not abs(value) <= MAX_LAYERS:
            raise CheckpointError(
                f"{file}: {name} is {str(value)[:MAX_TOLD_CHARS]}, more than {MAX_LAYERS:,}; correct the file"
            )


def check_layer_count(config: Any, tensors: int, place: Path) -> None:
    """Raise CheckpointError if a config has more layers than its checkpoint at `place` has tensors, since each layer is built
    before its tensors are looked for."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > tensors:
        raise CheckpointError(
            f"{place}: its config says {layers} layers (num_hidden_layers), and it has {tensors} tensors; fetch it again"
        )


def _without_kernels(values: Any) -> Any:
    """Return the config without its choice of implementations, so that this peer's own choice holds.

    transformers accepts the name of a hub repository there, and would fetch and run its code.
    """
    if isinstance(values, list):
        return [_without_kernels(value) for value in values]
    if not isinstance(values, dict):
        return values
    kept = {
        key: value
        for key, value in values.items()
        if not str(key).removesuffix("_internal").endswith("_implementation")
    }
    return {key: _without_kernels(value) for key, value in kept.items()}


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the checkpoint in folder `path`, by name, from the headers alone.

    Raises CheckpointError if files or tensors are missing or damaged.
    """
    index_file = path / INDEX_FILE
    if not index_file.is_file():
        if not (path / SINGLE_FILE).is_file():
            instead = ""  # a hint on the other formats in the folder
            if any(path.glob("*.gguf")):
                instead = (
                    ", but GGUF: found a swarm on it (`create`, `host`), which writes safetensors into NAME-weights"
                )
            elif any(path.glob("*.bin")):
                instead = ", but pickles (.bin), which may run code and are never opened: convert them to safetensors"
            raise CheckpointError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is here{instead}")
        return {**read_header(path / SINGLE_FILE), **packed_entries(path)}
    weight_map = read_weight_map(index_file)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        header = read_header(path / shard)
        entries.update({name: entry for name, entry in header.items() if weight_map.get(name) == shard})
    missing = sorted(set(weight_map) - set(entries))
    if missing:
        raise CheckpointError(
            f"{path / weight_map[missing[0]]}: lacks the tensor {missing[0]}, "
            f"which {INDEX_FILE} promises; fetch the checkpoint again"
        )
    return {**entries, **packed_entries(path)}


def read_weight_map(index_file: Path) -> dict[str, str]:
    """Return the shard's file name for each tensor. Raises CheckpointError if the index is damaged."""
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: has no weight_map; fetch the checkpoint again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index_file}: tensor {name} is in {shard!r}, which "
                "is not a plain file name; fetch the checkpoint again"
            )
    return weight_map


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes.

    Raises CheckpointError if the file is missing, damaged or cut short.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: missing shard; fetch the checkpoint again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file, or cut short in its header; fetch it again")
        raw = stream.read(header_bytes)
    try:
        header = parse_json(raw)
    except ValueError:
        raise CheckpointError(f"{file}: its header is damaged (not JSON); fetch it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is damaged (not a table of tensors); fetch it again")
    header.pop("__metadata__", None)
    data_begin = 8 + header_bytes
    return {name: _check_entry(file, name, value, data_begin, size) for name, value in header.items()}


def _check_entry(file: Path, name: str, value: Any, data_begin: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
            raise ValueError
        entry = TensorEntry(file, dtype, shape, data_begin + begin, data_begin + end)
        wanted_bytes = (entry.elements * DTYPE_BITS[dtype] + 7) // 8
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: the header's entry for {name} is damaged; fetch it again") from None
    if entry.nbytes != wanted_bytes:
        raise CheckpointError(
            f"{file}: the header's entry for {name} contradicts itself: {entry.nbytes} bytes, {shape}; fetch it again"
        )
    if entry.end > size:
        raise CheckpointError(f"{file}: truncated: {name} ends at byte {entry.end}, the file at {size}; fetch it again")
    return entry
