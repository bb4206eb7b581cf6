"""Reads an exported program (.pt2, as torch.export.save of torch 2.8 or newer writes it) without running anything that it holds.

torch.export.load is never called: it unpickles constants and, when its safe way fails, example inputs too; it imports the modules
that the tree of inputs names; and it evaluates the expressions of sizes. Here the JSON is read as data, weights are raw bytes,
the example batch is read by torch.load(weights_only=True), and whatever is pickled beyond that is refused.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.graph.program import DTYPES, Json, Program
from swarmnode.errors import UsageError

MAX_JSON_BYTES = 256 << 20
MAX_EXAMPLE_BYTES = 1 << 30
_TRAINING = "TRAINING"
_MODEL = "models/model.json"
_WEIGHTS = "data/weights"
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


def load_program(file: Path) -> tuple[Program, tuple[Tensor, ...]]:
    """The program as a module, and its example batch. Raises UsageError where it is damaged or would need code to be run."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _Archive(archive).load()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except _DAMAGE as error:
        raise UsageError(
            f"{file}: not an exported program, or a damaged one ({type(error).__name__}: {error})"
        ) from error


class _Archive:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        self.root = archive.namelist()[0].partition("/")[0]
        self.sizes = {info.filename: info.file_size for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise UsageError("the archive is compressed, which torch.export.save never does")

    def load(self) -> tuple[Program, tuple[Tensor, ...]]:
        if f"{self.root}/{_MODEL}" not in self.sizes:
            raise UsageError(
                f"the archive has no {_MODEL}: export it with torch 2.8 or newer, torch.export.save(program, file)"
            )
        if self._read("byteorder", 64).strip() != b"little":
            raise UsageError("the program was saved on a machine of another byte order")
        model = self._json(_MODEL)
        if _TRAINING not in model["verifiers"]:
            raise UsageError(
                "the program was decomposed, and its no_grad regions are lost: save it before run_decompositions"
            )
        tensors: dict[str, Tensor] = {}
        parameters: set[str] = set()
        same: dict[str, Tensor] = {}  # tied weights lie in the archive once
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
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.zeros(math.prod(sizes), dtype=dtype)
            tensor = flat.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()
            if payload["is_param"]:
                tensor = nn.Parameter(tensor, requires_grad=bool(meta["requires_grad"]))
            same[key] = tensor
        return same[key]

    def _example(self) -> tuple[Tensor, ...]:
        raw = self._read(_EXAMPLE, MAX_EXAMPLE_BYTES)
        try:
            args, kwargs = torch.load(io.BytesIO(raw), weights_only=True)
        except Exception:  # whatever torch raises about a pickle that it does not trust
            raise UsageError(
                "its example batch is more than tensors: reading it could run code, so it is refused"
            ) from None
        values = (*args, *kwargs.values())
        if not all(isinstance(value, Tensor) for value in values):
            raise UsageError("its example batch is more than tensors; export it with tensors as the only arguments")
        return values

    def _json(self, name: str) -> Any:
        return json.loads(self._read(name, MAX_JSON_BYTES))

    def _read(self, name: str, most: int) -> bytes:
        path = f"{self.root}/{name}"
        if self.sizes.get(path, 0) > most:
            raise UsageError(f"its {name} has {self.sizes[path]} bytes, more than the bound of {most}")
        return self.archive.read(path)
