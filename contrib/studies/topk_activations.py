"""Loss under top-k of activations and their gradients, relative to no compression. Prints JSON; some minutes for a subject.

    python contrib/studies/topk_activations.py [--subjects digits scratch tuned] [--steps 200] [--ratios 2 10 100] [--seed 0]

Three subjects, each cut into four stages. `digits` is a small ResNet that learns digits; its activations come out of ReLUs and
are sparse. `scratch` is a GPT-2 on bytes of the standard library's sources that begins at random weights. `tuned` is the same
GPT-2 after it has learnt half of the sources, on the other half. What crosses the three boundaries is encoded and
decoded, there and back, by each rule of `plan/compression.py` at each ratio; the links take 1, 1/2 and 1/10 of the slowest
one's seconds. `feedback` adds what top-k left out to the next values. `loss` is the mean of the last 20 steps, `relative` to
none; `zeros` the share of zeros in what crosses uncompressed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from inversion import LENGTH, batches, corpus
from torch import Tensor, nn

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, encode
from swarmnode.plan.compression import SPARSE_RULES, topk_ratio

LINKS = (0.5, 1.0, 0.1)  # of the slowest one's seconds
SAMPLES, LAST_STEPS = 64, 20
FONT = (  # of 3 x 5 dots, a row of three bits after another
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip


class Boundary:
    """Link between two stages, both ways. At a ratio of 1 nothing is left out."""

    def __init__(self, ratio: float, *, feedback: bool) -> None:
        self._ratio = ratio
        self._feedback = feedback
        self._left: dict[str, Tensor] = {}
        self.zeros: list[float] = []

    def cross(self, values: Tensor, way: str) -> Tensor:
        """Return the values as they arrive after top-k, and note their share of zeros."""
        self.zeros.append(float((values == 0).float().mean()))
        if self._ratio <= 1:
            return values
        wanted = values + self._left.get(way, torch.zeros(())) if self._feedback else values
        said = decode(*encode(wanted.contiguous(), Codec.TOPK, param=round(wanted.numel() / self._ratio)))
        self._left[way] = wanted - said
        return said


class Crossing(torch.autograd.Function):
    """Activations cross a boundary on the way forward, their gradients on the way back."""

    @staticmethod
    def forward(context: Any, values: Tensor, boundary: Boundary) -> Tensor:
        context.boundary = boundary
        return boundary.cross(values, "forward").clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.boundary.cross(gradient, "backward"), None


def cut(model: nn.Module, parts: list[nn.Module], boundaries: list[Boundary]) -> list[Any]:
    """Put a boundary behind each of these parts of a model, and return the hooks to remove."""

    def hook(boundary: Boundary) -> Any:
        def behind(_part: object, _inputs: object, output: Any) -> Any:
            values = output[0] if isinstance(output, tuple) else output
            crossed = Crossing.apply(values, boundary)
            return (crossed, *output[1:]) if isinstance(output, tuple) else crossed

        return behind

    return [part.register_forward_hook(hook(boundary)) for part, boundary in zip(parts, boundaries, strict=True)]


class Block(nn.Module):
    """A residual block whose output has passed a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        return torch.relu(values + self.body(values))


class Digits:
    """Digits of 3 x 5 dots, twice as large, anywhere in 16 x 16, in noise as strong as they are."""

    rate = 3e-3

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        enter = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.parts = [nn.Sequential(enter, Block(16)), Block(16), Block(16)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
        self.model = nn.Sequential(*self.parts, head)
        self._font = torch.tensor([[float(dot) for dot in digit] for digit in FONT]).view(10, 5, 3)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            label_B = torch.randint(10, (SAMPLES,), generator=generator)
            image = torch.randn(len(label_B), 1, 16, 16, generator=generator)
            for row, label in enumerate(label_B.tolist()):
                top, left = (int(torch.randint(bound, (1,), generator=generator)) for bound in (7, 11))
                image[row, 0, top : top + 10, left : left + 6] += self._font[label].kron(torch.ones(2, 2))
            yield image, label_B


class Text:
    """GPT-2 of 4 layers, 64 wide, on bytes."""

    rate = 2e-3

    def __init__(self, seed: int, *, learnt_steps: int = 0) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        config = GPT2Config(
            n_embd=64, n_layer=4, n_head=4, n_positions=LENGTH, vocab_size=256, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model: Any = GPT2LMHeadModel(config)
        self.parts = list(self.model.transformer.h[:3])
        learnt, self._text = corpus()
        if learnt_steps:
            train(self, islice(batches(learnt, seed), learnt_steps), self.rate)
            self.rate = 5e-4

    def loss(self, ids_BT: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        return loss

    def batches(self, seed: int) -> Iterator[Tensor]:
        return batches(self._text, seed)


def train(subject: Any, drawn: Iterator[Any], rate: float) -> list[float]:
    """Train on the drawn batches, and return the loss of each step."""
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=rate)
    losses = []
    for batch in drawn:
        optimizer.zero_grad()
        loss = subject.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def study(subject: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Train `subject` by every rule and ratio, and return the losses by name. Every run has the same weights at first and
    the same batches."""
    begun = copy.deepcopy(subject.model.state_dict())
    rows = [("none", 1.0, False)]
    rows += [(rule, ratio, False) for rule in SPARSE_RULES for ratio in options.ratios]
    rows += [("topk", ratio, True) for ratio in options.ratios]
    report: dict[str, Any] = {}
    for rule, ratio, feedback in rows:
        subject.model.load_state_dict(begun)
        ratios = [1.0 if rule == "none" else topk_ratio(rule, link_s, max(LINKS), ratio) for link_s in LINKS]
        boundaries = [Boundary(own, feedback=feedback) for own in ratios]
        hooks = cut(subject.model, subject.parts, boundaries)
        losses = train(subject, islice(subject.batches(options.seed), options.steps), subject.rate)
        for hook in hooks:
            hook.remove()
        loss = statistics.mean(losses[-LAST_STEPS:])
        name = f"{rule} {ratio:g}{' feedback' if feedback else ''}" if rule != "none" else rule
        report[name] = {"loss": round(loss, 4), "relative": round(loss / report.get("none", {"loss": loss})["loss"], 3)}
        if rule == "none":
            zeros = statistics.mean(share for boundary in boundaries for share in boundary.zeros)
            report[name] |= {"first_loss": round(losses[0], 4), "zeros": round(zeros, 3)}
        print(name, json.dumps(report[name]), file=sys.stderr)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--subjects", nargs="+", choices=("digits", "scratch", "tuned"), default=["digits", "scratch", "tuned"]
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 10.0, 100.0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < LAST_STEPS or min(options.ratios) < 1:
        parser.error(f"--steps is at least {LAST_STEPS}, and ratios are 1 or more")
    torch.set_num_threads(1)
    made = {
        "digits": lambda: Digits(options.seed),
        "scratch": lambda: Text(options.seed),
        "tuned": lambda: Text(options.seed, learnt_steps=2 * options.steps),
    }
    report = {name: study(made[name](), options) for name in options.subjects}
    print(json.dumps({"settings": vars(options), "subjects": report}, indent=2))


if __name__ == "__main__":
    main()
