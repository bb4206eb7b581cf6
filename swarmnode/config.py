"""Settings: one frozen dataclass per component, each with defaults that suit a home machine. Times in seconds, sizes in bytes.

Sizes and rates may be given as users write them ("6GB", "8Mbit"). A text with two possible meanings is refused, and the error shows
how to write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, overload

from swarmnode.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "nf4")
PRODUCTS = AUTO, EXACT, FAST, PLAIN = ("auto", "exact", "fast", "plain")
EQUAL = "equal"  # plain products with equal bits, in a manifest
ADAPTERS = NO_ADAPTERS, OF_MANIFEST, MEMBERS_TOO = ("none", "manifest", "members")
KV_FORMS = PLAIN, INT8_KV = ("plain", "int8")
CAPTURES = ("auto", "off")
OWN = "own"  # the draft model that is a layer of the served model itself
COMPRESSIONS = ("auto", "none", "bf16", "int8", "int4", "topk", "adatopk", "slowest")
SCHEDULES_BY_NAME = (
    "constant",
    "linear",
    "cosine",
    "hf-constant",
    "hf-linear",
    "hf-cosine",
    "hf-wsd",
)  # of a learning rate
DEVICES = re.compile(r"auto|all|cpu|mps|cuda|(cuda|cpu):\d{1,3}(,\1:\d{1,3})*")

LEAST_SHARE = 0.01

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES = {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
MAX_BYTES = 10**18
LEAST_BPS, MAX_BPS = 9600, 10**15  # at lower rates, even the links' heartbeats come too late
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size like 6GB or 512MiB. Raises UsageError if `text` is no size, has no unit, is 0 or is too large."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?", lowered)
    if match is None:
        raise UsageError(f"{option} {text}: this is not a size; write it as 6GB or 512MiB")
    if lowered[-1].isdigit():
        raise UsageError(f"{option} {text}: the unit is missing; write {text.strip()}GB or {text.strip()}MiB")
    exact_bytes = float(match[1]) * (_PREFIXES | _BINARY_PREFIXES)[match[2] or ""]
    if exact_bytes > MAX_BYTES:
        raise UsageError(f"{option} {text}: no machine has that much; write it as 6GB or 512MiB")
    size_bytes = int(exact_bytes)
    if not size_bytes:
        raise UsageError(f"{option} {text}: this is nothing; leave the option out, or give a size like 6GB")
    return size_bytes


def parse_rate(text: str, option: str) -> float:
    """Return the bits per second of a rate like 8Mbit or 500kbit/s. Raises UsageError if `text` is no rate, has no unit or is out
    of range."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"(?:([kmg]?)(?:bits?(?:/s)?|bps)|([kmg]))", lowered)
    if match is None and re.fullmatch(_NUMBER, lowered):
        raise UsageError(f"{option} {text}: the unit is missing; write {text.strip()}Mbit (per second)")
    if match is None or not float(match[1]):
        raise UsageError(f"{option} {text}: this is not a rate; write it as 8Mbit or 500kbit (bits per second)")
    rate_bps = float(match[1]) * _PREFIXES[match[2] or match[3] or ""]
    if not LEAST_BPS <= rate_bps <= MAX_BPS:
        raise UsageError(
            f"{option} {text}: give a rate from {LEAST_BPS / 1e3:g}kbit, which keeps links alive, to {MAX_BPS / 1e12:g}Tbit"
        )
    return rate_bps


N = TypeVar("N", int, float)


class _Quantity(Generic[N]):
    """Field of a frozen dataclass that takes a number, None, or a text as users write it; it holds the number, and is None without
    a value."""

    def __init__(self, parse: Callable[[str, str], N]) -> None:
        self._parse: Callable[[str, str], N] = parse

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...
    @overload
    def __get__(self, instance: object, owner: type) -> N | None: ...
    def __get__(self, instance: Any, owner: type) -> N | None:
        """Return the value; None, which is the default, for the class."""
        value: N | None = None if instance is None else instance.__dict__[self._name]
        return value

    def __set__(self, instance: object, value: N | str | None) -> None:
        """Set the value once, for `__init__`. Raises UsageError if a text is no such quantity."""
        vars(instance)[self._name] = self._parse(value, self._name) if isinstance(value, str) else value


class Size(_Quantity[int]):
    """Field of bytes that also takes a text like "6GB" or "512MiB"."""

    def __init__(self) -> None:
        super().__init__(parse_bytes)


