"""What `status --watch` tells below its table: what has changed in the swarm between two looks, and which links are slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarmnode.cli.terminal.printable import one_line
from swarmnode.counting import counted

KEPT = 6
SLOWEST = 3

Picture = Mapping[str, Any]


class SwarmNews:
    """The latest changes, each with the time of the day at which it was seen."""

    def __init__(self, picture: Picture, clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._last = picture
        self._clock = clock
        self.lines: deque[str] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<SwarmNews of {len(self._last['peers'])} peers, {len(self.lines)} lines>"

    def look(self, picture: Picture) -> None:
        """Take in what is seen now."""
        self.lines.extend(f"{self._clock()}  {change}" for change in changes(self._last, picture))
        self._last = picture


def changes(before: Picture, after: Picture) -> Iterator[str]:
    """Who came, went, moved or changed its state, and which texts of this machine's gateways others went on with: a sentence
    each."""
    known, there = ({peer["peer"]: peer for peer in picture["peers"]} for picture in (before, after))
    for name in known.keys() - there.keys():
        yield f"{_called(known[name])} is gone; it held {_units(known[name])}"
    for name, peer in there.items():
        earlier = known.get(name)
        if earlier is None:
            yield f"{_called(peer)} has come, for {_units(peer)}"
        elif tuple(earlier["span"]) != tuple(peer["span"]):
            yield f"{_called(peer)} moves from {_units(earlier)} to {_units(peer)}"
        elif earlier["state"] != peer["state"]:
            yield f"{_called(peer)} is {peer['state']}"
    were = before.get("reroutes", {})
    for cause, count in after.get("reroutes", {}).items():
        if count > were.get(cause, 0):
            yield f"{counted(count - were.get(cause, 0), 'text')} asked for here moved to another route ({cause.replace('_', ' ')})"


def slowest_links(links: Mapping[str, Any], picture: Picture) -> Iterator[str]:
    """The links with the longest round trips between peers that hold units, and how fast they are where that was measured."""
    called = {peer["peer"]: _called(peer) for peer in picture["peers"]}
    peers: Sequence[str] = links["peers"]
    pairs = [(links["rtt_s"][a][b], a, b) for a in range(len(peers)) for b in range(a)]
    for rtt_s, a, b in sorted(pairs, reverse=True)[:SLOWEST]:
        rates = [rate for rate in (links["bandwidth_bps"][a][b], links["bandwidth_bps"][b][a]) if rate is not None]
        speed = f", {min(rates) / 1e6:.3g} Mbit/s" if rates else ""
        guessed = "" if links["measured"][a][b] else " (estimated)"
        yield f"{called.get(peers[b], peers[b][-8:])} - {called.get(peers[a], peers[a][-8:])}: {rtt_s * 1e3:.1f} ms{guessed}{speed}"


def _called(peer: Mapping[str, Any]) -> str:
    name = one_line(peer["name"])
    return f"{name} ({peer['peer'][-8:]})" if name else str(peer["peer"][-8:])


def _units(peer: Mapping[str, Any]) -> str:
    start, end = peer["span"]
    return f"units {start}:{end}" if end > start else "no units"
