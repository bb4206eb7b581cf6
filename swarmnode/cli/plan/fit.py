"""Command `swarmnode fit`: how much of a model fits this machine, before any weights are downloaded, and how fast it is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.config import QUANTIZATIONS, StageConfig
from swarmnode.counting import counted
from swarmnode.errors import LocalError
from swarmnode.terminal.console import HOME, JSON, LogOptions, command, fail, print_json, say
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from swarmnode.compute.capacity.capacity import ModelShape, ModuleSpeed, UnitSizes
    from swarmnode.compute.device import Device
    from swarmnode.compute.graph.graph import Graph
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.plan.cost import ModelFit


POSITIONS = 64  # in a chunk of a prompt
CACHE_TOKENS = 4096
RTT_S = 0.02  # between two machines
PRODUCTS = ("queries, keys, values", "attention's output", "feed forward")  # modules that are products with weights


def show_speed(model: str, stage: StageConfig, home: Path, *, as_json: bool) -> None:
    """Measure each module of a layer of `model` (a folder or hub id, empty for Llama 3 8B), memory and disk, and print how fast
    well-known models are here. At most a config is downloaded. For known GPUs, measured figures are Helix's; the others follow from
    datasheets. Raises UsageError, LocalError, CheckpointError."""
    import torch

    from swarmnode.compute.device import probe_device, set_threads

    LogOptions().begin()
    device = probe_device(stage.device)
    set_threads(stage.threads)
    dtype = device.dtype_for(torch.bfloat16, stage.dtype)  # published models are in bfloat16
    shape = _shape_of(model)
    with spinner(f"Measuring a layer of {shape.name}", quiet=as_json) as shown:
        measured = _measure(device, dtype, shape, home, shown.now)
    cards = _cards(shape.layer.parameters)
    if as_json:
        print_json({**measured, "cards": cards})
        return
    _show(str(device), shape, measured, cards)


def _shape_of(model: str) -> ModelShape:
    from swarmnode.compute.capacity.capacity import LLAMA_8B, ModelShape

    if not model:
        return LLAMA_8B
    from swarmnode.compute.model.hub import open_checkpoint

    return ModelShape.of_config(model, open_checkpoint(model).config)


def _measure(
    device: Device, dtype: torch.dtype, shape: ModelShape, home: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    from swarmnode.compute.capacity.capacity import KNOWN_MODELS, measure_modules, whole_layer
    from swarmnode.compute.stopwatch import measure_disk, measure_read_rate
    from swarmnode.files import existing

    modules = list(measure_modules(device, dtype, shape.layer, positions=POSITIONS))
    layer = whole_layer(modules)
    tell("Measuring the disk")
    written, read = measure_disk(existing(home))
    tell("Measuring each format, and the memory")
    shapes = [*KNOWN_MODELS, *([shape] if shape not in KNOWN_MODELS else [])]
    return {
        "device": device.name,
        "dtype": _name(dtype),
        "layer_parameters": shape.layer.parameters,
        "modules": [asdict(module) for module in (*modules, layer)],
        "models": list(_models(device, dtype, shapes, shape, modules)),
        "decode_units_per_s": round(1 / layer.decode_s, 3),
        "prefill_units_per_s": round(POSITIONS / layer.prompt_s, 3),
        "training_units_per_s": round(POSITIONS / layer.training_s, 3),
        "flops_per_s": round(2 * shape.layer.parameters * POSITIONS / _products_s(modules, "prompt_s")),
        "memory_bytes": device.total_bytes,
        "memory_bytes_per_s": round(measure_read_rate(device)),
        "disk_write_bytes_per_s": round(written),
        "disk_read_bytes_per_s": round(read),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products_s(modules: Sequence[ModuleSpeed], field: str) -> float:
    return sum(getattr(module, field) for module in modules if module.name in PRODUCTS)


def _models(
    device: Device, dtype: torch.dtype, shapes: Sequence[ModelShape], timed: ModelShape, modules: Sequence[ModuleSpeed]
) -> Iterator[dict[str, Any]]:
    """Yield for each model and format how much of it fits here, and its speed on machines like this one. `modules` were measured
    of layers of `timed`."""
    from swarmnode.compute.capacity.capacity import measure_product_s, most_anywhere
    from swarmnode.measuring.packed_products import MEMORY_SHARE
    from swarmnode.plan.cost import fit

    room_bytes = int(device.free_bytes * MEMORY_SHARE)
    full_s = _products_s(modules, "decode_s") / timed.layer.parameters  # of one parameter
    rest_s = sum(module.decode_s for module in modules if module.name not in PRODUCTS)
    parameter_s = {"none": full_s}
    for quantize in QUANTIZATIONS[1:]:
        try:
            slower = measure_product_s(device, dtype, timed.layer.hidden, quantize)
            parameter_s[quantize] = full_s * slower / measure_product_s(device, dtype, timed.layer.hidden, "none")
        except LocalError:
            continue  # this device cannot compute in the format
    for shape in shapes:
        for quantize, one_s in parameter_s.items():
            sizes = shape.sizes(dtype.itemsize, quantize)
            fitting = most_anywhere(sizes, room_bytes, CACHE_TOKENS)
            layer_s = rest_s + shape.layer.parameters * one_s
            # of the embedding one row is read
            unit_s = (0.0, *[layer_s] * shape.layers, shape.head_parameters * full_s)
            fitted = fit(unit_s, fitting, read_bytes_per_s=1.0, rtt_s=RTT_S)  # in seconds instead of bytes
            yield {
                "model": shape.name,
                "format": _name(dtype) if quantize == "none" else quantize,
                "bytes": sum(sizes.weight_bytes),
                "layers": len(sizes.weight_bytes),
                "fitting": fitting,
                "machines": fitted and fitted.machines,
                "tokens_per_s": fitted and round(fitted.passes_per_s, 4),
            }


def _cards(layer_parameters: int) -> list[dict[str, Any]]:
    """Return the speeds of known GPUs for layers of this size, the fastest first."""
    from swarmnode.plan.offline.gpus import gpus_by_name
    from swarmnode.simulate.environment.peers import BACKWARD, CAPTURED_S, find_card

    cards = []
    for gpu in gpus_by_name().values():
        card = find_card(gpu.name, layer_parameters, CAPTURED_S)
        assert card is not None
        prompt_s = max(card.prompt_layer_s(POSITIONS), card.decode_layer_s(1))  # weights are read once in either pass
        cards.append(
            {
                "device": gpu.name,
                "decode_units_per_s": round(card.decode_units_per_s, 3),
                "prefill_units_per_s": round(POSITIONS / prompt_s, 3),
                "training_units_per_s": round(POSITIONS / prompt_s / (1 + BACKWARD), 3),
                "memory_bytes": gpu.memory_bytes,
                "memory_bytes_per_s": gpu.memory_bytes_per_s,
            }
        )
    return sorted(cards, key=lambda card: -card["decode_units_per_s"])


def _show(title: str, shape: ModelShape, measured: dict[str, Any], cards: list[dict[str, Any]]) -> None:
    from swarmnode.terminal.tables import new_table, show

    written, read = measured["disk_write_bytes_per_s"] / 1e9, measured["disk_read_bytes_per_s"] / 1e9
    say(f"{title}; the disk writes {written:.2f} GB/s and reads {read:.2f} GB/s.")
    say(
        f"It reads memory at {_short(measured['memory_bytes_per_s'] / 1e9)} GB/s: that limits how fast answers are written."
    )
    say(f"It computes {_short(measured['flops_per_s'] / 1e12)} TFLOP/s: that limits how fast prompts are read.")
    columns: Sequence[str] = ("model", "format", "GB", "fits here", "machines", "tokens/s")
    models = new_table(
        f"models on machines like this one, {1000 * RTT_S:g} ms apart, a conversation alone",
        columns,
        numbers=("GB", "machines"),
        plain=True,
    )
    for row in measured["models"]:
        models.add_row(row["model"], row["format"], f"{row['bytes'] / 1e9:,.1f}", *_fit_of(row))
    columns = ("ms of a pass", "one token", f"{POSITIONS} of a prompt", "and trained")
    millions = measured["layer_parameters"] / 1e6
    modules = new_table(
        f"a layer of {shape.name}: {millions:,.1f} M parameters, {measured['dtype']}", columns, numbers=columns[1:]
    )
    for module in measured["modules"]:
        times_s = module["decode_s"], module["prompt_s"], module["training_s"]
        modules.add_row(module["name"], *(f"{1e3 * time_s:,.2f}" for time_s in times_s))
    columns = ("tokens/s", "written", "prompts", "training", "GB", "GB/s")
    table = new_table(f"{shape.name} beside known GPUs, if they held it whole", columns, numbers=columns[1:])
    for row in ({**measured, "device": "this machine"}, *cards):
        speeds = row["decode_units_per_s"], row["prefill_units_per_s"], row["training_units_per_s"]
        sizes = row["memory_bytes"] / 1e9, row["memory_bytes_per_s"] / 1e9
        told = (_short(speed / shape.layers) for speed in speeds)
        table.add_row(row["device"], *told, *(f"{size:,.0f}" for size in sizes))
    show(models, modules, table)


def _fit_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the cells for the share that fits, the machines and the speed of a model."""
    if not row["fitting"]:
        return "no layer", "-", "-"
    fits = "all of it" if row["machines"] == 1 else f"{row['fitting']} of {row['layers']} layers"
    speed = f"about {_short(row['tokens_per_s'])}{' here' if row['machines'] == 1 else ''}"
    return fits, f"{row['machines']:,}", speed


