"""What this machine holds and computes: layers that fit into its memory, and the speed of layers.

The number of layers is exact from the checkpoint's headers, before anything is loaded. The speed is measured on the loaded
layers in less than half a second.

Speed of each module of a transformer layer on a device, as arXiv 2311.03687 breaks layers down: by itself, in plain torch.

The weights are made up and nothing is loaded, so that a host can tell a card's worth before it holds any model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.device import Device
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.quantize import quantize_layers
from swarmnode.compute.packing.tensor_entry import TensorEntry
from swarmnode.compute.serving.runner import WANT_LAST, WANT_NOTHING, StageRunner, StepInput
from swarmnode.compute.stopwatch import Clock, best_s
from swarmnode.compute.training.lm import SpanSegment
from swarmnode.compute.training.optimizer import FLOAT_BYTES, memory_bytes
from swarmnode.config import PLAIN
from swarmnode.counting import format_bytes
from swarmnode.swarm.records.run import Run

# Bytes per weight of a quantised matrix, block scales included (int8 by rows; NF4 by blocks of 64 with double quantisation,
# arXiv 2305.14314 section 3). Other tensors keep their dtype.
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + 0.127 / 8}
TRAINING_BYTES = 16  # per parameter
STATE_BYTES = 12  # of these, needed by another holder: all but gradients
BUFFER_BYTES = 64 << 20  # for activations, the allocator, journals and messages
BUFFER_SHARE = 0.05


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of each layer of a model: of its weights, and of the cache of one token of one row
    (`Family.planned_bytes_per_token`)."""

    weight_bytes: tuple[int, ...]
    cache_bytes_per_token: tuple[int, ...]

    def need_bytes(self, start: int, end: int, cache_tokens: int) -> int:
        """Return the memory for layers [start, end) with a cache of `cache_tokens` (rows x positions)."""
        return sum(self.weight_bytes[start:end]) + cache_tokens * sum(self.cache_bytes_per_token[start:end])


def unit_sizes(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    quantize: str = "none",
    keeps_packed: bool = False,
    kv: str = PLAIN,
) -> UnitSizes:
    """Return the sizes as loaded: tensors in `dtype`, the layers' matrices quantised if asked (but fused experts are not), packed
    tensors as they are if `keeps_packed`, and the KV cache in the form `kv`.

    A tied matrix counts in both ends.
    """
    family = checkpoint.family
    weights = [0.0] * family.units
    for name, entry in checkpoint.entries.items():
        for unit in family.units_of_tensor(name):
            is_matrix = 1 <= unit <= family.layer_count and len(entry.shape) == 2 and ".experts." not in name
            width = QUANTIZED_BYTES[quantize] if is_matrix and quantize in QUANTIZED_BYTES else dtype.itemsize
            weights[unit] += entry.packed_bytes if keeps_packed and entry.is_packed else entry.elements * width
    cache = (family.planned_bytes_per_token(unit, dtype.itemsize, kv) for unit in range(family.units))
    return UnitSizes(tuple(int(size) for size in weights), tuple(cache))


def graph_sizes(checkpoint: Checkpoint) -> UnitSizes:
    """Return the sizes of a served graph's layers, which cache nothing between passes. A shared tensor counts in each layer."""
    return _uncached_sizes(checkpoint, lambda entries: sum(entry.nbytes for entry in entries.values()))


def training_sizes(checkpoint: Checkpoint) -> UnitSizes:
    """Return the sizes for training: parameters, gradients and AdamW's two moments, all in float32.

    A tied matrix counts in both ends.
    """
    return _uncached_sizes(
        checkpoint, lambda entries: TRAINING_BYTES * sum(entry.elements for entry in entries.values())
    )


