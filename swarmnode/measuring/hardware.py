"""Hardware of this machine: the share of a model that the lent devices can hold."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swarmnode.compute.capacity.capacity import (
    TRAINING_BYTES,
    Speeds,
    UnitSizes,
    cache_tokens_that_fit,
    describe_fit,
    graph_sizes,
    most_anywhere,
    training_sizes,
    unit_sizes,
    units_that_fit,
    usable_bytes,
)
from swarmnode.compute.capacity.expert_tiers import ExpertTier, disk_advice, expert_tier
from swarmnode.compute.device import Device, probe_device, probe_devices, set_threads, threads_each, usable_cores
from swarmnode.compute.executor import Executor
from swarmnode.compute.graph.costs.estimate import usual_width
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.mtp import eagle_bytes, is_eagle, mtp_bytes
from swarmnode.compute.packing import ggml
from swarmnode.compute.serving.loading import prepare_span
from swarmnode.compute.serving.mtp_guesses import CACHE_POSITIONS
from swarmnode.compute.stopwatch import Throttle
from swarmnode.config import AUTO, EXACT, FAST, INT8_KV, OWN, PLAIN, StageConfig
from swarmnode.counting import format_bytes, layers
from swarmnode.errors import LocalError, UsageError
from swarmnode.ledger import MemoryLedger
from swarmnode.measuring.capability import Capability, Conditions, SpeedCache, speeds_section
from swarmnode.measuring.draft_part import CACHE_TOKENS, DraftPart, HeadPart, draft_name
from swarmnode.measuring.packed_products import MEMORY_SHARE, has_packed_products, missing_products
from swarmnode.net.clock import MACHINE_CLOCK, Clock
from swarmnode.peer.host import Host
from swarmnode.plan.audits import KV8, PACKED
from swarmnode.plan.spans.devices import DeviceView, PipelineLayout, lay_out
from swarmnode.plan.view import Span as Units
from swarmnode.swarm.records.announcement import Machine, Section
from swarmnode.version import install_command

if TYPE_CHECKING:
    from swarmnode.weights.adapter_files import AdapterFiles

SPEEDS_FILE = "speeds.json"
SPLIT = "split"  # in a number format after "+": the CPU computes some experts beside a card
NAME_LENGTH = 48  # characters of a device's announced name


@dataclass(frozen=True)
class LentDevice:
    """A device, and its lent memory without `set_aside_bytes`, which guesses and readers of experts take. `throttle` limits all
    computing on it."""

    device: Device
    memory_bytes: int
    ledger: MemoryLedger = field(default_factory=MemoryLedger, compare=False)
    throttle: Throttle = field(default_factory=Throttle, compare=False)
    set_aside_bytes: int = 0

    def without(self, size_bytes: int) -> LentDevice:
        """Return the device with as much more of its memory set aside, or all that it has."""
        taken_bytes = min(size_bytes, self.memory_bytes)
        aside_bytes = self.set_aside_bytes + taken_bytes
        return replace(self, memory_bytes=self.memory_bytes - taken_bytes, set_aside_bytes=aside_bytes)


@dataclass(frozen=True)
class Hardware:
    """Capacity of this machine for one model. Made by `probe`, before anything is loaded."""

    lent: tuple[LentDevice, ...]
    dtype: torch.dtype
    quantize: str
    sizes: UnitSizes
    config: StageConfig
    trains: bool = False
    folder: Path | None = None  # holds the model's tokenizer
    products: str = PLAIN  # of packed weights
    width: int = 0  # float32 values per position, or per sample of a module, that pass between two units
    wide: int = 0  # hidden size inside units if a bottleneck makes those values fewer, else 0
    draft: DraftPart | None = None  # on the first device, if this node holds the first layers
    head: HeadPart | None = None  # guesses at this node, if it holds the last layers
    advice: str = ""  # what a missing package would gain, and the command that installs it
    tier: ExpertTier | None = None  # of a mixture whose experts do not all fit; `sizes` are those of memory alone

    def __repr__(self) -> str:
        return f"<Hardware {self.device_name}, {self.capacity_units} units in {self.dtype}>"

    @classmethod
    def probe(
        cls,
        checkpoint: Checkpoint,
        config: StageConfig,
        *,
        trains: bool = False,
        host: MemoryLedger | None = None,
        clock: Clock = MACHINE_CLOCK,
        draft: Checkpoint | None = None,
        needed_units: int | None = None,
    ) -> Hardware:
        """Determine the capacity of the devices, and set the limit of the `host` ledger, which is also the device's if that is the
        CPU.

        Args:
            checkpoint: The model.
            config: What the volunteer lends.
            trains: Whether the units are trained, rather than served.
            host: The ledger of the host's memory.
            clock: For the throttles of the devices.
            draft: Model whose texts are guesses, or EAGLE head. Its memory is not available to layers.
            needed_units: Number of layers that this machine should hold even if some experts then stay on its disk; None: all.

        Raises:
            UsageError: An option is not valid, or not for this kind of model.
            LocalError: A device is not here, or the memory does not suffice for one unit.
            CheckpointError: The model cannot be split.
        """
        config.check()
        if trains and (config.quantize != "none" or config.dtype not in ("auto", "float32")):
            raise UsageError("training keeps its weights in float32: leave --quantize and --dtype alone")
        is_graph = isinstance(checkpoint, GraphCheckpoint)
        if isinstance(checkpoint, GraphCheckpoint):
            own = checkpoint.float_dtypes
            if config.quantize != "none" or (config.dtype != "auto" and own != {config.dtype}):
                raise UsageError(
                    f"this model computes in {' and '.join(sorted(own)) or 'whole numbers'}, as it was exported: leave --quantize "
                    "and --dtype alone"
                )
        if (trains or is_graph) and config.kv != PLAIN:
            raise UsageError(f"{'training' if trains else 'a module'} keeps no KV cache: leave --kv alone")
        devices = probe_devices(config.device)
        if is_graph and not trains and len(devices) > 1:
            raise UsageError(f"--device {config.device}: a module is served on one device of a node")
        set_threads(threads_each(config.device, config.threads, len(devices)))
        dtype = torch.float32 if trains or is_graph else _common_dtype(devices, checkpoint, config)
        products = _products(config) if _stays_packed(devices, checkpoint, config, dtype) else PLAIN
        if config.equal_bits:
            _check_equal_bits(devices, products, has_sessions=not (trains or is_graph))
        advice = packed_advice(devices, checkpoint, config, dtype)
        if trains:
            sizes = training_sizes(checkpoint)
        elif isinstance(checkpoint, GraphCheckpoint):
            sizes = graph_sizes(checkpoint)
        else:
            packs = products != PLAIN
            sizes = unit_sizes(checkpoint, dtype=dtype, quantize=config.quantize, keeps_packed=packs, kv=config.kv)
        host = host or MemoryLedger()
        lent = _lend(devices, config, host, clock)
        lent_bytes = sum(one.memory_bytes for one in lent)
        head = _head_part(checkpoint, draft, config, sizes, dtype)
        if head is not None:  # the last layer may come to lie on any device
            lent = tuple(_set_aside(one, head.need_bytes) for one in lent)
        part = None if draft is None or head is not None else _draft_part(devices[:1], draft, config)
        if part is not None:
            lent = (_set_aside(lent[0], part.need_bytes), *lent[1:])
        narrow = not isinstance(checkpoint, GraphCheckpoint) and checkpoint.family.bottleneck is not None
        tier: ExpertTier | None = None
        if isinstance(checkpoint, Checkpoint) and not trains and config.expert_disk == AUTO:
            tier, sizes, told = _expert_tier(checkpoint, sizes, lent, config, host, needed_units, products)
            advice = advice or told
        if tier is not None and not tier.host_slots:
            lent = (lent[0].without(tier.buffer_bytes),)
        hardware = cls(
            lent,
            dtype,
            config.quantize,
            sizes,
            config,
            trains,
            checkpoint.path,
            products=products,
            width=usual_width(checkpoint.layout)
            if isinstance(checkpoint, GraphCheckpoint)
            else checkpoint.family.width,
            wide=int(checkpoint.config.hidden_size) if narrow else 0,
            draft=part,
            head=head,
            advice=advice,
            tier=tier,
        )
        if hardware.capacity_units == 0:
            raise LocalError(
                f"{format_bytes(lent_bytes)} are not enough for one layer of this model "
                + ("with its gradients and optimiser" if trains else f"with a cache of {config.cache_tokens} tokens")
                + "; lend more with --memory"
            )
        return hardware

    @property
    def memory_bytes(self) -> int:
        """Lent bytes of all devices together."""
        return sum(lent.memory_bytes for lent in self.lent)

    @property
    def number_format(self) -> str:
        """Announced name of dtype, KV cache and quantisation: replicas with the same one compute the same except for the last
        bits."""
        kept = f"+{KV8}" if self.config.kv == INT8_KV else ""
        if self.products == FAST and all(lent.device.kind == "cpu" for lent in self.lent):
            return PACKED + kept  # on cards the products are those of dequantised weights
        name = str(self.dtype).removeprefix("torch.") + kept
        if self.products == FAST and self.tier is not None:  # the CPU's share of the experts has noise of its own
            name += f"+{SPLIT}"
        return name if self.quantize == "none" else f"{name}-{self.quantize}"

    @property
    def device_name(self) -> str:
        """Announced name of the devices."""
        names = [lent.device.name for lent in self.lent]
        several = len(names) > 1
        name = f"{len(names)} x {names[0]}" if several and len(set(names)) == 1 else " + ".join(names)
        return name[:NAME_LENGTH]

    @property
    def description(self) -> str:
        """Text about all devices, for people."""
        return "; ".join(str(lent.device) for lent in self.lent)

    def machine(self, home: Path) -> dict[str, Any]:
        """Return facts about the machine, for scripts; `home` is the folder whose disk keeps the weights."""
        return {
            "device": self.device_name,
            "memory_bytes": self.memory_bytes,
            "cpu_cores": usable_cores(),
            "disk_free_bytes": shutil.disk_usage(home).free,
            "capacity_units": self.capacity_units,
            "room": self.room,
        }

    @property
    def room(self) -> dict[str, Any]:
        """Number of layers (`units`) that fit into the memory, `of` how many, and whether they stay `packed`."""
        return {
            "units": self.capacity_units,
            "of": len(self.sizes.weight_bytes),
            "packed": self.products != PLAIN,
            "experts": None if self.tier is None else {"slots": self.tier.slots, "of": self.tier.experts},
        }

    @property
    def holds(self) -> str:
        """Text like "its 12 GB hold 31 of 50 layers, packed"."""
        packed = ("" if self.products == PLAIN else ", packed") + self.experts_in_memory
        lent_bytes = self.memory_bytes + sum(lent.set_aside_bytes for lent in self.lent)
        return f"its {format_bytes(lent_bytes)} hold {self.room['units']} of {self.room['of']} layers{packed}"

    @property
    def experts_in_memory(self) -> str:
        """Text like ", with 9 of 32 experts of each"; empty if all are in memory."""
        return "" if self.tier is None else f", with {self.tier.slots} of {self.tier.experts} experts of each"

    @cached_property
    def capacity_units(self) -> int:
        """Number of units that fit on all devices together, wherever in the model the span lies."""
        together = sum(self.capacity_of(lent.memory_bytes) for lent in self.lent)
        return min(together, len(self.sizes.weight_bytes))

    @property
    def parameters(self) -> tuple[float, ...]:
        """Number of parameters of each unit, if it is trained; else empty."""
        return tuple(size / TRAINING_BYTES for size in self.sizes.weight_bytes) if self.trains else ()

    def capacity_of(self, memory_bytes: int) -> int:
        """Return the number of units that fit on one device with `memory_bytes`, wherever in the model the span lies."""
        return most_anywhere(self.sizes, memory_bytes, self.config.cache_tokens)

    def check(self, units: Units) -> Units:
        """Return the span that the user fixed. Raises UsageError if the model does not have these units, LocalError if they do not
        fit."""
        if units.end > len(self.sizes.weight_bytes):
            raise UsageError(
                f"--span {units.start}:{units.end}: the model has layers 0 to {len(self.sizes.weight_bytes) - 1}"
            )
        self.lay_out(units)
        return units

    def lay_out(
        self, units: Units, speed_cache: SpeedCache | None = None, swarm_id: bytes = b""
    ) -> tuple[PipelineLayout, ...]:
        """Return the layout of a span on the devices, by their speeds if all were measured before. Raises LocalError if it does not
        fit."""
        known: list[float] = []
        for lent in self.lent if speed_cache is not None else ():
            assert speed_cache is not None
            conditions = self.training_conditions if self.trains else self.conditions
            measured = speed_cache.nearest(conditions(swarm_id, units.units, lent))
            known.append(measured.training_units_per_s if self.trains else measured.decode_units_per_s)
        speeds = known if known and all(known) else [1.0] * len(self.lent)

        def fitting(lent: LentDevice, start: int) -> int:
            return units_that_fit(self.sizes, lent.memory_bytes, self.config.cache_tokens, start=start)

        views = [DeviceView(partial(fitting, lent), speed) for lent, speed in zip(self.lent, speeds, strict=True)]
        layout = lay_out(units, views)
        if not layout:
            need_bytes = self.sizes.need_bytes(units.start, units.end, self.config.cache_tokens)
            raise LocalError(
                f"{layers(*units)} need {need_bytes / 1e6:.0f} MB and some room; {self.memory_bytes / 1e6:.0f} MB are lent"
            )
        return layout

    def cache_tokens(self, units: Units, lent: LentDevice) -> int:
        """Return the number of positions that the cache beside these units may hold on a device."""
        if self.trains:
            return self.config.cache_tokens
        left = cache_tokens_that_fit(self.sizes, lent.memory_bytes, units.start, units.end)
        return min(left, self.config.max_cache_tokens) if left else self.config.max_cache_tokens

    def conditions(self, swarm_id: bytes, units: int, lent: LentDevice) -> Conditions:
        """Return the conditions of speeds measured now on `units` units of a device."""
        return Conditions(
            model=swarm_id.hex(),
            device=lent.device.name,
            memory_bytes=lent.device.total_bytes,
            number_format=f"{self.dtype} {self.quantize if self.products == PLAIN else self.products}"
            + (f" kv {self.config.kv}" if self.config.kv != PLAIN else "")
            + ("" if self.tier is None else f" experts {self.tier.eighths}"),
            threads=torch.get_num_threads(),
            units=units,
            throttle=self.config.throttle_units_per_s or 0.0,
            share=self.config.share,
        )

    def training_conditions(self, swarm_id: bytes, units: int, lent: LentDevice) -> Conditions:
        """Return the conditions of training speeds measured now on `units` units of a device."""
        return replace(self.conditions(swarm_id, units, lent), number_format="training")

    def in_float32(self, checkpoint: Checkpoint) -> Hardware | None:
        """Return this hardware computing in float32; None if it does so already, or the owner chose the dtype."""
        if self.dtype is torch.float32 or self.config.dtype != "auto":
            return None
        keeps_packed = self.products != PLAIN
        sizes = unit_sizes(
            checkpoint, dtype=torch.float32, quantize=self.quantize, keeps_packed=keeps_packed, kv=self.config.kv
        )
        tier = self.tier
        if tier is not None:
            room = self.lent[0].memory_bytes, self.config.cache_tokens, self.capacity_units
            is_fixed = self.products == EXACT
            found = expert_tier(checkpoint, sizes, *room, host_bytes=tier.host_limit_bytes or None, is_fixed=is_fixed)
            tier, sizes = found or (None, sizes)
        return replace(self, dtype=torch.float32, sizes=sizes, tier=tier)

    @property
    def section(self) -> Machine:
        """Section of the announcement about this machine."""
        return Machine(device=self.device_name, number_format=self.number_format, memory_bytes=self.memory_bytes)

    def sections(self, host: Host) -> tuple[Section, ...]:
        """Return the sections of the announcement before a span is loaded, with the speeds measured on a span of similar size."""
        conditions = self.conditions(host.swarm.id, self.capacity_units, self.lent[0])
        known = SpeedCache(host.config.home / SPEEDS_FILE, now=host.clock.unix).nearest(conditions)
        return self.section, speeds_section(known)

    def prepare(self, outline: Checkpoint, units: Units) -> None:
        """Do the preparations for loading a span, apart from its weights. Raises CheckpointError if the model family cannot be
        split."""
        if isinstance(outline, GraphCheckpoint) or self.config.equal_bits:
            return
        device = self.lent[0].device.torch_device
        prepare_span(outline, units.start, units.end, device=device, dtype=self.dtype, products=self.products)

    def describe(self, units: Units) -> str:
        """Return a text like "12 of 34 layers: 5.1 GB of weights, and 1.2 GB for texts of 8,192 tokens in all". Raises LocalError
        if the units do not fit. The text for training names gradients and optimiser instead, and nothing is checked."""
        if self.trains:
            size = format_bytes(self.sizes.need_bytes(units.start, units.end, 0))
            return f"{units.units} of {len(self.sizes.weight_bytes)} layers: {size} of weights, gradients and optimiser"
        parts = [part for replica in self.lay_out(units) for part in replica]
        cache_tokens = min(self.cache_tokens(part.span, self.lent[part.device]) for part in parts)
        fit = describe_fit(self.sizes, units.start, units.end, cache_tokens)
        return fit if len(self.lent) == 1 else f"{fit}, on {len(self.lent)} devices"


@dataclass(frozen=True)
class StageResources:
    """Place where a node loads stages: its peer, the devices that it lends, their threads, and the swarm's adapters, if any."""

    host: Host
    hardware: Hardware
    executors: Sequence[Executor]  # by device
    adapters: AdapterFiles | None = None

    @property
    def speed_cache(self) -> SpeedCache:
        """Speeds measured on this machine before."""
        return SpeedCache(self.host.config.home / SPEEDS_FILE, now=self.host.clock.unix)

    def measure(self, units: int, lent: LentDevice, once: Callable[[], Speeds], *, lasting: bool = True) -> Capability:
        """Return the speeds of `units` units on a device: from the cache, else measured by `once`. To be called on the device's
        thread; `lasting`: see `Capability`."""
        conditions = self.hardware.conditions(self.host.swarm.id, units, lent)
        return Capability.of(conditions, self.speed_cache, once, lasting=lasting, clock=self.host.clock.monotonic)


