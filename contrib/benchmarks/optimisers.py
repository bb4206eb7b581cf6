"""Comparison of optimisers: those of swarms beside those that they should beat, by the learners that swarms train with.

Prints JSON with ratios. All numbers are of this machine and of the sizes that are printed. The first argument is a part:

    python contrib/benchmarks/optimisers.py packages

`packages` needs schedulefree and lion-pytorch, and prints the differences to them.

    python contrib/benchmarks/optimisers.py eva [--steps 120] [--norm batch|group] [--seeds 3]

`eva` needs scikit-learn. It trains a small ResNet on scikit-learn's digits, and compares the loss of all images with that of SGD
with momentum.

    python contrib/benchmarks/optimisers.py muon [--tokens 1000000] [--hidden 320] [--layers 8] [--seeds 3]

`muon` trains a byte-level Llama on the standard library's sources, and compares the loss of held-out windows with AdamW's.

In both, the two optimisers train over one grid of learning rates. The goal is the lowest last loss of SGD or AdamW. Then the other
optimiser trains with shorter and shorter schedules, at the rates that still reach the goal. `steps_ratio` is the shortest share of
the steps that reached it; it is null if all steps were not enough. `time_ratio` is that share times the ratio of the CPU seconds
of a step.

    python contrib/benchmarks/optimisers.py muloco [--steps 400] [--every 50] [--seeds 3]

`muloco` trains four replicas that average every 50 steps: with AdamW in float32, and with Muon in two bits. It prints the held-out
loss of their mean and the bytes that a replica sends.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import batches, read_corpus
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))  # replicas in one process belong to the tests

from swarmnode.codec.tensors import Codec
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.optimizer import Optimizer
from swarmnode.compute.training.segment import Segment, Shares, Values
from swarmnode.swarm.records.run import Averaging, Run
from tests.compute.training.averaging.together import agree

CLASSES, VOCABULARY = 10, 256
IMAGES = 128  # of a batch
EVA: dict[str, Any] = {"optimizer": "eva", "clip": 1e-3, "epsilon": 0.03, "betas": (0.9, 0.05)}
SGD: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0}
MUON: dict[str, Any] = {"optimizer": "muon", "momentum": 0.95}
EVA_RATES, RATES = (0.01, 0.03, 0.1, 0.3), (1e-3, 3e-3, 1e-2, 3e-2)
SEQUENCE, SAMPLES, WINDOWS = 64, 8, 256
REPLICAS = 4
Normalize = Callable[[int], nn.Module]
NORMS: dict[str, Normalize] = {"batch": nn.BatchNorm2d, "group": functools.partial(nn.GroupNorm, 4)}


class Residual(nn.Module):
    """Residual block of two convolutions, each with a norm."""

    def __init__(self, width: int, normalize: Normalize) -> None:
        super().__init__()
        layers = [[nn.Conv2d(width, width, 3, padding=1), normalize(width)] for _ in range(2)]
        self.path = nn.Sequential(*layers[0], nn.ReLU(), *layers[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input."""
        return functional.relu(x + self.path(x))


class Digits(Segment):
    """ResNet for images of 8 x 8 in one layer."""

    start, end, units = 0, 1, 1

    def __init__(self, seed: int, normalize: Normalize, width: int = 16) -> None:
        torch.manual_seed(seed)
        self.device = torch.device("cpu")
        stem = [nn.Conv2d(1, width, 3, padding=1), normalize(width), nn.ReLU()]
        first, *others = (Residual(width, normalize) for _ in range(3))
        blocks = [first, nn.AvgPool2d(2), *others]
        self.net = nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        ).train()

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the parameters of the one layer."""
        return {0: dict(self.net.named_parameters())}

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the running statistics of the one layer."""
        return {0: dict(self.net.named_buffers())}

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Return the mean loss."""
        return (functional.cross_entropy(self.net(values[0]), labels[0]),)


def run_of(steps: int, **settings: Any) -> Run:
    """Return a run of one microbatch a step. After a warm-up, its rate follows a cosine down to 0."""
    usual = {"data": bytes(32), "steps": steps, "batch": 1, "microbatch": 1, "schedule": "cosine", "final_share": 0.0}
    return Run(**{**usual, "warmup_steps": max(1, steps // 20), **settings})


def one_step(learner: Learner, inputs: Values, labels: Values) -> float:
    """Train one step and return its loss."""
    (loss,) = learner.forward(0, 0, 0, learner.segment.units, inputs, labels)
    learner.backward(0, ())
    learner.commit({}, math.sqrt(learner.squared_norm(learner.blocks)))
    return float(loss)


def interval(numbers: Sequence[float]) -> list[float]:
    """Return the mean, the least and the largest, rounded."""
    return [round(one, 4) for one in (statistics.fmean(numbers), min(numbers), max(numbers))]


# -- steps to a loss


@dataclass(frozen=True)
class Outcome:
    """Last loss of a training, and the CPU seconds of a step."""

    loss: float
    step_s: float


Train = Callable[[str, float, int], Outcome]
"""Function that trains with an optimiser, a highest learning rate and a number of steps"""


def train_all(learner: Learner, feed: Iterator[tuple[Values, Values]]) -> float:
    """Train all steps of a learner's run on `feed`, and return the CPU seconds of a step."""
    began_s = time.process_time()
    for _ in range(learner.run.steps):
        one_step(learner, *next(feed))
    return (time.process_time() - began_s) / learner.run.steps


