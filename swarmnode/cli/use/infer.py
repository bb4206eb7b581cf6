"""Command `swarmnode infer`: pass arrays through a module that a swarm serves."""

from __future__ import annotations

import asyncio
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.asking import PATIENCE, TRUST, asking
from swarmnode.cli.options.file_options import check_output
from swarmnode.cli.options.swarm import SWARM
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, run_async, say, unless_stopped
from swarmnode.terminal.option import option, path_option

if TYPE_CHECKING:
    import numpy as np

    from swarmnode.swarm.records.announcement import Trust


@command
def infer(
    *,
    swarm: str = SWARM,
    inputs: Path = option(
        ..., "File with the module's inputs, arrays by name (numpy.savez).", "--input", typed=Path, metavar="FILE.npz"
    ),
    output: Path = path_option("Write the outputs to this file; default: print them.", metavar="FILE.npz"),
    force: bool = option(False, "Overwrite an existing --output."),
    trust: Trust = TRUST,
    patience: float = PATIENCE,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: LogOptions,
) -> None:
    """Compute the outputs of a module that a swarm serves.

    Such a swarm was created with `create --module`.

    Example: swarmnode infer eyes.swarm --input images.npz --output scores.npz
    """
    logs.begin()
    if output is not None:
        if output.suffix != ".npz":
            fail(f"--output {output}: give the name of an .npz file", 2)
        check_output("--output", output, force=force)
    from swarmnode.compute.graph.boundary import read_arrays

    arrays = read_arrays(inputs)

    async def produce(stop: asyncio.Event) -> tuple[Mapping[str, np.ndarray], float] | None:
        async with asking(swarm, home, stop, patience_s=patience, trust=trust) as client:
            began_s = time.monotonic()
            outputs = await unless_stopped(client.infer(arrays), stop)
            return None if outputs is None else (outputs, time.monotonic() - began_s)

    result = run_async(produce)
    if result is None:
        fail("interrupted")
    outputs, took_s = result
    if output is not None:
        _write(output, outputs)
    if as_json:
        shapes = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in outputs.items()}
        print_json({"took_s": round(took_s, 3), "output": output and str(output), "outputs": shapes})
        return
    for name, array in outputs.items():
        say(f"{name}: {array.dtype} {array.shape}" + ("" if output is not None else f"\n{array}"))
    if output is not None:
        say(f"Wrote {output}, computed in {took_s:.2f} s.", err=True)


def _write(output: Path, outputs: Mapping[str, np.ndarray]) -> None:
    from numpy.lib.format import write_array

    try:
        # not numpy.savez: an output may have the name of one of its arguments
        with zipfile.ZipFile(output, "w") as archive:
            for name, array in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    write_array(file, array, allow_pickle=False)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror or error}")
