"""Heartbeat of a link: when to ask whether the peer lives, when to show that this side lives, and how much silence is too much.

Progress counts, not the amount sent: a peer that receives a large frame shows it at every beat. So a slow uplink and a hanging peer
differ within seconds, whatever the path. Pure: the link brings the time and acts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeartbeatConfig:
    """Patience of a link.

    A peer that is silent while something is expected of it is lost after max(min_silence_s, silence_rtts round trips), at most
    max_silence_s. While a large payload is on its way, signs of life may be as rare as its pieces (libp2p encrypts up to 64 KiB as
    one): payload_silence_s allows 32 KiB/s.
    """

    busy_s: float = 0.4  # between two beats
    idle_s: float = 10.0  # between two pings while nothing is expected
    min_silence_s: float = 1.5
    payload_silence_s: float = 2.5
    max_silence_s: float = 10.0
    silence_rtts: float = 8.0


class Heartbeat:
    """Heartbeat of one link. `busy`: answers are expected. `paced`: a rate limiter may hold back sent data, until `left`."""

    def __init__(self, config: HeartbeatConfig, now_s: float, *, paced: bool) -> None:
        self.busy = False
        self._config = config
        self._paced = paced
        self._heard_at_s = now_s
        self._silent_since_s: float | None = now_s  # None: nothing has left that the peer could answer
        self._pinged_at_s = 0.0
        self._owes_sign = False  # whether data arrived and nothing was sent since
        self._sent_bytes = 0  # sum of the bytes sent when it arrived

    def heard(self, now_s: float) -> None:
        """Record that something arrived from the peer at `now_s`."""
        self._heard_at_s = now_s
        self._silent_since_s = None if self._paced else now_s

    def heard_elsewhere(self, at_s: float) -> None:
        """Note a sign of life on another link with the peer: an answer on this link may queue behind the data there."""
        if self._silent_since_s is not None and at_s > self._silent_since_s:
            self.heard(at_s)

    def left(self, now_s: float) -> None:
        """Note that data which was held back has been sent: an answer may be expected from now on."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s

    def came(self, sent_bytes: int) -> None:
        """Note that data of the peer arrived, which this side must show at a beat. `sent_bytes` is the sum of the bytes sent so
        far."""
        if not self._owes_sign:
            self._owes_sign, self._sent_bytes = True, sent_bytes

    def limit_s(self, rtt_s: float | None, *, payload: bool) -> float:
        """Return the seconds that the peer may be silent while something is expected of it. `payload`: a large one is on its way to
        it."""
        config = self._config
        least_s = config.payload_silence_s if payload else config.min_silence_s
        return min(config.max_silence_s, max(least_s, config.silence_rtts * (rtt_s or 0.0)))

    @property
    def beat_s(self) -> float:
        """Seconds to the next beat: few while something is expected of the peer or owed to it, else until the next ping."""
        asked = self._pinged_at_s > self._heard_at_s
        return self._config.busy_s if self.busy or self._owes_sign or asked else self._config.idle_s

    def slept(self, late_s: float) -> bool:
        """Return whether a beat that is `late_s` seconds late shows that this process slept (suspended, or a blocked event
        loop)."""
        return late_s > self._config.min_silence_s / 2

    def too_long_s(self, now_s: float, limit_s: float) -> float | None:
        """Return the seconds of the peer's silence if they are more than `limit_s` (and an idle interval, if not busy); else
        None."""
        silence_s = 0.0 if self._silent_since_s is None else now_s - self._silent_since_s
        patience_s = limit_s + (0.0 if self.busy else self._config.idle_s)
        return silence_s if silence_s > patience_s else None

    def wants_ping(self, now_s: float) -> bool:
        """Return whether the peer should be pinged now."""
        due_s = 0.9 * (self._config.busy_s if self.busy else self._config.idle_s)
        return now_s - self._heard_at_s >= due_s and now_s - self._pinged_at_s >= due_s

    def pinged(self, now_s: float) -> None:
        """Record that a ping was sent at `now_s`."""
        self._pinged_at_s = now_s

    def wants_sign(self, sent_bytes: int) -> bool:
        """Return whether to send a sign of life at this beat: data arrived since the last one, and nothing was sent since."""
        owes, self._owes_sign = self._owes_sign and sent_bytes == self._sent_bytes, False
        return owes
