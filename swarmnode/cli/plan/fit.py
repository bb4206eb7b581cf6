"""Command `swarmnode fit`: show how much of a model fits this machine, before any weights are downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.config import QUANTIZATIONS, StageConfig
from swarmnode.counting import counted
from swarmnode.terminal.console import HOME, JSON, command, fail, print_json, say
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    from rich.table import Table

    from swarmnode.compute.capacity.capacity import UnitSizes
    from swarmnode.compute.device import Device
    from swarmnode.compute.graph.graph import Graph
    from swarmnode.compute.model.checkpoint import Checkpoint

CACHE_TOKENS = 4096
PASSES = {"generate": "tokens", "embed": "texts", "classify": "texts", "infer": "samples"}


@command
def fit(
    *,
    models: list[str] = argument(
        None,
        "Checkpoints (folders, GGUF files or hub ids), or modules as for `create --module`; default: as with --measure.",
        typed=list[str],
        metavar="[MODEL…]",
    ),
    measure: bool = option(False, "Measure a layer of one MODEL, and compare this machine with known GPUs and models."),
    node: Annotated[NodeOptions, "memory_bytes device kv dtype threads"],
    train: bool = option(
        False, "Show what training takes with each optimiser: weights, gradients and its memory, without activations."
    ),
    rtt: float = option(20.0, "Round-trip time between machines.", metavar="MS", min=0.0, max=60_000.0),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show how much of a model fits here, and how fast it is.

    It shows each precision, and how many machines like this the model needs. Only the config and the headers are read. `packed`
    keeps the weights of a GGUF file as they are. The speed is that of one conversation, or of short texts or samples one after
    another, estimated from how fast this machine reads its memory.

    Example: swarmnode fit Qwen/Qwen3-8B meta-llama/Llama-3.1-70B

    Example: swarmnode fit --measure
    """
    if measure or not models:
        from swarmnode.cli.plan.bench import show_speed

        if len(models or ()) > 1:
            fail("--measure takes one model", 2)
        show_speed(models[0] if models else "", node.stage, home, as_json=as_json)
        return
    stage, rows = node.stage, list[dict[str, Any]]()
    with spinner("Looking at this machine", quiet=as_json):
        from swarmnode.compute.device import probe_device  # imports torch

        probed = probe_device(stage.device)
    for model in models:
        with (
            spinner(f"Reading the config and the headers of {model}", quiet=as_json),
            tempfile.TemporaryDirectory(prefix="swarmnode-fit-") as folder,
        ):
            rows += _rows(model, probed, stage.memory_bytes, rtt / 1000, Path(folder), None if train else stage.kv)
    if as_json:
        print_json(rows)
        return
    from swarmnode.terminal.tables import show

    say(str(probed))
    show(*(_table([row for row in rows if row["model"] == model]) for model in models))
    for advice in dict.fromkeys(row["advice"] for row in rows if row["advice"]):
        say(advice)
    if not any(row["fitting"] for row in rows):
        say("Not one layer fits: lend more with --memory, or choose a smaller model.", err=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of one model: a row for each precision."""
    from swarmnode.terminal.tables import new_table

    model, context = rows[0]["model"], rows[0]["max_model_len"]
    title = f"{Path(model).name if Path(model).exists() else model}: {counted(rows[0]['units'], 'layer')}"
    columns = ("precision", "GB", "layers that fit", "machines", "speed")
    table = new_table(title if context is None else f"{title}, up to {context:,} tokens", columns, numbers=columns[1:])
    for row in rows:
        speed = float(format(row["passes_per_s"] or 0, ".2g"))
        told = f"about {speed:,g} {PASSES[row['task']]}/s" if speed else "-"
        held = [str(row["machines"]), told] if row["fitting"] else ["-", "-"]
        table.add_row(row["precision"], f"{row['bytes'] / 1e9:.1f}", str(row["fitting"]), *held)
    return table


def _rows(
    model: str, device: Device, limit_bytes: int | None, rtt_s: float, folder: Path, kv: str | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each precision; for training, which caches nothing (`kv` None), one for each optimiser."""
    import torch

    from swarmnode.client.model_files import context_limit
    from swarmnode.compute.capacity.capacity import most_anywhere
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.stopwatch import measure_read_rate
    from swarmnode.founding.model_source import outline
    from swarmnode.measuring.hardware import MEMORY_SHARE, packed_advice
    from swarmnode.plan import cost as plan

    source, task = outline(model, folder)
    is_text = isinstance(source, Checkpoint)
    rate = measure_read_rate(device)
    trains = kv is None
    advice = ""
    if isinstance(source, Checkpoint) and not trains:
        dtype = torch.float32 if device.kind == "cpu" else device.dtype_for(source.dtype)
        advice = packed_advice([device], source, StageConfig(), dtype)
    for precision, sizes in _optimizers(source) if kv is None else _precisions(source, device, kv):
        room_bytes = limit_bytes or int(device.free_bytes * MEMORY_SHARE)
        fitting = most_anywhere(sizes, room_bytes, 0 if trains else CACHE_TOKENS)
        fitted = plan.fit(sizes.weight_bytes, fitting, read_bytes_per_s=rate, rtt_s=rtt_s, led=not is_text)
        yield {
            "model": model,
            "task": task,
            "precision": precision,
            "bytes": sum(sizes.weight_bytes),
            "units": len(sizes.weight_bytes),
            "fitting": fitting,
            "machines": fitted and fitted.machines,
            "pass_s": None if trains else fitted and fitted.pass_s,
            "passes_per_s": None if trains else fitted and round(fitted.passes_per_s, 3),
            "max_model_len": context_limit(source.path) if isinstance(source, Checkpoint) else None,
            "advice": advice,
        }


def _optimizers(source: Checkpoint | Graph) -> Iterator[tuple[str, UnitSizes]]:
    """Yield each optimiser with the sizes of the units that it trains. Raises UsageError for a module or packed weights."""
    from swarmnode.cli.train.schedule import ScheduleOptions
    from swarmnode.compute.capacity.capacity import run_sizes
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.errors import UsageError
    from swarmnode.swarm.records.run import OPTIMIZERS, Recipe, Run

    if not isinstance(source, Checkpoint) or source.is_packed:
        raise UsageError("--train is for language models with plain weights: give a folder or a hub id of safetensors")
    for name in OPTIMIZERS:
        fields = ScheduleOptions(optimizer=name, microbatch=1).fields()
        sizes = run_sizes(source, Run(data=bytes(32), recipe=Recipe(), **fields))
        parameters = sum(source.entries[one].elements for one in source.tensor_names)
        yield f"{name}, {sum(sizes.weight_bytes) / parameters:.1f} B/parameter", sizes


def _precisions(source: Checkpoint | Graph, device: Device, kv: str) -> Iterator[tuple[str, UnitSizes]]:
    """Yield each possible precision of the weights with the sizes of the units; for a graph, only the exported one."""
    import torch

    from swarmnode.compute.capacity.capacity import UnitSizes, unit_sizes
    from swarmnode.compute.graph.costs.estimate import unit_weight_bytes
    from swarmnode.compute.graph.graph import Graph
    from swarmnode.measuring.hardware import has_packed_products
    from swarmnode.plan.audits import PACKED

    if isinstance(source, Graph):
        weight_bytes = unit_weight_bytes(source)
        yield "as exported", UnitSizes(weight_bytes, (0,) * len(weight_bytes))
        return
    dtype = device.dtype_for(source.dtype)
    if source.is_packed and has_packed_products(device) and (device.kind == "cpu" or source.quantised is None):
        packed_dtype = torch.float32 if device.kind == "cpu" else dtype
        yield PACKED, unit_sizes(source, dtype=packed_dtype, keeps_packed=True, kv=kv)
    for quantize in QUANTIZATIONS:
        name = str(dtype).removeprefix("torch.") if quantize == "none" else quantize
        yield name, unit_sizes(source, dtype=dtype, quantize=quantize, kv=kv)
