"""Whether a card should be given its next pass before the last one's results have come down: tokens/s round a ring of hops.

    python contrib/benchmarks/overlap.py [--hops 3] [--host-ms 0.8]

    waiting   the next pass is launched when the results of the last are encoded and sent, with all that has come meanwhile.
    at once   as soon as anything waits, while the card computes: results come down on a stream of their own.
    in time   as late as possible without leaving the card idle.

A calculation in virtual time, of events; nothing is computed. A pass takes 8 ms of the card and 0.1 ms for each session, and
`--host-ms` of the host, half of it before the card can begin.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable

PASS_S, SESSION_S, JITTER_S = 8e-3, 0.1e-3, 2e-3
RUN_S = 20.0
WAITING, AT_ONCE, IN_TIME = "waiting", "at once", "in time"


class Ring:
    """Hops of one card each, whose sessions come round again after a link's delay."""

    def __init__(self, policy: str, *, hops: int, host_s: float, sessions: int, delay_s: float) -> None:
        self.policy, self.host_s, self.delay_s = policy, host_s / 2, delay_s
        self.waiting = [0] * hops
        self.in_flight = [0] * hops
        self.host_free_s = [0.0] * hops
        self.card_free_s = [0.0] * hops
        self.tokens = self.passes = 0
        self._random = random.Random(0)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for _ in range(sessions):
            self._arrive(0, self._random.random() * 0.05)

    def __repr__(self) -> str:
        return f"<Ring of {len(self.waiting)} hops, {self.policy}: {self.tokens} tokens>"

    def run(self) -> tuple[float, float]:
        """Run the events, and return tokens/s and the mean number of sessions in a pass."""
        while self._events[0][0] < RUN_S:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        return self.tokens / RUN_S, self.tokens * len(self.waiting) / self.passes

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    def _arrive(self, hop: int, when_s: float) -> None:
        def arrive(now_s: float) -> None:
            self.waiting[hop] += 1
            self._launch(hop, now_s)

        self._at(when_s, arrive)

    def _launch(self, hop: int, now_s: float) -> None:
        """Launch the next pass of `hop`, now or when the host is free and the policy wants it."""
        most = 1 if self.policy == WAITING else 2
        if not self.waiting[hop] or self.in_flight[hop] == most:
            return
        from_s = self.host_free_s[hop]
        if self.policy == IN_TIME:
            from_s = max(from_s, self.card_free_s[hop] - self.host_s)
        if from_s > now_s:
            self._at(from_s, lambda then_s: self._launch(hop, then_s))
            return
        sessions, self.waiting[hop] = self.waiting[hop], 0
        self.in_flight[hop] += 1
        self.passes += 1
        self.host_free_s[hop] = now_s + self.host_s
        self.card_free_s[hop] = max(self.host_free_s[hop], self.card_free_s[hop]) + PASS_S + sessions * SESSION_S
        self._at(self.card_free_s[hop], lambda then_s: self._finish(hop, sessions, then_s))

    def _finish(self, hop: int, sessions: int, now_s: float) -> None:
        if self.host_free_s[hop] > now_s:
            self._at(self.host_free_s[hop], lambda then_s: self._finish(hop, sessions, then_s))
            return
        self.host_free_s[hop] = now_s + self.host_s
        self._at(self.host_free_s[hop], lambda then_s: self._send(hop, sessions, then_s))

    def _send(self, hop: int, sessions: int, now_s: float) -> None:
        self.in_flight[hop] -= 1
        after = (hop + 1) % len(self.waiting)
        self.tokens += sessions if after == 0 else 0
        for _ in range(sessions):
            self._arrive(after, now_s + self.delay_s + self._random.random() * JITTER_S)
        self._launch(hop, now_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--host-ms", type=float, default=0.8)
    options = parser.parse_args()
    if options.hops < 1 or not 0 <= options.host_ms < 1000:
        parser.error("at least one hop, and from 0 to 1000 ms")
    print(f"{'delay':>8} {'sessions':>8} {WAITING:>18} {AT_ONCE:>14} {IN_TIME:>14}   (sessions in a pass)")
    for delay_s, sessions in itertools.product((0.5e-3, 5e-3, 25e-3), (2, 4, 8, 16, 32)):
        found = [
            Ring(policy, hops=options.hops, host_s=options.host_ms / 1e3, sessions=sessions, delay_s=delay_s).run()
            for policy in (WAITING, AT_ONCE, IN_TIME)
        ]
        (base, of_pass), *others = found
        shares = "".join(f" {rate / base:8.2f} ({size:3.1f})" for rate, size in others)
        print(f"{1e3 * delay_s:5.1f} ms {sessions:>8} {base:10.0f}/s ({of_pass:4.1f}){shares}")


if __name__ == "__main__":
    main()