def threads_of_devices(config: StageConfig) -> list[int | None]:
    """Return for each device the number of its compute threads (None: torch's default). Raises LocalError if a device is not
    here, or has less free memory than is to be lent."""
    devices = probe_devices(config.device)
    for device in devices:
        _lent_bytes(device, config)
    return [threads_each(config.device, config.threads, len(devices))] * len(devices)


def _expert_tier(
    checkpoint: Checkpoint,
    sizes: UnitSizes,
    lent: Sequence[LentDevice],
    config: StageConfig,
    host: MemoryLedger,
    needed_units: int | None,
    products: str,
) -> tuple[ExpertTier | None, UnitSizes, str]:
    """Return how many experts lie in the device's memory (None: all), the sizes of the units with them, and an advice for weights
    that cannot lie elsewhere. Beside a card the others lie in the host's memory. Several devices keep all in memory."""
    device = lent[0].device
    if len(lent) != 1 or device.kind not in ("cpu", "cuda"):
        return None, sizes, ""
    needed = len(sizes.weight_bytes) if needed_units is None else needed_units
    room = lent[0].memory_bytes, config.cache_tokens, needed
    found, advice = None, ""
    if device.kind == "cpu":
        found = expert_tier(checkpoint, sizes, *room) if products != PLAIN else None
        advice = disk_advice(checkpoint, sizes, *room)
    elif products != PLAIN:
        host_bytes = usable_bytes(host.limit_bytes or 0)
        found = expert_tier(checkpoint, sizes, *room, host_bytes=host_bytes, is_fixed=products == EXACT)
        if found is not None and ggml.library() is None:
            found = None
            advice = f"The CPU would compute the experts that do not fit. Install: {install_command(ggml.PACKAGE)}"
    tier, left = found or (None, sizes)
    return tier, left, advice


