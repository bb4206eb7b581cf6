"""The error tree, by the party at fault. The message is the user's text: what happened, then what to do.

Every error that may cross the wire has a `code` (`protocol/errors.md`). Only the code and its fixed text travel, never the message
of an exception.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum


class ErrorCode(IntEnum):
    """Code of an error on the wire (`protocol/errors.md`). A reader treats an unknown code as INTERNAL."""

    INTERNAL = 1  # the peer failed for an internal reason
    VERSION = 2  # no common protocol version
    WRONG_SWARM = 3  # the peer serves another swarm
    REFUSED = 4  # membership or policy refuses this peer
    MALFORMED = 5  # a frame, body or tensor breaks the rules
    TOO_LARGE = 6  # a length is over its bound
    BUSY = 7  # no capacity now; the error carries the seconds until a retry is worth it
    DRAINING = 8  # the peer is leaving and takes nothing new
    NO_SESSION = 9  # the session is unknown here (freed, or never opened)
    STALE = 10  # the epoch is older than the one in force
    WRONG_SPAN = 11  # the peer does not hold the units asked for
    NOT_FINITE = 12  # a tensor holds NaN or infinity
    PEER_LOST = 13  # the next peer died, hangs or cannot be reached
    NOT_FOUND = 14  # the peer does not have the content asked for
    WRONG_RUN = 15  # the swarm is trained with other settings or other data
    ELSEWHERE = 16  # another peer does that at the moment
    INVALID_REQUEST = 17  # the request cannot be computed: the model has no such token ids or positions
    ADAPTER_REFUSED = 18  # the peer serves no adapters of members, or its owner has blocked this one
    ADAPTER_QUOTA = 19  # the adapter is over what the peer keeps for one owner, or for all of them
    ADAPTER_EXPIRED = 20  # the adapter's time is over
    ADAPTER_PRIVATE = 21  # the adapter is private to another member


ERROR_TEXT = {
    ErrorCode.INTERNAL: "it failed for a reason of its own",
    ErrorCode.VERSION: "it speaks another version of the protocol; one of us must upgrade",
    ErrorCode.WRONG_SWARM: "it serves another swarm",
    ErrorCode.REFUSED: "it does not admit this peer",
    ErrorCode.MALFORMED: "it could not make sense of what we sent",
    ErrorCode.TOO_LARGE: "what we sent is over its bounds",
    ErrorCode.BUSY: "it has no capacity at the moment",
    ErrorCode.DRAINING: "it is leaving the swarm",
    ErrorCode.NO_SESSION: "it does not know the session",
    ErrorCode.STALE: "it has moved on to a newer epoch of the session",
    ErrorCode.WRONG_SPAN: "it does not hold the units asked for",
    ErrorCode.NOT_FINITE: "it met a tensor with NaN or infinity",
    ErrorCode.PEER_LOST: "it lost the next peer of the route",
    ErrorCode.NOT_FOUND: "it does not have the content asked for",
    ErrorCode.WRONG_RUN: "the swarm is being trained with other settings or other data",
    ErrorCode.ELSEWHERE: "another peer does that at the moment",
    ErrorCode.INVALID_REQUEST: "the swarm has no such token ids, positions, codec or adapter, or cannot follow the grammar",
    ErrorCode.ADAPTER_REFUSED: "it serves no adapters that members bring, or its owner has blocked this one",
    ErrorCode.ADAPTER_QUOTA: "the adapter is over the space that it has for adapters of members",
    ErrorCode.ADAPTER_EXPIRED: "the adapter has expired",
    ErrorCode.ADAPTER_PRIVATE: "the adapter is private to another member",
}
"""Text shown for a code from a peer: never words that the peer chose."""


REMEDY = {
    ErrorCode.INTERNAL: "Try again: swarmnode asks other peers. If the peer is yours, its log says why (`--verbose`).",
    ErrorCode.VERSION: "Upgrade swarmnode here, or ask the owner of the other peer to upgrade.",
    ErrorCode.WRONG_SWARM: "The peer moved to another swarm. If you named it with `--peer`, ask for a new address.",
    ErrorCode.REFUSED: "Ask the swarm's owner for an invite with the role that you need (`swarmnode invite --role`).",
    ErrorCode.MALFORMED: "One of the two programs has a bug: upgrade both, and report it if it stays.",
    ErrorCode.TOO_LARGE: "Ask for less at a time: a shorter prompt, fewer new tokens, smaller batches.",
    ErrorCode.BUSY: "Wait and try again, or lend more of your own machines.",
    ErrorCode.DRAINING: "Try again: sessions move to other peers.",
    ErrorCode.NO_SESSION: "Try again: swarmnode opens a new session.",
    ErrorCode.STALE: "Try again: a newer route of the session has replaced this one.",
    ErrorCode.WRONG_SPAN: "Try again: the peer has moved, and swarmnode takes another route.",
    ErrorCode.NOT_FINITE: "Try again with other peers. If every peer answers this, the model overflows in this precision.",
    ErrorCode.PEER_LOST: "Try again: swarmnode takes another route. If it happens often, run `swarmnode why trace`.",
    ErrorCode.NOT_FOUND: "Try again with other peers. If no peer has it, run a peer with the whole checkpoint.",
    ErrorCode.WRONG_RUN: "Use the settings and the data that the training began with, or another `--seed` for a new run.",
    ErrorCode.ELSEWHERE: "Try again: swarmnode asks the peer that does it.",
    ErrorCode.INVALID_REQUEST: "Shorten the prompt, ask for fewer tokens, or use the tokenizer that belongs to the model.",
    ErrorCode.ADAPTER_REFUSED: "Use peers whose owners take adapters (`run --adapters members`), or leave the adapter out.",
    ErrorCode.ADAPTER_QUOTA: "Bring a smaller adapter (a lower rank, no replaced layers), or remove one of yours.",
    ErrorCode.ADAPTER_PRIVATE: "Ask its owner to share it (`swarmnode adapter add --share members`).",
    ErrorCode.ADAPTER_EXPIRED: "Ask its owner to add it again (`swarmnode adapter add`).",
}
"""Advice to the user for a code from a peer."""


class SwarmnodeError(Exception):
    """Base of all errors that swarmnode raises on purpose."""

    exit_code = 1
    code = ErrorCode.INTERNAL
    remedy = "The message says what to do; with `--verbose` the log says what happened before."


class UsageError(SwarmnodeError):
    """The user asked for something impossible: a wrong option, or a file with the wrong contents. Exit code 2."""

    remedy = "Correct the command; `--help` shows what each option takes."

    exit_code = 2


class ContextTooLong(UsageError):
    """A prompt and its new tokens do not fit into the model's positions."""

    remedy = "Shorten the prompt, or ask for fewer new tokens."


