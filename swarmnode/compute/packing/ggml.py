"""Library ggml (https://github.com/ggml-org/ggml), llama.cpp's for tensors: its build, its formats, its C functions.

The package xllamacpp contains a build of ggml; an owner may choose another one (`SWARMNODE_GGML`), which a process of its own tries
before it is used. Functions are called through ggml's C interface. `ggml_matrix.py` has the products.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.errors import CheckpointError, LocalError

PACKAGE, OWN_BUILD = "xllamacpp", "SWARMNODE_GGML"
"""Package with a build of ggml, and the environment variable with the path of another one"""
TRIED = "_SWARMNODE_GGML_TRIED"
"""Environment variable of the process that tries a build"""
TRIAL, MAX_TOLD_CHARS = "swarmnode.compute.packing.ggml_graph", 200  # its `try_build` has what the trial computes
LIBRARIES, TRIAL_S = ("ggml-base", "ggml-cpu", "ggml"), 120.0
MOST_ELEMENTS = 2**31 - 1  # of a dimension: ggml's kernels count in 32 bits
F32 = "F32"
I32 = 26  # ggml's number of whole numbers of 32 bits


@dataclass(frozen=True)
class Format:
    """Number format of a GGUF tensor: its name and number, and the elements and bytes of a block, which lies within a row.

    `activations` is the format of the activations that its integer products take; empty if it has none. `scales` are the places
    of a block's scales, each a float16.
    """

    name: str
    number: int
    block: int
    block_bytes: int
    activations: str = ""
    scales: tuple[int, ...] = ()

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row. Raises ValueError if its blocks are not whole."""
        if elements % self.block:
            raise ValueError(f"a row of {elements} elements has no whole blocks of {self.block}, as {self.name} has")
        return elements // self.block * self.block_bytes

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if ggml would end the process at a matrix of this shape (..., outputs, inputs): it asserts whole blocks,
        and divides by its sizes."""
        if not all(0 < size <= MOST_ELEMENTS for size in shape):
            raise ValueError(f"its shape is {tuple(shape)}: each size must be from 1 to {MOST_ELEMENTS:,}")
        self.row_bytes(shape[-1])


def _by_name(*formats: Format) -> Mapping[str, Format]:
    return {form.name: form for form in formats}


ACTIVATIONS = _by_name(Format("Q8_0", 8, 32, 34), Format("Q8_1", 9, 32, 36), Format("Q8_K", 15, 256, 292))
"""Formats of activations; Q8_1 also has the sum of each block"""

FORMATS = _by_name(
    Format(F32, 0, 1, 4),
    Format("F16", 1, 1, 2),
    Format("Q4_0", 2, 32, 18, "Q8_0", (0,)),
    Format("Q4_1", 3, 32, 20, "Q8_1", (0, 2)),
    Format("Q5_0", 6, 32, 22, "Q8_0", (0,)),
    Format("Q5_1", 7, 32, 24, "Q8_1", (0, 2)),
    Format("Q8_0", 8, 32, 34, "Q8_0", (0,)),
    Format("Q2_K", 10, 256, 84, "Q8_K", (80, 82)),
    Format("Q3_K", 11, 256, 110, "Q8_K", (108,)),
    Format("Q4_K", 12, 256, 144, "Q8_K", (0, 2)),
    Format("Q5_K", 13, 256, 176, "Q8_K", (0, 2)),
    Format("Q6_K", 14, 256, 210, "Q8_K", (208,)),
    Format("IQ4_NL", 20, 32, 18, "Q8_0", (0,)),
    Format("IQ4_XS", 23, 256, 136, "Q8_K", (0,)),
    Format("BF16", 30, 1, 2),
    Format("MXFP4", 39, 32, 17, "Q8_0"),
)
"""Formats that are kept packed, by GGUF's names"""

