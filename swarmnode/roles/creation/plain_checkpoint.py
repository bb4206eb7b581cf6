"""The checkpoint that a swarm is founded on has plain weights: quantised ones and GGUF are dequantised once, at the founder."""

from __future__ import annotations

import shutil
from pathlib import Path

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.hub import HubCheckpoint, open_checkpoint
from swarmnode.errors import LocalError, UsageError
from swarmnode.swarm.storage.content import Progress
from swarmnode.swarm.storage.new_folder import check_free, new_folder


def open_plain(model: str, out: Path, *, force: bool = False, progress: Progress | None = None) -> Checkpoint:
    """A local folder, a GGUF file, or a hub id (of a quantised model all files are downloaded); what is not plain is written into
    the folder `out`, which the checkpoint then is in.

    Raises UsageError where `model` is neither a folder nor a hub id, CheckpointError where it is damaged or of a method that cannot
    be dequantised, LocalError where the disk is too small.
    """
    from swarmnode.compute.model.dequantize.checkpoint import QuantisedCheckpoint
    from swarmnode.compute.model.dequantize.gguf import SUFFIX, GgufCheckpoint, find_gguf
    from swarmnode.compute.model.dequantize.settings import settings_of

    path = Path(model).expanduser()
    gguf = find_gguf(path)
    source: GgufCheckpoint | QuantisedCheckpoint
    if gguf is not None:
        source = GgufCheckpoint(gguf)
    else:
        repository = model.partition("@")[0]
        if not path.is_dir() and (
            repository.count("/") != 1 or model.startswith(("/", ".", "~")) or model.endswith(SUFFIX)
        ):
            raise UsageError(
                f"{model}: no such folder or GGUF file (and a hub id has the form organisation/model, "
                "or organisation/model@revision)"
            )
        checkpoint = open_checkpoint(model)
        settings = settings_of(checkpoint.config)
        if settings is None:
            return checkpoint
        source = QuantisedCheckpoint(checkpoint, settings)
        if isinstance(checkpoint, HubCheckpoint):
            checkpoint.open_slices(checkpoint.tensor_names)  # fetches every shard, with a progress bar
    if path.exists() and out.exists() and path.samefile(out):
        raise UsageError(f"{model} is where its plain weights were to be written: choose another name for the swarm")
    check_free(out, force=force)
    _check_space(out, source.plain_bytes)
    with new_folder(out, force=force) as partial:
        source.write(partial, progress)
    return Checkpoint(out)


def _check_space(out: Path, needed_bytes: int) -> None:
    """Raises LocalError where the plain weights find no place."""
    free_bytes = shutil.disk_usage(out.parent).free
    if needed_bytes > free_bytes:
        raise LocalError(
            f"dequantised the weights take {needed_bytes / 1e9:.1f} GB, and {out.parent} has {free_bytes / 1e9:.1f} GB left: "
            "found the swarm where there is more"
        )
