"""A folder that appears when all of it is written, so that nobody sees half a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnode.errors import LocalError, UsageError
from swarmnode.files.durable import replace_durably, sync_tree
from swarmnode.swarm.storage.content import is_allowed_name


def check_free(out: Path, *, force: bool = False) -> None:
    """Raises UsageError unless `out` is free, an empty folder, or (`force`) a folder of nothing but a checkpoint's files."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise UsageError(f"{out} is there already, and is no folder; name one that does not exist yet")
    names = [path.name for path in out.iterdir()]
    if names and not force:
        raise UsageError(f"{out} is there already; name a folder that does not exist yet, or --force to replace it")
    foreign = sorted(name for name in names if not is_allowed_name(name))
    if foreign:
        raise UsageError(
            f"{out} holds {foreign[0]}, which is no file of a checkpoint: it is not replaced, even by --force"
        )


@contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """An empty folder to write into; it becomes `out` at the end, or is removed where something raised.

    Raises UsageError as `check_free`, LocalError where this machine cannot write.
    """
    check_free(out, force=force)
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        check_free(out, force=force)
        if out.is_dir():
            shutil.rmtree(out)
        sync_tree(partial)
        replace_durably(partial, out)
    except OSError as error:
        raise LocalError(
            f"cannot write {out}: {error.strerror or error}; free disk space or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
