"""Estimates of time against measurement: shares of forward and backward time per group of units. Prints JSON.

    python contrib/benchmarks/estimate.py [gpt2] [resnet] [unet]

One thread, without a network. Each group should take equally long; the time of a group is the least of several passes.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from swarmnode.compute.graph.costs.estimate import estimate_units
from swarmnode.compute.graph.costs.rates import Rates, measure_rates
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.partition import balance, partition
from swarmnode.compute.training.saved_activations import accumulate, leaves
from tests.compute.graph.models import UNet, split

GROUPS = 5
TRIALS = 7


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model of the training benchmark (hidden 512, 8 layers) and a batch of 4 samples of 128 tokens."""
    config = GPT2Config(n_embd=512, n_layer=8, n_head=8, n_positions=128, vocab_size=4096, use_cache=False)
    ids = torch.randint(0, 4096, (4, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return ResNet-50 at half width, and a batch of small images."""
    config = ResNetConfig(embedding_size=32, hidden_sizes=[128, 256, 512, 1024], num_labels=10)
    images = torch.randn(8, 3, 128, 128)
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": torch.zeros(8, dtype=torch.int64)}


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the U-Net of the tests, 32 channels wide, and a batch of images of 64 x 64."""
    images = torch.randn(4, 3, 64, 64)
    return UNet(32), {"noisy": images, "clean": images}


MODELS: dict[str, Any] = {"gpt2": gpt2, "resnet": resnet, "unet": unet}


def main() -> None:
    """Print one JSON object for each model that is named, or for all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[*MODELS, []], help=", ".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rates = measure_rates()
    for name in options.models or MODELS:
        print(json.dumps({"model": name, "rates_per_s": dict(rates.per_s), **compare(name, rates)}))


def compare(name: str, rates: Rates) -> dict[str, Any]:
    """Compare predicted and measured seconds of groups of units that should take equally long."""
    module, example = MODELS[name]()
    exported = export_module(module, example)
    graph = partition(exported.graph).graph
    units = estimate_units(graph)
    seconds = [unit.seconds(rates) for unit in units]
    cuts = [0, *balance(seconds, [unit.boundary_bytes for unit in units], GROUPS), graph.units]
    predicted = [sum(seconds[start:end]) for start, end in pairwise(cuts)]
    segment = GraphSegment(graph, exported.weights, 0, graph.units)
    measured = measure(segment, *split(graph, example), cuts)
    errors = [
        (guess / sum(predicted)) / (real / sum(measured)) - 1 for guess, real in zip(predicted, measured, strict=True)
    ]
    return {
        "units": graph.units,
        "cuts": cuts,
        "gflops": round(sum(unit.forward.flops + unit.backward.flops for unit in units) / 1e9, 2),
        "predicted_s": [round(value, 4) for value in predicted],
        "measured_s": [round(value, 4) for value in measured],
        "error_of_shares": [round(error, 3) for error in errors],
        "error_of_total": round(sum(predicted) / sum(measured) - 1, 3),
    }


def measure(
    segment: GraphSegment, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], cuts: list[int]
) -> list[float]:
    """Return the seconds of the fastest of several passes, forward and backward, by group."""
    trials = [one_pass(segment, inputs, labels, cuts) for _ in range(TRIALS)]
    return [min(times) for times in zip(*trials, strict=True)]


def one_pass(
    segment: GraphSegment, values: tuple[Tensor, ...], labels: tuple[Tensor, ...], cuts: list[int]
) -> list[float]:
    """Return the seconds of one pass, forward and backward, by group."""
    groups = []
    seconds = []
    for start, end in pairwise(cuts):
        inputs = leaves(values, start)
        begin = time.perf_counter()
        values = segment.forward(inputs, start, end, 0, labels)
        seconds.append(time.perf_counter() - begin)
        groups.append((inputs, values))
    gradients: Any = (torch.ones(()),)
    for number, (inputs, outputs) in reversed(list(enumerate(groups))):
        begin = time.perf_counter()
        gradients = accumulate(outputs, gradients, inputs)
        seconds[number] += time.perf_counter() - begin
    return seconds


if __name__ == "__main__":
    main()