def _short(number: float) -> str:
    """Return a number with two significant digits."""
    return f"{float(format(number, '.2g')):,g}"


RTT_MS = 20.0
PASSES = {"generate": "tokens", "embed": "texts", "classify": "texts", "infer": "samples"}


@command
def fit(
    *,
    models: list[str] = argument(
        None,
        "Checkpoints (folders, GGUF files or hub ids), configs, or modules as for `create --module`; default: as with --measure.",
        typed=list[str],
        metavar="[MODEL…]",
    ),
    measure: bool = option(False, "Measure a layer of one MODEL, and compare this machine with known GPUs and models."),
    node: Annotated[NodeOptions, "memory_bytes device kv dtype threads"],
    train: bool = option(
        False, "Show what training takes with each optimiser: weights, gradients and its memory, without activations."
    ),
    rtt: float = option(RTT_MS, "Round-trip time between machines.", metavar="MS", min=0.0, max=60_000.0),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Show how much of a model fits here, and how fast it is.

    It shows each precision, and how many machines like this the model needs. Only the config and the headers are read. For a model
    that is to be trained from random weights, a config is enough. `packed` keeps the weights of a GGUF file as they are. The speed
    is that of one conversation, or of short texts or samples one after another, estimated from how fast this machine reads its
    memory.

    Example: swarmnode fit Qwen/Qwen3-8B meta-llama/Llama-3.1-70B

    Example: swarmnode fit --measure
    """
    if measure or not models:
        if len(models or ()) > 1:
            fail("--measure takes one model", 2)
        plain, passed_over = NodeOptions(), ("memory_bytes", "kv")
        given = [name for name in passed_over if getattr(node, name) != getattr(plain, name)]
        given += [*(["rtt"] if rtt != RTT_MS else []), *(["train"] if train else [])]
        if given:
            flags = " and ".join(f"--{name.removesuffix('_bytes')}" for name in given)
            fail(f"{flags}: --measure times this machine and does not plan; give a MODEL without --measure", 2)
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
    for row in rows:
        if row["experts"]:
            say(f"One machine alone, {row['precision']}: {row['experts']['says']}.")
        if row["expert_group"]:
            say(f"Experts in {row['precision']}: {row['expert_group']['says']}.")
    for model, forms in {row["model"]: row["between_stages"] for row in rows if row["between_stages"]}.items():
        told = (
            f"{form['form']} {10 * form['tokens_per_s_per_mbit']:,.0f}"
            + (f" (but {form['steps']:g} x as many steps)" if form["steps"] > 1 else "")
            for form in forms
        )
        say(f"{model}: tokens/s that 10 Mbit/s carry between two stages: {'; '.join(told)}.")
    if not any(row["fitting"] for row in rows):
        say("Not one layer fits: lend more with --memory, or choose a smaller model.", err=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of one model: a row for each precision."""
    from swarmnode.terminal.tables import new_table

    model, context = rows[0]["model"], rows[0]["max_model_len"]
    title = f"{Path(model).name if Path(model).exists() else model}: {counted(rows[0]['units'], 'layer')}"
    title += " with embedding and head" if rows[0]["task"] == "generate" else ""
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
    from swarmnode.compute.capacity.expert_tiers import disk_advice, on_one_machine
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.model.fresh import FreshCheckpoint
    from swarmnode.compute.stopwatch import measure_read_rate
    from swarmnode.founding.model_source import outline
    from swarmnode.measuring.hardware import packed_advice
    from swarmnode.measuring.packed_products import MEMORY_SHARE, host_memory
    from swarmnode.plan import cost as plan
    from swarmnode.plan.audits import PACKED

    source, task = outline(model, folder)
    is_text = isinstance(source, Checkpoint)
    rate = measure_read_rate(device)
    trains = kv is None
    host = None if trains else host_memory(device, measured=True)
    advice = f"{model} has no weights: sizes follow from its config" if isinstance(source, FreshCheckpoint) else ""
    if isinstance(source, Checkpoint) and not trains and not advice:
        dtype = torch.float32 if device.kind == "cpu" else device.dtype_for(source.dtype)
        advice = packed_advice([device], source, StageConfig(), dtype)
    for precision, sizes in _optimizers(source) if kv is None else _precisions(source, device, kv):
        room_bytes = limit_bytes or int(device.free_bytes * MEMORY_SHARE)
        fitting = most_anywhere(sizes, room_bytes, 0 if trains else CACHE_TOKENS)
        if isinstance(source, Checkpoint) and not trains and device.kind == "cpu":
            advice = advice or disk_advice(source, sizes, room_bytes, CACHE_TOKENS, len(sizes.weight_bytes))
        fitted = plan.fit(_read_bytes(source, sizes), fitting, read_bytes_per_s=rate, rtt_s=rtt_s, led=not is_text)
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
            "experts": on_one_machine(source, sizes, room_bytes, CACHE_TOKENS, rate, host)
            if precision == PACKED and isinstance(source, Checkpoint) and (host is not None or device.kind == "cpu")
            else None,
            "expert_group": None if trains else _expert_group(source, sizes, fitted, rate, room_bytes, rtt_s),
            "between_stages": _between_stages(source)
            if trains and isinstance(source, Checkpoint) and source.family.bottleneck is None
            else None,
        }


