"""Options of a node: its model, limits and rules of lending, and how quantities are typed."""

from __future__ import annotations

import datetime
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.file_options import read_toml
from swarmnode.config import ADAPTERS, COMPRESSIONS, KV_FORMS, MEMBERS_TOO, StageConfig, parse_bytes, parse_rate
from swarmnode.errors import UsageError
from swarmnode.lending.lending import DAYS, Hours, Rules
from swarmnode.terminal.console import home_option
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import definitions, file_key, of_same_names, one_of, option, path_option, settings

if TYPE_CHECKING:
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.peer.host_config import HostConfig
    from swarmnode.plan.offline.planner_files import PlanFile
    from swarmnode.plan.view import Span


_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_share(text: str, option: str, *, zero: bool = False) -> float:
    """Return a share like 25% as a number from 0 to 1; 0 is allowed only with `zero`. Raises UsageError for anything else, also for
    a number without the percent sign."""
    match = re.fullmatch(_NUMBER + "%", text.strip())
    if match is None or not 0 <= float(match[1]) <= 100 or not (zero or float(match[1])):
        raise UsageError(f"{option} {text}: this is not a share; write it as 25%")
    return float(match[1]) / 100


def parse_name(text: str, option: str = "--name") -> str:
    """Return the name of a node, which others see; it may be empty. Raises UsageError if the name is too long or not printable."""
    from swarmnode.swarm.records.announcement import MAX_NAME_CHARS

    if len(text) > MAX_NAME_CHARS or not text.isprintable() or text != text.strip():
        raise UsageError(
            f"{option} {text[:MAX_NAME_CHARS]!r}: give a name of at most {MAX_NAME_CHARS} printable characters"
        )
    return text


def parse_span(text: str, option: str = "--span") -> Span:
    """Return the range of layers in a text like 0:6. Raises UsageError for any other text."""
    from swarmnode.plan.view import Span

    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option} {text}: this is not a span; write it as A:B with A < B, for layers A to B-1")
    return Span(int(match[1]), int(match[2]))


FILE = "rules.toml"
LAST_DAY = 28  # every month has this day


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} = {value}: write it in quotes")
    return value.strip()


def _yes(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} = {value}: write true or false")
    return value


