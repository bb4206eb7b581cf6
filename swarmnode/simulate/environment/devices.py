"""Devices: how long they compute.

Where Helix measured the card (arXiv 2406.01566), its times of a layer, scaled by the size of ours. Otherwise a roofline
(Williams et al., 2009): a pass takes as long as reading the weights or as the arithmetic, whichever is longer. The shares
of the datasheet's peaks that are reached are the least that Helix's measurements show (A100, V100, L4, T4): 0.4 of the
arithmetic for prompts (0.4 to 0.8) and 0.7 of the memory's bandwidth for decoding (0.66 to 0.83). A speed that the scenario
gives for a device counts before both, and means what it means for a live node that is told to be that slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swarmnode.compute.throttle import Throttle
from swarmnode.errors import UsageError
from swarmnode.plan.offline.gpus import LayerTimes, find_gpu, layer_times
from swarmnode.plan.offline.scenario import Scenario
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.graph_model import GraphModel
from swarmnode.simulate.environment.model import WEIGHT_BYTES, Model

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
PASS_S = 0.0005  # of a unit's pass that no card is faster than: a dozen kernels to launch, and Python around them
CALL_S = PASS_S / 12  # of an operator, likewise
FLOPS_PER_PARAMETER = 2  # a multiplication and an addition, for each token
FLOPS_PER_BYTE = 100  # of a card that the table does not have: about the ratio of its consumer cards
BACKWARD = 2.0  # of the forward pass: gradients of the inputs and of the weights
DEFAULT_MEMORY_BYTES = 16 * 10**9

Seconds = Callable[[float], float]
"""tokens of a pass -> seconds per layer"""


@dataclass(frozen=True)
class SimulatedDevice:
    """A device as it computes one model. Layers are what is measured; other units count by their parameters, or (`by_units`)
    as much as a layer."""

    name: str
    memory_bytes: int
    decode_layer_s: Seconds
    prompt_layer_s: Seconds
    by_units: bool = False

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self.name}: {self.decode_units_per_s:.0f} units/s, {self.memory_bytes / 1e9:.0f} GB>"

    @property
    def decode_units_per_s(self) -> float:
        """Units of one session's decode steps per second, as nodes measure and announce it."""
        return 1 / self.decode_layer_s(1)

    def layers(self, model: Model, span: Span) -> float:
        """The work of a span, in layers."""
        return span.units if self.by_units else model.layers(span)

    def decode_s(self, layers: float, batch: int) -> float:
        """A pass of one token each of `batch` sessions."""
        return layers * self.decode_layer_s(batch)

    def prompt_s(self, layers: float, tokens: int) -> float:
        """A pass of a prompt's tokens, or of a microbatch going forward."""
        return layers * self.prompt_layer_s(tokens)

    def backward_s(self, layers: float, tokens: int) -> float:
        """A microbatch on its way back."""
        return BACKWARD * self.prompt_s(layers, tokens)


def device_of(scenario: Scenario, index: int, model: Model) -> SimulatedDevice:
    """One device of a scenario. Raises UsageError where nothing tells how fast it is."""
    gpu = scenario.gpus[index]
    known = find_gpu(gpu)
    name = gpu or f"device {index}"
    memory_bytes = scenario.memory_bytes[index] or (known.memory_bytes if known else DEFAULT_MEMORY_BYTES)
    given = scenario.decode_units_per_s[index] if scenario.decode_units_per_s else None
    trained = scenario.training_units_per_s[index] if scenario.training_units_per_s else None
    if given is not None or trained is not None:
        return SimulatedDevice(name, memory_bytes, *_measured(given, trained), True)
    flops = scenario.peak_flops[index]
    if isinstance(model, GraphModel) and (known is not None or flops is not None):
        peaks = (known.flops, known.memory_bytes_per_s) if known else (flops or 0.0, (flops or 0.0) / FLOPS_PER_BYTE)
        return SimulatedDevice(name, memory_bytes, *_graph_roofline(model, *peaks))
    card = known_card(gpu, model.layer_parameters)
    if card is not None:
        return replace(card, name=name, memory_bytes=memory_bytes)
    if flops is None:
        raise UsageError(
            f"how fast device {index} of {scenario.name} is, is not known: its scenario needs gpu, peak_tflops or "
            "decode_units_per_s, or name a card for all such devices with --gpu"
        )
    return SimulatedDevice(name, memory_bytes, *_roofline(model.layer_parameters, flops, flops / FLOPS_PER_BYTE))


def known_card(name: str | None, layer_parameters: int) -> SimulatedDevice | None:
    """A card of the table as it computes layers of this size; None where the table does not have it."""
    known, measured = find_gpu(name), layer_times(name, layer_parameters)
    if known is None:
        return None
    speeds = (
        _roofline(layer_parameters, known.flops, known.memory_bytes_per_s)
        if measured is None
        else _scaled(measured, layer_parameters)
    )
    return SimulatedDevice(known.name, known.memory_bytes, *speeds)


def _measured(decode_units_per_s: float | None, training_units_per_s: float | None) -> tuple[Seconds, Seconds]:
    """As nodes were measured, at least in one of the two; a prompt is the forward part of training."""
    if training_units_per_s is None:
        throttle = Throttle(decode_units_per_s or 0.0)
        return lambda _: throttle.least_s(1, 1), lambda tokens: throttle.least_s(1, int(tokens))
    token_s = 1 / ((1 + BACKWARD) * training_units_per_s)
    step_s = 1 / decode_units_per_s if decode_units_per_s else token_s
    return lambda _: step_s, lambda tokens: tokens * token_s


def _scaled(measured: LayerTimes, layer_parameters: int) -> tuple[Seconds, Seconds]:
    ratio = layer_parameters / measured.parameters
    return (
        lambda batch: max(PASS_S, ratio * measured.decode_s(batch)),
        lambda tokens: max(PASS_S, ratio * measured.prompt_s(tokens)),
    )


def _roofline(layer_parameters: int, flops: float, bytes_per_s: float) -> tuple[Seconds, Seconds]:
    arithmetic_s = FLOPS_PER_PARAMETER * layer_parameters / (flops * FLOPS_SHARE)
    reading_s = WEIGHT_BYTES * layer_parameters / (bytes_per_s * BANDWIDTH_SHARE)

    def pass_s(tokens: float) -> float:
        return max(PASS_S, reading_s, arithmetic_s * tokens)

    return pass_s, pass_s


def _graph_roofline(model: GraphModel, flops: float, bytes_per_s: float) -> tuple[Seconds, Seconds]:
    """Of a graph's middle unit: what its arithmetic takes, what its other operators move, and what it takes to call them."""
    step_s = model.flops / (flops * FLOPS_SHARE) + model.moved_bytes / (bytes_per_s * BANDWIDTH_SHARE)
    step_s += model.calls * CALL_S
    sample_s = step_s / ((1 + BACKWARD) * sum(model.unit_layers) * model.samples)
    return lambda samples: samples * sample_s, lambda samples: samples * sample_s