def _draft_part(devices: Sequence[Device], draft: Checkpoint, config: StageConfig) -> DraftPart:
    """Return a draft model as it will be loaded on the one device in `devices`: its weights are not quantised again."""
    config = replace(config, quantize="none")
    dtype = _common_dtype(devices, draft, config)
    products = _products(config) if _stays_packed(devices, draft, config, dtype) else PLAIN
    sizes = unit_sizes(draft, dtype=dtype, keeps_packed=products != PLAIN, kv=config.kv)
    weight_bytes = sizes.need_bytes(0, draft.units, 0)
    cache_bytes = CACHE_TOKENS * sum(sizes.cache_bytes_per_token)
    return DraftPart(draft_name(config.draft_model), draft, dtype, products, weight_bytes, cache_bytes)


def _head_part(
    checkpoint: Checkpoint, draft: Checkpoint | None, config: StageConfig, sizes: UnitSizes, dtype: torch.dtype
) -> HeadPart | None:
    """Return the layer that guesses beside the model's head: the model's own, or the EAGLE head `draft`. None if the owner asked
    for none. Raises UsageError if the model has none of its own."""
    if config.draft_model == OWN:
        # The bytes of the model's own prediction layer
        size = 0 if isinstance(checkpoint, GraphCheckpoint) else mtp_bytes(checkpoint, dtype)
        if not size:
            raise UsageError(
                "--draft-model own: this model has no prediction layer (MTP) that this version can use: "
                "leave it out, or name a model"
            )
        return HeadPart(None, size + CACHE_POSITIONS * max(sizes.cache_bytes_per_token))
    if draft is None or not is_eagle(draft):
        return None
    position_bytes = draft.family.cache_bytes_per_token(1, dtype.itemsize, config.kv)
    return HeadPart(draft, eagle_bytes(draft, checkpoint, dtype) + CACHE_POSITIONS * position_bytes)


