"""Values of graphs of ggml, with the views of them that torch would have, and the trial of a build of ggml.

ggml's tensors have four dimensions, and their rows are dense. A value is a contiguous tensor of ggml with a view of torch's on
it, on the meta device: so torch itself says what a view's sizes and strides are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import (
    DATA_AT,
    DTYPES,
    FORMATS,
    SIZES_AT,
    STRIDES_AT,
    InitParams,
    Library,
    Operators,
    address_at,
    aligned,
    library,
    numbers_at,
)
from swarmnode.compute.packing.ggml_matrix import TRIED_OUTPUTS, TRIED_ROWS, GgmlMatrix, threads
from swarmnode.errors import LocalError

NEOX = 2  # ggml's rotary embedding of halves
F32, F16, I32, I64 = FORMATS["F32"].number, FORMATS["F16"].number, 26, 27
NUMBERS = {
    torch.float32: F32,
    torch.float16: F16,
    torch.bfloat16: FORMATS["BF16"].number,
    torch.int32: I32,
    torch.int64: I64,
}


class CannotBeLowered(Exception):
    """The graph has no counterpart for something that the model computes: the span stays on torch's way."""


@functools.cache
def _operators() -> Operators:
    """Return ggml's functions that make nodes. Raises CannotBeLowered if the library lacks one."""
    ggml = library()
    if ggml is None:
        raise CannotBeLowered("ggml is missing")
    try:
        return Operators(ggml)
    except AttributeError as error:
        raise CannotBeLowered(f"this build of ggml lacks a function: {error}") from None


class GraphValue(NamedTuple):
    """Result in a graph: a contiguous tensor of ggml, and its view as torch would have it, without memory."""

    base: int
    view: Tensor


class GraphTensors:
    """Tensors of a graph of ggml, in a context with room for `nodes` of them. Raises CannotBeLowered if ggml lacks a function."""

    def __init__(self, ggml: Library, nodes: int) -> None:
        self._ggml, self._make = ggml, _operators()
        self._size = nodes * ggml.tensor_overhead()
        self._context = ggml.init(InitParams(self._size, None, True))
        self._contexts = [self._context]
        self._alive: list[Any] = []
        self._views: dict[Any, int] = {}

    def __del__(self) -> None:
        for context in getattr(self, "_contexts", ()):
            self._ggml.free(context)

    def _new_graph(self, nodes: int) -> int:
        """Return an empty graph with room for `nodes` nodes."""
        self._contexts.append(self._ggml.init(InitParams(self._make.overhead(nodes, False), None, True)))
        graph: int = self._ggml.new_graph(self._contexts[-1], nodes, False)
        return graph

    def _leaf(self, memory: Tensor) -> int:
        """Return a tensor of ggml at a torch tensor's memory, which stays alive. With more than four dimensions it has one."""
        shape = memory.shape if memory.dim() <= 4 else (memory.numel(),)
        sizes = (*reversed(shape), 1, 1, 1, 1)[:4]
        tensor: int = self._ggml.new_tensor_4d(self._context, NUMBERS[memory.dtype], *sizes)
        address_at(tensor + DATA_AT).value = memory.data_ptr()
        self._alive.append(memory)
        return tensor

    def _node(self, tensor: int, view: Tensor) -> GraphValue:
        self._views["made", tensor] = tensor
        return GraphValue(tensor, view)

    def _tensor(self, value: GraphValue, view: Tensor | None = None) -> int:
        """Return a tensor of ggml with the sizes and strides of a view of a value (default: its own)."""
        view = value.view if view is None else view
        key = value.base, tuple(view.shape), tuple(view.stride()), view.storage_offset()
        if key not in self._views:
            if view.dim() > 4:
                view = _merged(view)
            sizes = (*reversed(view.shape), 1, 1, 1, 1)[:4]
            strides = [4 * stride for stride in reversed(view.stride())][1:]
            while len(strides) < 3:
                strides.append(strides[-1] * sizes[len(strides)] if strides else 4 * sizes[0])
            own = list(numbers_at(value.base + SIZES_AT)), list(numbers_at(value.base + STRIDES_AT))[1:]
            if own == (list(sizes), strides) and not view.storage_offset():
                self._views[key] = value.base
            else:
                offset = 4 * view.storage_offset()
                self._views[key] = self._make.view(self._context, value.base, *sizes, *strides, offset)
        return self._views[key]

    def _contiguous(self, value: GraphValue) -> GraphValue:
        """Return the value with its elements one after the other."""
        if value.view.is_contiguous() and not value.view.storage_offset():
            return value
        tensor = self._make.cont(self._context, self._tensor(value))
        return self._node(tensor, torch.empty(value.view.shape, device="meta"))

    def _in_rows(self, value: GraphValue) -> tuple[int, Tensor]:
        """Return a value in the order of its memory, as (rows, last dimension) if it is dense, and the view of a result of the
        same layout."""
        view = value.view
        strides = view.stride()
        order = sorted(range(view.dim()), key=lambda dim: (-strides[dim], dim))
        lying = view.permute(order)
        if view.dim() and order[-1] == view.dim() - 1 and lying.is_contiguous():
            flat = lying.view(-1, lying.shape[-1])
            like = torch.empty(lying.shape, device="meta").permute([order.index(dim) for dim in range(view.dim())])
            return self._tensor(value, flat), like
        return self._tensor(value), torch.empty(view.shape, device="meta")


