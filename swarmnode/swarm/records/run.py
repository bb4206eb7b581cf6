"""Run: the training configuration, which decides everything that a training computes.

Equal runs on equal data draw the same loss curve, whichever peers take part. The run's id is the SHA-256 of its
encoding. The first trainer brings the run; a trainer with another run is refused.

Recipe: settings of a training that earlier versions do not know: schedules by name, groups of parameters, the objective, and
evaluation on held-out data.

Runs of earlier versions have none. In a run with a recipe the schedule's name is `recipe`, so that an earlier version refuses the
run, and names the schedule, instead of training it in another way.
"""

from __future__ import annotations

import hashlib
import math
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from swarmnode.codec.body import DECODE_ERRORS, MAX_RUN_BYTES, first_broken
from swarmnode.codec.tensors import SPARSE_CODECS, Codec
from swarmnode.config import COMPRESSIONS, SCHEDULES_BY_NAME
from swarmnode.errors import ProtocolError, UsageError

RECIPE = "recipe"  # the name of a run's schedule if the recipe has it
MAX_GROUPS = 16
MAX_PATTERN = 64  # characters
MAX_STARS = 4  # of a pattern: each may be tried at every place of a name
MAX_ROUTER_SUMS = 1 << 14  # two for each expert and two more, or four terms if layers are balanced by themselves

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


PROJECTIONS = ("*.thin_in.weight", "*.thin_out.weight")
"""Patterns of the names of a bottleneck's projections (`compute/model/stack.py`)"""
UNDECAYED = (*PROJECTIONS, "*.thin_anchor.weight", "*.thin_anchor_map.weight")
"""Patterns of the names of a bottleneck's parameters, which are never decayed"""


def is_projection(name: str) -> bool:
    """Return whether a parameter is a projection of a bottleneck: its rows, or its columns, stay orthonormal."""
    return any(fnmatchcase(name, pattern) for pattern in PROJECTIONS)


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
    the z-loss (arXiv 2202.08906) of a mixture's routers. With `balance_by_layer` the balance loss is the mean of each layer's own;
    without, as earlier versions and transformers have it, that of all layers' tokens together, which is small too if each layer
    has other favourites. `ema` is the share of an average of the weights that each step keeps; 0: there is no average. Every
    `evaluate_every` steps (0: never) and in the last step, `evaluation` microbatches of held-out data go forward through the
    step's parameters, or their average.
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
    balance_by_layer: bool | msgspec.UnsetType = msgspec.UNSET  # absent from older runs, which keep their ids

    @property
    def watches_routers(self) -> bool:
        """Whether the objective has a loss of the routers."""
        return bool(self.router_balance or self.router_z_loss)

    def treat(self, name: str, dimensions: int, weight_decay: float) -> Treatment:
        """Return the treatment of a parameter in a run of this `weight_decay`."""
        is_thin = any(fnmatchcase(name, pattern) for pattern in UNDECAYED)
        usual = weight_decay if dimensions >= 2 and not is_thin else 0.0
        for group in self.groups:
            if fnmatchcase(name, group.match):
                decay = usual if group.weight_decay is None or is_thin else group.weight_decay
                return Treatment(group.learning_rate, decay, group.frozen)
        return Treatment(1.0, usual, False)

    def factor_at(self, step: int, steps: int, warmup: int, final_share: float) -> float:
        """Return the factor of the learning rate for the update after step `step` (from 0) of `steps`.

        Those whose names begin with hf- are transformers' (`get_linear_schedule_with_warmup`, …), whose first step has the rate 0
        if there is a warm-up. The others rise to the full rate within the warm-up, and end at `final_share` in the last step.
        """
        if self.schedule.startswith("hf-"):
            if step < warmup:
                return step / warmup
            if self.schedule == "hf-constant":
                return 1.0
            first = max(warmup, steps - self.decay_steps) if self.schedule == "hf-wsd" else warmup
            if step < first:
                return 1.0
            done = min(1.0, (step - first) / max(1, steps - first))
            return 1 - done if self.schedule == "hf-linear" else _half_cosine(done)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - 1 - warmup)
        left = 1 - done if self.schedule == "linear" else _half_cosine(min(1.0, done))
        return final_share + (1 - final_share) * max(0.0, left)


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
        "a balance loss to take layer by layer, or none of it": recipe.balance_by_layer is msgspec.UNSET
        or (recipe.balance_by_layer and recipe.router_balance > 0),
    }


MAX_MICROBATCHES = 2048
FINGERPRINT_BYTES = 32
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "muon", "lion", "schedule-free", "eva")
AUTO = "auto"
MAX_RATIO = 1e6
SCHEDULES = ("constant", "linear", "cosine")
CONSTANT = ("constant", "hf-constant")


