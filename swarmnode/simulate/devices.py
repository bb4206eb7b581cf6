"""Devices: how long they compute.

Where Helix measured the card (arXiv 2406.01566), its times of a layer, scaled by the size of ours. Otherwise a roofline
(Williams et al., 2009): a pass takes as long as reading the weights or as the arithmetic, whichever is longer. The shares
of the datasheet's peaks that are reached are the least that Helix's measurements show (A100, V100, L4, T4): 0.4 of the
arithmetic for prompts (0.4 to 0.8) and 0.7 of the memory's bandwidth for decoding (0.66 to 0.83).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import UsageError
from swarmnode.plan.gpus import find_gpu, layer_times
from swarmnode.plan.scenario import Scenario
from swarmnode.simulate.model import WEIGHT_BYTES, Model

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
PASS_S = 0.0005  # of a unit's pass that no card is faster than: a dozen kernels to launch, and Python around them
FLOPS_PER_PARAMETER = 2  # a multiplication and an addition, for each token
BACKWARD = 2.0  # of the forward pass: gradients of the inputs and of the weights
BATCH_SHARE = 0.02  # what one more session costs a device of which only one session's speed is known

Seconds = Callable[[float], float]
"""tokens of a pass -> seconds per layer"""


@dataclass(frozen=True)
class Device:
    """A device as it computes one model. Speeds are for its middle layer; other units count by their work."""

    name: str
    memory_bytes: int
    decode_unit_s: Seconds
    prompt_unit_s: Seconds

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.decode_units_per_s:.0f} units/s, {self.memory_bytes / 1e9:.0f} GB>"

    @property
    def decode_units_per_s(self) -> float:
        """Units of one session's decode steps per second, as nodes measure and announce it."""
        return 1 / self.decode_unit_s(1)

    def decode_s(self, work: float, batch: int) -> float:
        """A pass of one token each of `batch` sessions through `work` layers."""
        return work * self.decode_unit_s(batch)

    def prompt_s(self, work: float, tokens: int) -> float:
        """A pass of a prompt's tokens, or of a microbatch going forward."""
        return work * self.prompt_unit_s(tokens)

    def backward_s(self, work: float, tokens: int) -> float:
        """A microbatch on its way back."""
        return BACKWARD * self.prompt_s(work, tokens)


def device_of(scenario: Scenario, index: int, model: Model) -> Device:
    """One device of a scenario. A speed that the scenario gives counts; else that of its card."""
    memory_bytes = scenario.memory_bytes[index]
    known = find_gpu(scenario.gpus[index])
    measured = layer_times(scenario.gpus[index], model.layer_parameters)
    peak_flops = scenario.peak_flops[index]
    given = scenario.decode_units_per_s[index] if scenario.decode_units_per_s else None
    name = scenario.gpus[index] or f"device {index}"
    memory_bytes = memory_bytes or (known.memory_bytes if known else 16 * 10**9)
    if given is not None:
        return Device(name, memory_bytes, *_of_speed(given))
    if measured is not None:
        ratio = model.layer_parameters / measured.parameters
        return Device(
            name,
            memory_bytes,
            lambda batch: max(PASS_S, ratio * measured.decode_s(batch)),
            lambda tokens: max(PASS_S, ratio * measured.prompt_s(tokens)),
        )
    flops = peak_flops or (known.flops if known else None)
    if flops is None:
        raise UsageError(
            f"the speed of device {index} of scenario {scenario.name} is not known: "
            "give gpu, peak_tflops or decode_units_per_s, or choose a card for all with --gpu"
        )
    bandwidth = known.memory_bytes_per_s if known else flops / 100  # the ratio of the table's consumer cards
    return Device(name, memory_bytes, *_roofline(model, flops, bandwidth))


def _of_speed(units_per_s: float) -> tuple[Seconds, Seconds]:
    """Where only one session's speed is known; a prompt's tokens cost what as many sessions would."""

    def pass_s(tokens: float) -> float:
        return (1 + BATCH_SHARE * (tokens - 1)) / units_per_s

    return pass_s, pass_s


def _roofline(model: Model, flops: float, bytes_per_s: float) -> tuple[Seconds, Seconds]:
    arithmetic_s = FLOPS_PER_PARAMETER * model.layer_parameters / (flops * FLOPS_SHARE)
    reading_s = WEIGHT_BYTES * model.layer_parameters / (bytes_per_s * BANDWIDTH_SHARE)

    def pass_s(tokens: float) -> float:
        return max(PASS_S, reading_s, arithmetic_s * tokens)

    return pass_s, pass_s
