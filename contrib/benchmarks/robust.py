"""Cost of robust averaging if all replicas are honest, and its gain if one of four lies. Prints JSON; some 10 minutes on
one core.

    python contrib/benchmarks/robust.py [--steps 150] [--seeds 2] [--layers 2] [--only TEXT]

A GPT-2 on bytes of the standard library's sources, sequence 64. Four replicas compute a quarter of each batch and agree on the
sum, in one process (`together.agree`); one of them contributes something else from step `FROM` on, and commits to that. The
others compute one of its samples once more now and then, as spot checks do, out of their budget. Whom two of the three others
suspect is left out from the same step on, as a coordinator would, and the others compute its samples. A loss is the mean over
the last 20 steps, and relative to that of honest replicas whose gradients are summed plainly. How far runs lie apart by
chance `1 % of noise` tells, which one honest replica adds to its gradient. `found_after`: contributions
until the liar was named; `wrongly_named`: honest ones that were. `missing`: what the lack of samples alone costs: one replica
contributes nothing for some steps (`MISSING`), and leaves; the others' gradients are summed plainly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from corpus import batches, read_corpus
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))  # replicas in one process belong to the tests

from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.tensors import Codec
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.sketch import deviations
from swarmnode.compute.training.averaging.gradient_compressor import make_gradient_compressor
from swarmnode.compute.training.averaging.robust_aggregation import History, OutlierDetector
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.recomputation import LEAST, gradient_sketch, in_rows
from swarmnode.plan.audits import AuditBudget, Calibration, SessionCost, judge_states
from swarmnode.plan.findings import outlier
from swarmnode.swarm.records.run import Averaging
from swarmnode.training.spot_checks.spot_checks import RECOMPUTED
from tests.compute.training.averaging.together import agree

HIDDEN, SEQUENCE, BATCH = 96, 64, 16
REPLICAS = ("a", "b", "c", "liar")
LEARNING_RATE, WARMUP_STEPS, LARGEST_NORM = 2e-3, 20, 1.0
LAST_STEPS = 20
FROM = 10  # the liar is honest before
MISSING = (5, 7, 10, 19)  # steps until a liar was found

Lie = Callable[[Tensor, int, Tensor], Tensor]
"""(gradient_N, lies before, direction_N of unit length) -> the contribution instead"""

LIES: dict[str, Lie] = {
    "honest": lambda gradient_N, _step, _direction_N: gradient_N,
    "turned round": lambda gradient_N, _step, _direction_N: -gradient_N,
    "100 times": lambda gradient_N, _step, _direction_N: 100 * gradient_N,
    "-100 times": lambda gradient_N, _step, _direction_N: -100 * gradient_N,
    "drifting, 2 % of its length more each step": lambda gradient_N, step, direction_N: (
        gradient_N + 0.02 * step * gradient_N.norm() * direction_N
    ),
    "drifting, 10 % of its length more each step": lambda gradient_N, step, direction_N: (
        gradient_N + 0.1 * step * gradient_N.norm() * direction_N
    ),
    "nothing": lambda gradient_N, _step, _direction_N: torch.zeros_like(gradient_N),
    "1 % of noise": lambda gradient_N, step, _direction_N: (
        gradient_N + 0.01 * gradient_N.norm() * random_like(gradient_N, 1000 + step)
    ),
    "noise of its length": lambda gradient_N, step, _direction_N: random_like(gradient_N, step) * gradient_N.norm(),
}


def random_like(vector_N: Tensor, seed: int) -> Tensor:
    """Return a random direction of unit length."""
    drawn_N = torch.randn(len(vector_N), generator=torch.Generator().manual_seed(seed))
    return drawn_N / drawn_N.norm()


@dataclass
class Outcome:
    """Results of one training. `found_after` is None if the liar was never named."""

    loss: float
    found_after: int | None
    wrongly_named: int


def make_checkpoint(folder: Path, layers: int, seed: int) -> Checkpoint:
    """Save a random GPT-2 on bytes in `folder`."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=HIDDEN, n_layer=layers, n_head=4, n_positions=SEQUENCE, vocab_size=256, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,  # dropout would differ between three replicas and four
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return Checkpoint(folder)