class Averaging(msgspec.Struct, frozen=True):
    """Averaging of replicas: of their gradients, or (every > 1, DiLoCo, arXiv 2311.08105) of their parameters."""

    every: int = 1  # steps between two averagings
    codec: int = Codec.NONE
    keep: float = 0.05  # share of the elements that top-k sends
    rank: int = 0  # above 0: PowerSGD (arXiv 1905.13727) of this rank, for matrices
    outer_lr: float = 1.0
    outer_momentum: float = 0.5  # Nesterov
    by_line: bool = False  # peers with slow lines send less: by a stronger codec, or by top-k fewer elements
    robust: bool = False  # centred clipping (arXiv 2012.10333), if three or more contribute
    # Only one of a rank's two factors per step, in turn: ACP-SGD (arXiv 2306.08881).
    alternating: bool = False


class Compression(msgspec.Struct, frozen=True):
    """Compression of activations and their gradients between stages. `auto` leaves the choice to each node."""

    rule: str = AUTO  # one of COMPRESSIONS
    ratio: float = 100.0  # top-k sends at most this many times fewer elements
    feedback: bool = False  # elements left out by top-k are added to the next message


def is_checkpoint(step: int, every_steps: int, last: int) -> bool:
    """Return whether the state after `step` steps is a checkpoint: one of each `every_steps`, and the one of the last step."""
    return step % every_steps == 0 or step == last


