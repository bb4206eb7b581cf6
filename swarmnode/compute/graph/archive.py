"""Reads an exported program (.pt2, as torch.export.save of torch 2.8 or newer writes it) without running anything in it.

torch.export.load is never called. It unpickles constants and, when its safe way fails, example inputs too; it imports the modules
that the tree of inputs names; and it evaluates the expressions of sizes. Here the JSON is read as data, weights are raw bytes,
the example batch is read by torch.load(weights_only=True), and anything pickled beyond that is refused.
"""

from __future__ import annotations

import io
import json
import math
import operator
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.graph import resolve
from swarmnode.errors import CheckpointError, UsageError

MAX_JSON_BYTES = 256 << 20
MAX_EXAMPLE_BYTES = 1 << 30
_TRAINING = "TRAINING"
_MODEL = "models/model.json"
_WEIGHTS = "data/weights"
MAX_REPEATED_BYTES = 1 << 27  # of all tensors, beyond the size of the archive: some repeat its bytes
_CONSTANTS = "data/constants"
_EXAMPLE = "data/sample_inputs/model.pt"
_CONFIGS = {_WEIGHTS: "model_weights_config.json", _CONSTANTS: "model_constants_config.json"}
_DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    RecursionError,
    zipfile.BadZipFile,
)
Json = dict[str, Any]

DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_STRIDED = 7
_ON_SIZES: dict[str, Callable[..., Any]] = {
    "torch.ops.aten.sym_size.int": lambda tensor, dim: tensor.shape[dim],
    "torch.ops.aten.sym_numel.default": lambda tensor: tensor.numel(),
    **{f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
}
_CHECKS = ("torch.ops.aten._assert", "torch.ops.aten.sym_constrain_range")
_NO_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"


class Program(nn.Module):
    """Module that runs the `graph_module` of a program's JSON. Raises UsageError for an operator that graphs may not use.

    `any_batch`: it was exported with a dynamic batch; otherwise numbers that depend on the batch's size are built in.
    """

    def __init__(self, graph_module: Json, tensors: Mapping[str, Tensor], parameters: frozenset[str]) -> None:
        super().__init__()
        self._graph = graph_module["graph"]
        self._names: dict[str, str] = {}  # value -> name in the state dict
        self._inputs: list[str] = []
        self._moves: list[tuple[str, str]] = []  # (buffer, value)
        for spec in graph_module["signature"]["input_specs"]:
            ((kind, content),) = spec.items()
            if kind == "user_input" and "as_tensor" in content["arg"]:
                self._inputs.append(content["arg"]["as_tensor"]["name"])
            elif kind in ("parameter", "buffer", "tensor_constant"):
                self._names[content["arg"]["name"]] = content[f"{kind}_name"]
            else:
                raise UsageError(f"the exported program takes a {kind} that is no tensor: only tensors can be used")
        sizes = [self._graph["tensor_values"][name]["sizes"] for name in self._inputs]
        self.any_batch = any("as_expr" in dimensions[0] for dimensions in sizes if dimensions)
        self._outputs = self._read_outputs(graph_module["signature"]["output_specs"])
        for name in self._names.values():
            _register(self, name, tensors[name], name in parameters)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._resolve(self._graph)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments in the exported module's code."""
        return tuple(self._inputs)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Return the program's tensors, in their order. Inputs come in theirs, or all of them by name."""
        held = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        values: dict[str, Any] = {value: held[name] for value, name in self._names.items()}
        values.update(named or zip(self._inputs, inputs, strict=True))
        self._run(self._graph, values)
        for buffer, value in self._moves:
            with torch.no_grad():
                held[buffer].copy_(values[value])
        return tuple(values[name] for name in self._outputs)

    # -- reading

    def _read_outputs(self, specs: list[Json]) -> list[str]:
        """Record the buffers that are updated, and return the values of the outputs. Raises UsageError for other outputs."""
        outputs: list[str] = []
        for spec in specs:
            ((kind, content),) = spec.items()
            if kind == "buffer_mutation":
                self._moves.append((content["buffer_name"], content["arg"]["name"]))
            elif kind == "user_output" and "as_tensor" in content["arg"]:
                outputs.append(content["arg"]["as_tensor"]["name"])
            elif kind != "user_output":
                raise UsageError(
                    f"the exported program has a {kind}, which a graph "
                    "cannot hold; change the module and export it again"
                )
        if not outputs:
            raise UsageError("the exported program returns no tensor; export a module that returns tensors")
        return outputs

    def _resolve(self, graph: Json) -> None:
        for node in graph["nodes"]:
            target = node["target"]
            if target == _NO_GRAD:
                self._resolve(node["inputs"][1]["arg"]["as_graph"]["graph"])
            elif not target.startswith(_CHECKS):
                try:  # unlike in a graph it may write in place, since the program is exported again
                    function = _ON_SIZES.get(target) or resolve(target.removeprefix("torch.ops."), is_source=True)
                except CheckpointError as error:
                    raise UsageError(
                        f"the exported program cannot be used: {error}; change the module and export it again"
                    ) from None
                self._functions[target] = function

    # -- running

    def _run(self, graph: Json, values: dict[str, Any]) -> None:
        for node in graph["nodes"]:
            target = node["target"]
            if target == _NO_GRAD:
                enabled, region, *operands = (item["arg"] for item in node["inputs"])
                inner = region["as_graph"]["graph"]
                names = [item["as_tensor"]["name"] for item in inner["inputs"]]
                own = dict(zip(names, (_argument(operand, values) for operand in operands), strict=True))
                with torch.set_grad_enabled(bool(enabled["as_bool"])):
                    self._run(inner, own)
                outputs: Any = [own[item["as_tensor"]["name"]] for item in inner["outputs"]]
            elif target.startswith(_CHECKS):
                continue
            else:
                arguments = [(item["name"], item["kind"], _argument(item["arg"], values)) for item in node["inputs"]]
                by_place = [value for _, kind, value in arguments if kind == 1]
                outputs = self._functions[target](
                    *by_place, **{name: value for name, kind, value in arguments if kind == 2}
                )
            _store(node["outputs"], outputs, values)


def _argument(argument: Json, values: dict[str, Any]) -> Any:
    """Return the value of an argument in the JSON. Raises UsageError for a kind that a graph cannot hold."""
    ((kind, content),) = argument.items()
    if kind in ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string", "as_strings"):
        return float(content) if kind == "as_float" else content
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        return values[content["name"]]
    if kind == "as_tensors":
        return [values[item["name"]] for item in content]
    if kind in ("as_optional_tensors", "as_sym_ints"):
        return [_argument(item, values) for item in content]
    if kind in ("as_sym_int", "as_sym_bool", "as_optional_tensor"):
        return _argument(content, values)
    if kind == "as_name":
        return values[content]
    if kind == "as_scalar_type" and content in DTYPES:
        return DTYPES[content]
    if kind == "as_memory_format" and content in _FORMATS:
        return _FORMATS[content]
    if kind == "as_layout" and content == _STRIDED:
        return torch.strided
    if kind == "as_device":
        return torch.device("cpu")
    raise UsageError(
        f"the exported program has an argument of kind {kind}, which "
        "a graph cannot hold; change the module and export it again"
    )


def _store(outputs: list[Json], results: Any, values: dict[str, Any]) -> None:
    """Store the results of an operator in `values`, by the names in `outputs`."""
    if len(outputs) == 1 and "as_tensors" in outputs[0]:
        outputs = [{"as_tensor": item} for item in outputs[0]["as_tensors"]]
    elif len(outputs) == 1 and not isinstance(results, list | tuple):
        results = [results]
    for output, result in zip(outputs, results, strict=True):
        ((kind, content),) = output.items()
        if kind in ("as_sym_int", "as_sym_bool"):
            values[content["as_name"]] = result
        elif kind == "as_tensor":
            values[content["name"]] = result


def _register(root: nn.Module, name: str, tensor: Tensor, is_parameter: bool) -> None:
    """Register a tensor at the place that its name in the state dict gives."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if is_parameter:
        root.register_parameter(last, tensor)  # type: ignore[arg-type]
    else:
        root.register_buffer(last, tensor)


def load_program(file: Path) -> tuple[Program, tuple[Tensor, ...]]:
    """Read a program as a module, with its example batch. Raises UsageError if it is damaged or would need code to be run."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _Archive(archive, file.stat().st_size).load()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}; check its name and permissions") from None
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except _DAMAGE as error:
        raise UsageError(
            f"{file}: not an exported program, or a damaged one "
            f"({type(error).__name__}: {error}); save it with torch.export.save"
        ) from error