class LocalError(SwarmnodeError):
    """Failure of this machine: disk full, port in use, no such device, not enough memory."""

    remedy = "Free what is missing on this machine (disk, port, memory), or lend less: --memory, --disk, --device."


class ExecutorDied(LocalError):
    """The compute thread has ended, after a fault of the device, for example: this process cannot go on computing."""

    remedy = "Start the node again. If the device fails again, `swarmnode doctor` and the driver's log say more."


class PrecisionError(LocalError):
    """The device computed NaN or infinity from the weights: numbers are too large for its precision."""

    remedy = "Use --dtype float32, and lend more memory if that does not fit."


class CheckpointError(LocalError):
    """A checkpoint cannot be used: missing, truncated or tampered files, or a model that cannot be split."""

    remedy = "Fetch the checkpoint again, or ask its owner: files are missing or changed, or the model cannot be split."


class WeightsLost(CheckpointError):
    """Weights that are read while a node computes cannot be read any more, or were changed: it cannot go on serving its layers."""

    remedy = "Start the node again: it checks its files, and fetches what is damaged. Leave the model's files alone while it runs."


class NotFinite(SwarmnodeError):
    """Training met NaN or infinity at `unit`. The step is not committed, so the last good one stands."""

    remedy = "Lower the learning rate (--lr), or clip gradients (--clip); the last good step stands."

    code = ErrorCode.NOT_FINITE

    def __init__(self, message: str, *, unit: int) -> None:
        super().__init__(message)
        self.unit = unit


class StepFailed(SwarmnodeError):
    """A training step fails at every peer that could compute it. It is not committed, so the last good one stands."""

    remedy = "Read the log of the peer that the error names: it may lack memory (--microbatch). The same command tries again."


