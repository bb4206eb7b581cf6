"""Waits: the peers that a coordinator waits for, as it reports them, and the sentences that show them to a user."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_messages import MAX_WAITS, ProgressReport, Wait
from swarmnode.plan.training.step_ledger import OutstandingLease
from swarmnode.training.coordinator.timeouts import Strikes
from swarmnode.training.coordinator.worker_group import WorkerHandle

WORTH_TELLING_S = 2.0  # shorter waits are normal
TOLD = 5
DOING = {
    FrameKind.LEAD: "to say what it holds",
    FrameKind.BEGIN: "to begin the run",
    FrameKind.RELEASE: "to say what it has counted",
    FrameKind.DISCARD: "to discard a step",
    FrameKind.REDUCE: "to average with its replicas",
    FrameKind.COMMIT: "to update",
    FrameKind.RESTORE: "to load a step",
    FrameKind.LEASE: "to bring back a microbatch",
}


def longest_waits(
    members: Iterable[WorkerHandle], leases: Iterable[OutstandingLease], strikes: Strikes, now_s: float
) -> tuple[Wait, ...]:
    """Return what the current step waits for: commands without an answer and peers in a pause, then microbatches under way. A
    microbatch may be at any place of its route, so all its peers are listed. Each kind is sorted by time, the longest first."""
    waits: list[Wait] = []
    for member in members:
        if member.refuses:
            waits.append(Wait(member.peer, FrameKind.FAILED, strikes.pause_s(member.peer), *member.span))
        elif member.asked and now_s - member.asked[0].began_s >= WORTH_TELLING_S:
            command = member.asked[0]
            waits.append(Wait(member.peer, command.kind, now_s - command.began_s, *member.span))
        elif strikes.rests(member.peer):
            waits.append(Wait(member.peer, 0, strikes.pause_s(member.peer), *member.span))
    for record in leases:
        if now_s - record.given_at_s >= WORTH_TELLING_S:
            waited_s = now_s - record.given_at_s
            waits.append(Wait(record.trainer, FrameKind.LEASE, waited_s))
            waits += [Wait(peer, FrameKind.LEASE, waited_s, *span) for peer, span in record.route]
    once = {(wait.peer, wait.what): wait for wait in sorted(waits, key=lambda wait: wait.since_s)}
    return tuple(
        sorted(once.values(), key=lambda wait: (wait.what == FrameKind.LEASE, -wait.since_s, wait.peer))[:MAX_WAITS]
    )


def sentence(progress: ProgressReport) -> str:
    """Return a sentence about the waits, or an empty text if there are none worth reporting. It quotes no text of a peer, and names
    peers as `status` does, by the end of the id."""
    parts = [_units_text("", progress.missing) + " no holder"] if progress.missing else []
    parts += [_wait_text(wait) for wait in progress.waits[:TOLD]]
    return f"step {progress.step} waits: {'; '.join(parts)}" if parts else ""


def _units_text(peer: str, units: Iterable[int]) -> str:
    numbers = sorted(units)
    named = f"layer {numbers[0]} has" if len(numbers) == 1 else f"layers {', '.join(map(str, numbers[:8]))} have"
    return f"{peer}{named}"


def _wait_text(wait: Wait) -> str:
    if wait.what == FrameKind.WORK:
        return f"until peers are at the places where steps are shortest, {wait.since_s:.0f} s so far"
    peer = wait.peer[-8:]
    where = f" (layers {wait.start}-{wait.end - 1})" if wait.end > wait.start else ""
    if wait.what == FrameKind.FAILED:
        return f"for peer {peer}{where}, which cannot take up the run: if its version is older, update swarmnode there"
    doing = DOING.get(FrameKind(wait.what)) if wait.what in FrameKind._value2member_map_ else None
    if doing is None:
        return f"peer {peer}{where} failed and is asked again in {wait.since_s:.0f} s"
    return f"for peer {peer}{where} {doing}, {wait.since_s:.0f} s so far"
