"""Settings of a volunteer's node, and the check which of them a running node can change."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from swarmnode.config import StageConfig
from swarmnode.lending.cards import CardLimits
from swarmnode.lending.lending import Rules
from swarmnode.peer.host_config import HostConfig
from swarmnode.peer.placement import PlacementConfig
from swarmnode.plan.offline.planner_files import PlanFile
from swarmnode.plan.view import Span

RATES = ("max_upload_bps", "max_download_bps")  # a running node can change a rate limit, but not add or remove one


@dataclass(frozen=True)
class NodeConfig:
    """Settings of a volunteer's node: lent resources, placement and rules.

    `span` fixes the units to hold. If it is None, `plan` chooses the first units, which then stay while the plan's peers stay.
    Without a plan the placement rule chooses. `notify` shows pauses by rule on the desktop.
    """

    host: HostConfig = field(default_factory=HostConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    span: Span | None = None
    plan: PlanFile | None = None
    place: PlacementConfig = field(default_factory=PlacementConfig)
    rules: Rules = field(default_factory=Rules)
    card: CardLimits = field(default_factory=CardLimits)
    notify: bool = True

    def fixed(self, other: NodeConfig) -> list[str]:
        """Return the names of the settings that differ in `other` and cannot change in a running node; empty if there are none."""
        parts = ((self.host, other.host), (self.stage, other.stage))
        names = [name.name for old, new in parts for name in fields(old) if _differs(old, new, name.name)]
        return names + [name for name in ("span", "notify") if getattr(self, name) != getattr(other, name)]


def _differs(old: object, new: object, name: str) -> bool:
    before, after = getattr(old, name), getattr(new, name)
    return before != after and not (name in RATES and before and after)
