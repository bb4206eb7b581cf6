"""Settings of a simulation. Times are in seconds, sizes in bytes; settings that nodes have too default to those of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.config import ClientConfig, StageConfig
from swarmnode.plan.routes.routing import RoutingConfig
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.records.run import FINGERPRINT_BYTES, Averaging, Run, check_run

EXACT_PEERS = 200  # above this number of peers a session is followed as a whole, not token by token


@dataclass(frozen=True)
class ServeSettings:
    """Load of a swarm that serves.

    Sessions arrive at random (Poisson), `arrivals_per_s` in the whole swarm. 0 means half of the load that the swarm could serve,
    with a small upper bound if it has more than `EXACT_PEERS` peers. With `clients` above 0 that number of clients replaces the
    arrivals, and each begins its next session when the last one has ended.
    """

    arrivals_per_s: float = 0.0
    prompt_tokens: int = 512
    new_tokens: int = 128
    spread: float = 0.5  # lengths are drawn evenly from 1 - spread to 1 + spread times the two above
    clients: int = 0


@dataclass(frozen=True)
class TrainSettings:
    """Training run: each step has `microbatches` microbatches of `microbatch` samples of `sequence` tokens."""

    microbatches: int = 32
    microbatch: int = 1
    sequence: int = 1024
    compress: str = "auto"  # auto, none, a codec's name, or adatopk
    averaging: Averaging = field(default_factory=Averaging)
    checkpoint_steps: int = 50

    @property
    def tokens(self) -> int:
        """Number of tokens of one microbatch."""
        return self.microbatch * self.sequence

    @property
    def run(self) -> Run:
        """The run as a trainer would announce it. Raises UsageError if the settings do not make a valid run."""
        run = Run(
            data=bytes(FINGERPRINT_BYTES),
            steps=1 << 31,
            batch=self.microbatches * self.microbatch,
            microbatch=self.microbatch,
            sequence=self.sequence,
            checkpoint_steps=self.checkpoint_steps,
            averaging=self.averaging,
        )
        check_run(run)
        return run


@dataclass(frozen=True)
class SwarmSettings:
    """Settings of the simulated peers: delays, caches, directory, routing, client."""

    detect_s: float = 1.0  # until the peers that talk to a vanished peer notice; a closed socket is faster
    load_bytes_per_s: float = 1e9  # from the disk onto the device
    settle_s: float = 1.0  # from a claim to the choice that takes it
    move_interval_s: float = 1.0  # between two decisions whether to move
    cache_tokens: int = StageConfig.cache_tokens
    rebalance: bool = True  # peers move for throughput; if False they only fill gaps
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


@dataclass(frozen=True)
class Settings:
    """Settings of one simulation. `workload` is "serve" or "train". `churn` is the share of the peers that leave per hour; each
    is replaced after a while."""

    workload: str = "serve"
    hours: float = 0.25
    seed: int = 0
    churn: float = 0.0
    sample_s: float = 10.0  # between two points of the curves
    serve: ServeSettings = field(default_factory=ServeSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    swarm: SwarmSettings = field(default_factory=SwarmSettings)

    @property
    def seconds(self) -> float:
        """Length of the simulation in seconds."""
        return self.hours * 3600
