"""Neighbours of a session at one hop: the server that holds it, and the devices that compute its positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarmnode.config import ServerConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.measuring.meters import StageMeter
from swarmnode.peer.questions import LocalPeer
from swarmnode.plan.serving.scheduler import PassCost
from swarmnode.serving.drafting.drafter import Drafting
from swarmnode.serving.job import Job, Pass
from swarmnode.serving.link_codecs import CodecRules


class SessionPipeline(Protocol):
    """The devices that compute a session's positions, one after another. `Pipeline` is the live one. Used on the event
    loop.

    The session has room here from before its first `submit` until the host's `freed`.

    Attributes:
        clock: Seconds; the clock of job submissions and of passes.
        pass_cost: Duration of passes on the last device, whose outputs are sent on.
        hidden_size: Width of the hidden states that come in and go out.
        vocab_size: Number of token ids of the model.
    """

    clock: Callable[[], float]
    pass_cost: PassCost
    hidden_size: int
    vocab_size: int

    def submit(self, job: Job) -> None:
        """Queue a job behind the session's earlier ones. Returns at once.

        Args:
            job: The next positions of the session. They come back through its `done`, on the loop and in their order,
                joined or cut to other jobs, also if they fail. After `freed`, waiting positions do not come back.
        """

    def reachable(self, source: int, held: int, length: int) -> int:
        """Return to how many positions a session can be cut, `length` at most: fewer if it keeps recurrent states, which cannot go
        back to any position. 0: it must begin anew.

        Args:
            source: Key of the session.
            held: Positions that it holds at most.
            length: Positions wanted.
        """

    def snapshot(self, session: int) -> None:
        """Keep the session's recurrent states as they are now, if it has any: another hop is about to take over.

        Args:
            session: Key of the session.
        """

    def bits_of(self, session: int) -> bytes:
        """Return the class of equal bits of all that the session has computed; empty if it has none.

        Args:
            session: Key of the session.
        """

    def computed(self, job: Job, run: Pass) -> None:
        """Note that a job came back, which shows that the device works.

        Args:
            job: The job as `done` received it.
            run: The pass that it was part of.
        """


class SessionHost(Protocol):
    """Server that holds a session. `StageServer` is the live one. Used on the event loop.

    Attributes:
        switchboard: Links to the other hops of a route.
        peer: This machine's peer.
        config: Times and limits of the server.
        codec_rules: Codecs that the swarm allows, and bandwidths of the links.
        meter: Counter of the faults that sessions report to their clients.
        draining: Whether this node leaves: no session is kept for another text then.
        drafting: Function that returns the proposer of guesses and their budget for the session of an OPEN; None if it
            shall not guess.
    """

    switchboard: Switchboard
    peer: LocalPeer
    config: ServerConfig
    codec_rules: CodecRules
    meter: StageMeter
    draining: bool

    @property
    def drafting(self) -> Drafting:
        """The source of guesses; see the attributes."""

    def freed(self, session: bytes) -> None:
        """Drop a session that is over, and its memory. Called once for each session.

        Args:
            session: Session id, as the hops and the client know it.
        """
