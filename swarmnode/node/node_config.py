"""What a volunteer lends, and what of it may change while the node runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from swarmnode.config import StageConfig
from swarmnode.lending.cards import CardLimits
from swarmnode.lending.rules import Rules
from swarmnode.peer.host_config import HostConfig
from swarmnode.peer.placement import PlacementConfig
from swarmnode.plan.offline.plan_file import PlanFile
from swarmnode.plan.view import Span

RATES = ("max_upload_bps", "max_download_bps")  # another rate may be kept to at once, where there was one


@dataclass(frozen=True)
class NodeConfig:
    """What a volunteer lends. None means: find out. A `plan` says where a node begins, and stays while the plan's peers do."""

    host: HostConfig = field(default_factory=HostConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    span: Span | None = None
    plan: PlanFile | None = None
    place: PlacementConfig = field(default_factory=PlacementConfig)
    rules: Rules = field(default_factory=Rules)
    card: CardLimits = field(default_factory=CardLimits)

    def fixed(self, other: NodeConfig) -> list[str]:
        """The names of what differs in `other` and cannot change in a running node."""
        parts = ((self.host, other.host), (self.stage, other.stage), (self.card, other.card))
        names = [name.name for old, new in parts for name in fields(old) if _differs(old, new, name.name)]
        return names if self.span == other.span else [*names, "span"]


def _differs(old: object, new: object, name: str) -> bool:
    before, after = getattr(old, name), getattr(new, name)
    return before != after and not (name in RATES and before and after)
