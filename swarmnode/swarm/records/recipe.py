"""Recipe: settings of a training that earlier versions do not know: schedules by name, groups of parameters, the objective, and
evaluation on held-out data.

Runs of earlier versions have none. In a run with a recipe the schedule's name is `recipe`, so that an earlier version refuses the
run, and names the schedule, instead of training it in another way.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from swarmnode.config import SCHEDULES_BY_NAME

RECIPE = "recipe"  # the name of a run's schedule if the recipe has it
MAX_GROUPS = 16
MAX_PATTERN = 64  # characters
MAX_STARS = 4  # of a pattern: each may be tried at every place of a name
MAX_ROUTER_SUMS = 1 << 14  # two for each expert, and two more

Share = Annotated[float, Meta(ge=0, le=1)]


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the parameters whose names match the pattern `match`, such as `*embed*` (`*`: any text, `?`: any letter).

    `learning_rate` multiplies the run's. A `weight_decay` of None is the run's for matrices and none for vectors (norms, biases).
    A frozen parameter does not change.
    """

    match: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN)]
    learning_rate: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    frozen: bool = False


NO_DECAY = tuple(ParameterGroup(match, weight_decay=0.0) for match in ("*embed*", "*wte*", "*wpe*", "*bias"))
"""Groups of a new run: embeddings are not decayed, nor are biases, whatever their shape"""


class Treatment(NamedTuple):
    """Treatment of one parameter: the factor of the learning rate, its weight decay, and whether it is frozen."""

    learning_rate: float
    weight_decay: float
    frozen: bool


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recipe of a run. A version that does not know one of its fields refuses the run.

    `schedule` is one of `SCHEDULES_BY_NAME`; `decay_steps` are those of hf-wsd at its end. The first group that matches a parameter
    counts. `label_smoothing` and `z_loss` (the factor of the mean squared log-sum-exp of the logits, arXiv 2204.02311) change the
    objective of language models. `router_balance` and `router_z_loss` are the factors of the balance loss (arXiv 2101.03961) and
    the z-loss (arXiv 2202.08906) of a mixture's routers. `ema` is the share of an average of the weights that each step keeps; 0:
    there is no average. Every `evaluate_every` steps (0: never) and in the last step, `evaluation` microbatches of held-out data
    go forward through the step's parameters, or their average.
    """

    schedule: Annotated[str, Meta(max_length=32)] = "cosine"
    decay_steps: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    groups: Annotated[tuple[ParameterGroup, ...], Meta(max_length=MAX_GROUPS)] = NO_DECAY
    label_smoothing: Share = 0.0
    z_loss: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    router_balance: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    router_z_loss: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    ema: Share = 0.0
    evaluate_every: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    evaluation: Annotated[int, Meta(ge=0, le=2048)] = 0

    @property
    def watches_routers(self) -> bool:
        """Whether the objective has a loss of the routers."""
        return bool(self.router_balance or self.router_z_loss)

    def treat(self, name: str, dimensions: int, weight_decay: float) -> Treatment:
        """Return the treatment of a parameter in a run of this `weight_decay`."""
        usual = weight_decay if dimensions >= 2 else 0.0
        for group in self.groups:
            if fnmatchcase(name, group.match):
                decay = usual if group.weight_decay is None else group.weight_decay
                return Treatment(group.learning_rate, decay, group.frozen)
        return Treatment(1.0, usual, False)

    def factor_at(self, step: int, steps: int, warmup: int, final_share: float) -> float:
        """Return the factor of the learning rate for the update after step `step` (from 0) of `steps`.

        Those whose names begin with hf- are transformers' (`get_linear_schedule_with_warmup`, …), whose first step has the rate 0
        if there is a warm-up. The others rise to the full rate within the warm-up, and end at `final_share` in the last step.
        """
        if self.schedule.startswith("hf-"):
            return self._hf_factor(step, steps, warmup)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - 1 - warmup)
        left = 1 - done if self.schedule == "linear" else _half_cosine(min(1.0, done))
        return final_share + (1 - final_share) * max(0.0, left)

    def _hf_factor(self, step: int, steps: int, warmup: int) -> float:
        if step < warmup:
            return step / warmup
        if self.schedule == "hf-constant":
            return 1.0
        first = max(warmup, steps - self.decay_steps) if self.schedule == "hf-wsd" else warmup
        if step < first:
            return 1.0
        done = min(1.0, (step - first) / max(1, steps - first))
        return 1 - done if self.schedule == "hf-linear" else _half_cosine(done)


def _half_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def recipe_rules(recipe: Recipe) -> dict[str, bool]:
    """Return the rules that a recipe keeps, by what it needs."""
    return {
        f"a schedule out of {', '.join(SCHEDULES_BY_NAME)}": recipe.schedule in SCHEDULES_BY_NAME,
        f"patterns with at most {MAX_STARS} stars and without brackets": all(
            group.match.count("*") <= MAX_STARS and "[" not in group.match for group in recipe.groups
        ),
        "an average of the weights (ema) that keeps less than all of itself": recipe.ema < 1,
        "finite settings": all(
            math.isfinite(number)
            for group in recipe.groups
            for number in (group.learning_rate, group.weight_decay or 0.0)
        ),
        "held-out microbatches where it evaluates": bool(recipe.evaluate_every) == bool(recipe.evaluation),
    }
