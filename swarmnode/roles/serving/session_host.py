"""What a session and the server that it runs on know of one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmnode.codec.messages import Open
from swarmnode.errors import ErrorCode
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.plan.serving.pass_cost import PassCost
from swarmnode.roles.measuring.observed_latency import ObservedLatency
from swarmnode.roles.measuring.trace_log import SessionTrace
from swarmnode.roles.serving.job import Job, Pass
from swarmnode.roles.serving.link_codecs import CodecRules


class HostedSession(Protocol):
    """A session, as its server counts it."""

    key: int
    trace: SessionTrace
    trace_id: bytes

    @property
    def id(self) -> bytes:
        """The 16 bytes by which all hops and the client know the session."""

    @property
    def opened(self) -> Open:
        """The OPEN in force."""


class SessionHost(Protocol):
    """What a session needs of the node that it runs on."""

    switchboard: Switchboard
    hidden_size: int
    codec_rules: CodecRules
    pass_cost: PassCost
    orphan_grace_s: float
    observed_latency: ObservedLatency
    clock: Callable[[], float]
    draining: bool

    def submit(self, job: Job) -> None:
        """Run it as soon as the stage comes to it; its `done` is called on the loop."""

    def computed(self, session: HostedSession, job: Job, run: Pass) -> None:
        """A job came back from the compute thread."""

    def note_fault(self, code: ErrorCode) -> None:
        """The session told its client that a hop fails."""

    def freed(self, session: HostedSession) -> None:
        """The session is over."""
