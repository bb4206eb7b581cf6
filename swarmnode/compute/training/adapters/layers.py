"""Tensors of an adapter on one span: their names, shapes and starts, and the changes of the span's layers that they make.

Start of an adapter's tensors: a pure function of the recipe's seed, the tensor's name and the base model.

Layers that an adapter changes: the linear layers of a model that a recipe names.

Changes of one layer whose tensors take gradients; those of `compute/model/adapters/span_adapters.py` are for serving.

Weights, gradients and moments of one adapter on one span, each strung together in one vector, and their updates by AdamW.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.model.adapters.adapter_file import PREFIX, units_of_layer
from swarmnode.compute.model.adapters.span_adapters import features_of, row_blocks
from swarmnode.compute.model.assemble import outline
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_recipe import ALL_LINEAR, MOST_FLOAT, PLACELESS, AdapterRecipe
from swarmnode.compute.training.optimizer import update_adamw
from swarmnode.compute.training.randomness import hashed
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.errors import CheckpointError, NotFinite, UsageError
from swarmnode.ledger import Account

VECTORS = ("weight", "exp_avg", "exp_avg_sq")
"""Vectors of an adapter's state. The state's tensors are their parts, named "weight/NAME" and so on."""
STEP = "step"
"""Name of the number of updates (int64) in a state"""
MOST_STEPS = 1 << 53
MOMENTS = 2
"""Numbers that an adapter's updates keep for each weight"""
PIECE_ELEMENTS = 1 << 22
"""Most elements that a piece of work draws, copies or updates: some hundredths of a second on a CPU"""
PIECE_PRODUCTS = 1 << 30
"""Most products of two numbers in a piece of work besides passes: about a tenth of a second on a CPU"""


