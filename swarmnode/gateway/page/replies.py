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
    """A swarm at one moment. `id` is what it is called here, `task` what may be asked of it (see ModelCard); `missing` are units
    that nobody holds; `max_model_len` as ModelCard's; `sessions` are those of this gateway, unless it has keys: then each asker
    knows its own."""

    id: str
    swarm: str
    name: str
    mode: str
    task: str
    adapters: list[str]
    model: str
    units: int
    weights_bytes: int
    covered: bool
    missing: list[int]
    training_step: int
    peers: list[PeerReply]
    bootstraps: list[str]
    max_model_len: int | None
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


class MemberReply(BaseModel):
    """Who belongs to a swarm; `unseen` is the state of one who came by an invite and has not announced itself. Role, group and
    invite are what its certificate says, empty where nobody has seen one; `expires_at` null is never."""

    peer: str
    name: str
    state: str
    role: str = ""
    group: str = ""
    invite: str = ""
    joined_at: int | None = None
    expires_at: int | None = None


class InviteReply(BaseModel):
    """Terms of an invite. `uses` null is any number, `peer` null anybody, `expires_at` null never."""

    id: str
    role: str
    expires_at: int | None
    uses: int | None
    peer: str | None
    group: str


class GivenInvite(InviteReply):
    """An invite that was given out, and how many `used` it."""

    issued_at: int
    used: int
    note: str
    revoked: bool


class MembersReply(BaseModel):
    """As `swarmnode members --json` has it. `owned`: the .swarm file and the owner's key lie on this machine, so that invites can
    be made and revoked."""

    name: str
    membership: str
    owned: bool
    members: list[MemberReply]
    invites: list[GivenInvite]


class QrPicture(BaseModel):
    """The dark modules of a QR code as an SVG `path` in a square of `size`, which has a light ground and its quiet zone."""

    size: int
    path: str


class NewInvite(InviteReply):
    """New invite: `invite` is the line to hand out, which is kept nowhere; `qr` is null if the line is too long for a picture."""

    invite: str
    qr: QrPicture | None


class RevocationReply(BaseModel):
    """Which peer or invite belongs no more. `told`: how many peers heard it now; where none did, it spreads when a node runs with
    the .swarm file."""

    peer: str | None
    invite: str | None
    told: int