def contest(
    train: Train, usual: str, other: str, rates: Sequence[float], steps: int, shares: Sequence[float]
) -> dict[str, Any]:
    """Return the steps and the time that `other` needs for the lowest loss of `usual`, and the last losses of both."""
    found = {name: {rate: train(name, rate, steps) for rate in rates} for name in (usual, other)}
    goal, reached = (min(one.loss for one in found[name].values()) for name in (usual, other))
    usual_s, other_s = (statistics.fmean(one.step_s for one in found[name].values()) for name in (usual, other))
    reaching = [rate for rate, one in found[other].items() if one.loss <= goal]
    share = 1.0 if reaching else None
    for shorter in sorted(shares, reverse=True):
        reaching = [rate for rate in reaching if train(other, rate, round(shorter * steps)).loss <= goal]
        share = shorter if reaching else share
    return {
        **{name: {str(rate): round(one.loss, 5) for rate, one in outcomes.items()} for name, outcomes in found.items()},
        "loss_ratio": round(reached / goal, 4),
        "step_s": [round(usual_s, 5), round(other_s, 5)],
        "steps_ratio": share,
        "time_ratio": share and round(share * other_s / usual_s, 3),
    }


# -- Eva


def eva(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare Eva with SGD."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images_NCHW, labels_N = torch.tensor(data.images[:, None] / 16).float(), torch.tensor(data.target)

    def feed(seed: int) -> Iterator[tuple[Values, Values]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen_B = torch.randint(len(labels_N), (IMAGES,), generator=generator)
            yield (images_NCHW[chosen_B],), (labels_N[chosen_B],)

    def train(seed: int, name: str, rate: float, steps: int) -> Outcome:
        settings = {"momentum": 0.9, "weight_decay": 5e-4, **(EVA if name == "eva" else SGD)}
        segment = Digits(seed, NORMS[arguments.norm])
        step_s = train_all(Learner(segment, run_of(steps, learning_rate=rate, **settings)), feed(seed))
        with torch.no_grad():
            return Outcome(float(functional.cross_entropy(segment.net(images_NCHW), labels_N)), step_s)

    rates = arguments.rates or EVA_RATES
    for seed in range(arguments.seeds):
        train_one = functools.partial(train, seed)
        found = contest(train_one, "sgd", "eva", rates, arguments.steps, arguments.shares)
        yield {"seed": seed, "steps": arguments.steps, "norm": arguments.norm, **found}


# -- language models


def llama(folder: Path, hidden: int, layers: int, seed: int) -> Path:
    """Write a random byte-level Llama, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def learner_of(folder: Path, run: Run) -> Learner:
    """Return a learner of the whole model."""
    checkpoint = Checkpoint(folder)
    return Learner(load_segment(checkpoint, 0, checkpoint.units), run)


def held_out(learner: Learner, ids_NT: Tensor) -> float:
    """Return the mean loss of held-out windows."""
    found = [learner.compute(0, 0, learner.segment.units, (ids_BT,), (ids_BT,))[0] for ids_BT in ids_NT.split(SAMPLES)]
    return float(torch.stack(found).mean())


def data_of(seed: int, batch: int) -> tuple[Iterator[Tensor], Tensor]:
    """Return batches ids_BT to learn, and held-out windows ids_NT."""
    corpus_N = read_corpus()
    cut = len(corpus_N) - WINDOWS * SEQUENCE
    return batches(corpus_N[:cut], batch, SEQUENCE, seed), corpus_N[cut:].view(-1, SEQUENCE)


def muon(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare Muon with AdamW."""
    steps = arguments.tokens // (SAMPLES * SEQUENCE)

    def train(path: Path, seed: int, name: str, rate: float, steps: int) -> Outcome:
        settings = MUON if name == "muon" else {}
        learner = learner_of(path, run_of(steps, learning_rate=rate, sequence=SEQUENCE, **settings))
        feed, ids_NT = data_of(seed, SAMPLES)
        step_s = train_all(learner, (((ids_BT,), (ids_BT,)) for ids_BT in feed))
        return Outcome(held_out(learner, ids_NT), step_s)

    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            path = llama(Path(folder), arguments.hidden, arguments.layers, seed)
            train_one = functools.partial(train, path, seed)
            found = contest(train_one, "adamw", "muon", arguments.rates or RATES, steps, arguments.shares)
        sizes = {"hidden": arguments.hidden, "layers": arguments.layers}
        yield {"seed": seed, "tokens": steps * SAMPLES * SEQUENCE, **sizes, **found}


# -- MuLoCo


def replicas_loss(path: Path, run: Run, seed: int) -> tuple[float, float]:
    """Return the held-out loss of replicas that average, and the bytes that one of them sends at each averaging."""
    members = [learner_of(path, run) for _ in range(REPLICAS)]
    blocks = tuple(members[0].blocks)
    compressors = [make_gradient_compressor(run.averaging, members[0].shapes(blocks)) for _ in members]
    feed, ids_NT = data_of(seed, REPLICAS * SAMPLES)
    sent_bytes = []
    for step in range(run.steps):
        for member, ids_BT in zip(members, next(feed).chunk(REPLICAS), strict=True):
            member.forward(0, 0, 0, member.segment.units, (ids_BT,), (ids_BT,))
            member.backward(0, ())
        ways: list[Mapping[tuple[int, ...], Tensor]] = [{} for _ in members]
        if step % run.averaging.every == run.averaging.every - 1 or step == run.steps - 1:
            own = [member.pseudo_gradients(blocks) / REPLICAS for member in members]
            agreed, crossed_bytes = agree(compressors, own, [1 / REPLICAS] * REPLICAS)
            for compressor in compressors:
                compressor.accept()
            ways = [{blocks: way_N} for way_N in agreed]
            sent_bytes.append(crossed_bytes / REPLICAS)
        for member, way in zip(members, ways, strict=True):
            norm = math.sqrt(member.apart_squared_norm(blocks))
            member.commit({}, norm, summed=(), apart=blocks, pseudo_gradients=way)
    return held_out(members[0], ids_NT), statistics.fmean(sent_bytes)


def muloco(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare MuLoCo with DiLoCo."""
    averagings = {
        "diloco": Averaging(every=arguments.every),
        "muloco": Averaging(every=arguments.every, codec=Codec.INT2),
    }
    for seed in range(arguments.seeds):
        losses: dict[str, float] = {}
        sent: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            path = llama(Path(folder), arguments.hidden, arguments.layers, seed)
            for name, averaging in averagings.items():
                settings = MUON if name == "muloco" else {}
                found = [
                    replicas_loss(
                        path,
                        run_of(arguments.steps, learning_rate=rate, averaging=averaging, sequence=SEQUENCE, **settings),
                        seed,
                    )
                    for rate in arguments.rates or RATES
                ]
                losses[name], sent[name] = min(found)
        yield {
            "seed": seed,
            "steps": arguments.steps,
            "every": arguments.every,
            "hidden": arguments.hidden,
            "layers": arguments.layers,
            **{name: round(loss, 4) for name, loss in losses.items()},
            "loss_ratio": round(losses["muloco"] / losses["diloco"], 4),
            "bytes_ratio": round(sent["muloco"] / sent["diloco"], 4),
        }


# -- packages


def packages(_arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare updates with those of the packages schedulefree and lion-pytorch."""
    try:
        from lion_pytorch import Lion
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise SystemExit(f"{error}: pip install schedulefree lion-pytorch") from None

    settings: dict[str, Any] = {"weight_decay": 0.1, "warmup_steps": 3, "schedule": "constant"}
    free = run_of(20, optimizer="schedule-free", betas=(0.9, 0.999), learning_rate=1e-2, **settings)
    sign = run_of(20, optimizer="lion", betas=(0.9, 0.99), learning_rate=1e-3, **settings)
    cases: list[tuple[Run, Callable[[list[nn.Parameter]], Any]]] = [
        (free, lambda own: AdamWScheduleFree(own, lr=1e-2, betas=free.betas, weight_decay=0.1, warmup_steps=3)),
        (sign, lambda own: Lion(own, lr=1e-3, betas=sign.betas, weight_decay=0.1)),
    ]
    for run, theirs in cases:
        own, other = ({"weight": nn.Parameter(torch.linspace(-1, 1, 400).view(20, 20))} for _ in range(2))
        optimizer, reference = Optimizer(own, run), theirs([*other.values()])
        for step in range(run.steps):
            gradient = torch.randn(20, 20, generator=torch.Generator().manual_seed(step))
            own["weight"].grad, other["weight"].grad = gradient.clone(), gradient.clone()
            optimizer.update(step)
            if run is free:
                reference.train()
            else:
                reference.param_groups[0]["lr"] = run.learning_rate_at(step)
            reference.step()
        if run is free:
            reference.eval()
        apart = float((own["weight"] - other["weight"]).detach().abs().max())
        yield {"optimizer": run.optimizer, "steps": run.steps, "largest_difference": apart}


def main() -> None:
    """Run the benchmark that is named, print a line for each seed, and a last one with means and ranges of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["packages", "eva", "muon", "muloco"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.6, 0.5])
    parser.add_argument("--norm", choices=NORMS, default="batch")
    arguments = parser.parse_args()
    rows = []
    for row in {"packages": packages, "eva": eva, "muon": muon, "muloco": muloco}[arguments.what](arguments):
        print(json.dumps(row), flush=True)
        rows.append(row)
    ratios = {name for row in rows for name in row if name.endswith("ratio")}
    found = {name: [row[name] for row in rows if row[name] is not None] for name in sorted(ratios)}
    print(json.dumps({name: interval(numbers) for name, numbers in found.items() if numbers}))


if __name__ == "__main__":
    main()