def run_sizes(checkpoint: Checkpoint, run: Run) -> UnitSizes:
    """Return the sizes for a training run: parameters, gradients and the memory of its optimiser, without activations.

    A tied matrix counts in both ends.
    """

    def unit_bytes(entries: Mapping[str, TensorEntry]) -> int:
        shapes = {name: entry.shape for name, entry in entries.items()}
        tensors = {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
        elements = sum(tensor.numel() for tensor in tensors.values())
        return 2 * FLOAT_BYTES * elements + int(memory_bytes(run, tensors))

    return _uncached_sizes(checkpoint, unit_bytes)


def _uncached_sizes(checkpoint: Checkpoint, bytes_of: Callable[[Mapping[str, TensorEntry]], int]) -> UnitSizes:
    """Return the sizes of units that cache nothing, by the tensors that each needs."""
    units = (checkpoint.tensors_of(unit, unit + 1) for unit in range(checkpoint.units))
    weights = tuple(bytes_of({name: checkpoint.entries[name] for name in names}) for names in units)
    return UnitSizes(weights, (0,) * len(weights))


def units_that_fit(sizes: UnitSizes, limit_bytes: int, cache_tokens: int, *, start: int = 1) -> int:
    """Return the most layers from `start` on that fit into `limit_bytes`, with `reserve_bytes` left free for passes."""
    room_bytes = usable_bytes(limit_bytes)
    count = 0
    while start + count < len(sizes.weight_bytes) and (
        sizes.need_bytes(start, start + count + 1, cache_tokens) <= room_bytes
    ):
        count += 1
    return count


def most_anywhere(sizes: UnitSizes, limit_bytes: int, cache_tokens: int) -> int:
    """Return the most layers that fit wherever in the model their span lies; 0 if not even one layer fits everywhere."""
    units = len(sizes.weight_bytes)
    fits = [units_that_fit(sizes, limit_bytes, cache_tokens, start=start) for start in range(units)]
    return next(
        (count for count in range(units, 0, -1) if all(fits[start] >= count for start in range(units - count + 1))), 0
    )


def reserve_bytes(limit_bytes: int) -> int:
    """Return the part of a memory limit that is kept for running passes, journals and messages."""
    return min(limit_bytes, max(BUFFER_BYTES, int(limit_bytes * BUFFER_SHARE)))


def usable_bytes(limit_bytes: int) -> int:
    """Return the part of a memory limit that weights and caches may take."""
    return limit_bytes - reserve_bytes(limit_bytes)


def limit_bytes_for(need_bytes: int) -> int:
    """Return the memory limit whose `usable_bytes` are about `need_bytes`, and no less."""
    return max(need_bytes + BUFFER_BYTES, int(need_bytes / (1 - BUFFER_SHARE)) + 1)


def cache_tokens_that_fit(sizes: UnitSizes, limit_bytes: int, start: int, end: int) -> int:
    """Return the cache positions (rows x positions) that fit beside layers [start, end).

    0 if there is no room, or these layers cache nothing.
    """
    per_token = sum(sizes.cache_bytes_per_token[start:end])
    left_bytes = usable_bytes(limit_bytes) - sum(sizes.weight_bytes[start:end])
    return max(0, left_bytes) // per_token if per_token else 0


def describe_fit(sizes: UnitSizes, start: int, end: int, cache_tokens: int) -> str:
    """Describe the fit, as in "12 of 34 layers: 5.1 GB of weights, and 1.2 GB for texts of 8,192 tokens in all"."""
    weights = sum(sizes.weight_bytes[start:end])
    cache = cache_tokens * sum(sizes.cache_bytes_per_token[start:end])
    text = f"{end - start} of {len(sizes.weight_bytes)} layers: {format_bytes(weights)} of weights"
    return f"{text}, and {format_bytes(cache)} for texts of {cache_tokens:,} tokens in all" if cache else text


PROBE_SESSION = -1
FEW_UNITS = 4
PREFILL_POSITIONS = 64
TRAINING_POSITIONS = 32


@dataclass(frozen=True)
class Speeds:
    """Speeds in positions through one layer per second: singly, inside a prompt, forward and backward, and in steps of two
    positions, as guesses make them. 0: not measured."""

    decode_units_per_s: float = 0.0
    prefill_units_per_s: float = 0.0
    training_units_per_s: float = 0.0
    pair_units_per_s: float = 0.0


def measure_serving(runner: StageRunner, *, few: bool = False, clock: Clock = time.perf_counter) -> Speeds:
    """Measure decode steps, steps of two positions and prompt chunks in a session of its own, closed at the end. No other session
    may run meanwhile.

    `few` measures only some layers in the middle and assumes that all take as long, for a result that will not hold for long.
    """
    start, end = runner.span.start, runner.span.end
    runner_units = end - start
    if few and end - start > FEW_UNITS:
        start = (start + end - FEW_UNITS) // 2
        end = start + FEW_UNITS
    units = end - start
    positions = min(PREFILL_POSITIONS, _context(runner.span))

    def time_s(count: int, want: int) -> float:
        x, missed = _inputs(runner.span, start, count), list[int]()

        def run() -> None:
            before = runner.span.missed_experts
            runner.run([StepInput(PROBE_SESSION, x, want=want)])
            runner.truncate(PROBE_SESSION, 0)  # room for the next pass: some models have few positions
            missed.append(runner.span.missed_experts - before)

        taken_s = best_s(run, runner.span.device, clock)
        # The same positions again and again find more of their experts than a text does, and the shortest pass most.
        return taken_s + runner.span.expected_wait_s(count, min(missed), units / runner_units, clock)

    runner.open(PROBE_SESSION, rows=1, max_length=positions, start=start, end=end)
    try:
        step_s = time_s(1, WANT_LAST)
        pair_s = time_s(2, WANT_LAST) if positions > 1 else 0.0
        chunk_s = time_s(positions, WANT_NOTHING)
    finally:
        runner.close(PROBE_SESSION)
    pair_units_per_s = 2 * units / pair_s if positions > 1 else 0.0
    return Speeds(units / step_s, units * positions / chunk_s, pair_units_per_s=pair_units_per_s)


def measure_training(segment: SpanSegment, *, clock: Clock = time.perf_counter) -> Speeds:
    """Measure forward and backward passes of a short microbatch. No parameter, gradient or random state changes."""
    parameters = [parameter for block in segment.parameters().values() for parameter in block.values()]
    positions = min(TRAINING_POSITIONS, _context(segment.span))
    made = segment.dummies(segment.start, 1, positions)
    values, labels = (tuple(value.to(segment.device) for value in each) for each in made)
    if segment.start:
        values[0].requires_grad_()

    def there_and_back() -> None:
        with torch.random.fork_rng(devices=_cards(segment.device)):
            output = segment.forward(values, segment.start, segment.end, 0, labels)[0]
        torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)

    pass_s = best_s(there_and_back, segment.device, clock)
    return Speeds(training_units_per_s=(segment.end - segment.start) * positions / pass_s)


