"""State of a tuning on the owner's disk: the last checkpoint, with the settings that it belongs to."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec

from swarmnode.codec.body import DECODE_ERRORS
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.errors import LocalError, UsageError
from swarmnode.files import write_private
from swarmnode.swarm.records.run import Run, differences, encode_run
from swarmnode.tuning.client.tuned_route import AdapterState


class _Saved(msgspec.Struct, frozen=True):
    base: bytes  # id of the swarm
    recipe: AdapterRecipe
    run: bytes
    step: int
    layers: dict[int, bytes]


class SavedTuning:
    """File with the last checkpoint of a tuning of an adapter for the swarm `base`."""

    def __init__(self, path: Path, base: bytes, recipe: AdapterRecipe, run: Run) -> None:
        self.path = path
        self._base = base
        self._recipe = recipe
        self._run = run

    def __repr__(self) -> str:
        return f"SavedTuning({self.path})"

    def load(self) -> AdapterState | None:
        """Return the checkpoint; None if there is no file.

        Raises UsageError if it is of another base model, adapter or run, or no state of a tuning; LocalError if it cannot be read.
        """
        try:
            saved = msgspec.msgpack.decode(self.path.read_bytes(), type=_Saved)
            run = msgspec.msgpack.decode(saved.run, type=Run)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(f"cannot read {self.path}: {error.strerror or error}; choose another --out") from error
        except (*DECODE_ERRORS, UsageError):
            raise UsageError(f"{self.path} holds no state of a tuning: remove it, or choose another --out") from None
        self._check(saved, run)
        return AdapterState(saved.step, saved.layers)

    def _check(self, saved: _Saved, run: Run) -> None:
        advice = f"give the same, another --out, or remove {self.path} to begin anew"
        if saved.base != self._base:
            raise UsageError(f"{self.path} holds an adapter of another swarm's model: {advice}")
        for field in fields(AdapterRecipe):
            here, there = getattr(self._recipe, field.name), getattr(saved.recipe, field.name)
            if here != there:
                words = field.name.replace("_", " ")
                raise UsageError(f"{self.path} holds an adapter whose {words} is {there}, not {here}: {advice}")
        if run.id != self._run.id:
            told = " ".join(differences(self._run, run)) or "Its settings differ."
            raise UsageError(f"{self.path} holds a tuning with other settings or data. {told} G{advice[1:]}")

    def save(self, state: AdapterState) -> None:
        """Write a checkpoint in place of the one before, flushed to the disk. Raises LocalError if it cannot be written."""
        saved = _Saved(self._base, self._recipe, encode_run(self._run), state.step, dict(state.layers))
        write_private(self.path, msgspec.msgpack.encode(saved))
