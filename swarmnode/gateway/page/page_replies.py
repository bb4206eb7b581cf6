"""Responses of the page's endpoints. Unknown values are null; speeds that were never measured are 0."""

from __future__ import annotations

from pydantic import BaseModel


class RouteHop(BaseModel):
    """Peer of a route, and the layers (units) [start, end) that it computes."""

    peer: str
    span: tuple[int, int]


class FaultReply(BaseModel):
    """Machine that was replaced in a route, and the cause."""

    peer: str
    cause: str


class DraftReply(BaseModel):
    """Numbers of guessed tokens: all, those that were right, and those that were computed in vain."""

    drafted: int
    accepted: int
    wasted: int


class SessionReply(BaseModel):
    """Text that is being generated. `longest_stall_s` is the longest wait for a token. `drafts` are the tokens that were guessed
    ahead, by proposer."""

    trace: str
    route: list[RouteHop]
    tokens: int
    tokens_per_s: float
    reroutes: int
    faults: list[FaultReply]
    longest_stall_s: float
    drafts: dict[str, DraftReply]


class PeerReply(BaseModel):
    """Peer as it announces itself. `machine` is the same for peers on one machine. `standing` (good, doubted, shunned), `trust`
    (0 to 1) and `findings` (the last one of each kind) are this gateway's own."""

    peer: str
    machine: str
    name: str
    span: tuple[int, int]
    state: str
    device: str
    number_format: str
    memory_bytes: int
    since: float
    sessions: int
    cache_tokens_free: int
    draft_model: str
    bits: str  # class of equal bits, in hex; empty: none
    decode_units_per_s: float
    training_units_per_s: float
    training_step: int
    up_bps: float
    down_bps: float
    reached: str
    sends: dict[str, str]
    standing: str
    trust: float
    findings: list[str]


class SwarmReply(BaseModel):
    """State of a swarm. `id` is its name at this gateway, `task` its use (see ModelCard); `missing` are the layers (units) without
    a holder, `ungiven` those whose weights no peer gives to new machines; `max_model_len` is that of ModelCard.

    `tokens_per_s` is the speed of one text lately, as this gateway measured it; null before the first. `sessions` are the texts
    that this gateway generates; empty if the gateway has keys.
    """

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
    ungiven: list[int]
    training_step: int
    peers: list[PeerReply]
    bootstraps: list[str]
    max_model_len: int | None
    tokens_per_s: float | None
    sessions: list[SessionReply]


class SwarmList(BaseModel):
    """Swarms that this gateway serves."""

    swarms: list[str]


class LinksReply(BaseModel):
    """Links between machines, as matrices: rows send, columns receive. Values that are not `measured` are estimated from network
    coordinates."""

    peers: list[str]
    rtt_s: list[list[float]]
    measured: list[list[bool]]
    bandwidth_bps: list[list[float | None]]


class HistorySample(BaseModel):
    """Sample of the last hour. `tokens_per_s` counts the tokens that this gateway received, and `accepted_per_s` and `wasted_per_s`
    those that were guessed ahead, rightly and in vain. `loss` is null unless a node of this machine trains in the swarm."""

    at: float
    tokens_per_s: float
    accepted_per_s: float
    wasted_per_s: float
    sessions: int
    peers: int
    missing: int
    training_step: int
    loss: float | None


class HistoryReply(BaseModel):
    """Samples of the last hour, the oldest first."""

    period_s: float
    samples: list[HistorySample]


class NodeReply(BaseModel, extra="allow"):
    """Node of this machine, as it describes itself to its owner."""

    node: str
    state: str
    reason: str


class MachineReply(BaseModel):
    """Nodes of this machine, and its temperatures. The temperatures are those of the hottest card, and of the hottest part of the
    CPU; null without a sensor."""

    nodes: list[NodeReply]
    card_celsius: float | None
    cpu_celsius: float | None


class LendingOption(BaseModel):
    """Limit or rule of a node. `kind` is text, list or yes; `value` is as typed in a file, empty if the option is off; `origin` is
    where it comes from: a file, a flag, or an environment variable; empty for the default."""

    name: str
    kind: str
    value: str | bool | list[str]
    default: str | bool | list[str]
    example: str
    help: str
    origin: str


class LendingOptionsReply(BaseModel):
    """Limits and rules of a node that its owner can change while it runs."""

    node: str
    options: list[LendingOption]


class ChangeReply(LendingOptionsReply):
    """Limits and rules after a change; `told` names in sentences the files that keep them, the flags that win over them at the next
    start, and the options that need a restart of the node."""

    told: str


class MemberPeer(BaseModel):
    """Peer of a member: a node or a program of its machine."""

    peer: str
    state: str


class MemberReply(BaseModel):
    """Member of a swarm, with all peers of its machine. `label` is for people; `name` is the one announced last and `note` that of
    the invite, and these may be empty. `role`, `group` and `invite` are empty in a public swarm. The state `offline` means that no
    peer of it is online; `expires_at` null means never."""

    id: str
    label: str
    name: str
    note: str
    state: str
    role: str
    group: str
    invite: str
    joined_at: int | None
    seen_at: int
    expires_at: int | None
    revoked: bool
    peers: list[MemberPeer]


class InviteReply(BaseModel):
    """Terms of an invite. `uses` null means any number, `peer` null any peer, `expires_at` null never."""

    id: str
    role: str
    expires_at: int | None
    uses: int | None
    peer: str | None
    group: str


class GivenInvite(InviteReply):
    """Invite that was issued; `used` is how many members used it."""

    issued_at: int
    used: int
    note: str
    revoked: bool


class UsualTerms(BaseModel):
    """Terms of an invite that names no others."""

    role: str
    life_s: int | None
    uses: int


class MembersReply(BaseModel):
    """Members and invites, as in `swarmnode members --json`. `owned` means that the .swarm file and the owner's key are on this
    machine, so that invites can be created and revoked; `locked` that the key has a password. `roles` are those that an invite can
    give."""

    name: str
    membership: str
    owned: bool
    locked: bool
    roles: list[str]
    usual: UsualTerms
    members: list[MemberReply]
    invites: list[GivenInvite]


class QrPicture(BaseModel):
    """QR code: `path` is an SVG path of its dark modules in a square of `size`, which includes the quiet zone."""

    size: int
    path: str


class NewInvite(InviteReply):
    """New invite. `invite` is the line to hand out, which is not stored; `qr` is null if the line is too long for a QR code."""

    invite: str
    qr: QrPicture | None


class RevocationReply(BaseModel):
    """Result of a revocation: the `peers` and `invites` that were revoked. `told` is how many peers received it. If it is 0, the
    revocation spreads when a node runs with the .swarm file."""

    name: str
    peers: list[str]
    invites: list[str]
    told: int
