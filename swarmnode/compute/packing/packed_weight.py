"""Weights that stay packed in memory: stand-ins for a model's parameters that multiply without being dequantised.

A module keeps its own code: `functional.linear(x, weight, bias)` and `functional.embedding(ids, weight)` find a `PackedWeight` in
the place of the parameter, and torch calls its `__torch_function__`.

The forward product of a frozen layer may be any kernel. Its gradient with regard to the inputs needs the matrix itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.device import trim_heap
from swarmnode.compute.expert_slots import ByteRange, ExpertSlots, LayerSlots
from swarmnode.compute.packing.card_matrix import CardMatrix
from swarmnode.compute.packing.ggml import ALIGNMENT, FORMATS, aligned, check_finite
from swarmnode.compute.packing.ggml_matrix import ROWS_OF_ORDER, GgmlMatrix, GgmlStack, by_expert
from swarmnode.compute.packing.tensor_entry import TensorEntry, parts_by_parameter, read_packed
from swarmnode.errors import CheckpointError

Block = tuple[slice, slice, Tensor]
"""Outputs, inputs, and values of a part of a matrix (O, I)"""
Blocks = Callable[[], Iterator[Block]]

ONE_BY_ONE = "one_by_one"  # the implementation of experts that takes one expert's matrices at a time
TILE = 256  # rows or columns of a matrix that are read at a time


class _FrozenProduct(torch.autograd.Function):
    """Product of activations with a matrix that takes no gradient. Nothing is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], blocks: Blocks) -> Tensor:
        """Return multiply(x)."""
        ctx.blocks, ctx.inputs = blocks, x.shape[-1]
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient (..., I) of the activations for that of the result (..., O)."""
        gradient_RO = gradients[0].reshape(-1, gradients[0].shape[-1])
        back_RI: Tensor | None = None
        for outputs, inputs, block in ctx.blocks():
            if outputs == inputs == slice(None):  # the whole matrix
                back_RI = gradient_RO @ block.to(gradient_RO.dtype)
                break
            back_RI = gradient_RO.new_zeros(len(gradient_RO), ctx.inputs) if back_RI is None else back_RI
            back_RI[:, inputs].addmm_(gradient_RO[:, outputs], block.to(back_RI.dtype))
        assert back_RI is not None
        return back_RI.view(*gradients[0].shape[:-1], ctx.inputs), None, None


def frozen_product(x: Tensor, multiply: Callable[[Tensor], Tensor], blocks: Blocks) -> Tensor:
    """Return multiply(x), for x (..., I) and a result (..., O), with a gradient for `x` if it takes one.

    `blocks` yields the matrix that `multiply` uses, without its bias.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _FrozenProduct.apply(x, multiply, blocks)  # type: ignore[no-any-return,no-untyped-call]
    return multiply(x)


def tiles(matrix_OI: Tensor) -> Iterator[Block]:
    """Yield a plain matrix as one block."""
    yield slice(None), slice(None), matrix_OI


def probe_columns(multiply: Callable[[Tensor], Tensor], inputs: int, one: float, like: Tensor) -> Iterator[Block]:
    """Yield the columns of a matrix that only multiplies, by its products with unit vectors times `one`.

    The products have no bias. Unit vectors have the dtype and device of `like`. Costs as much as a prompt of I positions.
    """
    for first in range(0, inputs, TILE):
        count = min(TILE, inputs - first)
        units_KI = torch.zeros(count, inputs, dtype=like.dtype, device=like.device)
        units_KI[:, first : first + count].fill_diagonal_(one)
        yield slice(None), slice(first, first + count), (multiply(units_KI) / one).t()


CPU = torch.device("cpu")
EXACT_IN_8_BITS = 127 / 128
"""A one that fast products round to no other number: 127 steps of a scale of 2^-7, which float16 holds."""
TRIM_BYTES = 64 << 20  # read between two times that freed copies of bytes in another order go back to the system


class _StandIn:
    """Attributes that transformers and torch read of a parameter that is not trained and has its values."""

    requires_grad = False
    is_meta = False
    _is_hf_initialized = True  # transformers' mark of a parameter that needs no random numbers
    device: torch.device


