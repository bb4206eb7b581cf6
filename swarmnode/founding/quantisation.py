"""Packed files of a model for `quantize`: a GGUF file of a GGUF file, a folder of any other checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.compute.model.hub import HubCheckpoint, open_checkpoint
from swarmnode.errors import UsageError
from swarmnode.founding.model_source import local_gguf
from swarmnode.swarm.storage.content import GGUF_SUFFIX, Progress
from swarmnode.swarm.storage.small_files import check_free, check_space, new_file, new_folder

if TYPE_CHECKING:
    from swarmnode.compute.packing.recipes import FormatChoice, FormatMix


@dataclass(frozen=True)
class Quantised:
    """A packed model that was written: its place, its bytes, how many matrices have which format, and sentences for the user."""

    out: Path
    nbytes: int
    formats: Mapping[str, int]
    notices: tuple[str, ...]


def quantise_model(
    model: str, out: Path, form: str, *, again: bool = False, force: bool = False, progress: Progress | None = None
) -> Quantised:
    """Write a model with its matrices in a format, or in llama.cpp's mix of formats of that name.

    Args:
        model: a GGUF file, any part of a split one, a folder, or a hub id.
        out: the place of the result: a GGUF file if `model` is one, else a folder, which appears when it is complete.
        form: the name of the format, as `q4_k_m`.
        again: whether matrices that are packed already may be rounded a second time.
        force: whether `out` may be replaced.
        progress: is called with the written bytes and those of all matrices.

    Raises:
        UsageError: if there is no such model or format, `out` is not free or has the wrong suffix, or the model is packed already.
        CheckpointError: if the model is damaged, or cannot be packed.
        LocalError: if the disk is full, or a package is missing.
    """
    from swarmnode.compute.packing.recipes import recipe_of

    recipe = recipe_of(form)
    path = Path(model).expanduser()
    if out.exists() and path.exists() and out.samefile(path):
        raise UsageError(f"{out} is the model itself; name another place")
    gguf = local_gguf(model)
    if gguf is None and model.endswith(GGUF_SUFFIX):
        raise UsageError(f"{model}: no such file; check its name")
    if gguf is None:
        return _of_folder(model, out, recipe, force=force, progress=progress)
    return _of_gguf(gguf, out, recipe, again=again, force=force, progress=progress)


def _of_gguf(
    file: Path, out: Path, recipe: FormatMix, *, again: bool, force: bool, progress: Progress | None
) -> Quantised:
    """Write a GGUF file with the matrices of another one."""
    from swarmnode.compute.gguf.repack import GgufRepack

    if not out.name.endswith(GGUF_SUFFIX):
        raise UsageError(f"{out}: of a GGUF file a GGUF file is made; end its name with {GGUF_SUFFIX}")
    source = GgufRepack(file, recipe, again=again)
    check_space(out, source.total_bytes)
    with new_file(out, force=force) as stream:
        source.write(stream, progress)
    return _quantised(out, out.stat().st_size, source.choice)


def _of_folder(model: str, out: Path, recipe: FormatMix, *, force: bool, progress: Progress | None) -> Quantised:
    """Write a folder with the matrices of a folder or a hub model."""
    from swarmnode.compute.gguf.repack import FolderPack
    from swarmnode.compute.model.family import settings_of

    if out.name.endswith(GGUF_SUFFIX):
        raise UsageError(
            f"{out}: of a checkpoint that is no GGUF file a folder is made; leave out {GGUF_SUFFIX} (docs/host.md has the way to "
            "a GGUF file)"
        )
    check_free(out, force=force)
    checkpoint = open_checkpoint(model)
    if (settings := settings_of(checkpoint.config)) is not None:
        raise UsageError(
            f"{model}: its weights are packed already ({settings.get('quant_method', 'unknown')}): found a swarm on it as it "
            "is, or quantise the model that it was made of"
        )
    source = FolderPack(checkpoint, recipe)
    check_space(out, source.total_bytes)
    if isinstance(checkpoint, HubCheckpoint):
        checkpoint.open_slices(checkpoint.tensor_names)  # fetches every shard, with a progress bar
    with new_folder(out, force=force) as partial:
        source.write(partial, progress)
    return _quantised(out, sum(file.stat().st_size for file in out.iterdir()), source.choice)


def _quantised(out: Path, nbytes: int, choice: FormatChoice) -> Quantised:
    return Quantised(out, nbytes, Counter(form.name for form in choice.forms.values()), choice.notices)
