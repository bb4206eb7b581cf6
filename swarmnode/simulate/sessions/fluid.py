"""Session of a large swarm, followed as a whole: tokens flow at a rate that depends on the load of its peers.

The rate is computed anew every few seconds. A turn of the ring takes the links' delays plus the passes of all hops,
each in a batch with simultaneous sessions of that hop. It takes at least the time that the busiest hop needs for all its sessions
together.
"""

from __future__ import annotations

from swarmnode.simulate.environment.model import WEIGHT_BYTES
from swarmnode.simulate.sessions.session import FRAME_BYTES, ID_BYTES, Session, SimulatedHop

BREATH_S = 5.0  # between two computations of the rate


class FluidSession(Session):
    """Session that is followed as a whole. `produced` counts whole tokens; the fraction of a token is carried over."""

    _rest = 0.0

    def _begin(self) -> None:
        first_s = self._prompt_s(self.hops, self.prompt_tokens) + self._turn_s(alone=True)

        def begin() -> None:
            self.produced = 1
            self._world.measures.count("tokens", 1)
            self._world.measures.note("first token, s", self._clock.now_s - self.began_s)
            self._breathe()

        self._clock.after(first_s, self._guard(begin))

    def _resume(self, kept: set[SimulatedHop]) -> None:
        fresh = [hop for hop in self.hops if hop not in kept]
        for hop in fresh:
            self._world.measures.count("replayed, unit tokens", self.positions * hop.span.units)
        self._clock.after(self._prompt_s(fresh, self.positions), self._guard(self._breathe))

    def _breathe(self) -> None:
        """Let tokens flow for at most `BREATH_S` seconds at the current rate, then finish or compute the rate anew."""
        turn_s = self._turn_s()
        left_s = (self.new_tokens - self.produced - self._rest) * turn_s
        flow_s = min(BREATH_S, max(0.0, left_s))

        def flow() -> None:
            done = self._rest + flow_s / turn_s
            tokens = self.new_tokens - self.produced if flow_s == left_s else int(done)
            self._rest = done - tokens
            self._note(tokens, turn_s)
            if self.produced >= self.new_tokens:
                self._owner.finish(self)
            else:
                self._breathe()

        self._clock.after(flow_s, self._guard(flow))

    def _note(self, tokens: int, turn_s: float) -> None:
        self.produced += tokens
        self._world.measures.count("tokens", tokens)
        self._world.measures.note("between tokens, s", turn_s)
        token_bytes = FRAME_BYTES + WEIGHT_BYTES * self._world.model.hidden
        for here, there in zip(self.hops, [*self.hops[1:], self.hops[0]], strict=True):
            size_bytes = token_bytes if there is not self.hops[0] else FRAME_BYTES + ID_BYTES
            self._links.bytes_sent[here.peer.index, there.peer.index] += tokens * size_bytes
        for hop in self.hops:
            batch = self._batch(hop, turn_s)
            hop.peer.busy_s += tokens * hop.peer.device.decode_s(hop.layers, round(batch)) / batch

    def _turn_s(self, *, alone: bool = False) -> float:
        """Return the seconds of one token around the ring; `alone`: without the load of other sessions."""
        path_s = sum(
            self._links.delay_s(here.peer.index, there.peer.index)
            for here, there in zip(self.hops, [*self.hops[1:], self.hops[0]], strict=True)
            if here is not there
        )
        once_s = path_s + sum(hop.peer.device.decode_s(hop.layers, 1) for hop in self.hops)
        if alone:
            return once_s
        turn_s = path_s
        busiest_s = 0.0
        for hop in self.hops:
            batch = self._batch(hop, once_s)
            pass_s = hop.peer.device.decode_s(hop.layers, round(batch))
            turn_s += pass_s * (1 + min(1.0, batch - 1) / 2)  # waits for half of another session's pass
            busiest_s = max(busiest_s, hop.peer.device.decode_s(hop.layers, hop.peer.sessions))
        return max(turn_s, busiest_s)

    def _batch(self, hop: SimulatedHop, turn_s: float) -> float:
        """Return the average number of sessions in a batch of `hop`, this session included; at least 1."""
        share = min(1.0, hop.peer.device.decode_s(hop.layers, 1) / turn_s)
        return 1 + (hop.peer.sessions - 1) * share if hop.peer.sessions > 1 else 1.0

    def _prompt_s(self, hops: list[SimulatedHop], tokens: int) -> float:
        """Return the seconds of `tokens` positions through `hops`, in chunks, so that after the first chunk only the slowest
        hop counts. Adds the hops' busy time."""
        chunk = min(tokens, self._world.settings.client.prompt_chunk_tokens)
        sender, slowest_s, total_s = self.place, 0.0, 0.0
        for hop in hops:
            receiver = hop.peer.index
            size_bits = 8 * chunk * WEIGHT_BYTES * self._world.model.hidden
            travel_s = size_bits / self._links.bandwidth_bps(sender, receiver) if sender != self.place else 0.0
            compute_s = hop.peer.device.prompt_s(hop.layers, chunk)
            slowest_s = max(slowest_s, travel_s, compute_s)
            total_s += travel_s + compute_s + self._links.delay_s(sender, receiver)
            hop.peer.busy_s += hop.peer.device.prompt_s(hop.layers, tokens)
            sender = receiver
        return total_s + (tokens / chunk - 1) * slowest_s if chunk else 0.0
