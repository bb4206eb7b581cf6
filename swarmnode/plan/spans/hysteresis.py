"""Speeds as placement sees them: held until they have really changed, so that nobody moves because of noise."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import View

REAL_CHANGE = 1.25  # a speed that differs by less than this factor from the held one is the same speed


class Hysteresis:
    """One observer's held speeds, in units/s, by peer. A peer that was not measured yet is not held."""

    def __init__(self) -> None:
        self._held: dict[PeerId, float] = {}

    def __repr__(self) -> str:
        return f"<Hysteresis speeds of {len(self._held)} peers>"

    def view(self, view: View) -> View:
        """The same view with held speeds. Peers that are gone are forgotten."""
        self._held = {peer.peer: self._hold(peer.peer, peer.decode_units_per_s) for peer in view.peers}
        peers = tuple(replace(peer, decode_units_per_s=self._held[peer.peer]) for peer in view.peers)
        return replace(view, peers=peers)

    def _hold(self, peer: PeerId, units_per_s: float) -> float:
        held = self._held.get(peer, 0.0)
        same = held > 0 and held / REAL_CHANGE < units_per_s < held * REAL_CHANGE
        return held if same else units_per_s