def _set_aside(lent: LentDevice, need_bytes: int) -> LentDevice:
    """Return a lent device without `need_bytes` of its memory, for guesses. Raises LocalError if it has no more."""
    if lent.memory_bytes <= need_bytes:
        need, have = format_bytes(need_bytes), format_bytes(lent.memory_bytes)
        raise LocalError(
            f"--draft-model needs {need}, and {have} are lent: lend more with --memory, or choose a smaller model"
        )
    return lent.without(need_bytes)


def _check_equal_bits(devices: Sequence[Device], products: str, *, has_sessions: bool) -> None:
    """Raise UsageError if `--equal-bits` does not go with the swarm, the devices or the kind of products."""
    reasons = {
        "it is for sessions of a language model, which this swarm does not serve; leave it out": not has_sessions,
        "not measured on cards (contrib/studies/row_invariance.py --device cuda measures it); give --device cpu": any(
            device.kind != "cpu" for device in devices
        ),
        "it is for plain products, and fast ones of packed weights have equal bits by themselves; leave it out, or add --products "
        "plain": products != PLAIN,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UsageError(f"--equal-bits: {reason}")


def _products(config: StageConfig) -> str:
    """Return the kind of products of packed weights: for auto, exact ones for an owner that chose float32."""
    if config.products == AUTO:
        return EXACT if config.dtype == "float32" else FAST
    return config.products


def _stays_packed(devices: Sequence[Device], checkpoint: Checkpoint, config: StageConfig, dtype: torch.dtype) -> bool:
    """Return whether packed weights stay packed here: if they can, and all devices have fast products for them. A card whose owner
    chose the products does without these."""
    if not _can_stay_packed(devices, checkpoint, config, dtype):
        return False
    return all(map(has_packed_products, devices)) or (devices[0].kind == "cuda" and config.products != AUTO)


def _can_stay_packed(
    devices: Sequence[Device], checkpoint: Checkpoint, config: StageConfig, dtype: torch.dtype
) -> bool:
    """Return whether fast products would keep the weights packed: if the owner wants them, and all devices are CPUs, which compute
    in float32, or all are cards. A quantised checkpoint of safetensors stays packed on CPUs only."""
    wanted = checkpoint.is_packed and config.quantize == "none" and config.products != PLAIN
    kinds = {device.kind for device in devices}
    possible = [{"cpu"}] if checkpoint.quantised is not None else [{"cpu"}, {"cuda"}]
    return wanted and kinds in possible and (kinds != {"cpu"} or dtype is torch.float32)


def packed_advice(devices: Sequence[Device], checkpoint: Checkpoint, config: StageConfig, dtype: torch.dtype) -> str:
    """Return what a package would gain that the packed weights lack here; empty if they lack none."""
    lacking = [device for device in devices if not has_packed_products(device)]
    if not lacking or not _can_stay_packed(devices, checkpoint, config, dtype):
        return ""
    packed, plain = (
        sum(unit_sizes(checkpoint, dtype=dtype, keeps_packed=keeps).weight_bytes) for keeps in (True, False)
    )
    return missing_products(lacking[0], plain / packed, is_fast=_products(config) == FAST)


def _common_dtype(devices: Sequence[Device], checkpoint: Checkpoint, config: StageConfig) -> torch.dtype:
    """Return the dtype for all devices: their own for this checkpoint if they agree, else float16."""
    # Packed weights need float32 for exact products, and on CPUs, whose products take and return it.
    in_float32 = config.products == EXACT or all(device.kind == "cpu" for device in devices)
    own = torch.float32 if checkpoint.is_packed and in_float32 else checkpoint.dtype
    dtypes = {device.dtype_for(own, config.dtype) for device in devices}
    return dtypes.pop() if len(dtypes) == 1 else torch.float16


def _lend(devices: Sequence[Device], config: StageConfig, host: MemoryLedger, clock: Clock) -> tuple[LentDevice, ...]:
    """Return the lent devices, with limits set in their ledgers. Raises LocalError if less memory is free than is to be lent."""
    lent = []
    for number, device in enumerate(devices):
        memory_bytes = _lent_bytes(device, config)
        name = "device" if len(devices) == 1 else f"device {number}"
        ledger = host if device.shared else MemoryLedger(memory_bytes, name=name)
        host.limit_bytes = memory_bytes if device.shared else int(probe_device("cpu").free_bytes * MEMORY_SHARE)
        slowed = config.throttle_units_per_s or math.inf
        throttle = Throttle(slowed, config.share, clock=clock.compute, sleep=clock.hold_up)
        own_bytes = memory_bytes // len(devices) if device.shared else memory_bytes
        lent.append(LentDevice(device, own_bytes, ledger, throttle))
    return tuple(lent)


def _lent_bytes(device: Device, config: StageConfig) -> int:
    """Return the bytes of a device's memory that are to be lent. Raises LocalError if a card has less free memory."""
    memory_bytes = config.memory_bytes or int(device.free_bytes * MEMORY_SHARE)
    if not device.shared and memory_bytes > device.free_bytes:
        wanted, free = format_bytes(memory_bytes), format_bytes(device.free_bytes)
        raise LocalError(f"--memory {wanted}: {device.name} has {free} free now; lend less, or end what uses it")
    return memory_bytes
