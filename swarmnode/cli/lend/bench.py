"""Command `swarmnode bench`: measure how fast this machine is, beside known GPUs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from swarmnode.cli.options.node_options import NodeOptions
from swarmnode.cli.options.option import argument
from swarmnode.cli.terminal.console import HOME, JSON, command, print_json, say

if TYPE_CHECKING:
    from swarmnode.compute.capacity.module_speed import LayerShape
    from swarmnode.compute.device import Device

POSITIONS = 64  # in a chunk of a prompt


@command
def bench(
    *,
    model: str = argument(
        "",
        "Measure layers of this model (a folder or hub id; only the config is read); default: Llama 2 7B.",
        metavar="[MODEL]",
    ),
    node: Annotated[NodeOptions, "device dtype threads"],
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Measure this machine beside known GPUs.

    It measures each module of a layer, memory and disk, and downloads at most a config. Speeds are in layers of this size. For
    known GPUs, measured figures are Helix's; the others follow from datasheets.

    Example: swarmnode bench --device cuda
    """
    from swarmnode.compute.device import probe_device, set_threads

    stage = node.stage
    probed = probe_device(stage.device)
    set_threads(stage.threads)
    shape = _shape_of(model)
    measured = _measure(probed, stage.dtype, shape, home)
    cards = _cards(shape.parameters)
    if as_json:
        print_json({**measured, "cards": cards})
        return
    _show(str(probed), measured, cards)


def _shape_of(model: str) -> LayerShape:
    from swarmnode.compute.capacity.module_speed import LayerShape

    if not model:
        return LayerShape()
    from swarmnode.compute.model.hub import open_checkpoint

    return LayerShape.of_config(open_checkpoint(model).config)


def _measure(device: Device, dtype: str, shape: LayerShape, home: Path) -> dict[str, Any]:
    from swarmnode.compute.capacity.module_speed import measure_modules, whole_layer
    from swarmnode.compute.stopwatch import measure_disk, measure_read_rate
    from swarmnode.files import existing

    chosen = device.dtype_for(device.default_dtype, dtype)
    modules = list(measure_modules(device, chosen, shape, positions=POSITIONS))
    layer = whole_layer(modules)
    written, read = measure_disk(existing(home))
    return {
        "device": device.name,
        "dtype": str(chosen).removeprefix("torch."),
        "layer_parameters": shape.parameters,
        "modules": [asdict(module) for module in (*modules, layer)],
        "decode_units_per_s": round(1 / layer.decode_s, 3),
        "prefill_units_per_s": round(POSITIONS / layer.prompt_s, 3),
        "training_units_per_s": round(POSITIONS / layer.training_s, 3),
        "memory_bytes": device.total_bytes,
        "memory_bytes_per_s": round(measure_read_rate(device)),
        "disk_write_bytes_per_s": round(written),
        "disk_read_bytes_per_s": round(read),
    }


def _cards(layer_parameters: int) -> list[dict[str, Any]]:
    """Return the speeds of known GPUs for layers of this size, the fastest first."""
    from swarmnode.plan.offline.gpus import known_gpus
    from swarmnode.simulate.environment.devices import BACKWARD, known_card

    cards = []
    for gpu in known_gpus().values():
        card = known_card(gpu.name, layer_parameters)
        assert card is not None
        prompt_s = card.prompt_layer_s(POSITIONS)
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


def _show(title: str, measured: dict[str, Any], cards: list[dict[str, Any]]) -> None:
    from swarmnode.cli.terminal.tables import new_table, show

    millions, dtype = measured["layer_parameters"] / 1e6, measured["dtype"]
    written, read = measured["disk_write_bytes_per_s"] / 1e9, measured["disk_read_bytes_per_s"] / 1e9
    say(f"{title}; the disk writes {written:.2f} GB/s and reads {read:.2f} GB/s")
    columns = ("ms of a pass", "one token", f"{POSITIONS} of a prompt", "and trained")
    modules = new_table(f"a layer of {millions:,.1f} M parameters in {dtype}", columns, numbers=columns[1:])
    for module in measured["modules"]:
        times_s = module["decode_s"], module["prompt_s"], module["training_s"]
        modules.add_row(module["name"], *(f"{1e3 * time_s:,.2f}" for time_s in times_s))
    speeds_of = ("layers/s", "one by one", "prompts", "training", "GB", "GB/s")
    table = new_table("beside known GPUs", speeds_of, numbers=speeds_of[1:])
    for row in ({**measured, "device": "this machine"}, *cards):
        speeds = row["decode_units_per_s"], row["prefill_units_per_s"], row["training_units_per_s"]
        sizes = row["memory_bytes"] / 1e9, row["memory_bytes_per_s"] / 1e9
        plain = (f"{float(format(speed, '.3g')):,g}" for speed in speeds)
        table.add_row(row["device"], *plain, *(f"{size:,.0f}" for size in sizes))
    show(modules, table)
