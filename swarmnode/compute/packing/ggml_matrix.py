"""Products of GGUF's matrices on the CPU, by ggml.

ggml rounds each row of activations to 8 bits, in blocks of 32 or 256 of that row, and multiplies integers. So a row's
result does not depend on the other rows of a pass, except for the order of its float sums: some kernels add in another order if
there are several rows, and then a fast product takes each row apart. An exact product takes three such parts of the activations,
each 256 times finer than the one before: together they have 24 bits, as float32 has.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarmnode.compute.packing.ggml import (
    ACTIVATIONS,
    ALIGNMENT,
    BUFFER_AT,
    CONTEXT_BYTES,
    DATA_AT,
    DTYPES,
    EXTRA_AT,
    F32,
    FORMATS,
    I32,
    STRIDES_AT,
    Format,
    InitParams,
    Library,
    address_at,
    aligned,
    dequantise,
    library,
    numbers_at,
)

PARTS, STEP = 3, 256.0
FEW_ROWS = 4  # with more rows an exact product is faster with dequantised weights
TILE_ELEMENTS = 1 << 19  # dequantised at once, so that they stay in the processor's cache
FEW_CHOSEN, MANY_ROWS = 8, 1 << 31
ROWS_OF_ORDER = 16  # rows that follow one another, and can be interleaved by themselves
ROWS_OF_EXPERT = 4  # that ggml multiplies at once with an interleaved matrix
KINDS_KEPT = 256  # prepared products of a thread; those used least recently are dropped
TRIED_ROWS, TRIED_OUTPUTS = (2, 3, 4, 5, 8, 9, 33), 64  # ggml has different kernels for these numbers of rows


class Prepared:
    """Prepared computation of ggml: tensors whose places take any addresses, and a graph with one result."""

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        self.context = ggml.init(InitParams(CONTEXT_BYTES, None, True))
        self.graph = ggml.new_graph(self.context, 16, False)

    def __del__(self) -> None:
        self._ggml.free(self.context)


class ActivationParts:
    """Memory of R rows of activations (R, I) as sums of parts in the format `form`, each the rest that the one before left, times
    STEP."""

    def __init__(self, ggml: Library, form: Format, rows: int, inputs: int) -> None:
        self._form, self._rest_RI, self._rounded_RI = form, torch.empty(rows, inputs), torch.empty(rows, inputs)
        plain = ACTIVATIONS["Q8_0"] if form.name == "Q8_1" else form  # no function of ggml reads Q8_1
        self._quantise, self._dequantise = ggml.quantisers[plain.name], ggml.dequantisers[plain.name]
        self._plain_PRB = aligned(PARTS * rows * plain.row_bytes(inputs)).view(PARTS, rows, -1)
        self.parts_PRB = self._plain_PRB
        if plain is not form:
            self.parts_PRB = aligned(PARTS * rows * form.row_bytes(inputs)).view(PARTS, rows, -1)
            blocks_PNB = self.parts_PRB.view(PARTS, -1, form.block_bytes)
            plain_PNB = self._plain_PRB.view(PARTS, -1, plain.block_bytes)
            self._copied = [(blocks_PNB[..., :2], plain_PNB[..., :2]), (blocks_PNB[..., 4:], plain_PNB[..., 2:])]
            self._sums = blocks_PNB[..., 2:4].view(torch.float16).unbind()

    def fill(self, x_RI: Tensor) -> Tensor:
        """Split activations, and return the parts (PARTS, R, bytes), which the next call overwrites."""
        self._rest_RI.copy_(x_RI)
        rest, rounded, count = self._rest_RI.data_ptr(), self._rounded_RI.data_ptr(), x_RI.numel()
        for part_RB in self._plain_PRB:
            self._quantise(rest, part_RB.data_ptr(), count)
            self._dequantise(part_RB.data_ptr(), rounded, count)
            self._rest_RI.sub_(self._rounded_RI).mul_(STEP)
        if (
            self.parts_PRB is not self._plain_PRB
        ):  # each block's sum as float16, where parts hold what those before have lost
            for blocks, plain in self._copied:
                blocks.copy_(plain)
            rest_N1 = x_RI.view(-1, self._form.block).sum(dim=1, keepdim=True)
            for sum_N1 in self._sums:
                sum_N1.copy_(rest_N1)
                rest_N1.sub_(sum_N1).mul_(STEP)
        return self.parts_PRB


P = TypeVar("P", bound=Prepared)


class _Product(Prepared):
    """Product of a matrix (O, I) with R rows of activations, in some formats. `apart` takes each row as a matrix of its own."""

    def __init__(
        self, ggml: Library, form: Format, x_form: Format, outputs: int, inputs: int, rows: int, apart: bool
    ) -> None:
        super().__init__(ggml)
        weight = ggml.new_tensor(self.context, form.number, inputs, outputs)
        shape = (inputs, 1, rows, 1) if apart else (inputs, rows, 1, 1)
        x = ggml.new_tensor_4d(self.context, x_form.number, *shape)
        y = ggml.multiply(self.context, weight, x)
        ggml.expand(self.graph, y)
        self.weight, self.x, self.y = (address_at(tensor + DATA_AT) for tensor in (weight, x, y))
        self.buffer, self.extra = (address_at(weight + place) for place in (BUFFER_AT, EXTRA_AT))


class _Backend:
    """ggml's working memory; it is freed with the object, as at the end of a thread."""

    def __init__(self, ggml: Library) -> None:
        self._ggml = ggml
        self.address = ggml.new_backend()

    def __del__(self) -> None:
        self._ggml.free_backend(self.address)