class LeaderLost(SwarmnodeError):
    """The leader of an adapter's trainers has gone, or refuses this one. This trainer's last checkpoint stands."""

    remedy = "Ask the leader to start again with `tune --share`, and join with the new ticket."


class NetworkDown(SwarmnodeError):
    """The swarm cannot be reached from this machine: no bootstrap peer answers, or the local p2pd has ended."""

    remedy = (
        "Check that this machine is online and that the bootstrap peer of the invite runs: `swarmnode doctor SWARM`."
    )

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy or self.remedy


class NotAdmitted(SwarmnodeError):
    """The swarm does not admit this peer: its invite has expired, was revoked, is used up, or is for something else.

    Exit code 2, as for any wrong invite: a service that starts again cannot mend it.
    """

    remedy = "Ask the swarm's owner for a new invite."

    exit_code = 2
    code = ErrorCode.REFUSED


class NoRoute(SwarmnodeError):
    """The live peers do not cover the model."""

    remedy = "Wait for volunteers, or lend the missing layers yourself: `swarmnode status` lists them."


class PeerError(SwarmnodeError):
    """Fault of another peer. `peer` is its id, if known."""

    remedy = "Try again: swarmnode asks other peers."

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLost(PeerError):
    """The peer died, hangs, or closed the stream before the end."""

    code = ErrorCode.PEER_LOST


class ProtocolError(PeerError):
    """The peer broke the protocol. `code` is the kind of the fault; the peer gets it before the link closes."""

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.MALFORMED, peer: str | None = None) -> None:
        super().__init__(message, peer=peer)
        self.code = code

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.peer is None or self.peer in text else f"peer {self.peer}: {text}"


@contextmanager
def blaming(peer: str | None) -> Iterator[None]:
    """Name `peer`, if there is one, in a ProtocolError of the `with` block, which reads what this peer sent, unless the error names
    another one."""
    try:
        yield
    except ProtocolError as error:
        error.peer = error.peer or peer
        raise


class PeerRefused(PeerError):
    """The peer answered with an error code."""

    def __init__(self, message: str, *, code: ErrorCode, retry_s: float | None = None, peer: str | None = None) -> None:
        super().__init__(message, peer=peer)
        self.code = code
        self.remedy = REMEDY[code]
        self.retry_s = retry_s


class Busy(SwarmnodeError):
    """No capacity now. `retry_s` says after how many seconds asking again is worth it."""

    remedy = "Wait and try again, or lend more."

    code = ErrorCode.BUSY

    def __init__(self, message: str, *, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


def refusal(code: int, *, retry_s: float = 0.0, peer: str | None = None) -> PeerRefused:
    """Return the error for `code` that `peer` sent in ERROR or FAULT; an unknown code counts as INTERNAL."""
    known = ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.INTERNAL
    text = f"peer {peer or 'unknown'} answered {known.name}: {ERROR_TEXT[known]}"
    return PeerRefused(text, code=known, retry_s=retry_s or None, peer=peer)


def with_remedy(error: SwarmnodeError) -> str:
    """Return the text of `error` and its remedy; the text alone if that kind of text already says what to do."""
    text = str(error)
    if isinstance(error, (UsageError, LocalError, NotFinite, NotAdmitted)):
        return text
    return f"{text}{'' if text.endswith(('.', '?')) else '.'} {error.remedy}"


OPEN_FILES = "allow more open files (ulimit -n)"
ADVICE = {
    errno.EMFILE: OPEN_FILES,
    errno.ENFILE: OPEN_FILES,
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, since your quota is used up",
}
"""Advice for errors of the operating system that does not depend on the attempted operation."""


def with_advice(error: OSError, usual: str, others: Mapping[int, str] = {}) -> str:
    """Return the reason of an operating system error and advice: that of `others` or ADVICE for its number, else `usual`."""
    return f"{error.strerror or error}; {({**ADVICE, **others}).get(error.errno or 0, usual)}"


def with_port_advice(error: OSError, usual: str) -> str:
    """Return the reason why no port could be opened, and advice: `usual` unless the address itself is wrong or not allowed."""
    address = "give an address of this machine"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror or error}; {address}"
    others = {errno.EADDRNOTAVAIL: address, errno.EACCES: "choose a port above 1023", errno.EAFNOSUPPORT: address}
    return with_advice(error, usual, others)
