"""Adapters that a swarm is founded with: looked through whole, and copied beside the swarm's file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarmnode.codec.body import MAX_ADAPTER_CHARS
from swarmnode.errors import UsageError
from swarmnode.roles.creation.model_source import ModelSource
from swarmnode.swarm.records.adapter_info import (
    MAX_ADAPTERS,
    MAX_WEIGHTS_BYTES,
    AdapterInfo,
    file_names,
    is_adapter_name,
)
from swarmnode.swarm.records.manifest import CAUSAL_LM
from swarmnode.swarm.storage.content import describe_files
from swarmnode.swarm.storage.new_folder import new_folder


@dataclass(frozen=True)
class AdapterSource:
    """The folder with the files of all adapters, and what the manifest says of them."""

    folder: Path
    adapters: tuple[AdapterInfo, ...]


def check_adapter_names(names: list[str]) -> None:
    """Raises UsageError for what cannot be the names of a swarm's adapters."""
    for name in names:
        if not is_adapter_name(name):
            raise UsageError(
                f"{name[:MAX_ADAPTER_CHARS]!r} is not a name for an adapter; use up to {MAX_ADAPTER_CHARS} letters, digits, "
                "dots and dashes, a letter or digit first"
            )
    if len({name.casefold() for name in names}) < len(names):
        raise UsageError("two adapters have the same name")
    if len(names) > MAX_ADAPTERS:
        raise UsageError(f"a swarm has at most {MAX_ADAPTERS} adapters, not {len(names)}")


def from_folders(folders: Mapping[str, Path], source: ModelSource, out: Path, *, force: bool = False) -> AdapterSource:
    """Adapters by their names, each from a folder that peft has saved it into, copied into the folder `out`. Raises UsageError
    where the model generates no text, CheckpointError where one is no plain LoRA adapter of it, LocalError."""
    import torch

    from swarmnode.compute.adapters.adapter_file import adapter_in
    from swarmnode.compute.model.assemble import outline
    from swarmnode.compute.model.checkpoint import Checkpoint

    check_adapter_names(list(folders))
    if source.kind != CAUSAL_LM:
        raise UsageError("adapters are for models that generate text")
    family = Checkpoint(source.folder).family
    model = outline(family, 0, family.units, dtype=torch.float32)
    with new_folder(out, force=force) as partial:
        for name, folder in folders.items():
            adapter = adapter_in(folder)
            adapter.check(family, model, 0, family.units)
            adapter.check_numbers()
            if adapter.weights.stat().st_size > MAX_WEIGHTS_BYTES:
                raise UsageError(f"{adapter.weights} is over {MAX_WEIGHTS_BYTES >> 30} GiB: an adapter is smaller")
            for original, copy in zip((adapter.config_file, adapter.weights), file_names(name), strict=True):
                shutil.copyfile(original, partial / copy)
    return AdapterSource(out, tuple(_describe(name, out) for name in folders))


def _describe(name: str, folder: Path) -> AdapterInfo:
    config, weights = describe_files([folder / file for file in file_names(name)])
    return AdapterInfo(name, config, weights)