class Checker:
    """Spot checks of one honest replica, with the budget and the tolerances of a stage."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.found: set[str] = set()
        self.suspected: set[str] = set()
        self._budget = AuditBudget()
        self._calibration = Calibration()

    def draw(self, others: list[str], counted: int) -> str | None:
        """Return the replica to check in this step; None if none is to be checked."""
        others = [other for other in others if other not in self.found]
        cost = SessionCost(served_s=counted, audit_s=RECOMPUTED)
        chance = self._budget.chance(cost, 0.0)
        suspected = next((other for other in others if other in self.suspected), None)
        if suspected is not None and self._budget.afford(cost):
            return suspected
        if not others or self.dice.random() >= chance:
            return None
        self._budget.spend(cost)
        return self.dice.choice(others)

    def is_false(self, told_N: Tensor, found_N: Tensor) -> bool:
        """Return whether the sketches of two gradients of one sample differ beyond the tolerance."""
        seed = self.dice.randbytes(SEED_BYTES)
        apart = deviations(*(in_rows(gradient_sketch(one_N, seed)) for one_N in (told_N, found_N)), least=LEAST)
        tolerance = self._calibration.tolerance("float32", Codec.NONE, units=1, deviations=apart)
        return judge_states(apart, tolerance).false


class Swarm:
    """Four replicas with equal parameters, so one copy of them."""

    def __init__(self, checkpoint: Checkpoint, lie: Lie, *, robust: bool, checked: bool) -> None:
        self._segment = load_segment(checkpoint, 0, checkpoint.units)
        self._parameters = [parameter for block in self._segment.parameters().values() for parameter in block.values()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE)
        self._warmup = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
        )
        shapes = [parameter.shape for parameter in self._parameters]
        self._compressors = {peer: make_gradient_compressor(Averaging(robust=robust), shapes) for peer in REPLICAS}
        self._detectors = {peer: OutlierDetector(bytes([seed])) for seed, peer in enumerate(REPLICAS)} if robust else {}
        self._direction_N = random_like(torch.empty(sum(shape.numel() for shape in shapes)), 1)
        self._lie = lie
        self._checkers = {peer: Checker(random.Random(peer)) for peer in REPLICAS if peer != "liar"} if checked else {}
        self.members = list(REPLICAS)

    def step(self, number: int, ids_BT: Tensor) -> tuple[float, str | None]:
        """Train one step. Returns the loss, and the replica that this step excluded for good; None if all stay."""
        shares = ids_BT.tensor_split(len(self.members))
        losses, gradients = zip(*(self._gradient(share_BT, number) for share_BT in shares), strict=True)
        weights = [len(share_BT) / len(ids_BT) for share_BT in shares]
        self._spot_check(number, dict(zip(self.members, shares, strict=True)))
        named = self._agree(number, gradients, weights)
        if named is not None:
            self.members.remove(named)
            return self.step(number, ids_BT)[0], named
        return statistics.mean(losses), None

    def _spot_check(self, number: int, shares: Mapping[str, Tensor]) -> None:
        """Let each other replica decide whether to compute one sample of another replica once more."""
        for peer, checker in self._checkers.items():
            drawn = checker.draw([other for other in self.members if other != peer], len(shares[peer]))
            if drawn is None:
                continue
            row = checker.dice.randrange(len(shares[drawn]))
            _, gradient_N = self._gradient(shares[drawn][row : row + 1], number)
            if checker.is_false(self._told_by(drawn, gradient_N, number), gradient_N):
                checker.found.add(drawn)
                for other in self._checkers.values():
                    other.suspected.add(drawn)

    def _told_by(self, peer: str, gradient_N: Tensor, number: int) -> Tensor:
        return (
            self._lie(gradient_N, number - FROM, self._direction_N) if peer == "liar" and number >= FROM else gradient_N
        )

    def _gradient(self, ids_BT: Tensor, seed: int) -> tuple[float, Tensor]:
        (loss,) = self._segment.forward((ids_BT,), 0, self._segment.units, seed, (ids_BT,))
        gradients = torch.autograd.grad(loss, self._parameters)
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])

    def _agree(self, number: int, gradients: typing.Sequence[Tensor], weights: list[float]) -> str | None:
        """Update all models with the sum of the gradients and return None. If a replica is named, return its name without
        an update."""
        contributed = [
            self._told_by(peer, gradient_N, number) for peer, gradient_N in zip(self.members, gradients, strict=True)
        ]
        scaled = [gradient_N * weight for gradient_N, weight in zip(contributed, weights, strict=True)]
        detectors = [self._detectors[peer] for peer in self.members if len(self.members) > 2 and self._detectors]
        for detector in detectors:
            detector.begin()
        clippings = [detector.clipping(0, tuple(self.members), self.members) for detector in detectors]
        totals, _ = agree([self._compressors[peer] for peer in self.members], scaled, weights, clippings)
        histories = [detector.histories() for detector in detectors]
        voices = Counter(
            named
            for peer, seen in zip(self.members, histories or [{}] * len(self.members), strict=False)
            if (named := self._named_by(peer, seen)) not in (None, peer)
        )
        for named, count in voices.most_common(1):
            if count > max(1, (len(self.members) - 1) / 2):
                return typing.cast(str, named)
        for detector, seen in zip(detectors, histories, strict=True):
            detector.accept(seen)
        self._update(totals[0])
        return None

    def _named_by(self, peer: str, seen: Mapping[str, History]) -> str | None:
        found = self._checkers[peer].found if peer in self._checkers else set()
        return min(found & {*self.members}, default=None) or outlier(seen)

    def _update(self, total_N: Tensor) -> None:
        parts = total_N.split([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST_NORM)
        self._optimizer.step()
        self._warmup.step()


def train(
    checkpoint: Checkpoint,
    lie: Lie,
    steps: int,
    corpus_N: Tensor,
    seed: int,
    *,
    robust: bool,
    checked: bool,
    leaves_after: int | None = None,
) -> Outcome:
    """Train from the first step on. With `leaves_after`, the liar leaves by itself after that many steps of lies."""
    swarm = Swarm(checkpoint, lie, robust=robust, checked=checked)
    losses: list[float] = []
    found_after, wrongly_named = None, 0
    for number, ids_BT in enumerate(islice(batches(corpus_N, BATCH, SEQUENCE, seed), steps)):
        if leaves_after is not None and number == FROM + leaves_after:
            swarm.members.remove("liar")
        loss, named = swarm.step(number, ids_BT)
        losses.append(loss)
        if named == "liar" and number >= FROM:
            found_after = number - FROM + 1
        elif named is not None:
            wrongly_named += 1
    return Outcome(statistics.mean(losses[-LAST_STEPS:]), found_after, wrongly_named)


def relative_to(losses: list[float], outcomes: list[Outcome]) -> list[float]:
    """Return the ratio of each outcome's loss to the loss of the same seed."""
    return [outcome.loss / loss for outcome, loss in zip(outcomes, losses, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 150), ("seeds", 2), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="trainings with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus_N = read_corpus()
    trainings: dict[str, tuple[Lie, bool, bool, int | None]] = {
        "summed plainly": (LIES["honest"], False, False, None),
        "summed plainly, one turned round": (LIES["turned round"], False, False, None),
        "summed plainly, 1 % of noise": (LIES["1 % of noise"], False, False, None),
    }
    trainings |= {f"robust, {name}": (lie, True, False, None) for name, lie in LIES.items()}
    trainings |= {f"robust and checked, {name}": (lie, True, True, None) for name, lie in LIES.items()}
    trainings |= {f"missing for {count} steps": (LIES["nothing"], False, False, count) for count in MISSING}
    chosen = {name: how for name, how in trainings.items() if options.only in name or name == "summed plainly"}
    found: dict[str, list[Outcome]] = {name: [] for name in chosen}
    began_s = time.perf_counter()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
            checkpoint = make_checkpoint(Path(folder), options.layers, seed)
            for name, (lie, robust, checked, count) in chosen.items():
                outcome = train(
                    checkpoint,
                    lie,
                    options.steps,
                    corpus_N,
                    seed,
                    robust=robust,
                    checked=checked,
                    leaves_after=count,
                )
                found[name].append(outcome)
                print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr)
    plain = [outcome.loss for outcome in found["summed plainly"]]
    report = {
        name: {
            "loss": round(statistics.mean(outcome.loss for outcome in outcomes), 4),
            "relative": round(statistics.mean(relative := relative_to(plain, outcomes)), 4),
            "relative_by_seed": [round(each, 4) for each in relative],
            "found_after": [outcome.found_after for outcome in outcomes],
            "wrongly_named": sum(outcome.wrongly_named for outcome in outcomes),
        }
        for name, outcomes in found.items()
    }
    print(
        json.dumps(
            {"settings": vars(options), "seconds": round(time.perf_counter() - began_s, 1), "trainings": report},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