class MatrixProducts(Protocol):
    """Matrix (O, I) in a packed format, with its products."""

    name: str
    outputs: int
    inputs: int
    nbytes: int

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read. Else the matrix only multiplies."""
        ...

    def multiply(self, x_RI: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), both contiguous float32, or on a card both in the model's dtype."""
        ...

    def rows(self, numbers_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers in the dtype of its products."""
        ...


SlotMatrix = GgmlMatrix | CardMatrix


class PackedWeight(_StandIn):
    """Matrix (O, I) that stays packed: one or more parts, one above the other, in the place of a module's parameter.

    `dtype` is that of the model, whose activations it takes and returns. Its parts lie on `device`: on CPUs ggml multiplies
    them, on cards kernels do.
    """

    def __init__(self, parts: Sequence[MatrixProducts], dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.shape = torch.Size((sum(part.outputs for part in parts), parts[0].inputs))
        self.dtype, self.device = dtype, device
        self.nbytes = sum(part.nbytes for part in parts)
        self._takes = torch.float32 if device.type == "cpu" else dtype
        self._parts = list(parts)

    def __repr__(self) -> str:
        names = "+".join(part.name for part in self._parts)
        return f"{type(self).__name__}({'x'.join(map(str, self.shape))}, {names}, {self.nbytes / 1e6:.1f} MB)"

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if function is functional.linear:
            return linear(*args, **given)
        if function is functional.embedding:
            ids, weight = args[:2]  # settings of a training have no effect here
            return weight.rows(ids.reshape(-1)).view(*ids.shape, weight.shape[1])
        raise TypeError(
            f"a packed weight has no {getattr(function, '__name__', function)}: load the model with --products plain"
        )

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return y (..., O, T) for x (..., I, T): Mamba's code multiplies one matrix from the left."""
        return functional.linear(x.transpose(-1, -2), self).transpose(-1, -2)  # type: ignore[arg-type]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or its size in dimension `dim`."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def is_exact(self) -> bool:
        """Whether ggml multiplies with the values of some part as they are."""
        return any(isinstance(part, GgmlMatrix) and part.is_exact for part in self._parts)

    @property
    def card_parts(self) -> list[CardMatrix]:
        """Parts that lie on a card."""
        return [part for part in self._parts if isinstance(part, CardMatrix)]

    def move_to(self, device: torch.device) -> None:
        """Move the bytes from a card to the host's memory, or back again; they are not multiplied there."""
        if parts := self.card_parts:
            self.device = device
            for part in parts:
                part.move_to(device)

    def multiply(self, x: Tensor) -> Tensor:
        """Return y (R, O) for x (R, I), in float32 from ggml, in the model's dtype from a card."""
        x_RI = x.to(self._takes).contiguous()
        parts_RO = [part.multiply(x_RI) for part in self._parts]
        return parts_RO[0] if len(parts_RO) == 1 else torch.cat(parts_RO, dim=1)

    def rows(self, ids_N: Tensor) -> Tensor:
        """Return the rows (N, I) of these numbers in the model's dtype."""
        (part,) = self._parts
        return part.rows(ids_N).to(self.dtype)

    def blocks(self) -> Iterator[Block]:
        """Yield the matrix in parts, some rows at a time, or some columns of a part that only multiplies."""
        first = 0
        for part in self._parts:
            end = first + part.outputs
            for begin in range(first, end if part.has_rows else first, TILE):
                numbers_N = torch.arange(begin - first, min(begin + TILE, end) - first, device=self.device)
                yield slice(begin, begin + len(numbers_N)), slice(None), part.rows(numbers_N)
            if not part.has_rows:
                like = torch.empty(0, dtype=self._takes, device=self.device)
                for _, inputs, block in probe_columns(part.multiply, part.inputs, EXACT_IN_8_BITS, like):
                    yield slice(first, end), inputs, block
            first = end


class TransposedWeight(PackedWeight):
    """Matrix (I, O), as some families' experts have it: activations are multiplied with it by `x @ weight`."""

    def __init__(self, parts: Sequence[MatrixProducts], dtype: torch.dtype) -> None:
        super().__init__(parts, dtype)
        self.shape = self.shape[::-1]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (Tensor.matmul, Tensor.__matmul__, torch.matmul) and isinstance(args[1], cls):
            return linear(args[0], args[1])
        return super().__torch_function__(function, types, args, kwargs)


class PackedStack(_StandIn):
    """Matrices (N, O, I) of a layer's N experts that stay packed, in the place of a module's parameter.

    `stacks` has their parts, from above, for ggml's products with rows that choose among the experts; empty if ggml has none.

    Raises ValueError if the matrices are of unlike shapes.
    """

    def __init__(self, matrices: Sequence[PackedWeight]) -> None:
        self._matrices = list(matrices)
        if len(shapes := {tuple(matrix.shape) for matrix in matrices}) != 1:
            raise ValueError(f"its experts are of unlike shapes: {sorted(shapes)}")
        parts = zip(*(matrix._parts for matrix in matrices), strict=True)
        self.stacks = [GgmlStack.of(part) for part in parts] if matrices[0].device.type == "cpu" else []
        if None in self.stacks:
            self.stacks = []
        self.shape = torch.Size((len(matrices), *matrices[0].shape))
        self.dtype = matrices[0].dtype
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the matrices."""
        return self._matrices[0].device

    @property
    def card_parts(self) -> list[CardMatrix]:
        """Parts of all matrices that lie on a card."""
        return [part for matrix in self._matrices for part in matrix.card_parts]

    def move_to(self, device: torch.device) -> None:
        """Move the bytes from a card to the host's memory, or back again."""
        for matrix in self._matrices:
            matrix.move_to(device)

    def __getitem__(self, number: Any) -> PackedWeight:
        """Return the matrix of one expert."""
        return self._matrices[int(number)]

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def implementation(self) -> tuple[str, Callable[..., Tensor]]:
        """Name and function of the implementation of transformers' experts interface that multiplies with these matrices."""
        return ONE_BY_ONE, experts_one_by_one

    def times(self, x_RI: Tensor, number: int, _slot: int) -> Tensor:
        """Return y (R, O) for x (R, I) and one expert."""
        return linear(x_RI, self._matrices[number])

    def blocks_of(self, number: int) -> Iterator[Block]:
        """Yield the matrix of one expert in parts."""
        return self._matrices[number].blocks()


class SlotStack(PackedStack):
    """Matrices (N, O, I) of a layer's N experts that stay packed: some lie in slots of memory, and all in a file. `matrices` are
    those of the slots of `layer`, in whose `pool` all layers' are."""

    def __init__(self, matrices: Sequence[PackedWeight], pool: ExpertSlots, layer: LayerSlots) -> None:
        super().__init__(matrices)
        self.shape = torch.Size((layer.experts, *matrices[0].shape))
        self.stacks: list[Any] = []  # a graph's products choose among all experts by their numbers
        self.pool, self.layer = pool, layer

    def __getitem__(self, number: Any) -> PackedWeight:
        """Return the matrix of one expert, after reading it if it is in no slot."""
        return self._matrices[self.layer.slot_of(int(number))]

    def times(self, x_RI: Tensor, number: int, slot: int) -> Tensor:
        """Return y (R, O) for x (R, I) and one expert in a slot. On the way back of a gradient another one may be there, so that it
        is read again."""
        return linear(x_RI, self._matrices[slot], blocks=functools.partial(self.blocks_of, number))

    def blocks_of(self, number: int) -> Iterator[Block]:
        """Yield the matrix of one expert in parts, which stays in its slot meanwhile: gradients of a card's and of the CPU's part
        of a layer go back on threads of their own."""
        with self.pool.way_back:
            yield from self[number].blocks()


def experts_one_by_one(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """Return the weighted sums (N, H) of the experts that each row of `top_k_index` (N, K) chooses, one choice after the other.

    It is an implementation for transformers' experts interface: `self` is the family's module of all experts, whose matrices are in
    packed stacks.
    """
    results_SH = results_of_choices(
        self, hidden_states, top_k_index, self._apply_gate if self.has_gate else self.act_fn
    )
    return sum_of_choices(self, results_SH, top_k_weights).to(hidden_states.dtype)


def results_of_choices(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the results (N K, H) of the experts that each row of `top_k_index` (N, K) chooses; `activate` is what is between an
    expert's products. Experts in memory are computed while others are read. The order has no influence on a bit."""
    stacks, biases = matrices_of(self)
    inputs, back_S = by_expert(hidden_states, top_k_index)
    counts = {number: len(rows) for number, rows in inputs.items()}
    outputs = {
        number: result_of_expert(self, (stacks, biases), number, slot, inputs[number], activate)
        for number, slot in visits(stacks, counts, top_k_index.shape[1])
    }
    return torch.cat([outputs[number] for number in inputs])[back_S]


Matrices = tuple[Sequence[PackedStack | Tensor], Sequence[Tensor]]
"""The first matrices (N, O, I) of a layer's experts and the last ones, and their biases (N, O), if they have any"""


def matrices_of(experts: Any) -> Matrices:
    """Return the matrices and biases of a family's module of all experts."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    biases = (getattr(experts, f"{first}_bias"), experts.down_proj_bias) if experts.has_bias else ()
    return (getattr(experts, first), experts.down_proj), biases


def visits(stacks: Sequence[PackedStack | Tensor], rows: Mapping[int, int], active: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each expert that `rows` of a pass choose, each `active` of them, and its slot, if the stacks have slots.
    Raises as `LayerSlots.visit` does."""
    in_slots = next((stack for stack in stacks if isinstance(stack, SlotStack)), None)
    return ((number, -1) for number in rows) if in_slots is None else in_slots.layer.visit(rows, active)


def result_of_expert(
    experts: Any, matrices: Matrices, number: int, slot: int, x_RH: Tensor, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the results (R, H) of one expert, in its slot if the stacks have slots, for the rows that choose it."""
    stacks, biases = matrices

    def times(x: Tensor, which: int) -> Tensor:
        stack = stacks[which]
        if isinstance(stack, PackedStack):
            y = stack.times(x, number, slot)
        else:
            y = x @ stack[number] if experts.is_transposed else functional.linear(x, stack[number])
        return y + biases[which][number] if biases else y

    return times(activate(times(x_RH, 0)), 1)


def sum_of_choices(experts: Any, results_SH: Tensor, weights_NK: Tensor) -> Tensor:
    """Return the weighted sums (N, H) of the results of each row's choices, one choice after the other. `experts` is the family's
    module of all experts."""
    if experts.has_post_expert_norm:
        results_SH = experts.post_expert_norm(results_SH)
    parts = (results_SH * weights_NK.reshape(-1, 1)).view(*weights_NK.shape, -1).unbind(1)
    return functools.reduce(torch.add, parts)


def read_slots(
    entries: Mapping[str, TensorEntry], slots: int, dtype: torch.dtype, *, exact: bool, device: torch.device = CPU
) -> dict[str, SlotStack]:
    """Return the stacks of these experts' packed tensors (N, O, I), by the names of their parameters, with memory for `slots`
    experts of each layer on a device; nothing is read yet.

    Raises CheckpointError if a file cannot be opened, or a layer's tensors have unlike numbers of experts.
    """
    layers: dict[str, dict[str, list[TensorEntry]]] = {}
    for name, parts in parts_by_parameter(entries).items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = parts

    def matrices_in_slots(entry: TensorEntry) -> list[SlotMatrix]:
        form, (experts, outputs, inputs) = FORMATS[entry.dtype], entry.shape
        count, size = min(slots, experts), entry.nbytes // experts
        if device.type != "cpu":
            memory_SOB = torch.zeros(count, outputs, size // outputs, dtype=torch.uint8, device=device)
            return [CardMatrix(packed_OB, form, inputs, dtype, device) for packed_OB in memory_SOB]
        stride = size + -size % ALIGNMENT
        memory_B = aligned(count * stride)
        parts = (memory_B[slot * stride : slot * stride + size] for slot in range(count))
        return [GgmlMatrix.slot(part_B, form, outputs, inputs, exact=exact) for part_B in parts]

    places: list[list[list[ByteRange]]] = []
    matrices: list[list[list[SlotMatrix]]] = []  # of each layer by number of the matrix in an expert, and by slot
    for layer, parameters in layers.items():
        each = [part for parts in parameters.values() for part in parts]
        if len({part.shape[0] for part in each}) > 1:
            raise CheckpointError(f"{each[0].file}: the tensors of {layer} have unlike numbers of experts")
        places.append([[_expert_range(part, number) for part in each] for number in range(each[0].shape[0])])
        matrices.append([matrices_in_slots(part) for part in each])

    def fill(layer: int, slot: int, number: int, place: int, piece: memoryview) -> None:
        matrix = matrices[layer][number][slot]
        packed_B = torch.frombuffer(piece, dtype=torch.uint8)
        check_finite(packed_B, matrix.form, "an expert")
        matrix.refill(packed_B, place)

    pool = ExpertSlots(places, slots, fill)
    stacks: dict[str, SlotStack] = {}
    for layer_slots, by_part, parameters in zip(pool.layers, matrices, layers.values(), strict=True):
        of_parts = iter(by_part)
        for name, parts in parameters.items():
            per_slot = zip(*(next(of_parts) for _ in parts), strict=True)
            stacks[name] = SlotStack([PackedWeight(some, dtype, device) for some in per_slot], pool, layer_slots)
    return stacks


def _expert_range(entry: TensorEntry, number: int) -> ByteRange:
    """Return the place of one expert's matrix in the tensor of all experts of its layer."""
    size = entry.nbytes // entry.shape[0]
    rows_bytes = size // entry.shape[1] * ROWS_OF_ORDER
    return ByteRange(entry.file, entry.begin + number * size, entry.begin + (number + 1) * size, rows_bytes)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, blocks: Blocks | None = None) -> Tensor:
    """Return (..., O) for x (..., I), in the dtype of x. `blocks` yields the matrix on the way back, else the weight does."""

    def multiply(x: Tensor) -> Tensor:
        y_RO = weight.multiply(x.reshape(-1, x.shape[-1]))
        if bias is not None:
            y_RO += bias
        return y_RO.view(*x.shape[:-1], -1).to(x.dtype)

    return frozen_product(x, multiply, blocks or weight.blocks)


def read_weights(
    entries: Mapping[str, TensorEntry], dtype: torch.dtype, *, exact: bool, looked_up: str, device: torch.device = CPU
) -> dict[str, PackedWeight | PackedStack]:
    """Return the weights that these packed tensors make, for a model that computes in `dtype`, by the names of its parameters.

    `looked_up` is the name of the embedding's. Products of `exact` weights are those of dequantised ones, and so are all on a
    `device` that is not the CPU. One tensor at a time is in the host's memory on its way there.

    Raises CheckpointError if a file cannot be read, or a weight has scales that are no finite numbers.
    """

    def weight(parts: Sequence[TensorEntry], rows: Sequence[Tensor], *, looked_up: bool) -> PackedWeight:
        matrices: list[MatrixProducts] = []
        for entry, packed_OB in zip(parts, rows, strict=True):
            form, inputs = FORMATS[entry.dtype], entry.shape[-1]
            if device.type == "cpu":
                matrices.append(GgmlMatrix(packed_OB, form, inputs, exact=exact, looked_up=looked_up))
            else:
                matrices.append(CardMatrix(packed_OB, form, inputs, dtype, device))
        return PackedWeight(matrices, dtype, device)

    weights: dict[str, PackedWeight | PackedStack] = {}
    kept_bytes = 0
    for name, parts in parts_by_parameter(entries).items():
        rows = [read_packed(part, name) for part in parts]
        if rows[0].ndim == 2:
            weights[name] = weight(parts, rows, looked_up=name == looked_up)
        else:
            stacks = zip(*rows, strict=True)
            weights[name] = PackedStack([weight(parts, matrices, looked_up=False) for matrices in stacks])
        kept_bytes += weights[name].nbytes
        if kept_bytes >= TRIM_BYTES:
            trim_heap()
            kept_bytes = 0
    trim_heap()
    return weights


def held_by(model: nn.Module) -> Iterator[PackedWeight | PackedStack]:
    """Yield each packed weight of a model once."""
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, PackedWeight | PackedStack) and id(value) not in seen:
                seen.add(id(value))
                yield value


def hold(model: Any, packed: Mapping[str, PackedWeight | PackedStack]) -> None:
    """Put packed weights into the places of a model's parameters. Those that are tied to one of these share it.

    Raises CheckpointError if one has another shape than its parameter.
    """
    if stacks := [weight for weight in packed.values() if isinstance(weight, PackedStack)]:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        name, function = stacks[0].implementation
        ALL_EXPERTS_FUNCTIONS.register(name, function)
        model.config._experts_implementation = name
    tied = {target: packed[source] for target, source in model.all_tied_weights_keys.items() if source in packed}
    for name, weight in {**packed, **tied}.items():
        module_name, _, parameter = name.rpartition(".")
        try:
            module = model.get_submodule(module_name)
        except AttributeError:
            continue  # the tied matrix of a span without the embedding
        own = module._parameters.get(parameter)
        if own is not None and own.shape != weight.shape:
            raise CheckpointError(f"{name} has the shape {tuple(weight.shape)}, and the model's is {tuple(own.shape)}")
        if own is not None:
            del module._parameters[parameter]
            setattr(module, parameter, weight)