def _cards(device: torch.device) -> list[torch.device]:
    """Return the device if it is a card with its own random generator, else none."""
    return [device] if device.type == "cuda" else []


def _context(span: ModelSpan) -> int:
    """Return the number of positions that the model was made for, or a default if its config names none."""
    return getattr(span.model.config, "max_position_embeddings", None) or PREFILL_POSITIONS


def _inputs(span: ModelSpan, unit: int, positions: int) -> Tensor:
    """Return a zero input of `unit`: ids for layer 0, else hidden states."""
    if unit == 0:
        return torch.zeros((1, positions), dtype=torch.int64)
    return torch.zeros((1, positions, span.width), dtype=span.dtype)


Module = Callable[..., Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Shape of a layer with grouped-query attention and a gated feed-forward network, in elements.

    The defaults are Llama 2 7B's.
    """

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    head_size: int = 128
    feed_forward: int = 11_008

    @classmethod
    def of_config(cls, config: Any) -> LayerShape:
        """Return the layer shape of a transformers config."""
        heads = int(config.num_attention_heads)
        return cls(
            hidden=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            feed_forward=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        )

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def parameters(self) -> int:
        """Number of elements of the layer's matrices."""
        return self.hidden * (self.qkv + self.heads * self.head_size + 3 * self.feed_forward)


@dataclass(frozen=True)
class ModelShape:
    """Shape of a language model: `layers` equal layers between an embedding and a head, both of `vocabulary` rows."""

    name: str
    layers: int
    layer: LayerShape
    vocabulary: int

    @classmethod
    def of_config(cls, name: str, config: Any) -> ModelShape:
        """Return the shape in a transformers config."""
        return cls(name, int(config.num_hidden_layers), LayerShape.of_config(config), int(config.vocab_size))

    @property
    def head_parameters(self) -> int:
        """Number of elements of the head; the embedding has as many."""
        return self.vocabulary * self.layer.hidden

    def sizes(self, itemsize: int, quantize: str) -> UnitSizes:
        """Return the sizes of the units in elements of `itemsize` bytes, with the layers' matrices quantised if asked."""
        layer_bytes = int(self.layer.parameters * QUANTIZED_BYTES.get(quantize, itemsize))
        end_bytes, cache_bytes = (
            self.head_parameters * itemsize,
            2 * self.layer.kv_heads * self.layer.head_size * itemsize,
        )
        return UnitSizes((end_bytes, *[layer_bytes] * self.layers, end_bytes), (0, *[cache_bytes] * self.layers, 0))


LLAMA_8B = ModelShape("Llama 3 8B", 32, LayerShape(4096, 32, 8, 128, 14_336), 128_256)
KNOWN_MODELS = (
    ModelShape("Llama 3.2 1B", 16, LayerShape(2048, 32, 8, 64, 8192), 128_256),
    LLAMA_8B,
    ModelShape("Qwen3 32B", 64, LayerShape(5120, 64, 8, 128, 25_600), 151_936),
    ModelShape("Llama 3 70B", 80, LayerShape(8192, 64, 8, 128, 28_672), 128_256),
)
"""Shapes from the models' published configs."""


@dataclass(frozen=True)
class ModuleSpeed:
    """Seconds of one pass of a module: of a single position, of a prompt chunk, and of a chunk forward and backward."""

    name: str
    decode_s: float
    prompt_s: float
    training_s: float


@dataclass(frozen=True)
class _Part:
    """A module of the layer: a function of `inputs(positions)` and of weights of these shapes."""

    name: str
    run: Module
    inputs: Callable[[int], Sequence[tuple[int, ...]]]
    weights: Sequence[tuple[int, ...]] = ()


def measure_modules(
    device: Device,
    dtype: torch.dtype,
    shape: LayerShape = LayerShape(),
    *,
    positions: int = 64,
    context: int = 512,
    clock: Clock = time.perf_counter,
) -> Iterator[ModuleSpeed]:
    """Measure each module by itself: one position after `context` others, then chunks of `positions`. Takes some seconds in all."""
    for part in _parts(shape, context):
        weights = [_drawn(size, device, dtype) for size in part.weights]
        one, many = ([_drawn(size, device, dtype) for size in part.inputs(count)] for count in (1, positions))
        with torch.inference_mode():
            decode_s, prompt_s = (_pass_s(part.run, inputs, weights, device, clock) for inputs in (one, many))
        learnt = [value.detach().requires_grad_() for value in (*many, *weights)]

        def there_and_back(run: Module = part.run, learnt: Sequence[Tensor] = learnt) -> None:
            torch.autograd.grad(run(*learnt).float().sum(), learnt)

        yield ModuleSpeed(part.name, decode_s, prompt_s, best_s(there_and_back, device.torch_device, clock))


def measure_product_s(
    device: Device, dtype: torch.dtype, width: int, quantize: str, clock: Clock = time.perf_counter
) -> float:
    """Measure the seconds per element of the product of one position with a square matrix of `width`, quantised as nodes do it.
    Raises LocalError if this device cannot compute in that format."""
    product = nn.Linear(width, width, bias=False, dtype=dtype, device=device.torch_device)
    nn.init.constant_(product.weight, 0.01)
    matrix = nn.Sequential(product)
    if quantize != "none":
        quantize_layers(matrix, quantize, device.torch_device)
    with torch.inference_mode():
        return _pass_s(matrix, [_drawn((1, 1, width), device, dtype)], [], device, clock) / width**2


def whole_layer(modules: Sequence[ModuleSpeed]) -> ModuleSpeed:
    """Return the sums of all modules' seconds: the time of a whole layer."""
    sums = (sum(getattr(one, field) for one in modules) for field in ("decode_s", "prompt_s", "training_s"))
    return ModuleSpeed("layer", *sums)


def _parts(shape: LayerShape, context: int) -> tuple[_Part, ...]:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size

    def attention_inputs(count: int) -> Sequence[tuple[int, ...]]:
        keys = context + 1 if count == 1 else count
        return (1, heads, count, size), (1, kv_heads, keys, size), (1, kv_heads, keys, size)

    def hidden(count: int) -> Sequence[tuple[int, ...]]:
        return ((1, count, shape.hidden),)

    attended = heads * size
    return (
        _Part("normalise (twice)", _normalise, hidden, [(shape.hidden,)] * 2),
        _Part("queries, keys, values", functional.linear, hidden, [(shape.qkv, shape.hidden)]),
        _Part("attend", _attend, attention_inputs),
        _Part("attention's output", functional.linear, lambda count: ((1, count, attended),), [(shape.hidden, attended)]),
        _Part(
            "feed forward", _feed_forward, hidden,
            [(shape.feed_forward, shape.hidden)] * 2 + [(shape.hidden, shape.feed_forward)],
        ),
    )  # fmt: skip


def _normalise(hidden_BTH: Tensor, first_H: Tensor, second_H: Tensor) -> Tensor:
    width = hidden_BTH.shape[-1:]
    return functional.rms_norm(functional.rms_norm(hidden_BTH, width, first_H), width, second_H)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend, with tensors of (rows, heads, positions, head size). Keys and values are repeated for their group of heads."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=queries.shape[2] > 1)


def _feed_forward(hidden_BTH: Tensor, gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor) -> Tensor:
    gated = functional.silu(functional.linear(hidden_BTH, gate_FH)) * functional.linear(hidden_BTH, up_FH)
    return functional.linear(gated, down_HF)


def _drawn(size: tuple[int, ...], device: Device, dtype: torch.dtype) -> Tensor:
    return torch.full(size, 0.01, dtype=dtype, device=device.torch_device)


def _pass_s(run: Module, inputs: Sequence[Tensor], weights: Sequence[Tensor], device: Device, clock: Clock) -> float:
    return best_s(lambda: run(*inputs, *weights), device.torch_device, clock)
