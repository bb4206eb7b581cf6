"""Options of a training's recipe, a file of them, and the text of such a file.

Options of a training's steps: their number and size, the optimiser and its learning rate.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnode.cli.options.file_options import read_toml
from swarmnode.config import SCHEDULES_BY_NAME
from swarmnode.errors import UsageError
from swarmnode.terminal.option import Definition, definitions, file_key, option, path_option

if TYPE_CHECKING:
    from swarmnode.swarm.records.run import ParameterGroup, Recipe


T = TypeVar("T")
GROUPS = "groups"
FIELDS = ("label_smoothing", "z_loss", "router_balance", "router_z_loss", "ema", "decay_steps")
"""Options that are fields of a recipe with the same names"""
LEFT_OUT = frozenset({"recipe", "print_recipe", "data", "eval_data", "freeze"})


@dataclass(frozen=True)
class RecipeOptions:
    """Options of a training's objective and of the parameters that it changes."""

    recipe: Path | None = path_option(
        "Read options and groups of parameters from this TOML file; options that you give override it.", metavar="FILE"
    )
    print_recipe: bool = option(False, "Print all options of the recipe as such a file, and end.")
    freeze: list[str] = option(
        [], "Leave parameters with such names unchanged, for example '*embed*'. Repeatable.", metavar="PATTERN"
    )
    label_smoothing: float = option(0.0, "Share of each label that goes to the whole vocabulary.")
    z_loss: float = option(0.0, "Factor of the squared log-sum-exp of the logits in the loss; PaLM's is 1e-4.")
    router_balance: float = option(
        0.0, "Factor of the routers' balance loss in mixtures of experts, a mean over layers; for example 0.001."
    )
    router_z_loss: float = option(0.0, "Factor of the squared log-sum-exp of the routers' logits; ST-MoE's is 0.001.")
    ema: float = option(0.0, "Also keep an average of the weights, which holds this share of itself per step.")
    decay_steps: int = option(0, "With --schedule hf-wsd: steps of the decay at the end.")

    def made(self, schedule: str, groups: Iterable[ParameterGroup]) -> Recipe:
        """Return the recipe with this schedule and the groups of a file, which come after the frozen ones. Raises UsageError if it
        is not valid."""
        import msgspec

        from swarmnode.swarm.records.run import NO_DECAY, ParameterGroup, Recipe

        frozen = [{"match": pattern, "frozen": True} for pattern in self.freeze]
        given = [*msgspec.convert(frozen, list[ParameterGroup]), *groups]
        fields = {name: getattr(self, name) for name in FIELDS}
        if self.router_balance:
            fields["balance_by_layer"] = True
        try:
            return msgspec.convert(
                {"schedule": schedule, "groups": tuple(dict.fromkeys((*given, *NO_DECAY))), **fields}, Recipe
            )
        except msgspec.ValidationError as error:
            raise UsageError(f"the recipe is not valid: {error}") from None


def read_recipe(path: Path | None) -> tuple[dict[str, Any], list[ParameterGroup]]:
    """Return the options in a recipe's file by their keys, and its groups of parameters; empty if `path` is None.

    Raises UsageError if it cannot be read, or a group is not valid.
    """
    import msgspec

    from swarmnode.swarm.records.run import ParameterGroup

    if path is None:
        return {}, []
    values = read_toml(path, path, what="a recipe")
    try:
        groups = msgspec.convert(_strict(values.pop(GROUPS, [])), list[ParameterGroup])
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{path}: a group of parameters is not valid: {error}") from None
    return values, groups


def _strict(groups: Any) -> Any:
    """Return the groups unchanged. Raises UsageError if one has a key that no group has."""
    known = {"match", "learning_rate", "weight_decay", "frozen"}
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and (strange := group.keys() - known):
            raise UsageError(f"it has no key {min(strange)}; choose among {', '.join(sorted(known))}")
    return groups


def with_file(settings: T, values: Mapping[str, Any]) -> T:
    """Return settings with the options of a file wherever they have their defaults. Raises UsageError for a value of a wrong
    type."""
    usual, found = type(settings)(), dict[str, Any]()
    for name, definition in definitions(type(settings)).items():
        key = _key(definition, name)
        if key in values and getattr(settings, name) == getattr(usual, name):
            found[name] = _value(key, values[key], definition.typed)
    return dataclasses.replace(settings, **found) if found else settings  # type: ignore[type-var]


def _key(definition: Definition, name: str) -> str:
    """Return the key of an option in a recipe's file; of one that can be turned off, that which turns it on."""
    return file_key(definition.flag(name).split("/")[0])


def _value(key: str, value: Any, typed: Any) -> Any:
    kinds = {float: (int, float), list[str]: (list,)}.get(typed, (typed,))
    if type(value) not in kinds:
        raise UsageError(f"the recipe's {key} is {value!r}, which is of another type; see --print-recipe")
    return float(value) if typed is float else value