def gated_silu(gate_up_RI: Tensor) -> Tensor:
    """Return SiLU(gate) * up (R, I / 2) of rows (R, I) that hold both, float32, with the bits of a node in a graph."""
    ggml = library()
    assert ggml is not None
    graph = GraphTensors(ggml, 8)
    gate_RI, up_RI = (part_RI.contiguous() for part_RI in gate_up_RI.chunk(2, 1))
    result_RI, program = aligned(4 * gate_RI.numel()).view(torch.float32).view(gate_RI.shape), graph._new_graph(8)
    node = graph._make.gated["silu"](graph._context, graph._leaf(gate_RI), graph._leaf(up_RI))
    address_at(node + DATA_AT).value = result_RI.data_ptr()
    ggml.expand(program, node)
    threads().compute_graph(program)
    return result_RI


def _merged(view: Tensor) -> Tensor:
    """Return a view with at most four dimensions. Raises CannotBeLowered if none has the same elements."""
    try:
        return view.flatten(0, view.dim() - 4) if view.is_contiguous() else view.view(-1, *view.shape[-3:])
    except RuntimeError:
        raise CannotBeLowered("a view of it has more than four dimensions") from None


# -- trial of a build


INPUTS, MOST_LOST = 512, {"exact": 1e-4, "fast": 0.03}
"""Width of the tried matrices, and the largest share of a product that rounding may take"""


def try_build() -> None:
    """Compare the chosen build's products with those of the values that the package gguf dequantises, and its nodes with torch.

    For a process of its own: it prints the first difference, or why the build cannot be loaded, and ends with 1.
    """
    try:
        wrong = next(filter(None, map(_difference, FORMATS)), "") or _wrong_nodes()
    except (CannotBeLowered, LocalError) as error:
        wrong = str(error)
    if wrong:
        print(wrong)
        raise SystemExit(1)


