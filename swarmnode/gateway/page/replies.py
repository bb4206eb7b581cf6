"""What the page is told. Unknown is null; speeds that nobody measured are 0."""

from __future__ import annotations

from pydantic import BaseModel


class RouteHop(BaseModel):
    """A machine and the units [start, end) that it computes."""

    peer: str
    span: tuple[int, int]


class FaultReply(BaseModel):
    """A machine that was replaced, and why."""

    peer: str
    cause: str


class SessionReply(BaseModel):
    """A text that is being written. `longest_stall_s`: the longest wait for a token."""

    trace: str
    route: list[RouteHop]
    tokens: int
    tokens_per_s: float
    reroutes: int
    faults: list[FaultReply]
    longest_stall_s: float


class PeerReply(BaseModel):
    """A machine, as it announces itself; `standing` (good, doubted, shunned) and `trust` (0 to 1) are what this gateway's own
    audits have found."""

    peer: str
    name: str
    span: tuple[int, int]
    state: str
    device: str
    number_format: str
    memory_bytes: int
    since: float
    sessions: int
    cache_tokens_free: int
    decode_units_per_s: float
    training_units_per_s: float
    training_step: int
    up_bps: float
    down_bps: float
    reached: str
    sends: dict[str, str]
    standing: str
    trust: float


class SwarmReply(BaseModel):
    """A swarm at one moment. `id` is what it is called here; `missing` are units that nobody holds; `sessions` are those of this
    gateway, unless it has keys: then each asker knows its own."""

    id: str
    swarm: str
    name: str
    mode: str
    model: str
    units: int
    weights_bytes: int
    covered: bool
    missing: list[int]
    training_step: int
    peers: list[PeerReply]
    bootstraps: list[str]
    sessions: list[SessionReply]


class SwarmList(BaseModel):
    """The swarms that are served here."""

    swarms: list[str]


class LinksReply(BaseModel):
    """Rows send, columns receive. What was not `measured` follows from network coordinates."""

    peers: list[str]
    rtt_s: list[list[float]]
    measured: list[list[bool]]
    bandwidth_bps: list[list[float | None]]


class HistorySample(BaseModel):
    """A moment of the last hour. `tokens_per_s`: what this gateway has got; `loss` where a node of this machine trains."""

    at: float
    tokens_per_s: float
    sessions: int
    peers: int
    missing: int
    training_step: int
    loss: float | None


class HistoryReply(BaseModel):
    """The oldest first."""

    period_s: float
    samples: list[HistorySample]


class NodeReply(BaseModel, extra="allow"):
    """A node of this machine, as it describes itself to its owner."""

    node: str
    state: str
    reason: str


class MachineReply(BaseModel):
    """The nodes that run on this machine."""

    nodes: list[NodeReply]