class Run(msgspec.Struct, frozen=True):
    """Settings of a training. `batch` and `microbatch` count samples, `sequence` the tokens of a sample (0: no tokens)."""

    data: bytes  # fingerprint of the data, 32 bytes
    steps: int
    batch: int
    microbatch: int
    sequence: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    final_share: float = 0.1  # of the learning rate, at the last step
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0  # of SGD and Muon
    clip: float = 1.0  # global norm; 0 is off
    seed: int = 0
    checkpoint_steps: int = 50
    autocast: bool = False  # 16 bits on GPUs that are fast at them
    averaging: Averaging = Averaging()
    compression: Compression = Compression()
    label_weights: bool | msgspec.UnsetType = msgspec.UNSET  # absent from older runs, which keep their ids
    recipe: Recipe | msgspec.UnsetType = msgspec.UNSET  # likewise

    @property
    def weighs_labels(self) -> bool:
        """Whether a microbatch counts by its share of the step's labels. Otherwise all microbatches count the same."""
        return self.label_weights is True

    @property
    def microbatches(self) -> int:
        """Number of microbatches of one step."""
        return self.batch // self.microbatch

    @property
    def has_recipe(self) -> bool:
        """Whether the run has a recipe. Those that earlier versions began have none."""
        return self.recipe is not msgspec.UNSET

    @property
    def known_recipe(self) -> Recipe:
        """Recipe of the run; if it has none, that by which earlier versions train: with its schedule, and without groups."""
        return Recipe(self.schedule, groups=()) if self.recipe is msgspec.UNSET else self.recipe

    def is_checkpoint(self, step: int) -> bool:
        """Return whether all stages write the state after `step` steps to their disks."""
        return is_checkpoint(step, self.checkpoint_steps, self.steps)

    def evaluations_at(self, step: int) -> int:
        """Return the number of held-out microbatches that go forward in a step; their numbers follow the others'.

        Step `steps` is behind the last one: the final weights are evaluated in it, and in its place the last step is not.
        """
        if self.recipe is msgspec.UNSET or not self.recipe.evaluate_every:
            return 0
        is_due = step == self.steps or (step % self.recipe.evaluate_every == 0 and step < self.steps - 1)
        return self.recipe.evaluation if is_due else 0

    def passes(self, step: int) -> range:
        """Return the numbers of the microbatches in a step, the held-out ones included. Step `steps` has only these."""
        first = 0 if step < self.steps else self.microbatches
        return range(first, self.microbatches + self.evaluations_at(step))

    def treat(self, name: str, dimensions: int) -> Treatment:
        """Return how a parameter is trained. Runs without a recipe decay all matrices."""
        return self.known_recipe.treat(name, dimensions, self.weight_decay)

    @property
    def positions(self) -> int:
        """Positions of one microbatch; its samples if they have no tokens."""
        return self.microbatch * max(1, self.sequence)

    @property
    def id(self) -> bytes:
        """Id of the run, 32 bytes: the SHA-256 of its encoding."""
        return hashlib.sha256(encode_run(self)).digest()

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the update after step `step` (from 0): linear warm-up, then the schedule down to
        `final_share`."""
        if not self.has_recipe and step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps  # rounded as by earlier versions, bit for bit
        factor = self.known_recipe.factor_at(step, self.steps, self.warmup_steps, self.final_share)
        return self.learning_rate * factor


_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(Run)


def encode_run(run: Run) -> bytes:
    """Encode the settings of a training run, always to the same bytes."""
    return _encoder.encode(run)


def decode_run(raw: bytes) -> Run:
    """Decode a run. Raises ProtocolError if it is not valid."""
    if len(raw) > MAX_RUN_BYTES:
        raise ProtocolError(f"a run of {len(raw)} bytes; the bound is {MAX_RUN_BYTES}")
    try:
        run = _decoder.decode(raw)
        check_run(run)
    except (*DECODE_ERRORS, UsageError) as error:
        raise ProtocolError(f"bad run: {error}") from None
    return run


def check_run(run: Run) -> None:
    """Check the settings of a training run. Raises UsageError, naming the first invalid one."""
    numbers = (run.learning_rate, run.final_share, run.epsilon, run.weight_decay, run.momentum, run.clip, *run.betas)
    rules = {
        "a fingerprint of the data": len(run.data) == FINGERPRINT_BYTES,
        "at least one step": 0 < run.steps <= 1 << 31,
        "a microbatch of at least one sample": run.microbatch > 0,
        "a batch that is a multiple of the microbatch": run.batch > 0 and run.batch % max(1, run.microbatch) == 0,
        f"at most {MAX_MICROBATCHES} microbatches in a step": run.batch // max(1, run.microbatch) <= MAX_MICROBATCHES,
        "a sequence length of 0 or more": 0 <= run.sequence <= 1 << 24,
        f"an optimizer out of {', '.join(OPTIMIZERS)}": run.optimizer in OPTIMIZERS,
        f"a schedule out of {', '.join(SCHEDULES)}": run.schedule in SCHEDULES
        or (run.schedule == RECIPE and run.recipe is not msgspec.UNSET),
        "a recipe only with the schedule that it names": run.schedule == RECIPE or run.recipe is msgspec.UNSET,
        f"at most {MAX_MICROBATCHES} microbatches with the held-out ones": run.batch // max(1, run.microbatch)
        + run.evaluations_at(run.steps)
        <= MAX_MICROBATCHES,
        "finite settings, none of them negative": all(math.isfinite(number) and number >= 0 for number in numbers),
        "betas below 1": max(run.betas) < 1,
        "a momentum below 1 for muon": run.optimizer != "muon" or run.momentum < 1,
        "float32 (no autocast), a damping above 0 and an averaging in every step for eva": run.optimizer != "eva"
        or (not run.autocast and run.epsilon > 0 and run.averaging.every == 1),
        "a constant schedule, a beta1 above 0 and an averaging in every step for schedule-free": run.optimizer
        != "schedule-free"
        or (run.known_recipe.schedule in CONSTANT and run.betas[0] > 0 and run.averaging.every == 1),
        "an averaging in every step, and another optimizer than schedule-free, for an average of the weights (ema)": not (
            run.known_recipe.ema and (run.averaging.every > 1 or run.optimizer == "schedule-free")
        ),
        "a warm-up of 0 steps or more": 0 <= run.warmup_steps <= 1 << 31,
        "checkpoints every step or more seldom": run.checkpoint_steps > 0,
        "a codec that this version knows": run.averaging.codec in Codec._value2member_map_,
        "an averaging every step or more seldom": run.averaging.every > 0,
        "a share of kept elements up to 1": 0 < run.averaging.keep <= 1,
        "a rank of 0 or more": 0 <= run.averaging.rank <= 1024,
        "robust averaging without top-k and without factors": not run.averaging.robust
        or (run.averaging.codec not in SPARSE_CODECS and not run.averaging.rank),
        "robust averaging with at least 4 bits, not int2": not run.averaging.robust
        or run.averaging.codec != Codec.INT2,
        "averaging by line without factors": not (run.averaging.by_line and run.averaging.rank),
        "a rank of which factors alternate": run.averaging.rank > 0 or not run.averaging.alternating,
        "label weights, or none": run.label_weights in (msgspec.UNSET, True),
        f"a compression out of {', '.join(COMPRESSIONS)}": run.compression.rule in COMPRESSIONS,
        f"a top-k ratio from 1 to {MAX_RATIO:g}": 1 <= run.compression.ratio <= MAX_RATIO,
    }
    broken = first_broken(rules)
    if broken is None and run.recipe is not msgspec.UNSET:
        broken = first_broken(recipe_rules(run.recipe))
    if broken is not None:
        raise UsageError(f"the training needs {broken}")


def differences(own: Run, other: Run) -> list[str]:
    """Return one sentence for each setting that differs in another run."""
    found = []
    for field in Run.__struct_fields__:
        here, there = getattr(own, field), getattr(other, field)
        if (field == "recipe" and msgspec.UNSET not in (here, there)) or field in ("averaging", "compression"):
            found += [_difference(f"{field} {name}", here, there, name) for name in here.__struct_fields__]
        elif field == "data":
            same = here == there
            found.append("" if same else f"The data is other data ({here.hex()[:8]} here, {there.hex()[:8]} there).")
        else:
            found.append(_difference(field.replace("_", " "), own, other, field))
    return [sentence for sentence in found if sentence]


def _difference(words: str, own: msgspec.Struct, other: msgspec.Struct, field: str) -> str:
    here, there = (value is not msgspec.UNSET and value for value in (getattr(own, field), getattr(other, field)))
    return "" if here == there else f"The setting {words!r} is {here} here and {there} there."
