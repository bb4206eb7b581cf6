"""Training on a card is training on the CPU, to the last bits of float32; codecs make the very same bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
from swarmnode.compute.training.datasets.batches import Microbatch
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.optimizer import Optimizer
from swarmnode.swarm.records.run import Averaging, Run
from tests.card.conftest import LAYERS
from tests.card.simulated import LOADED
from tests.card.tables import SAMPLES, batch_of_tables
from tests.compute.graph.models import split
from tests.compute.training.averaging.together import agree

UNITS = LAYERS + 2
CPU = torch.device("cpu")
CLOSE = {"atol": 2e-4, "rtol": 1e-3}


def train(learners: list[Learner], batches: list[Microbatch], steps: int) -> list[Tensor]:
    """What comes out of each stage, and all that the stages hold in the end."""
    outputs: list[Tensor] = []
    for _ in range(steps):
        for index, batch in enumerate(batches):
            values, labels = batch
            for learner in learners:
                values = learner.forward(index, index, learner.segment.start, learner.segment.end, values, labels)
                outputs.append(values[0].detach().cpu())
            gradients: tuple[Tensor | None, ...] = ()
            for learner in reversed(learners):
                gradients = learner.backward(index, gradients)
        norm = math.sqrt(sum(learner.squared_norm([b for b in learner.blocks if b >= 0]) for learner in learners))
        for learner in learners:
            learner.commit({}, norm)
    held = (learner.state(block) for learner in learners for block in learner.blocks)
    return outputs + [tensor.detach().float().cpu() for tensors in held for tensor in tensors.values()]


@pytest.mark.parametrize(("kind", "recompute"), [("llama", False), ("gpt2", True)])
def test_language_models(kind: str, recompute: bool, card: torch.device, checkpoints: dict[str, Checkpoint]) -> None:
    run = Run(
        data=bytes(32),
        steps=6,
        batch=4,
        microbatch=2,
        sequence=12,
        learning_rate=1e-2,
        warmup_steps=1,
        clip=0.5,
        seed=7,
    )
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(0, 99, (2, 12), generator=generator),) for _ in range(2)]
    batches = [Microbatch(ids, ids) for ids in rows]

    def on(device: torch.device) -> list[Tensor]:
        segments = [load_segment(checkpoints[kind], *cut, device=device) for cut in ((0, 2), (2, UNITS))]
        return train([Learner(segment, run, recompute=recompute) for segment in segments], batches, steps=2)

    for got, wanted in zip(on(card), on(CPU), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("recompute", [False, True])
def test_float16_where_a_card_has_nothing_else(
    recompute: bool, cards: Any, card: torch.device, checkpoints: dict[str, Checkpoint]
) -> None:
    """As on Turing: what is learned is float32's but for float16's rounding, though gradients are smaller than it knows."""
    cards.majors = [7, 7]
    run = Run(data=bytes(32), steps=6, batch=4, microbatch=2, sequence=12, seed=7, autocast=True)
    hidden_BTH = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))

    def on(device: torch.device) -> tuple[Tensor, Tensor]:
        learner = Learner(load_segment(checkpoints["llama"], 1, LAYERS + 1, device=device), run, recompute=recompute)
        (output_BTH,) = learner.forward(0, 0, 1, LAYERS + 1, (hidden_BTH.to(device),))
        (gradient_BTH,) = learner.backward(0, (1e-9 * output_BTH.float(),))
        assert gradient_BTH is not None and gradient_BTH.dtype is torch.float32
        return gradient_BTH.cpu(), learner.gradient(learner.blocks).copy().cpu()

    for got, wanted in zip(on(card), on(CPU), strict=True):
        assert 0 < float((got - wanted).norm() / wanted.norm()) < 1e-2


def test_graphs(cards: Any, card: torch.device, tables: Exported) -> None:
    """With dropout, which a simulated card draws as the CPU does."""
    settings: dict[str, Any] = {"clip": 0.0, "optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.5}
    run = Run(data=bytes(32), steps=4, batch=SAMPLES, microbatch=SAMPLES, **settings)

    def on(device: torch.device) -> list[Tensor]:
        graph = partition(tables.graph).graph
        weights = {name: weight.clone() for name, weight in tables.weights.items()}
        segment = GraphSegment(graph, weights, 0, graph.units, device=device)
        return train([Learner(segment, run)], [split(graph, batch_of_tables())], steps=2)

    for got, wanted in zip(on(card), on(CPU), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("averaging", [{"codec": 0}, {"codec": 3}, {"codec": 5, "keep": 0.05}, {"codec": 0, "rank": 2}])
def test_replicas_agree_on_the_same_sums(averaging: dict[str, Any], card: torch.device) -> None:
    shapes = [torch.Size((40, 30)), torch.Size((30,)), torch.Size((30, 64))]
    size = sum(shape.numel() for shape in shapes)

    def on(device: torch.device) -> Tensor:
        compressors = [make_gradient_compressor(Averaging(**averaging), shapes) for _ in range(2)]
        for seed in range(2):
            own = [torch.randn(size, generator=torch.Generator().manual_seed(9 * seed + one)) / 2 for one in range(2)]
            sums, _ = agree(compressors, [gradient.to(device) for gradient in own], [0.5, 0.5])
            for compressor in compressors:
                compressor.accept()
        return sums[0].cpu()

    torch.testing.assert_close(on(card), on(CPU), **CLOSE)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_payloads_are_those_of_the_cpu(codec: Codec, dtype: torch.dtype, card: torch.device) -> None:
    for count in (1, 100, 5000, 200_000):
        x_N = torch.randn(count, generator=torch.Generator().manual_seed(count))
        x_N[::77] *= 30
        x_N = x_N.to(dtype)
        info, payload = encode(x_N.to(card), codec, param=count // 30 + 1 if codec == Codec.TOPK else 0)
        wanted_info, wanted = encode(x_N, codec, param=count // 30 + 1 if codec == Codec.TOPK else 0)
        assert info == wanted_info
        assert not LOADED or bytes(payload) == bytes(wanted)  # a real card breaks ties and rounds sums in its own way
        decoded, own = decode(info, bytes(payload), device=card).cpu(), decode(info, bytes(payload))
        torch.testing.assert_close(decoded, own, rtol=0.0 if LOADED else 1e-6, atol=0.0 if LOADED else 1e-6)
        lost, usual = (
            (values.float() - x_N.float()).norm() for values in (decoded, decode(wanted_info, bytes(wanted)))
        )
        assert lost <= 1.001 * usual, "its payloads are as good as the CPU's"


def test_moments_of_8_bits_are_the_cpus(card: torch.device) -> None:
    def on(device: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(70, 100, generator=generator).to(device))
        run = Run(data=bytes(32), steps=4, batch=1, microbatch=1, optimizer="adamw8bit")
        optimizer = Optimizer({"weight": parameter}, run)
        for step in range(run.steps):
            parameter.grad = torch.randn(70, 100, generator=generator).to(device)
            optimizer.update(step)
        return [parameter.detach().cpu(), *(named["weight"].cpu() for named in optimizer.slots.values())]

    for got, wanted in zip(on(card), on(CPU), strict=True):
        if LOADED:
            assert torch.equal(got, wanted)
        else:  # a real card rounds once where a CPU rounds twice (multiply and add), so that a code may be the next one
            apart = (got.float() - wanted.float()).abs()
            steps = 1.0 if got.dtype is torch.uint8 else 1e-5 * float(wanted.float().abs().max())
            assert float(apart.max()) <= steps and float((apart > 0).float().mean()) < (0.01 if steps == 1.0 else 1.0)