def _read_bytes(source: Checkpoint | Graph, sizes: UnitSizes) -> Sequence[float]:
    """Return the bytes of weights that a pass of one token reads in each unit: in a mixture those of the experts that it uses."""
    from swarmnode.compute.capacity.expert_tiers import active_experts
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.simulate.environment.model import Model

    if not isinstance(source, Checkpoint) or not active_experts(source.config):
        return sizes.weight_bytes
    model = Model.of_config(source.config, source.config.model_type)
    units = zip(sizes.weight_bytes, model.active, model.parameters, strict=True)
    return [held_bytes * used / parameters for held_bytes, used, parameters in units]


def _expert_group(
    source: Checkpoint | Graph, sizes: UnitSizes, fitted: ModelFit | None, rate: float, room_bytes: int, rtt_s: float
) -> dict[str, object] | None:
    """Compare decoding by a group of machines like this one that share each layer's experts with decoding by a pipeline of them.

    Returns None unless the model is a mixture that needs several machines. Raises UsageError if its config contradicts itself.
    """
    from swarmnode.compute.capacity.capacity import usable_bytes
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.plan.expert_groups import (
        MESSAGE_S,
        GroupMachine,
        GroupNetwork,
        GroupWork,
        LinkCost,
        WorkKind,
        compare,
    )
    from swarmnode.simulate.environment.model import Model

    if not isinstance(source, Checkpoint) or fitted is None or fitted.machines < 2:
        return None
    model = Model.of_config(source.config, source.config.model_type)
    mixture = model.mixture(sum(sizes.weight_bytes) / sum(model.parameters))
    if mixture is None:
        return None
    machine = GroupMachine(0.0, rate, usable_bytes(room_bytes))  # that of one with a disk is told by itself
    network = GroupNetwork(fitted.machines, LinkCost(rtt_s / 2, MESSAGE_S, 0.0))
    return compare(mixture, machine, network, GroupWork(WorkKind.DECODING, 1)).summary()


def _between_stages(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return for each form of the values between stages the tokens/s that a line carries for each Mbit/s, one way."""
    from swarmnode.plan.compression import FORMS

    hidden = int(checkpoint.config.hidden_size)
    return [
        {
            "form": form.describe(hidden),
            "tokens_per_s_per_mbit": round(1e6 / 8 / form.token_bytes(hidden), 1),
            "steps": form.steps,
        }
        for form in FORMS
    ]


def _optimizers(source: Checkpoint | Graph) -> Iterator[tuple[str, UnitSizes]]:
    """Yield each optimiser with the sizes of the units that it trains. Raises UsageError for a module or packed weights."""
    from swarmnode.cli.train.recipe import ScheduleOptions
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
    from swarmnode.measuring.packed_products import has_packed_products
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