class _Thread(threading.local):
    """ggml's working memory of the current thread, and its prepared products."""

    def __init__(self) -> None:
        ggml = library()
        assert ggml is not None
        self._ggml = ggml
        self._backend = _Backend(ggml)
        self._threads = 0
        self.recorder: Any = None  # takes calls that torch does not see, while a pass is recorded
        self._prepared: OrderedDict[Hashable, Any] = OrderedDict()
        self._last_split: tuple[Tensor, str, Tensor] | None = None

    def split(self, x_RI: Tensor, form: Format) -> Tensor:
        """Return activations as sums of parts (PARTS, R, bytes), each the rest that the one before left, times STEP.

        The last ones are kept: several matrices take the same x.
        """
        last = self._last_split
        if last is not None and last[1] == form.name and torch.equal(last[0], x_RI):
            return last[2]
        parts_PRB = ActivationParts(self._ggml, form, *x_RI.shape).fill(x_RI)
        self._last_split = x_RI.clone(), form.name, parts_PRB
        return parts_PRB

    def compute(self, prepared: Prepared) -> None:
        """Compute a prepared graph. Raises RuntimeError if ggml cannot."""
        self.compute_graph(prepared.graph)

    def compute_graph(self, graph: int, most: int | None = None) -> None:
        """Compute a graph of ggml with torch's number of threads, `most` at most. Raises RuntimeError if ggml cannot."""
        count = torch.get_num_threads()
        if (count := count if most is None else min(count, most)) != self._threads:
            self._threads = count
            self._ggml.set_threads(self._backend.address, count)
        if self._ggml.compute(self._backend.address, graph) != 0:
            raise RuntimeError("ggml could not compute a product")

    def prepared(self, make: Callable[..., P], *kind: Hashable) -> P:
        """Return what `make` prepares for this kind, the same as before if it was used lately."""
        found: P | None = self._prepared.get((make, kind))
        if found is None:
            found = self._prepared[make, kind] = make(self._ggml, *kind)
            if len(self._prepared) > KINDS_KEPT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end((make, kind))
        return found


@functools.cache
def threads() -> _Thread:
    """Return ggml's state, which differs in each thread."""
    return _Thread()


