"""Rendezvous: it finds the step to go on from, given the holdings that all stages report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarmnode.plan.training.recovery import RecoveryPlan, plan_anew, plan_recovery
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from swarmnode.training.coordinator.worker_group import WorkerHandle

ANSWERS_S = 3.0
ANEW_AFTER_S = 60.0  # before a first run that nothing is left of begins anew: a holder may only be away
ROLL_BACK_AFTER_S = 3.0  # before steps on disk count while units are missing: a peer may only have been slow


class Rendezvous:
    """A rendezvous of the stages. It goes on until they together hold all `units`; `missing` are the layers without a holder."""

    def __init__(self, units: int, clock: Callable[[], float]) -> None:
        self.missing: tuple[int, ...] = ()
        self._units = units
        self._clock = clock
        self._began_s = clock()
        self._missing_since_s: float | None = None

    def __repr__(self) -> str:
        return f"<Rendezvous, {len(self.missing)} of {self._units} units missing>"

    @property
    def waited(self) -> bool:
        """Whether ANSWERS_S have passed: stages that have not answered are not waited for if the others hold all layers."""
        return self._clock() - self._began_s >= ANSWERS_S

    def find(self, members: Iterable[WorkerHandle], run: Run) -> RecoveryPlan | None:
        """Return the step to go on from and each member's way there; None while layers are missing. All `members` must have
        answered."""
        members = list(members)
        fresh = all(member.is_as_founded for member in members)
        reports = {member.peer: member.report(encode_run(run), fresh=fresh) for member in members}
        now_s = self._clock()
        waited_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        alone = not any(report.ready for report in reports.values())
        found = plan_recovery(self._units, reports, roll_back=alone or waited_s >= ROLL_BACK_AFTER_S)
        if found.missing and waited_s >= ANEW_AFTER_S:
            found = plan_anew(self._units, reports, kept_from=run.checkpoint_steps) or found
        self.missing = found.missing
        if not found.missing:
            return found
        self._missing_since_s = now_s - waited_s
        return None


def furthest_run(members: Iterable[WorkerHandle]) -> Run | None:
    """Return the run that has come furthest at any stage; None if no stage has begun one."""
    begun = [member.status for member in members if member.has_begun and member.status is not None]
    furthest = max(begun, key=lambda status: (status.condition, status.step, max(status.kept, default=0)), default=None)
    return None if furthest is None else decode_run(furthest.run)