DTYPES = {F32: torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPONENTS = {F32: (torch.int32, 0x7F800000), "F16": (torch.int16, 0x7C00), "BF16": (torch.int16, 0x7F80)}
"""Bits of the exponent; all of them are set in infinity and NaN alone"""
ALIGNMENT = 64
CONTEXT_BYTES = 1 << 13  # of the description of one product
BLOCKS_AT_ONCE = 1 << 20  # floats that are compared at once
LARGE_EXPONENT = 253  # of MXFP4: 12 times its power of two is beyond float32
# Places in ggml's struct of a tensor; `Library.checked` compares them with what ggml's own functions say.
BUFFER_AT, SIZES_AT, STRIDES_AT, DATA_AT, EXTRA_AT, TENSOR_BYTES = 8, 16, 48, 248, 320, 336
OBJECT_BYTES = 32


class InitParams(ctypes.Structure):
    """Parameters of `ggml_init`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _c_name(name: str) -> str:
    """Return a format's name as ggml's C functions have it."""
    return name.lower().replace("_k", "_K")


# ggml holds its address for as long as the process lives, whichever `Library` gave it.
_NO_LOG = ctypes.CFUNCTYPE(None, c_int, ctypes.c_char_p, c_void_p)(lambda *_: None)


class Library:
    """C functions of ggml in the libraries `files`, by short names.

    Functions that some builds lack: `dequantisers` has those that are there, `interleaved` (ggml's kind of memory in which the rows
    of some formats lie interleaved), `add_sinks` and `quantise_rows` are None without theirs.

    Raises AttributeError if the library lacks another function, OSError if it cannot be loaded.
    """

    def __init__(self, *files: Path) -> None:
        self.files = files
        self._dlls = [ctypes.CDLL(str(file)) for file in files]
        pointer, size = c_void_p, c_size_t
        self.init = self._function("ggml_init", pointer, InitParams)
        self.free = self._function("ggml_free", None, pointer)
        self.new_tensor = self._function("ggml_new_tensor_2d", pointer, pointer, c_int, c_int64, c_int64)
        self.new_tensor_4d = self._function("ggml_new_tensor_4d", pointer, pointer, c_int, *(4 * [c_int64]))
        self.multiply = self._function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.multiply_chosen = self._function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        self.attend = self._function("ggml_flash_attn_ext", pointer, *(5 * [pointer]), *(3 * [c_float]))
        self.add_sinks = self._optional_function("ggml_flash_attn_ext_add_sinks", None, pointer, pointer)
        self.new_graph = self._function("ggml_new_graph_custom", pointer, pointer, size, c_bool)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.new_backend = self._function("ggml_backend_cpu_init", pointer)
        self.free_backend = self._function("ggml_backend_free", None, pointer)
        self.set_threads = self._function("ggml_backend_cpu_set_n_threads", None, pointer, c_int)
        self.compute = self._function("ggml_backend_graph_compute", c_int, pointer, pointer)
        self.tensor_overhead = self._function("ggml_tensor_overhead", size)
        self.used_bytes = self._function("ggml_used_mem", size, pointer)
        self.over_memory = self._function("ggml_backend_cpu_buffer_from_ptr", pointer, pointer, size)
        self.place = self._function("ggml_backend_tensor_alloc", c_int, pointer, pointer, pointer)
        self.data_of = self._function("ggml_get_data", pointer, pointer)
        self.free_buffer = self._function("ggml_backend_buffer_free", None, pointer)
        self.new_buffer = self._function("ggml_backend_buft_alloc_buffer", pointer, pointer, size)
        self.base_of = self._function("ggml_backend_buffer_get_base", pointer, pointer)
        self.set_values = self._function("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self._function("ggml_log_set", None, pointer, pointer)(ctypes.cast(_NO_LOG, pointer), None)
        row = (None, pointer, pointer, c_int64)
        self.dequantisers = {}
        for name in (*FORMATS, *ACTIVATIONS):
            function = self._optional_function(f"dequantize_row_{_c_name(name)}", *row)
            if function is not None:
                self.dequantisers[name] = function
        self.quantisers = {name: self._function(f"quantize_row_{_c_name(name)}", *row) for name in ACTIVATIONS}
        memory = self._optional_function("_Z35ggml_backend_cpu_repack_buffer_typev", pointer)
        self.interleaved: int | None = None if memory is None else memory()
        arguments = (c_int, pointer, pointer, c_int64, c_int64, c_int64, pointer)
        self.quantise_rows = self._optional_function("ggml_quantize_chunk", size, *arguments)
        self.sizes_of = [
            self._function(f"ggml_{what}", result, c_int)
            for what, result in (("type_name", ctypes.c_char_p), ("blck_size", c_int64), ("type_size", size))
        ]

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        found = [dll for dll in self._dlls if hasattr(dll, name)]
        if not found:
            raise AttributeError(f"it has no function {name}")
        function: Any = getattr(found[0], name)
        function.restype, function.argtypes = result, arguments
        return function  # type: ignore[no-any-return]

    def _optional_function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
        """Return a C function; None if this build lacks it."""
        try:
            return self._function(name, result, *arguments)
        except AttributeError:
            return None

    def checked(self) -> Library:
        """Return the library. Raises OSError if its tensors or formats are not laid out as expected."""
        for name, form in (*FORMATS.items(), *ACTIVATIONS.items()):
            own, block, block_bytes = (size_of(form.number) for size_of in self.sizes_of)
            if ((own or b"").decode().upper(), block, block_bytes) != (name, form.block, form.block_bytes):
                raise OSError(f"its format {form.number} is not {name} with blocks of {form.block_bytes} bytes")
        if self.tensor_overhead() != OBJECT_BYTES + TENSOR_BYTES:
            raise OSError("its tensors have another size")
        context = self.init(InitParams(CONTEXT_BYTES, None, True))
        memory = aligned(ALIGNMENT)
        tensor = self.new_tensor(context, 0, 4, 3)
        buffer = self.over_memory(memory.data_ptr(), memory.nbytes)
        self.place(buffer, tensor, memory.data_ptr())
        known = {BUFFER_AT: buffer, DATA_AT: memory.data_ptr(), EXTRA_AT: None}
        found = {place: address_at(tensor + place).value for place in known}
        sizes, strides = numbers_at(tensor + SIZES_AT), numbers_at(tensor + STRIDES_AT)
        agrees = found == known and self.data_of(tensor) == memory.data_ptr()
        agrees &= (list(sizes), list(strides)) == ([4, 3, 1, 1], [4, 16, 48, 48])
        self.free(context)
        self.free_buffer(buffer)
        if not agrees:
            raise OSError("its tensors have another layout")
        return self


@functools.cache
def library() -> Library | None:
    """Return ggml's functions; None if the package is not installed, or its build cannot be used: `fault` says which.

    Raises LocalError if the owner chose another build (`OWN_BUILD`) that cannot be used.
    """
    found = _load()
    return found if isinstance(found, Library) else None


def fault() -> str:
    """Return why the installed package cannot be used here; empty if it can, or is not installed."""
    found = _load()
    return found if isinstance(found, str) else ""


def build() -> str:
    """Return which build of ggml is used: the owner's, or the package with its version; empty if there is none.

    Raises LocalError as `library` does.
    """
    if library() is None:
        return ""
    chosen = os.environ.get(OWN_BUILD)
    return f"ggml of {OWN_BUILD}={chosen}" if chosen else f"ggml of {PACKAGE} {importlib.metadata.version(PACKAGE)}"


@functools.cache
def _load() -> Library | str:
    """Return ggml's functions, or why the package's build cannot be used; an empty text if it is not installed.

    Raises LocalError as `library` does.
    """
    if chosen := os.environ.get(OWN_BUILD):
        return _load_own(Path(chosen).expanduser())
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        return ""
    if platform.machine().lower() in ("x86_64", "amd64") and not torch.cpu._is_avx2_supported():
        return "this CPU has no AVX2"  # the wheel's code would end the process
    why = "it contains no library"
    for folder in spec.submodule_search_locations or ():
        for file in sorted(file for end in ("so", "pyd") for file in Path(folder).glob(f"{PACKAGE}*.{end}")):
            try:
                return Library(file).checked()
            except (AttributeError, OSError) as error:
                why = str(error)
    return why


def _load_own(path: Path) -> Library:
    """Return the functions of a build of ggml. `path` is a library, or a folder with ggml's libraries.

    The build is tried in a process of its own first, as ggml may end the process. Raises LocalError if it cannot be used.
    """
    ends = {"darwin": ".dylib", "win32": ".dll"}
    start = "" if sys.platform == "win32" else "lib"
    files = [path]
    if path.is_dir():
        files = [path / f"{start}{name}{ends.get(sys.platform, '.so')}" for name in LIBRARIES]
        files = [file for file in files if file.is_file()]
    why = ""
    if not files or not files[0].is_file():
        why = f"there is no library {start}{LIBRARIES[1]}"
    elif not os.environ.get(TRIED):
        program = f"from {TRIAL} import try_build; try_build()"
        try:
            tried = subprocess.run(
                [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
                env={**os.environ, TRIED: "1"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_S,
            )
            if tried.returncode < 0:
                why = f"it ended a process that tried it ({signal.Signals(-tried.returncode).name})"
            elif tried.returncode:
                why = (
                    tried.stdout.strip() or f"a process that tried it failed: {tried.stderr.strip()[-MAX_TOLD_CHARS:]}"
                )
        except (OSError, subprocess.SubprocessError) as error:
            why = f"a process that tried it did not end ({type(error).__name__})"
    if not why:
        try:
            return Library(*files).checked()
        except (AttributeError, OSError) as error:
            why = str(error)
    if os.environ.get(TRIED):
        raise LocalError(why)
    raise LocalError(
        f"{OWN_BUILD}={path} cannot be used: {why}. Give a build of ggml for this CPU with shared libraries, of about the version "
        f"that {PACKAGE} has, or unset {OWN_BUILD}"
    )


def numbers_at(address: int) -> Any:
    """Return the four sizes, or strides in bytes, that a tensor has at this address. Their change is the tensor's."""
    return (c_int64 * 4).from_address(address)


def address_at(place: int) -> c_void_p:
    """Return the pointer at an address. A change of its value changes the tensor there."""
    return c_void_p.from_address(place)


def aligned(size: int) -> Tensor:
    """Return new memory (uint8) of `size` bytes at an address that ggml accepts."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + size]


def dequantise(packed_B: Tensor, form: Format, elements: int) -> Tensor:
    """Return the values of whole blocks as float32 (elements,)."""
    if form.name in DTYPES:
        return packed_B.view(DTYPES[form.name]).float()
    ggml = library()
    function = None if ggml is None else ggml.dequantisers.get(form.name)
    if function is not None:
        values = torch.empty(elements, dtype=torch.float32)
        function(packed_B.data_ptr(), values.data_ptr(), elements)
        return values
    import gguf

    kind = gguf.GGMLQuantizationType[form.name]
    return torch.from_numpy(np.copy(gguf.dequantize(packed_B.numpy(), kind))).view(-1)


def check_finite(packed_B: Tensor, form: Format, name: str) -> None:
    """Raise CheckpointError if the tensor `name` has values that are no finite numbers. Only the scales of its blocks are read:
    values are scales times small whole numbers."""
    blocks_NB = packed_B.view(-1, form.block_bytes)
    if form.scales or form.name in EXPONENTS:
        whole, exponent = EXPONENTS.get(form.name, EXPONENTS["F16"])
        of_scale = (blocks_NB[:, at : at + whole.itemsize].view(whole) for at in form.scales or (0,))
        parts = (part for numbers in of_scale for part in numbers.split(BLOCKS_AT_ONCE))
        is_finite = all(part.bitwise_and(exponent).amax() < exponent for part in parts)  # far faster than isfinite
    else:  # MXFP4: a scale is a byte, an exponent of 2, and the largest ones overflow with large values only
        large_NB = blocks_NB[blocks_NB[:, 0] >= LARGE_EXPONENT]
        is_finite = bool(dequantise(large_NB.reshape(-1), form, len(large_NB) * form.block).isfinite().all())
    if not is_finite:
        raise CheckpointError(f"{name} holds values that are no finite numbers: its scales are damaged")


CALLED = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_int, c_void_p)
"""Function that a node of a graph calls: it gets the node, its thread's number, their count, and what was given with it"""
UNARY = {
    "silu": "silu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "neg": "neg",
    "exp": "exp",
    "sqrt": "sqrt",
    "square": "sqr",
    "abs": "abs",
}
BINARY = {"add": "add", "mul": "mul", "sub": "sub", "div": "div"}
"""ggml's functions of one or two tensors, by the names of torch's operators"""


class Operators:
    """ggml's functions that make nodes. Raises AttributeError if the library lacks one."""

    def __init__(self, ggml: Library) -> None:
        p, size, n = c_void_p, c_size_t, c_int64
        make = ggml._function
        self.view = make("ggml_view_4d", p, p, p, n, n, n, n, size, size, size, size)
        self.reshape = make("ggml_reshape_4d", p, p, p, n, n, n, n)
        self.cont = make("ggml_cont", p, p, p)
        self.copy = make("ggml_cpy", p, p, p, p)
        self.cast = make("ggml_cast", p, p, p, c_int)
        self.rms_norm = make("ggml_rms_norm", p, p, p, c_float)
        self.norm = make("ggml_norm", p, p, p, c_float)
        self.scale_bias = make("ggml_scale_bias", p, p, p, c_float, c_float)
        self.rope = make("ggml_rope_ext", p, p, p, p, p, c_int, c_int, c_int, *(6 * [c_float]))
        self.set_rows = make("ggml_set_rows", p, p, p, p, p)
        self.set_inplace = make("ggml_set_inplace", p, p, p, p, size, size, size, size)
        self.concat = make("ggml_concat", p, p, p, p, c_int)
        self.softmax = make("ggml_soft_max", p, p, p)
        self.sum_rows = make("ggml_sum_rows", p, p, p)
        self.argsort = make("ggml_argsort", p, p, p, c_int)
        self.get_rows = make("ggml_get_rows", p, p, p, p)
        self.add_chosen = make("ggml_add_id", p, p, p, p, p)
        self.clamp = make("ggml_clamp", p, p, p, c_float, c_float)
        self.keep = make("ggml_set_output", None, p)
        self.call = make("ggml_custom_4d", p, p, c_int, n, n, n, n, p, c_int, CALLED, c_int, p)
        self.overhead = make("ggml_graph_overhead_custom", size, size, c_bool)
        self.cpu_memory = make("ggml_backend_cpu_buffer_type", p)
        self.new_allocator = make("ggml_gallocr_new", p, p)
        self.free_allocator = make("ggml_gallocr_free", None, p)
        self.reserve = make("ggml_gallocr_reserve", c_bool, p, p)
        self.allocate = make("ggml_gallocr_alloc_graph", c_bool, p, p)
        self.allocated_bytes = make("ggml_gallocr_get_buffer_size", size, p, c_int)
        names = (*UNARY.values(), *BINARY.values(), "gelu", "gelu_erf", "gelu_quick")
        one, two = (p, p, p), (p, p, p, p)
        self.by_name = {name: make(f"ggml_{name}", *(two if name in BINARY else one)) for name in names}
        self.gated = {
            name: make(f"ggml_{glu}_split", *two)
            for name, glu in (("silu", "swiglu"), ("relu", "reglu"), ("gelu", "geglu"), ("gelu_erf", "geglu_erf"))
        }