class Rate(_Quantity[float]):
    """Field of bits per second that also takes a text like "8Mbit"."""

    def __init__(self) -> None:
        super().__init__(parse_rate)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a node that serves sessions of other peers; times are in seconds."""

    orphan_grace_s: float = 10.0  # how long a session without upstream keeps its cache
    idle_s: float = 5.0  # silence after which a session makes room for peers that have less
    forgotten_s: float = 600.0  # silence after which a session is ended
    retry_s: float = 2.0  # waiting time in a BUSY answer
    drain_s: float = 20.0  # how long a leaving node waits for its sessions to move
    max_early_attaches: int = 256  # sessions whose subscriptions came before their OPEN
    max_early_per_session: int = 4
    max_early_per_peer: int = 64
    max_compiling: int = 16  # grammars waiting to be compiled
    compile_s: float = 20.0  # how long a session waits for its grammar, and the first session for the tokenizer
    adapter_s: float = 1.5  # how long a session waits for its adapter: shorter than its client waits for READY
    adapters: int = 256  # of members, on the disk at a time
    adapter_bytes: int = 4 << 30  # of all of them together
    owner_adapters: int = 16  # of one owner
    owner_adapter_bytes: int = 1 << 30
    max_drafts: int = 16  # guessed positions of one session in flight; 0: none
    longest_chunk_tokens: int = (
        1024  # prompt tokens in one pass, on devices where further positions cost next to nothing
    )


@dataclass(frozen=True)
class ClientConfig:
    """Settings of a client's sessions; times are in seconds."""

    prompt_chunk_tokens: int = 128  # prompts travel in chunks, so that hops work on them at once
    patience_s: float = 60.0  # how long to look for a route before giving up
    progress_s: float = 30.0  # silence of a session after which it is opened anew although all its links are alive
    avoid_s: float = 1.0  # how long a peer is avoided after a failure; doubles with each further one
    audit_share: float = 0.03  # share of the throughput spent on recomputing sessions; docs/decisions/audits.md


@dataclass(frozen=True)
class StageConfig:
    """Settings of one stage: what the volunteer lends to it. If `memory_bytes` or `threads` is None, the node chooses it for the
    machine."""

    device: str = "auto"  # or several: "cuda:0,cuda:1"
    dtype: str = "auto"
    quantize: str = "none"
    products: str = "auto"  # of packed weights; auto: exact if the dtype is float32 by choice, else fast
    equal_bits: bool = False  # plain products give a position the same bits in any company
    kv: str = "plain"  # form of the KV cache; int8: per head and position
    memory_bytes: Size = Size()  # of each card; of the machine if CPUs compute
    threads: int | None = None
    cache_tokens: int = 4096  # positions (rows x length) that must fit beside the weights
    expert_disk: str = "auto"  # experts that do not fit stay on the disk; off: only layers that fit whole are held
    max_cache_tokens: int = 262_144
    compress: str = (
        "auto"  # codec of tensors between stages in training: auto, a codec, or a top-k rule; a run may override it
    )
    throttle_units_per_s: float | None = None  # compute no faster than this, to have unequal peers on one machine
    capture: str = "auto"  # decode steps are replayed if the device and the model family can
    min_holders: int = 2  # back up the states of units that fewer nodes train on other peers' disks; below 2: none
    share: float = 1.0  # largest share of the time that serving may keep the device busy
    audit_share: float = 0.03  # share of the training compute spent on recomputing replicas' microbatches
    # Of the device's time for tuning while sessions are served; 0: no tuning; None: by the swarm
    tune_share: float | None = None
    # Small model whose texts are guesses, or EAGLE head: folder, GGUF file or hub id; OWN: its MTP layer; empty: none
    draft_model: str = ""
    server: ServerConfig = field(default_factory=ServerConfig)

    def meeting(self, least: str) -> StageConfig:
        """Return these settings for a swarm whose manifest asks for products of at least the kind `least`, or for EQUAL
        ones; empty: of any kind.

        Automatic options follow it. Raises UsageError if another one contradicts it.
        """
        if least and self.quantize != "none":
            raise UsageError(
                f"--quantize {self.quantize}: this swarm asks for weights that are not rounded again: leave it out"
            )
        if least == EQUAL:
            return replace(self, equal_bits=True).check()
        if least != EXACT:
            return self
        chosen = (("--products", self.products, (AUTO, EXACT, PLAIN)), ("--dtype", self.dtype, (AUTO, "float32")))
        for option, text, allowed in (*chosen, ("--kv", self.kv, (PLAIN,))):
            if text not in allowed:
                raise UsageError(f"{option} {text}: this swarm asks for exact products: leave it out")
        return replace(self, dtype="float32")

    def check(self) -> StageConfig:
        """Return these settings unchanged. Raises UsageError if the value of an option is not valid."""
        if not DEVICES.fullmatch(self.device):
            several = "several of one kind as in cuda:0,cuda:1"
            raise UsageError(f"--device {self.device}: choose auto, cpu, cuda, cuda:N, mps, all, or {several}")
        if not LEAST_SHARE <= self.share <= 1:
            raise UsageError(
                f"--cpu-share {self.share:.3g}: a node that computes for "
                "less than 1% of the time is of no use; give at least 1%"
            )
        numbers = [int(number) for number in re.findall(r"\d+", self.device)]
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"--device {self.device}: the same device twice; name each device once")
        for option, text, choices in (
            ("--dtype", self.dtype, DTYPES),
            ("--quantize", self.quantize, QUANTIZATIONS),
            ("--products", self.products, PRODUCTS),
            ("--kv", self.kv, KV_FORMS),
            ("--compress", self.compress, COMPRESSIONS),
            ("--capture", self.capture, CAPTURES),
            ("--expert-disk", self.expert_disk, CAPTURES),
        ):
            if text not in choices:
                raise UsageError(f"{option} {text}: choose {', '.join(choices)}")
        others = (("--quantize", self.quantize, "none"), ("--draft-model", self.draft_model, ""))
        for option, text, allowed in others if self.equal_bits else ():
            if text != allowed:
                raise UsageError(
                    f"{option} {text}: its products have other bits in company; leave it or --equal-bits out"
                )
        return self