def _programs(value: Any, name: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise UsageError(f"{name} = {value}: write a list of programs' names")
    return frozenset(value)


def _hours(text: str, name: str) -> Hours:
    match = re.fullmatch(r"(\d{1,2}:\d\d)-(\d{1,2}:\d\d)", text)
    try:
        start, end = (datetime.time.fromisoformat(part.zfill(5)) for part in (match.groups() if match else ()))
    except ValueError:
        raise UsageError(f"{name} {text}: write the hours as 22:00-07:00") from None
    if start == end:
        raise UsageError(f"{name} {text}: it begins and ends at the same time; leave it out to lend at all hours")
    return Hours(start, end)


def _days(text: str, name: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.lower().split(","):
        names = part.strip().split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            raise UsageError(f"{name} {text}: write the days as mon-fri or sat,sun")
        start, end = DAYS.index(names[0]), DAYS.index(names[-1])
        days.update((start + step) % 7 for step in range((end - start) % 7 + 1))
    return frozenset(days)


def _day(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LAST_DAY:
        raise UsageError(f"{name} {text}: give the day of the month on which it begins, 1 to {LAST_DAY}")
    return int(text)


def _rule(
    help_text: str, flag: str, parse: Callable[[Any, str], Any], metavar: str | None = None, default: Any = None
) -> Any:
    """Define the option of a rule. Its value is a text unless `default` is of another kind; files and errors name it by its key."""
    name = file_key(flag)

    def read(value: Any, _flag: str) -> Any:
        return parse(_text(value, name) if default is None else value, name)

    return option(default, help_text, flag, parse=read, metavar=metavar)


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules of lending, by the names of the fields of Rules. A rule that is not given is None or empty."""

    rules_file: Path | None = path_option(
        "File of rules for when to lend; default: rules.toml in the home folder.", "--rules"
    )
    only_idle_s: float | None = _rule(
        "Lend only if nobody has typed for this time.", "--only-idle", parse_duration, "10m"
    )
    max_others_load: float | None = _rule(
        "Pause while other programs use more of the CPUs than this.", "--max-load", parse_share, "25%"
    )
    exclusive: frozenset[str] = _rule(
        "Pause while this program runs. Repeatable.", "--exclusive", _programs, "PROGRAM", default=[]
    )
    hours: Hours | None = _rule("Lend only at these hours.", "--hours", _hours, "22:00-07:00")
    days: frozenset[int] | None = _rule("Lend only on these days.", "--days", _days, "mon-fri")
    on_mains: bool = _rule("Pause on battery.", "--on-mains", _yes, default=False)
    max_memory_pressure: float | None = _rule(
        "Pause while other programs wait for memory for more of the time than this.",
        "--max-pressure",
        parse_share,
        "10%",
    )
    monthly_bytes: int | None = _rule(
        "Pause for the rest of the month after sending and receiving this much.", "--monthly", parse_bytes, "500GB"
    )
    month_day: int | None = _rule("Day on which that month begins; default: the first.", "--month-day", _day, "15")
    unmetered: bool = _rule("Pause on a metered connection (NetworkManager).", "--unmetered", _yes, default=False)
    max_others_gpu_bytes: int | None = _rule(
        "Pause while other programs use more of a GPU's memory than this.", "--max-gpu-memory", parse_bytes, "2GB"
    )
    max_others_gpu_load: float | None = _rule(
        "Pause while other programs use more of a GPU's time than this.", "--max-gpu-load", parse_share, "25%"
    )


RULES = {
    file_key(definition.flag(field)): (field, definition)
    for field, definition in definitions(RuleOptions).items()
    if field != "rules_file"
}


def read_rules(home: Path, flags: RuleOptions = RuleOptions()) -> Rules:
    """Read the rules of a file (`rules.toml` in the home folder if it exists) and add those of `flags`, which override them. Raises
    UsageError."""
    texts = read_toml(flags.rules_file, home / FILE, what="a file of rules")
    given = {field: value for field, _ in RULES.values() if (value := getattr(flags, field))}
    return replace(parse_rules(texts), **given)


def parse_rules(texts: Mapping[str, Any]) -> Rules:
    """Read rules by their names in a file. Raises UsageError, which names the rule that is wrong."""
    unknown = sorted(texts.keys() - RULES.keys())
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; choose from {', '.join(RULES)}")
    found = ((RULES[name], value) for name, value in texts.items())
    return Rules(**{field: definition.read(field, value) for (field, definition), value in found})


def _addresses(**bounds: bool) -> Callable[[Sequence[str], str], tuple[str, ...]]:
    def parse(texts: Sequence[str], flag: str) -> tuple[str, ...]:
        from swarmnode.net.addressing.addresses import check_all

        return check_all(flag, texts, **bounds)

    return parse


def _load_plan(path: Path, _flag: str) -> PlanFile:
    from swarmnode.plan.offline.planner_files import PlanFile

    return PlanFile.load(path)


def _weights(text: str, flag: str) -> tuple[Path, ...]:
    """Return the files and folders to copy weights from. Raises UsageError if `text` is none that can be read, and not auto."""
    if text == "auto":
        from swarmnode.weights.sources import model_caches

        return model_caches()
    try:
        path = Path(text).expanduser().resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{flag} {text}: {getattr(error, 'strerror', None) or error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(f"{flag} {text}: neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{flag} {text}: this user cannot read it")
    return (path,)


rate_option = partial(option, None, metavar="RATE", parse=parse_rate)
addresses_option = partial(option, [], metavar="MADDR", parse=_addresses())
size_option = partial(option, None, metavar="SIZE", parse=parse_bytes)


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node. Each field is also a field of HostConfig, StageConfig, CardLimits or NodeConfig if one of them has that
    name."""

    device: str = option("auto", "Where to compute: auto, cpu, cuda, cuda:1 or mps.")
    dtype: str = option("auto", "Number format: auto, float32, bfloat16 or float16.")
    quantize: str = option("none", "Quantise the weights while loading them.", metavar="none|int8|nf4")
    products: str = option(
        "auto",
        "Products of a GGUF file's packed weights: fast ones round activations to 8 bits on a CPU and to --dtype on a GPU, exact "
        "ones compute in float32, and plain unpacks the weights in memory. auto: exact with --dtype float32, else fast.",
        metavar="auto|exact|fast|plain",
    )
    equal_bits: bool = option(
        False,
        "Compute each position with the same bits alone and in any company, with plain products on a CPU: other machines "
        "of this kind then find one wrong bit. Decoding is slower; the node says by how much.",
    )
    kv: str = option(
        "plain",
        "Keep the KV caches of sessions as computed, or in 8 bits: about twice as many sessions fit.",
        metavar="|".join(KV_FORMS),
    )
    capture: str = option(
        "auto", "Replay decoding steps if possible: as CUDA graphs, or on a CPU as flat programs.", metavar="auto|off"
    )
    draft_model: str = option(
        "",
        "Guess tokens with this small model while others compute, for clients with --drafts auto: a folder, a GGUF file or a hub "
        "id. Its vocabulary must be that of the swarm's model. own: with the prediction layer (MTP) of the swarm's model, at "
        "the node with the last layer. An EAGLE head guesses there, too.",
        metavar="PATH|HUB_ID|own",
    )
    memory_bytes: int | None = size_option("Memory to lend, as 6GB; default: the free memory.", "--memory")
    max_cache_bytes: int | None = size_option("Disk space to lend; default: most of the free space.", "--disk")
    expert_disk: str = option(
        "auto",
        "Of a mixture of experts in a GGUF file, hold layers whose experts do not all fit into --memory, if no other machine has "
        "these layers: read the others from the disk, or compute them by the CPU beside a GPU. off: hold only layers that fit.",
        metavar="auto|off",
    )
    weights: tuple[Path, ...] | None = option(
        None,
        "Copy the weights from this file or folder where they are right; auto: from the caches of Ollama, LM Studio, llama.cpp "
        "and the Hugging Face hub. Others can see which weights your node does not fetch.",
        metavar="PATH|auto",
        parse=_weights,
    )
    adapters: str = option(
        MEMBERS_TOO,
        "Adapters that texts may use here: those of members, too; those that the swarm was founded with; or none.",
        metavar="|".join(ADAPTERS),
        parse=one_of(ADAPTERS),
    )
    min_holders: int = option(
        2,
        "In training: back up layers held by fewer than N machines on other machines' disks; 1 turns this off.",
        metavar="N",
        min=1,
        max=16,
    )
    max_upload_bps: float | None = rate_option("Send no faster than this, as 8Mbit.", "--max-upload")
    max_download_bps: float | None = rate_option("Receive no faster than this, as 8Mbit.", "--max-download")
    share: float = option(
        "100%",
        "Compute only for this share of the time, as 50%.",
        "--cpu-share",
        "--gpu-share",
        metavar="SHARE",
        parse=parse_share,
    )
    nice: int = option(0, "Let other programs go first; 19 yields the most.", min=0, max=19)
    rules: RuleOptions = settings(RuleOptions)
    notify: bool = option(True, "Show on the desktop when a rule pauses or resumes the node.", "--notify/--no-notify")
    max_celsius: float | None = option(
        None,
        "Compute less while a GPU is hotter than this.",
        "--max-gpu-temperature",
        typed=float,
        metavar="°C",
        min=30,
        max=110,
    )
    max_watts: float | None = option(
        None,
        "Compute less while a GPU draws more than this.",
        "--max-gpu-power",
        typed=float,
        metavar="WATTS",
        min=1,
        max=10_000,
    )
    life_s: float | None = option(
        None, "Leave the swarm after this time, as Ctrl-C does.", "--max-age", metavar="12h", parse=parse_duration
    )
    idle_disk: bool = option(False, "Let other programs use the disk first (ionice idle).")
    compress: str = option(
        "auto",
        "In training, unless `train` chooses: how data to other machines is encoded; auto compresses on slow links.",
        metavar="|".join(COMPRESSIONS),
    )
    audit_share: float = option(
        "3%",
        "In training: recompute this share of others' work to catch wrong results; 0% turns this off.",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
    )
    tune_share: float | None = option(
        None,
        "Tune adapters of others for this share of the time while texts are served; default: 30% in private swarms, else 0%.",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
    )
    span: Span | None = option(
        None,
        "Hold layers A to B-1 (0: a language model's embedding); default: what the swarm needs most.",
        metavar="A:B",
        parse=parse_span,
    )
    plan: PlanFile | None = path_option(
        "In training: start with the layers that `plan --model --json` gave this machine, and keep them while the others "
        "keep theirs.",
        metavar="PLAN.json",
        parse=_load_plan,
    )
    host_maddrs: tuple[str, ...] = addresses_option("Listen at this address. Repeatable.", "--host-maddr")
    announce_maddrs: tuple[str, ...] = addresses_option(
        "Address at which others reach this machine. Repeatable.", "--announce-maddr", parse=_addresses(dialled=True)
    )
    peers: tuple[str, ...] = addresses_option(
        "Join through this machine of the swarm, too. Repeatable.", "--peer", parse=_addresses(needs_peer=True)
    )
    home: Path = home_option()
    name: str = option("", "Name that others see; default: the one given to `swarmnode join`.", parse=parse_name)
    threads: int | None = option(
        None, "CPU threads for computing; default: torch's choice.", text=0, min=0, max=4096, show_default=True
    )
    throttle_units_per_s: float | None = option(
        None,
        "Compute only as fast as a device of this speed.",
        "--throttle",
        text=0.0,
        metavar="UNITS_PER_S",
        min=0.0,
        max=1e9,
        hidden=True,
    )
    nat_port_map: bool = option(False, "Ask the router to open a port (UPnP).", "--nat/--no-nat")
    direct: bool = option(True, "Connect to other machines by encrypted TCP as well.", "--direct/--no-direct")
    lan: bool = option(False, "Find machines on the local network (mDNS).", "--lan/--no-lan")

    @property
    def host(self) -> HostConfig:
        """Return the options of the node's network connections as settings."""
        from swarmnode.peer.host_config import HostConfig

        return of_same_names(HostConfig, self)

    @property
    def stage(self) -> StageConfig:
        """Settings of the stage, checked. Raises UsageError if a device, a format or the share is not valid."""
        return of_same_names(StageConfig, self).check()

    def config(self) -> NodeConfig:
        """Return the node's settings. Raises UsageError, which names the option that is wrong."""
        from swarmnode.lending.cards import CardLimits
        from swarmnode.node.node_config import NodeConfig

        if self.span is not None and self.plan is not None:
            raise UsageError("--span and --plan both choose the layers to hold: leave one out")
        card, rules = of_same_names(CardLimits, self), read_rules(self.home, self.rules)
        return of_same_names(NodeConfig, self, card=card, rules=rules)
