"""Settings: one frozen dataclass per component, each with defaults that suit a home machine. Times in seconds, sizes in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from swarmnode.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "nf4")
PRODUCTS = AUTO, EXACT, FAST, PLAIN = ("auto", "exact", "fast", "plain")
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
    kv: str = "plain"  # form of the KV cache; int8: per head and position
    memory_bytes: int | None = None  # of each card; of the machine if CPUs compute
    threads: int | None = None
    cache_tokens: int = 4096  # positions (rows x length) that must fit beside the weights
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
        """Return these settings for a swarm whose manifest asks for products of at least the kind `least`; empty: of any kind.

        Automatic options follow it. Raises UsageError if another one contradicts it.
        """
        if least and self.quantize != "none":
            raise UsageError(
                f"--quantize {self.quantize}: this swarm asks for weights that are not rounded again: leave it out"
            )
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
        ):
            if text not in choices:
                raise UsageError(f"{option} {text}: choose {', '.join(choices)}")
        return self
