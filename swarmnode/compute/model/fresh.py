"""A fresh model: the weights that a training begins with, drawn at random from a seed, for a transformers config."""

from __future__ import annotations

from pathlib import Path

import torch

from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.family import family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS, ONE_AT_A_TIME
from swarmnode.errors import CheckpointError

with lean():
    from transformers.utils import logging as transformers_logging


@lean()
def write_fresh_model(config: Path, out: Path, seed: int) -> None:
    """Write config and float32 weights of the model that the config in folder `config` describes into the folder `out`.

    The same seed draws the same weights. Raises CheckpointError where it is no config, or of a model that has no units.
    """
    family = family_of(load_config(config / CONFIG_FILE))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with ONE_AT_A_TIME, torch.random.fork_rng():
            torch.manual_seed(seed)
            model = family.model_class(family.config).float()
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{config / CONFIG_FILE}: no model can be made of it: {error}") from error
    model.save_pretrained(out)