def _wrong_nodes() -> str:
    """Return which nodes of a graph give other numbers than torch; empty if none do.

    The graph has an attention block without products: a norm, a rotary embedding, a cache that is written, attention with a cap, a
    gated activation.
    """
    ggml = library()
    assert ggml is not None
    graph, width, heads, columns = GraphTensors(ggml, 64), 32, 2, 5
    make, context, draw = graph._make, graph._context, torch.Generator().manual_seed(0)
    x_THD, positions_T = torch.randn(3, heads, width, generator=draw), torch.arange(3, dtype=torch.int32) + columns
    cache_HCD, sinks_H = torch.randn(heads, 3 + columns, width, generator=draw), torch.randn(heads, generator=draw)
    sinks_H = sinks_H if ggml.add_sinks is not None else torch.full((heads,), -torch.inf)
    frequencies = 2.0 ** -torch.arange(width // 2)
    seen_TC = torch.arange(3 + columns) <= positions_T[:, None]
    mask_TC = torch.where(seen_TC, 0.0, -torch.inf).half()
    # torch's numbers
    normed = x_THD * (x_THD.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    angles = (positions_T[:, None] * frequencies.repeat(2))[:, None]
    turned = torch.cat([-normed[..., width // 2 :], normed[..., : width // 2]], -1)
    roped = normed * angles.cos() + turned * angles.sin()
    kept = cache_HCD.clone()
    kept[:, columns:] = roped.transpose(0, 1)
    scores = torch.tanh(roped.transpose(0, 1) @ kept.transpose(1, 2) * 0.2 / 3) * 3
    scores = torch.cat([scores.masked_fill(~seen_TC, -torch.inf), sinks_H[:, None, None].expand(-1, 3, 1)], -1)
    attended = (scores.softmax(-1)[..., :-1] @ kept).transpose(0, 1)
    wanted = {
        "norm": normed,
        "rotary embedding": roped,
        "attention": attended,
        "gated activation": torch.nn.functional.silu(attended) * x_THD,
    }
    # ggml's
    x, cache = graph._leaf(x_THD), graph._leaf(cache_HCD)
    norm = make.rms_norm(context, x, 1e-5)
    factors = graph._leaf(1 / frequencies)
    rope = make.rope(
        context, norm, graph._leaf(positions_T), factors, *(width, NEOX, 0), *(1.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    )
    by_head = GraphValue(rope, torch.empty(3, heads, width, device="meta").transpose(0, 1))
    written = make.set_rows(context, cache, graph._tensor(by_head), graph._leaf(positions_T.long()))
    every = GraphValue(written, torch.empty(1, heads, 3 + columns, width, device="meta"))
    keys = graph._tensor(every, every.view.expand(1, -1, -1, -1))
    queries = graph._tensor(GraphValue(rope, torch.empty(1, 3, heads, width, device="meta").transpose(1, 2)))
    attention = ggml.attend(context, queries, keys, keys, graph._leaf(mask_TC), 0.2, 0.0, 3.0)
    if ggml.add_sinks is not None:
        ggml.add_sinks(attention, graph._leaf(sinks_H))
    nodes = {
        "norm": norm,
        "rotary embedding": rope,
        "attention": attention,
        "gated activation": make.gated["silu"](context, attention, x),
    }
    results, program = {name: torch.zeros(3, heads, width) for name in nodes}, graph._new_graph(64)
    for name, node in nodes.items():
        ggml.expand(program, make.copy(context, node, graph._leaf(results[name])))
    allocator = make.new_allocator(make.cpu_memory())
    make.allocate(allocator, program)
    threads().compute_graph(program)
    make.free_allocator(allocator)
    for name, result in results.items():
        if not torch.allclose(result, wanted[name], atol=1e-3):
            return f"its {name} gives other numbers than torch"
    return ""


def _difference(name: str) -> str:
    """Return how products of a matrix in the format `name` differ from what they must be; empty if they do not."""
    import gguf

    form, draw = FORMATS[name], torch.Generator().manual_seed(0)
    rows_OB = torch.randint(0, 256, (TRIED_OUTPUTS, form.row_bytes(INPUTS)), generator=draw).to(torch.uint8)
    blocks_NB = rows_OB.view(-1, form.block_bytes)
    for at in form.scales:
        blocks_NB[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if name in DTYPES:
        rows_OB = torch.randn(TRIED_OUTPUTS, INPUTS, generator=draw).to(DTYPES[name]).view(torch.uint8)
    elif not form.scales:  # MXFP4: a scale is a power of two
        blocks_NB[:, 0] = 120
    values = gguf.dequantize(rows_OB.numpy(), gguf.GGMLQuantizationType[name])
    weight_OI = torch.from_numpy(np.copy(values)).view(TRIED_OUTPUTS, INPUTS)
    x_RI = torch.randn(max(TRIED_ROWS), INPUTS, generator=draw)
    expected_RO = x_RI @ weight_OI.t()
    for kind, most in MOST_LOST.items():
        matrix = GgmlMatrix(rows_OB, form, INPUTS, exact=kind == "exact")
        for count in (1, *TRIED_ROWS):
            wanted_RO = expected_RO[:count]
            lost = float((matrix.multiply(x_RI[:count]) - wanted_RO).norm() / wanted_RO.norm())
            if not lost < most:
                return f"its {kind} products of {name} with {count} rows are wrong by {lost:.1g} of their size"
    return ""
