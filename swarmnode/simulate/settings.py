"""Settings of a simulation. Times in seconds, sizes in bytes; what nodes are configured with has the nodes' own defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.config import ClientConfig, StageConfig
from swarmnode.plan.routes.lattice import RoutingConfig
from swarmnode.swarm.peers.directory import DirectoryConfig
from swarmnode.swarm.records.run import FINGERPRINT_BYTES, Averaging, Run, check_run

EXACT_PEERS = 200  # up to so many peers every token and microbatch is followed; beyond, a session is one thing


@dataclass(frozen=True)
class ServeSettings:
    """Sessions come at random (Poisson), `arrivals_per_s` of them in the whole swarm; 0: half of what it could serve (of a large
    swarm: a sample of that). With `clients` above 0 there are so many clients instead, each of which begins its next session
    when the last one has ended."""

    arrivals_per_s: float = 0.0
    prompt_tokens: int = 512
    new_tokens: int = 128
    spread: float = 0.5  # lengths are drawn evenly from 1 - spread to 1 + spread times these
    clients: int = 0


@dataclass(frozen=True)
class TrainSettings:
    """Steps of `microbatches` microbatches of `microbatch` samples of `sequence` tokens."""

    microbatches: int = 32
    microbatch: int = 1
    sequence: int = 1024
    compress: str = "auto"  # auto, none, a codec's name, or adatopk
    averaging: Averaging = field(default_factory=Averaging)
    checkpoint_steps: int = 50

    @property
    def tokens(self) -> int:
        """Of one microbatch."""
        return self.microbatch * self.sequence

    @property
    def run(self) -> Run:
        """As a trainer would bring it. Raises UsageError."""
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
    """How peers live together."""

    detect_s: float = 1.0  # until a peer that vanished is noticed by those who talk to it; a closed socket is faster
    load_bytes_per_s: float = 1e9  # from the disk onto the device
    settle_s: float = 1.0  # a claim stands for so long before it is taken
    look_s: float = 1.0  # between two looks whether to move
    cache_tokens: int = StageConfig.cache_tokens
    rebalance: bool = True  # peers move for throughput; without, they only fill gaps
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


@dataclass(frozen=True)
class Settings:
    """What is simulated. `churn`: share of the peers that leave per hour, each replaced by another after a while."""

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
        """How long."""
        return self.hours * 3600
