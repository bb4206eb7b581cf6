"""Command `swarmnode quantize`: write a model with packed weights."""

from __future__ import annotations

import shlex
from pathlib import Path

from swarmnode.terminal.console import JSON, command, print_json, say
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import bytes_bar


@command
def quantize(
    *,
    model: str = argument(..., "GGUF file, or a folder or hub id of a checkpoint in safetensors.", metavar="IN"),
    out: Path = argument(
        ...,
        "What to write: a GGUF file if IN is one, else a folder for `create` and `host`.",
        typed=Path,
        metavar="OUT",
    ),
    form: str = option(
        "q4_k_m",
        "Number format: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k_s|m|l, q4_k_s|m, q5_k_s|m, q6_k, iq4_nl, iq4_xs, or mxfp4 "
        "(experts; the rest q8_0).",
        "--format",
        metavar="NAME",
    ),
    allow_requantize: bool = option(False, "Round weights that are packed already a second time."),
    force: bool = option(False, "Replace OUT."),
    as_json: bool = JSON,
) -> None:
    """Write a model with packed weights, of 3 to 8 bits each.

    Matrices that matter more get more bits, as in llama.cpp; norms stay float32. OUT appears when it is complete.

    Example: swarmnode quantize ./Qwen3-8B-F16.gguf ./Qwen3-8B-Q4_K_M.gguf

    Example: swarmnode quantize Qwen/Qwen3-8B ./qwen3-packed --format q5_k_m
    """
    from swarmnode.counting import format_bytes
    from swarmnode.founding.quantisation import quantise_model

    with bytes_bar("Packing the weights", quiet=as_json) as progress:
        made = quantise_model(model, out, form, again=allow_requantize, force=force, progress=progress)
    if as_json:
        values = {"bytes": made.nbytes, "formats": dict(made.formats), "notices": list(made.notices)}
        print_json({"out": str(out), **values})
        return
    for notice in made.notices:
        say(f"Note: {notice}")
    formats = ", ".join(f"{count} in {name}" for name, count in made.formats.items())
    say(f"Wrote {out}, {format_bytes(made.nbytes)}; matrices: {formats}. Next: swarmnode host {shlex.quote(str(out))}")
