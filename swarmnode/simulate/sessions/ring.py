"""A session followed token by token: its prompt travels in chunks, then one token after another turns round the ring.

When a hop is lost, the client names another route; hops that stay keep their caches, and what the new ones lack is sent to
them again from the journal of the hop before, and computed again.
"""

from __future__ import annotations

from swarmnode.simulate.environment.model import WEIGHT_BYTES
from swarmnode.simulate.sessions.executor import SimulatedJob
from swarmnode.simulate.sessions.session import FRAME_BYTES, ID_BYTES, Session, SimulatedHop


class RingSession(Session):
    """See `Session`."""

    _token_at_s = 0.0

    def _begin(self) -> None:
        size = self._world.settings.client.prompt_chunk_tokens
        for start in range(0, self.prompt_tokens, size):
            tokens = min(size, self.prompt_tokens - start)
            self._send(self.place, 0, tokens, ID_BYTES, last=start + tokens == self.prompt_tokens)

    def _send(self, sender: int, index: int, tokens: int, token_bytes: int, *, last: bool) -> None:
        """Bring positions to a hop, and compute them there."""
        hop, size_bytes = self.hops[index], FRAME_BYTES + tokens * token_bytes
        arrives_s = self._links.send(self._clock.now_s, sender, hop.peer.index, size_bytes)
        self._clock.at(arrives_s, self._guard(lambda: self._compute(index, tokens, last)))

    def _compute(self, index: int, tokens: int, last: bool) -> None:
        hop = self.hops[index]
        if hop.lives:  # what comes to a dead peer is lost; the client will hear of it
            done = self._guard(lambda: self._pass_on(index, tokens, last))
            hop.worker.submit(SimulatedJob(self.number, hop.span, tokens, done, len(self.hops) - 1 - index))

    def _pass_on(self, index: int, tokens: int, last: bool) -> None:
        if index + 1 < len(self.hops):
            hidden_bytes = WEIGHT_BYTES * self._world.model.hidden
            self._send(self.hops[index].peer.index, index + 1, tokens, hidden_bytes, last=last)
        elif last:
            self._emit()

    def _emit(self) -> None:
        """The last hop has drawn a token: the client gets it, and the first hop its next input."""
        end, now_s = self.hops[-1].peer.index, self._clock.now_s
        self.produced += 1
        arrives_s = self._links.send(now_s, end, self.place, FRAME_BYTES + ID_BYTES)
        self._note_token(arrives_s)
        if self.produced == self.new_tokens:
            self._owner.finish(self)
        else:
            self._send(end, 0, 1, ID_BYTES, last=True)

    def _note_token(self, arrives_s: float) -> None:
        measures = self._world.measures
        measures.count("tokens", 1)
        if self.produced == 1:
            measures.note("first token, s", arrives_s - self.began_s)
        else:
            measures.note("between tokens, s", arrives_s - self._token_at_s)
        self._token_at_s = arrives_s

    # -- after a hop was lost

    def _resume(self, kept: set[SimulatedHop]) -> None:
        self._replay(0, kept)

    def _replay(self, index: int, kept: set[SimulatedHop]) -> None:
        """Fill the caches of new hops, one after another along the route, then let the ring turn again."""
        while index < len(self.hops) and self.hops[index] in kept:
            index += 1
        if index == len(self.hops):
            self._send(self.hops[-1].peer.index, 0, 1, ID_BYTES, last=True)
            return
        hop, model = self.hops[index], self._world.model
        sender = self.hops[index - 1].peer.index if index else self.place
        token_bytes = WEIGHT_BYTES * model.hidden if index else ID_BYTES
        arrives_s = self._links.send(
            self._clock.now_s, sender, hop.peer.index, FRAME_BYTES + self.positions * token_bytes
        )
        self._world.measures.count("replayed, unit tokens", self.positions * hop.span.units)

        def compute() -> None:
            if hop.lives:
                done = self._guard(lambda: self._replay(index + 1, kept))
                hop.worker.submit(SimulatedJob(self.number, hop.span, max(2, self.positions), done))

        self._clock.at(arrives_s, self._guard(compute))
