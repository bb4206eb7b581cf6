"""Heartbeat of a link: when to ask whether the peer is there, when to show that we are, and when its silence is too long.

What counts is progress, not how much was sent: who takes in a large frame shows it at every beat, so a slow uplink is told
from a peer that hangs within the same seconds, whatever lies between. Pure: the link brings the time and acts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeartbeatConfig:
    """How patient a link is. A peer that is silent while something is expected of it is lost after
    max(min_silence_s, silence_rtts round trips), at most max_silence_s. While a large payload is on its way, signs of life
    may come as seldom as its pieces arrive (libp2p encrypts up to 64 KiB as one): payload_silence_s allows 32 KiB/s."""

    busy_s: float = 0.4  # between two beats
    idle_s: float = 10.0  # between two pings where nothing is expected
    min_silence_s: float = 1.5
    payload_silence_s: float = 2.5
    max_silence_s: float = 10.0
    silence_rtts: float = 8.0


class Heartbeat:
    """One link's. `busy` says that answers are expected. `paced`: what is sent may be kept back here, which `left` ends."""

    def __init__(self, config: HeartbeatConfig, now_s: float, *, paced: bool) -> None:
        self.busy = False
        self._config = config
        self._paced = paced
        self._heard_at_s = now_s
        self._silent_since_s: float | None = now_s  # None: nothing has left that could be answered
        self._pinged_at_s = 0.0
        self._owes_sign = False  # whether something came for which nothing went back
        self._sent_bytes = 0  # when it came

    def __repr__(self) -> str:
        return f"<Heartbeat {'busy' if self.busy else 'idle'}, heard at {self._heard_at_s:.1f} s>"

    def heard(self, now_s: float) -> None:
        """The peer lives."""
        self._heard_at_s = now_s
        self._silent_since_s = None if self._paced else now_s

    def heard_elsewhere(self, at_s: float) -> None:
        """The peer lived then, as another link with it shows: an answer here may queue behind what comes there."""
        if self._silent_since_s is not None and at_s > self._silent_since_s:
            self.heard(at_s)

    def left(self, now_s: float) -> None:
        """Something that was kept back has really left: an answer may be expected from now on."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s

    def came(self, sent_bytes: int) -> None:
        """A part of what the peer has to say came; its sender is to hear that, or it would take us for dead. `sent_bytes` is
        what was sent until now, in all."""
        if not self._owes_sign:
            self._owes_sign, self._sent_bytes = True, sent_bytes

    def limit_s(self, rtt_s: float | None, *, payload: bool) -> float:
        """How long the peer may be silent while something is expected of it. `payload`: a large one is on its way there."""
        config = self._config
        least_s = config.payload_silence_s if payload else config.min_silence_s
        return min(config.max_silence_s, max(least_s, config.silence_rtts * (rtt_s or 0.0)))

    @property
    def beat_s(self) -> float:
        """To the next beat: soon where something is expected of the peer or owed to it, else when it should be asked again."""
        asked = self._pinged_at_s > self._heard_at_s
        return self._config.busy_s if self.busy or self._owes_sign or asked else self._config.idle_s

    def slept(self, late_s: float) -> bool:
        """Whether a beat came so late that it was we who slept (a suspended process, a blocked loop)."""
        return late_s > self._config.min_silence_s / 2

    def too_long_s(self, now_s: float, limit_s: float) -> float | None:
        """For how long the peer was silent, where that is too long."""
        silence_s = 0.0 if self._silent_since_s is None else now_s - self._silent_since_s
        patience_s = limit_s + (0.0 if self.busy else self._config.idle_s)
        return silence_s if silence_s > patience_s else None

    def wants_ping(self, now_s: float) -> bool:
        """Whether the peer should be asked now."""
        due_s = 0.9 * (self._config.busy_s if self.busy else self._config.idle_s)
        return now_s - self._heard_at_s >= due_s and now_s - self._pinged_at_s >= due_s

    def pinged(self, now_s: float) -> None:
        """It was asked."""
        self._pinged_at_s = now_s

    def wants_sign(self, sent_bytes: int) -> bool:
        """Whether to show, at this beat, that we live: something came since the one before, and nothing went back."""
        owes, self._owes_sign = self._owes_sign and sent_bytes == self._sent_bytes, False
        return owes
