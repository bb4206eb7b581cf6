"""Sessions on a card answer as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmnode.codec.sampling import Sampling
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.sampler import sample
from tests.card.conftest import LAYERS

UNITS = LAYERS + 2
CLOSE = {"atol": 1e-4, "rtol": 1e-3}  # float32, whose sums real cards add up in another order
PROMPTS = {"a": 3, "b": 9, "c": 17}


def serve(checkpoint: Checkpoint, device: torch.device) -> list[Tensor]:
    """What sessions of unlike lengths get that come and go, one of two padded rows that are permuted among them."""
    runner = StageRunner(load_span(checkpoint, 0, UNITS, device=device), RunnerConfig(1 << 22, prefill_positions=8))
    generator = torch.Generator().manual_seed(1)
    outputs: list[Tensor] = []

    def ids(rows: int, count: int) -> Tensor:
        return torch.randint(0, 99, (rows, count), generator=generator)

    def run(*works: StepInput) -> None:
        outputs.extend(result.output.cpu() for result in runner.run(works))

    for name, length in PROMPTS.items():
        runner.open(name, rows=1, max_length=60)
        run(StepInput(name, ids(1, length), WANT_NOTHING))
    runner.open("padded", rows=2, max_length=40, padding=(0, 3))
    run(StepInput("padded", ids(2, 9), WANT_ALL))
    for step in range(8):
        present = "abc" if step % 4 else "ac"
        run(*(StepInput(name, ids(1, 1)) for name in present), StepInput("padded", ids(2, 1), reorder=(1, 0)))
        if step == 4:
            runner.truncate("b", 4)
    runner.close("a")
    run(StepInput("b", ids(1, 1)))
    return outputs


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sessions_get_what_they_get_on_the_cpu(
    kind: str, checkpoints: dict[str, Checkpoint], card: torch.device
) -> None:
    for got, wanted in zip(serve(checkpoints[kind], card), serve(checkpoints[kind], torch.device("cpu")), strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_logits_draw_the_same(temperature: float, card: torch.device) -> None:
    logits_BV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * 3
    parameters = Sampling(
        prompt_length=1, max_new_tokens=9, temperature=temperature, top_p=0.9, top_k=0, seed=3, stop_ids=()
    )
    for position in range(20):
        assert torch.equal(sample(logits_BV.to(card), parameters, position), sample(logits_BV, parameters, position))