def _refuse_compressed(archive: zipfile.ZipFile) -> None:
    """Raise UsageError if an archive is compressed: few bytes could take any memory."""
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise UsageError(
            "the archive is compressed, which torch.export.save never does; save the program with it again"
        )


class _Archive:
    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self.archive = archive
        self.root = archive.namelist()[0].partition("/")[0]
        self.sizes = {info.filename: info.file_size for info in archive.infolist()}
        self._room = size + MAX_REPEATED_BYTES
        _refuse_compressed(archive)

    def load(self) -> tuple[Program, tuple[Tensor, ...]]:
        if f"{self.root}/{_MODEL}" not in self.sizes:
            raise UsageError(
                f"the archive has no {_MODEL}: export it with torch 2.8 or newer, torch.export.save(program, file)"
            )
        if self._read("byteorder", 64).strip() != b"little":
            raise UsageError(
                "the program was saved on a machine of another byte order; save it on a little-endian machine"
            )
        model = self._json(_MODEL)
        if _TRAINING not in model["verifiers"]:
            raise UsageError(
                "the program was decomposed, and its no_grad regions are lost: save it before run_decompositions"
            )
        tensors: dict[str, Tensor] = {}
        parameters: set[str] = set()
        same: dict[str, Tensor] = {}  # tied weights are in the archive once
        for folder, config in _CONFIGS.items():
            for name, payload in self._json(f"{folder}/{config}")["config"].items():
                tensors[name] = self._tensor(name, folder, payload, same)
                if payload["is_param"]:
                    parameters.add(name)
        return Program(model["graph_module"], tensors, frozenset(parameters)), self._example()

    def _tensor(self, name: str, folder: str, payload: Json, same: dict[str, Tensor]) -> Tensor:
        if payload["use_pickle"] or payload["tensor_meta"] is None:
            raise UsageError(
                f"{name} is a pickled object: reading it could run code, so it is refused; use plain tensors"
            )
        meta = payload["tensor_meta"]
        key = json.dumps([folder, payload])
        if key not in same:
            sizes, strides = ([int(number["as_int"]) for number in meta[field]] for field in ("sizes", "strides"))
            dtype = DTYPES[meta["dtype"]]
            path = f"{folder}/{payload['path_name']}"
            raw = bytearray(self._read(path, self.sizes.get(f"{self.root}/{path}", 0)))
            self._count_bytes(name, sizes, dtype)
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
            tensor = flat.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()
            if payload["is_param"]:
                tensor = nn.Parameter(tensor, requires_grad=bool(meta["requires_grad"]))
            same[key] = tensor
        return same[key]

    def _example(self) -> tuple[Tensor, ...]:
        raw = io.BytesIO(self._read(_EXAMPLE, MAX_EXAMPLE_BYTES))
        with zipfile.ZipFile(raw) as inner:
            _refuse_compressed(inner)
        raw.seek(0)
        try:
            args, kwargs = torch.load(raw, weights_only=True)
        except Exception:  # torch may raise anything about a pickle that it does not trust
            raise UsageError(
                "its example batch is more than tensors: reading it could run "
                "code, so it is refused; export it with tensors as the only arguments"
            ) from None
        values = (*args, *kwargs.values())
        if not all(isinstance(value, Tensor) for value in values):
            raise UsageError("its example batch is more than tensors; export it with tensors as the only arguments")
        for value in values:
            self._count_bytes("its example batch", value.shape, value.dtype)
        return values

    def _count_bytes(self, name: str, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """Count the bytes of a tensor. Raises UsageError if all that were counted are more than the archive and what may repeat."""
        self._room -= math.prod(sizes) * dtype.itemsize
        if self._room < 0:
            raise UsageError(
                f"{name} says {list(sizes)}: with it the tensors are much larger than the archive; save the program again"
            )

    def _json(self, name: str) -> Any:
        return json.loads(self._read(name, MAX_JSON_BYTES))

    def _read(self, name: str, most: int) -> bytes:
        path = f"{self.root}/{name}"
        if self.sizes.get(path, 0) > most:
            raise UsageError(
                f"its {name} has {self.sizes[path]} bytes, more than the bound of {most}; export a smaller module"
            )
        return self.archive.read(path)