def check_keys(values: Mapping[str, Any], *classes: type) -> None:
    """Raise UsageError if a key of a recipe's file belongs to no option of the settings classes."""
    known = {_key(definition, name) for cls in classes for name, definition in definitions(cls).items()}
    if strange := sorted(values.keys() - known):
        raise UsageError(f"a recipe has no key {strange[0]}; see --print-recipe")


def recipe_text(groups: Iterable[ParameterGroup], *settings: Any) -> str:
    """Return all options of the settings, and the groups, as a recipe's file (TOML)."""
    return "\n".join([*_lines(settings), *(line for group in groups for line in _group_lines(group))])


def _lines(settings: Iterable[Any]) -> Iterator[str]:
    for one in settings:
        for name, definition in definitions(type(one)).items():
            if name not in LEFT_OUT and (value := getattr(one, name)) is not None:
                yield f"{_key(definition, name)} = {json.dumps(value)}"


def _group_lines(group: ParameterGroup) -> Iterator[str]:
    yield from ("", f"[[{GROUPS}]]", f"match = {json.dumps(group.match)}")
    for name in ("learning_rate", "weight_decay", "frozen"):
        if (value := getattr(group, name)) is not None:
            yield f"{name} = {json.dumps(value)}"


USUAL = {"clip": 1.0, "momentum": 0.0, "beta2": 0.95, "epsilon": 1e-8}
"""Settings that are not given"""
PUBLISHED: dict[str, dict[str, float]] = {
    "muon": {"momentum": 0.95},
    "lion": {"beta2": 0.99},
    "schedule-free": {"beta2": 0.999},
    "eva": {"clip": 1e-3, "momentum": 0.9, "beta2": 0.05, "epsilon": 0.03},
}
"""Settings that optimisers' authors recommend in place of the usual ones"""


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of a training run. Each is the field of Run with the same name; `schedule` is the recipe's."""

    steps: int = option(0, "Updates in the whole run.", show_default=False)
    batch: int = option(32, "Samples per step.")
    microbatch: int = option(0, "Samples that are computed together; default: 4.", show_default=False)
    sequence: int = option(0, "Tokens per sample; default: 128.", show_default=False)
    optimizer: str = option(
        "adamw",
        "Optimiser; adamw8bit needs a quarter of AdamW's memory, for nearly the same steps. muon leaves embeddings, heads, norms "
        "and biases to AdamW; schedule-free needs --schedule constant.",
        metavar="adamw|adamw8bit|sgd|muon|lion|schedule-free|eva",
    )
    learning_rate: float = option(3e-4, "Highest learning rate.", "--lr")
    schedule: str = option(
        "cosine",
        "Learning rate after the warm-up: linear and cosine end at --final-share; hf-...: as in transformers, down to 0.",
        metavar="|".join(SCHEDULES_BY_NAME),
    )
    warmup_steps: int = option(0, "Steps during which the learning rate rises.", "--warmup")
    final_share: float = option(0.1, "Share of the learning rate at the end of linear and cosine.")
    clip: float | None = option(
        None,
        "Largest norm of the whole gradient, with eva its KL clip; 0 turns clipping off; default: 1, with eva 0.001.",
        text=-1.0,
    )
    weight_decay: float = option(0.1, "Weight decay of matrices; norms, biases and embeddings have none.")
    momentum: float | None = option(
        None, "Momentum of sgd, muon and eva; default: 0, with muon 0.95, with eva 0.9.", text=-1.0
    )
    beta1: float = option(0.9, "AdamW's share of the mean gradient that is kept.")
    beta2: float | None = option(
        None,
        "AdamW's share of the mean squared gradient that is kept, with eva of its means; default: 0.95, with schedule-free 0.999, "
        "with lion 0.99, with eva 0.05.",
        text=-1.0,
    )
    epsilon: float | None = option(
        None, "AdamW's smallest divisor, or eva's damping; default: 1e-8, with eva 0.03.", text=-1.0
    )
    seed: int = option(0, "Seed of the order of samples and of dropout.")
    autocast: bool = option(
        True,
        "Multiply in 16 bits on GPUs that are faster at it: bfloat16 and TF32 since Ampere, float16 on Volta and Turing.",
        "--autocast/--no-autocast",
    )
    checkpoint_steps: int = option(50, "Machines save their state every this many steps.")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Run with a recipe. Steps of 0, which follow from the epochs, are 1."""
        from swarmnode.swarm.records.run import RECIPE

        fields = dataclasses.asdict(self)
        defaults = USUAL | PUBLISHED.get(self.optimizer, {})
        fields |= {name: default for name, default in defaults.items() if fields[name] is None}
        betas = fields.pop("beta1"), fields.pop("beta2")
        return {
            **fields,
            "steps": self.steps or 1,
            "betas": betas,
            "schedule": RECIPE,
            "autocast": self.autocast and self.optimizer != "eva",
        }