@dataclass(frozen=True)
class _Interleaving:
    """ggml's interleaved order of rows for a shape: an empty buffer of that kind of memory, and the functions for it."""

    buffer: int
    extra: int

    def write(self, packed_B: Tensor, form: Format, inputs: int, address: int) -> None:
        """Write packed rows in this order to an address. They are a multiple of ROWS_OF_ORDER, or the last ones of a matrix."""
        packed_B, ggml = packed_B.contiguous(), library()
        assert ggml is not None
        context = ggml.init(InitParams(CONTEXT_BYTES, None, True))
        tensor = ggml.new_tensor(context, form.number, inputs, packed_B.nbytes // form.row_bytes(inputs))
        put_at(tensor, address, self)
        ggml.set_values(tensor, packed_B.data_ptr(), 0, packed_B.nbytes)
        ggml.free(context)


def put_at(tensor: int, address: int, order: _Interleaving | None) -> None:
    """Let a tensor of ggml have the bytes at an address, whose rows lie in this order; None: one after the other."""
    address_at(tensor + DATA_AT).value = address
    if order is not None:
        address_at(tensor + BUFFER_AT).value, address_at(tensor + EXTRA_AT).value = order.buffer, order.extra


@functools.cache
def _interleaving(form: Format, outputs: int, inputs: int) -> _Interleaving | None:
    """Return how ggml interleaves the rows of a matrix on this CPU; None if it does not, or not ROWS_OF_ORDER by themselves."""
    ggml = library()
    if ggml is None or ggml.interleaved is None or form.name in DTYPES:
        return None
    context = ggml.init(InitParams(CONTEXT_BYTES, None, True))
    buffer = ggml.new_buffer(ggml.interleaved, outputs * form.row_bytes(inputs))
    tensor = ggml.new_tensor(context, form.number, inputs, outputs)
    ggml.place(buffer, tensor, ggml.base_of(buffer))
    extra = address_at(tensor + EXTRA_AT).value
    ggml.free(context)
    ggml.free_buffer(buffer)
    if extra is None:
        return None
    order = _Interleaving(ggml.new_buffer(ggml.interleaved, ALIGNMENT), extra)
    packed_2B = torch.arange(2 * ROWS_OF_ORDER * form.row_bytes(inputs), dtype=torch.uint8).view(2, -1)
    whole_B, parts_B = (aligned(packed_2B.nbytes) for _ in range(2))
    order.write(packed_2B, form, inputs, whole_B.data_ptr())
    for part_B, place in zip(packed_2B, (0, packed_2B.shape[1]), strict=True):
        order.write(part_B, form, inputs, parts_B.data_ptr() + place)
    return order if torch.equal(whole_B, parts_B) else None


_agreeing: dict[tuple[str, int, bool], bool] = {}


class GgmlMatrix:
    """Matrix (O, I) in a packed format whose products ggml computes. It keeps the bytes, or a copy of them in another order.

    Its products are those of the dequantised matrix if it is `exact`; else it rounds activations to 8 bits, and its rows are
    interleaved if that is faster on this CPU, unless it is `looked_up` by rows.

    Raises ValueError if ggml cannot take a matrix of this shape, or it has other bytes.
    """

    def __init__(
        self, packed_OB: Tensor, form: Format, inputs: int, *, exact: bool = False, looked_up: bool = False
    ) -> None:
        form.check_shape((len(packed_OB), inputs))
        if packed_OB.nbytes != len(packed_OB) * form.row_bytes(inputs):  # ggml would read beyond them
            raise ValueError(
                f"{packed_OB.nbytes} bytes are no {len(packed_OB)} rows of {inputs} elements in {form.name}"
            )
        self.form, self.outputs, self.inputs, self._exact = form, len(packed_OB), inputs, exact
        self.name, self.nbytes = form.name, packed_OB.nbytes
        self.order = None if exact or looked_up else _interleaving(form, self.outputs, inputs)
        kept = packed_OB.is_contiguous() and packed_OB.data_ptr() % ALIGNMENT == 0 and self.order is None
        self._memory = packed_OB.view(-1) if kept else aligned(packed_OB.nbytes)
        if not kept:
            self.refill(packed_OB.reshape(-1))

    @classmethod
    def slot(cls, memory_B: Tensor, form: Format, outputs: int, inputs: int, *, exact: bool) -> GgmlMatrix:
        """Return a matrix in `memory_B` (uint8, at an address that ggml accepts), whose values `refill` writes."""
        matrix = cls(memory_B.view(outputs, -1), form, inputs, exact=exact, looked_up=True)
        matrix.order = None if exact else _interleaving(form, outputs, inputs)
        return matrix

    def refill(self, packed_B: Tensor, place: int = 0) -> None:
        """Take the packed bytes of other rows from byte `place` on, in the order in which this matrix keeps them. They are whole
        rows, in multiples of ROWS_OF_ORDER if it keeps them in another order."""
        if self.order is None:
            self._memory[place : place + packed_B.nbytes].copy_(packed_B)
        else:
            self.order.write(packed_B, self.form, self.inputs, self.address + place)

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read: not if they are interleaved."""
        return self.order is None

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers as float32. Only for a matrix that `has_rows`."""
        assert self.order is None
        if (recorder := threads().recorder) is not None:
            rows_NI: Tensor = recorder.calling(self.rows, numbers_N)
            return rows_NI
        packed_NB = self._memory.view(self.outputs, -1)[numbers_N]
        return dequantise(packed_NB.view(-1), self.form, numbers_N.numel() * self.inputs).view(-1, self.inputs)

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both contiguous float32. Raises ValueError if x has another width, RuntimeError if ggml
        fails."""
        if x_RI.shape[1:] != (self.inputs,):  # ggml would read beyond it
            raise ValueError(f"activations of width {self.inputs} are needed, not {tuple(x_RI.shape)}")
        if len(x_RI) == 0:
            return torch.empty(0, self.outputs)
        recorder = threads().recorder
        if recorder is not None:
            is_product = hasattr(recorder, "product") and (not self._exact or self.form.activations)
            recorded_RO: Tensor = recorder.product(self, x_RI) if is_product else recorder.calling(self.multiply, x_RI)
            return recorded_RO
        if not self._exact:
            return self._product(x_RI, FORMATS[F32], len(x_RI), apart=self.multiplies_rows_apart(len(x_RI)))
        if not self.form.activations or len(x_RI) > FEW_ROWS:
            y_RO = torch.empty(len(x_RI), self.outputs)
            packed_OB = self._memory.view(self.outputs, -1)
            height = max(1, TILE_ELEMENTS // self.inputs)
            for first in range(0, self.outputs, height):
                tile_OB = packed_OB[first : first + height]
                tile_OI = dequantise(tile_OB.reshape(-1), self.form, len(tile_OB) * self.inputs).view(-1, self.inputs)
                torch.mm(x_RI, tile_OI.t(), out=y_RO[:, first : first + height])
            return y_RO
        x_form = ACTIVATIONS[self.form.activations]
        parts_PRO = self._product(threads().split(x_RI, x_form), x_form, PARTS * len(x_RI)).view(
            PARTS, *x_RI.shape[:1], -1
        )
        *parts, y_RO = parts_PRO.unbind()
        for part_RO in reversed(parts):
            y_RO = part_RO.add_(y_RO, alpha=1 / STEP)
        return y_RO

    def move_into(self, memory: Tensor) -> None:
        """Keep the packed bytes in this memory (uint8) of their size."""
        if memory.data_ptr() != self.address:
            memory.copy_(self._memory)
        self._memory = memory

    @property
    def is_exact(self) -> bool:
        """Whether products are those of the dequantised matrix."""
        return self._exact

    @property
    def address(self) -> int:
        """Address of the packed bytes."""
        return self._memory.data_ptr()

    def multiplies_rows_apart(self, rows: int) -> bool:
        """Return whether products of ggml take each of several rows apart, since ggml gives a row other bits beside others.

        This is tried once for each kind of matrix.
        """
        if rows == 1:
            return False
        kind = self.form.name, self.inputs, self.order is not None
        if kind not in _agreeing:
            outputs = min(self.outputs, TRIED_OUTPUTS)
            x_RI = torch.randn(max(TRIED_ROWS), self.inputs, generator=torch.Generator().manual_seed(0))
            alone_RO = self._product(x_RI, FORMATS[F32], len(x_RI), apart=True, outputs=outputs)
            _agreeing[kind] = all(
                torch.equal(self._product(x_RI[:rows], FORMATS[F32], rows, outputs=outputs), alone_RO[:rows])
                for rows in TRIED_ROWS
            )
        return not _agreeing[kind]

    def _product(
        self, x: Tensor, x_form: Format, rows: int, *, apart: bool = False, outputs: int | None = None
    ) -> Tensor:
        """Return ggml's product (R, O) with rows of activations in `x_form`, for the first `outputs`."""
        y_RO = torch.empty(rows, outputs or self.outputs)
        here = threads()
        product = here.prepared(_Product, self.form, x_form, y_RO.shape[1], self.inputs, rows, apart)
        product.weight.value, product.x.value, product.y.value = self.address, x.data_ptr(), y_RO.data_ptr()
        if self.order is not None:
            product.buffer.value, product.extra.value = self.order.buffer, self.order.extra
        here.compute(product)
        return y_RO


def by_expert(x: Tensor, index_NK: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Return the rows of x, (N, I) or (N K, I), that choose each expert, by its number, and the place of each choice among them."""
    chosen_S = index_NK.reshape(-1)
    order_S = chosen_S.argsort(stable=True)
    numbers, counts = (each.tolist() for each in chosen_S[order_S].unique_consecutive(return_counts=True))
    x_SI = x[order_S if len(x) == len(order_S) else order_S // index_NK.shape[1]]
    return dict(zip(numbers, x_SI.split(counts), strict=True)), order_S.argsort()


class _ChosenProduct(Prepared):
    """Products of R rows of activations, each with the first two of a stack's matrices, of which the first O rows count."""

    def __init__(self, ggml: Library, form: Format, outputs: int, inputs: int, stride: int, rows: int) -> None:
        super().__init__(ggml)
        weight = ggml.new_tensor_4d(self.context, form.number, inputs, outputs, 2, 1)
        numbers_at(weight + STRIDES_AT)[2] = stride
        x = ggml.new_tensor_4d(self.context, FORMATS[F32].number, inputs, 1, rows, 1)
        chosen = ggml.new_tensor(self.context, I32, 2, rows)
        y = ggml.multiply_chosen(self.context, weight, x, chosen)
        ggml.expand(self.graph, y)
        self.places = [address_at(tensor + DATA_AT) for tensor in (weight, x, chosen, y)]
        self.buffer, self.extra = (address_at(weight + place) for place in (BUFFER_AT, EXTRA_AT))


_beside: dict[tuple[str, int, bool], int] = {}


class GgmlStack:
    """Matrices (N, O, I) of a layer's N experts in one memory, `stride` bytes apart, for ggml's products of rows that choose.

    The matrices keep their bytes there from now on.
    """

    def __init__(self, matrices: Sequence[GgmlMatrix]) -> None:
        first = matrices[0]
        self.form, self.order, self.count = first.form, first.order, len(matrices)
        self.outputs, self.inputs = first.outputs, first.inputs
        self.stride = first.nbytes + -first.nbytes % ALIGNMENT
        self.address = first.address
        if any(matrix.address != self.address + place * self.stride for place, matrix in enumerate(matrices)):
            memory = aligned(self.count * self.stride)
            self.address = memory.data_ptr()
            for place, matrix in enumerate(matrices):
                matrix.move_into(memory[place * self.stride :][: matrix.nbytes])
        self._alive = list(matrices)  # by expert

    @classmethod
    def of(cls, matrices: Sequence[Any]) -> GgmlStack | None:
        """Return the stack of these matrices; None if they are no fast ones of ggml in one format and shape."""
        kinds = {
            (each.form, each.order, each.outputs, each.inputs, each.is_exact) if isinstance(each, GgmlMatrix) else None
            for each in matrices
        }
        kind = kinds.pop()
        return None if kinds or kind is None or kind[-1] else cls(matrices)

    def is_faster_by_expert(self, products: int) -> bool:
        """Return whether `multiply` is faster than ggml's own products, which take interleaved matrices row by row, and
        others few rows at once where more would have other bits."""
        is_cut = self.order is not None or self.rows_at_once() < MANY_ROWS
        return is_cut and products >= ROWS_OF_EXPERT * self.count

    def multiply(self, x: Tensor, index_NK: Tensor) -> Tensor:
        """Return the products (N, K, O) of rows x (N, I), or (N K, I), with the matrices that they choose, by expert."""
        rows, back_S = by_expert(x.reshape(-1, self.inputs), index_NK)
        y_SO = torch.cat([self._alive[number].multiply(x_RI) for number, x_RI in rows.items()])
        return y_SO[back_S].view(*index_NK.shape, self.outputs)

    def rows_at_once(self) -> int:
        """Return the most rows that a product may take without another row's bits changing. This is tried once for each kind.

        Some builds compute an expert that `FEW_CHOSEN` rows choose in another order.
        """
        kind = self.form.name, self.inputs, self.order is not None
        if kind not in _beside:
            random = torch.Generator().manual_seed(0)
            x_RI = torch.randn(max(TRIED_ROWS), self.inputs, generator=random)
            alone = torch.cat([self._tried(row_I[None]) for row_I in x_RI])
            agreeing = (
                most
                for most in (MANY_ROWS, FEW_CHOSEN - 1)
                if all(torch.equal(self._tried(x_RI[:rows]), alone[:rows]) for rows in TRIED_ROWS if rows <= most)
            )
            _beside[kind] = next(agreeing, 1)
        return _beside[kind]

    def _tried(self, x_RI: Tensor) -> Tensor:
        """Return products (R, 2, O) of rows that all choose the same experts, for the first outputs."""
        outputs, here = min(self.outputs, TRIED_OUTPUTS), threads()
        product = here.prepared(_ChosenProduct, self.form, outputs, self.inputs, self.stride, len(x_RI))
        chosen_R2 = torch.tensor([0, self.count - 1 and 1], dtype=torch.int32).repeat(len(x_RI), 1)
        y_R2O = torch.empty(len(x_RI), 2, outputs)
        addresses = self.address, x_RI.data_ptr(), chosen_R2.data_ptr(), y_R2O.data_ptr()
        for place, address in zip(product.places, addresses, strict=True):
            place.value = address
        if self.order is not None:
            product.buffer.value, product.extra.value = self.order.buffer, self.order.extra
        here.compute(product)
        return y_R2O