def portions(groups: Iterable[Sequence[Tensor]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield flat parts of the tensors of each group, which have equal sizes, side by side: at most `PIECE_ELEMENTS` at a time."""
    portion: list[tuple[Tensor, ...]] = []
    room = PIECE_ELEMENTS
    for tensors in groups:
        for parts in zip(*(tensor.reshape(-1).split(PIECE_ELEMENTS) for tensor in tensors), strict=True):
            if len(parts[0]) > room:
                yield portion
                portion, room = [], PIECE_ELEMENTS
            portion.append(parts)
            room -= len(parts[0])
    if portion:
        yield portion


def copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> ByPiece[None]:
    """Copy into the first tensor of each pair the second one."""
    for portion in portions(pairs):
        for into_N, from_N in portion:
            into_N.copy_(from_N)
        yield


class AdapterWeights:
    """Trained tensors of an adapter, by name: float32 views of one vector each of weights, gradients and AdamW's moments.

    `step` is the number of updates. `tensors` are the weights, zero at first, and take gradients; they are written only by their
    start, updates and loads. `unit` is the span's first, for errors. Work on whole vectors goes by piece.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], device: torch.device, *, unit: int) -> None:
        self.step = 0
        self._unit = unit
        self._shapes = {name: torch.Size(shape) for name, shape in sorted(shapes.items())}
        size = sum(shape.numel() for shape in self._shapes.values())
        self._weight_N, self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N = (
            torch.zeros(size, device=device) for _ in range(4)
        )
        self.tensors = self._views(self._weight_N)
        self.gradients = self._views(self._gradient_N)
        for tensor in self.tensors.values():
            tensor.requires_grad_()

    def __repr__(self) -> str:
        return (
            f"AdapterWeights({len(self._shapes)} tensors, {len(self._weight_N) / 1e6:.2f} M weights, step {self.step})"
        )

    def _views(self, vector_N: Tensor) -> dict[str, Tensor]:
        parts = torch.split(vector_N, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    @torch.no_grad()
    def accumulate(self, gradients: Mapping[str, Tensor]) -> ByPiece[None]:
        """Add one microbatch's gradients to the step's sums. Raises NotFinite, adding nothing, if one is NaN or infinite."""
        for portion in portions((gradient,) for gradient in gradients.values()):
            if not is_finite([part for (part,) in portion]):
                raise self._not_finite("holds NaN or infinity")
            yield
        for portion in portions((self.gradients[name], gradient) for name, gradient in gradients.items()):
            for sum_N, part_N in portion:
                sum_N.add_(part_N)
            yield

    def _not_finite(self, what: str) -> NotFinite:
        text = f"the adapter's gradient {what}; lower --lr or --clip, or check the data"
        return NotFinite(text, unit=self._unit)

    def discard(self) -> ByPiece[None]:
        """Set the step's sums of gradients to zero."""
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            part_N.zero_()
            yield

    def gradient_square(self) -> ByPiece[float]:
        """Return the square of the norm of the step's gradient. Raises NotFinite if it is NaN or infinite."""
        norms = []
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            norms.append(torch.linalg.vector_norm(part_N).item())
            yield
        square = math.fsum(norm * norm for norm in norms)
        if not square <= MOST_FLOAT**2:
            raise self._not_finite("is too large for float32")
        return square

    @torch.no_grad()
    def update(
        self, recipe: AdapterRecipe, learning_rate: float, factors: Mapping[str, Tensor], scale: float
    ) -> ByPiece[None]:
        """Update the weights by the step's gradient times `scale`, and set the sums to zero.

        `factors` are matrices (R, R) that the gradients of some matrices (O, R) are multiplied with first.
        """
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            part_N.mul_(scale)
            yield
        for name, factor_RR in factors.items():
            for part_OR in self.gradients[name].split(max(1, PIECE_PRODUCTS // factor_RR.numel())):
                part_OR.copy_(part_OR @ factor_RR)
                yield
        vectors = (self._weight_N, self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N)
        for parts in zip(*(vector_N.split(PIECE_ELEMENTS) for vector_N in vectors), strict=True):
            if len(parts[0]):
                update_adamw(
                    *([part_N] for part_N in parts),
                    step=self.step,
                    learning_rate=learning_rate,
                    betas=recipe.betas,
                    weight_decay=recipe.weight_decay,
                    epsilon=recipe.epsilon_at(self.step),
                )
            parts[1].zero_()
            yield
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        """Return weights, moments and the number of updates, by name: references, not copies."""
        named = zip(VECTORS, (self._weight_N, self._exp_avg_N, self._exp_avg_sq_N), strict=True)
        tensors = {f"{kind}/{name}": view for kind, vector_N in named for name, view in self._views(vector_N).items()}
        return {**tensors, STEP: torch.tensor(self.step)}

    @torch.no_grad()
    def load_gradients(self, gradients: Mapping[str, Tensor]) -> ByPiece[None]:
        """Replace the step's sums of gradients by `gradients`, which have the names of the weights.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        yield from self._check(self.gradients, gradients)
        yield from copied((tensor, gradients[name]) for name, tensor in self.gradients.items())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> ByPiece[None]:
        """Load a state, bit for bit, and forget gradients. Other tensors in `state` are ignored.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        own = self.state()
        yield from self._check(own, state)
        if not 0 <= int(state[STEP]) <= MOST_STEPS:
            raise CheckpointError("the adapter's state has a negative or huge step: it is of another adapter")
        yield from copied((tensor, state[name]) for name, tensor in own.items())
        self.step = int(state[STEP])
        yield from self.discard()

    @staticmethod
    def _check(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> ByPiece[None]:
        for name, tensor in own.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the adapter's state lacks {name[:100]} of shape {tuple(tensor.shape)}: it is of another adapter"
                )
        unseen = 0  # elements since the last piece
        for name in own:
            for part_N in state[name].reshape(-1).split(PIECE_ELEMENTS):
                if not bool(part_N.isfinite().all()):
                    raise CheckpointError(f"the adapter's state holds NaN or infinity in {name[:100]}; go back further")
                unseen += len(part_N)
                if unseen >= PIECE_ELEMENTS:
                    yield
                    unseen = 0


PROMPT = "prompt_embeddings"
"""Name of a soft prompt, as peft saves it"""


def start_of_a(seed: int, layer: str, rank: int, inputs: int) -> Tensor:
    """Return the start of a layer's matrix A, float32_RI: uniform within 1 / sqrt(I), as peft draws it. B starts at zero."""
    a_RI = torch.empty(rank, inputs)
    drain(draw_a(a_RI, seed, layer))
    return a_RI


def draw_a(a_RI: Tensor, seed: int, layer: str) -> ByPiece[None]:
    """Draw the start of a layer's matrix A, on the CPU, and copy it into `a_RI`."""
    bound, generator = 1 / math.sqrt(a_RI.shape[1]), _generator(seed, layer)
    for part_N in a_RI.view(-1).split(PIECE_ELEMENTS):
        part_N.copy_(torch.empty(len(part_N)).uniform_(-bound, bound, generator=generator))
        yield


@torch.no_grad()
def start_of_prompt(seed: int, model: Any, tokens: int, vocabulary: int) -> Tensor:
    """Return the start of a soft prompt, float32_PH: the model's embeddings of random tokens (arXiv 2104.08691)."""
    ids_P = torch.randint(vocabulary, (tokens,), generator=_generator(seed, PROMPT))
    embedding = model.get_input_embeddings()
    embedded_PH: Tensor = embedding(ids_P.to(embedding.weight.device))
    return embedded_PH.float()


def _generator(seed: int, name: str) -> torch.Generator:
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(hashed(seed, word))


Sizes = tuple[int, int]
"""Numbers of inputs and outputs of a linear layer"""

TOLD = 12  # names of layers in an error


def target_layers(model: Any, recipe: AdapterRecipe) -> dict[str, Sizes]:
    """Return the linear layers of `model`, a whole one or a span's, that the adapter changes, by name.

    Methods of `PLACELESS` change none. "all-linear" leaves out the head, as peft does.
    """
    layers = _linear_layers(model)
    if recipe.method in PLACELESS:
        return {}
    if recipe.targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        return {name: sizes for name, sizes in layers.items() if model.get_submodule(name) is not head}
    return {name: sizes for name, sizes in layers.items() if _is_named(name, recipe.targets)}


def linear_layers(family: Family) -> dict[str, bool]:
    """Return the names of a model's linear layers, and whether each is the head. Weights are not needed."""
    model = outline(family, 0, family.units, dtype=torch.float32)
    head = model.get_output_embeddings()
    return {name: model.get_submodule(name) is head for name in _linear_layers(model)}


def check_targets(family: Family, recipe: AdapterRecipe, layers: Mapping[str, bool] | None = None) -> None:
    """Raise UsageError if the model has no linear layer of some name in the recipe. `layers` are its `linear_layers`, if known."""
    if recipe.method in PLACELESS:
        return
    layers = linear_layers(family) if layers is None else layers
    if recipe.targets == ALL_LINEAR and all(layers.values()):
        raise UsageError("the model has no linear layers that an adapter could change; use --method prompt")
    for end in () if recipe.targets == ALL_LINEAR else recipe.targets:
        if not any(_is_named(name, (end,)) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(
                f"the model has no linear layer {end[:64]!r} (experts in one tensor are no linear layers); "
                f"it has {', '.join(known[:TOLD])}{', …' if len(known) > TOLD else ''}"
            )


def _linear_layers(model: Any) -> dict[str, Sizes]:
    found = ((name, features_of(module)) for name, module in model.named_modules())
    return {name: sizes for name, sizes in found if sizes is not None}


def _is_named(layer: str, ends: Collection[str]) -> bool:
    return any(layer == end or layer.endswith(f".{end}") for end in ends)


@dataclass(frozen=True)
class TrainedLora:
    """Low-rank matrices `a_RI` and `b_OR` of one layer, whose product is multiplied by `scale`.

    If `a_RI` takes no gradient (LoRA-FA), autograd keeps the projection of rank R for the way back, and not the layer's inputs.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), with the adapter's product added, in the dtype of `y`."""
        low = functional.linear(x.to(self.a_RI.dtype), self.a_RI) * self.scale
        outputs, rank = self.b_OR.shape
        if y.dtype != self.b_OR.dtype:
            return y + functional.linear(low, self.b_OR).to(y.dtype)
        return torch.addmm(y.reshape(-1, outputs), low.reshape(-1, rank), self.b_OR.t()).view(y.shape)


class TrainedDora:
    """DoRA's matrices and `magnitude_O` of a linear layer: m * (W + s B A) / |W + s B A|, row by row; its bias stays.

    The norm counts as a constant on the way back (arXiv 2402.09353, section 4.3). It must be refreshed before the first pass, and
    after each update.
    """

    def __init__(self, lora: TrainedLora, magnitude_O: Tensor, layer: nn.Module) -> None:
        self.lora, self.magnitude_O = lora, magnitude_O
        self._layer = layer
        self._norm_O = torch.zeros_like(magnitude_O)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), as the adapter changes it, in the dtype of `y`."""
        bias_O: Tensor | None = getattr(self._layer, "bias", None)
        changed = self.lora.add(x, y if bias_O is None else y - bias_O)
        changed = changed * (self.magnitude_O / self._norm_O).to(y.dtype)
        return changed if bias_O is None else changed + bias_O

    def refresh(self) -> None:
        """Compute the norms of the changed matrix's rows anew."""
        drain(self.refresh_by_piece())

    @torch.no_grad()
    def refresh_by_piece(self) -> ByPiece[None]:
        """Do `refresh`. Reads the whole matrix, some rows at a time."""
        a_RI, b_OR, squares_O = self.lora.a_RI, self.lora.b_OR * self.lora.scale, torch.zeros_like(self._norm_O)
        for outputs, inputs, block in row_blocks(self._layer, PIECE_PRODUCTS // (1 + len(a_RI))):
            squares_O[outputs] += torch.addmm(block.float(), b_OR[outputs], a_RI[:, inputs]).square().sum(dim=1)
            yield
        torch.sqrt(squares_O, out=self._norm_O)


TrainedChange = TrainedLora | TrainedDora


A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Ends of the names of a layer's tensors, as peft saves them"""
FLOAT_BYTES = 4
RIDGE = 1e-8
Shapes = dict[str, tuple[int, ...]]


class AdapterLayers:
    """Layers of a span that an adapter changes, and the names and shapes of its tensors there, before anything is allocated.

    Names are those of a folder that peft saves, without its prefix. `trained` take gradients; `frozen` keep their start.
    """

    def __init__(self, span: ModelSpan, recipe: AdapterRecipe) -> None:
        self.span, self.recipe = span, recipe
        found = target_layers(span.model, recipe)
        self.sizes = {layer: sizes for layer, sizes in found.items() if self._is_here(layer)}
        self.trained: Shapes = {}
        self.frozen: Shapes = {}
        for layer, sizes in self.sizes.items():
            trained, frozen = shapes_of(layer, sizes, recipe)
            self.trained |= trained
            self.frozen |= frozen
        if recipe.method == "prompt" and span.has_embedding:
            self.trained[PROMPT] = (recipe.prompt_tokens, span.hidden_size)

    def __repr__(self) -> str:
        return f"AdapterLayers({self.recipe.method}, {len(self.sizes)} layers of {self.span!r})"

    @property
    def elements(self) -> int:
        """Number of trained weights."""
        return sum(math.prod(shape) for shape in self.trained.values())

    @property
    def frozen_elements(self) -> int:
        """Number of the adapter's weights that are not trained."""
        return sum(math.prod(shape) for shape in self.frozen.values())

    def memory_bytes(self) -> dict[Account, int]:
        """Return the bytes that the adapter takes until it is closed, by account."""
        trained_bytes = FLOAT_BYTES * self.elements
        corrections_bytes = FLOAT_BYTES * len(self.frozen) * self.recipe.rank**2
        return {
            Account.ADAPTERS: trained_bytes + FLOAT_BYTES * self.frozen_elements + corrections_bytes,
            Account.GRADIENTS: trained_bytes,
            Account.OPTIMIZER: MOMENTS * trained_bytes,
        }

    def names_in(self, start: int, end: int) -> list[str]:
        """Return the names of the trained tensors in units [start, end)."""
        return [name for name in self.trained if start <= self._unit(name) < end]

    def _is_here(self, layer: str) -> bool:
        """Return whether a layer is one of the span's units: its model may hold more than a narrowed span."""
        return self.span.start <= units_of_layer(self.span.family, layer)[0] < self.span.end

    def _unit(self, name: str) -> int:
        if name == PROMPT:
            return 0
        return units_of_layer(self.span.family, layer_of(name))[0]

    def starts(self) -> dict[str, Tensor]:
        """Return the values of all tensors before the first step, trained and frozen, in float32 on the CPU."""
        found = {name: torch.zeros(shape) for name, shape in {**self.trained, **self.frozen}.items()}
        drain(self.start_by_piece(found))
        return found

    @torch.no_grad()
    def start_by_piece(self, tensors: Mapping[str, Tensor]) -> ByPiece[None]:
        """Set tensors, which are zero, to their values before the first step.

        A is drawn, B is zero, DoRA's magnitudes are the norms of the layer's rows, and a prompt is drawn from the embeddings.
        """
        for layer in self.sizes:
            yield from draw_a(tensors[f"{layer}.{A}"], self.recipe.seed, layer)
            if self.recipe.method == "dora":
                magnitude_O = tensors[f"{layer}.{MAGNITUDE}"]
                for outputs, _, block in row_blocks(self.span.model.get_submodule(layer), PIECE_ELEMENTS):
                    magnitude_O[outputs] += block.float().square().sum(dim=1).to(magnitude_O.device)
                    yield
                magnitude_O.sqrt_()
        if PROMPT in self.trained:
            count = self.recipe.prompt_tokens
            tensors[PROMPT].copy_(start_of_prompt(self.recipe.seed, self.span.model, count, self.span.vocab_size))
            yield

    def corrections(self, frozen: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield matrices (R, R) that the gradients of B are multiplied with, and the tensors' names, if A is frozen.

        The corrected gradient is the B whose product with A comes closest to the layer's own gradient:
        (1 / scale^2) (A A^T + 1e-8 I)^-1, as peft's `create_lorafa_optimizer` has it.
        """
        for name, a_RI in frozen.items():
            square_RR = a_RI @ a_RI.t() + RIDGE * torch.eye(len(a_RI), device=a_RI.device)
            yield f"{layer_of(name)}.{B}", torch.linalg.pinv(square_RR, hermitian=True) / self.recipe.scale**2

    def changes(self, tensors: Mapping[str, Tensor]) -> dict[str, TrainedChange]:
        """Return the changes of the span's layers by these tensors, by layer. DoRA's norms are not computed yet."""
        return {layer: self._change(layer, tensors) for layer in self.sizes}

    def _change(self, layer: str, tensors: Mapping[str, Tensor]) -> TrainedChange:
        lora = TrainedLora(tensors[f"{layer}.{A}"], tensors[f"{layer}.{B}"], self.recipe.scale)
        if self.recipe.method != "dora":
            return lora
        return TrainedDora(lora, tensors[f"{layer}.{MAGNITUDE}"], self.span.model.get_submodule(layer))


def shapes_of(layer: str, sizes: Sizes, recipe: AdapterRecipe) -> tuple[Shapes, Shapes]:
    """Return the names and shapes of a layer's tensors: those that take gradients, and those that keep their start."""
    inputs, outputs = sizes
    a_shape: Shapes = {f"{layer}.{A}": (recipe.rank, inputs)}
    trained: Shapes = {f"{layer}.{B}": (outputs, recipe.rank)}
    if recipe.method == "lora-fa":
        return trained, a_shape
    magnitude: Shapes = {f"{layer}.{MAGNITUDE}": (outputs,)} if recipe.method == "dora" else {}
    return {**a_shape, **trained, **magnitude}, {}


def file_name(name: str) -> str:
    """Return the name of a tensor in a folder that peft saves."""
    return name if name == PROMPT else f"{PREFIX}{name}"


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to, by the tensor's name."""
    return next((name.removesuffix(f".{end}") for end in (A, B, MAGNITUDE) if name.endswith(f".{end}")), "")
