"""Mode `fit --measure`: measure this machine, and tell how fast known models are here, and this machine beside known GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.config import QUANTIZATIONS, StageConfig
from swarmnode.errors import LocalError
from swarmnode.terminal.console import LogOptions, print_json, say
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    import torch

    from swarmnode.compute.capacity.capacity import ModelShape, ModuleSpeed
    from swarmnode.compute.device import Device

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
    from swarmnode.measuring.hardware import MEMORY_SHARE
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
            unit_s = (
                0.0,
                *[layer_s] * shape.layers,
                shape.head_parameters * full_s,
            )  # of the embedding one row is read
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
    from swarmnode.plan.offline.gpus import known_gpus
    from swarmnode.simulate.environment.devices import BACKWARD, CAPTURED_S, known_card

    cards = []
    for gpu in known_gpus().values():
        card = known_card(gpu.name, layer_parameters, CAPTURED_S)
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
