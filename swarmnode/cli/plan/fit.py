"""`swarmnode fit`: what of a model fits this machine, before anything is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from swarmnode.cli.options.node_flags import DEVICE, MEMORY
from swarmnode.cli.terminal.console import JSON, print_json, reports_errors, say
from swarmnode.config import QUANTIZATIONS

if TYPE_CHECKING:
    from swarmnode.compute.device import Device

CACHE_TOKENS = 4096


@reports_errors
def fit(
    models: list[str] = typer.Argument(..., metavar="MODEL…", help="Checkpoints: folders, or hub ids."),
    memory: str = MEMORY,
    device: str = DEVICE,
    rtt: float = typer.Option(20.0, "--rtt", metavar="MS", min=0.0, help="Round trip between machines."),
    as_json: bool = JSON,
) -> None:
    """What of a model fits this machine in which precision, how many such machines hold all of it, and about how fast they write.

    Only config and headers are read. The speed is that of one conversation, by how fast this machine reads its memory.

    Example: swarmnode fit Qwen/Qwen3-8B meta-llama/Llama-3.1-70B
    """
    from swarmnode.cli.options.quantities import parse_bytes
    from swarmnode.compute.device import probe_device
    from swarmnode.config import StageConfig

    StageConfig(device=device).check()
    limit_bytes = parse_bytes(memory, "--memory") if memory else None
    probed = probe_device(device)
    rows = [row for model in models for row in _rows(model, probed, limit_bytes, rtt / 1000)]
    if as_json:
        print_json(rows)
        return
    from swarmnode.cli.terminal.tables import new_table, show

    columns = ("model", "precision", "GB", "units", "fit here", "machines", "tokens/s")
    table = new_table(str(probed), columns, numbers=columns[2:])
    for row in rows:
        told = [f"{row['bytes'] / 1e9:.1f}", str(row["units"]), str(row["fitting"])]
        speed = float(format(row["tokens_per_s"] or 0, ".2g"))
        held = [str(row["machines"]), f"about {speed:,g}"] if row["fitting"] else ["-", "-"]
        table.add_row(row["model"], row["precision"], *told, *held)
    show(table)
    if not any(row["fitting"] for row in rows):
        say("Not one unit fits: lend more with --memory, or choose a smaller model.", err=True)


def _rows(model: str, device: Device, limit_bytes: int | None, rtt_s: float) -> Iterator[dict[str, Any]]:
    from swarmnode.compute.memory import most_anywhere, unit_sizes
    from swarmnode.compute.model.hub import open_checkpoint
    from swarmnode.compute.read_rate import measure_read_rate
    from swarmnode.plan.offline import fit as plan
    from swarmnode.roles.serving.hardware import MEMORY_SHARE

    checkpoint = open_checkpoint(model)
    dtype = device.dtype_for(checkpoint.dtype)
    rate = measure_read_rate(device)
    for quantize in QUANTIZATIONS:
        sizes = unit_sizes(checkpoint, dtype=dtype, quantize=quantize)
        room_bytes = limit_bytes or int(device.free_bytes * MEMORY_SHARE)
        units = len(sizes.weight_bytes)
        fitting = most_anywhere(sizes, room_bytes, CACHE_TOKENS)
        fitted = plan.fit(sizes.weight_bytes, fitting, read_bytes_per_s=rate, rtt_s=rtt_s)
        yield {
            "model": model,
            "precision": str(dtype).removeprefix("torch.") if quantize == "none" else quantize,
            "bytes": sum(sizes.weight_bytes),
            **(
                asdict(fitted)
                if fitted is not None
                else {"units": units, "fitting": 0, "machines": None, "token_s": None}
            ),
            "tokens_per_s": None if fitted is None else round(fitted.tokens_per_s, 3),
        }
