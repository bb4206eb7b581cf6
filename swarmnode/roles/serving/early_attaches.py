"""Early attaches: subscriptions that were faster than the OPEN of their session, which travels hop to hop."""

from __future__ import annotations

from collections import OrderedDict

from swarmnode.codec.messages import Attach, Error
from swarmnode.config import ServerConfig
from swarmnode.errors import ErrorCode, PeerError, PeerLost
from swarmnode.net.links.switchboard import Channel


class EarlyAttaches:
    """By session, within bounds. A peer with too many of them loses its own."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._waiting: OrderedDict[bytes, list[tuple[Channel, Attach]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EarlyAttaches to {len(self._waiting)} sessions>"

    def take(self, session: bytes) -> list[tuple[Channel, Attach]]:
        """Those to a session that is open now."""
        return self._waiting.pop(session, [])

    def keep(self, channel: Channel, body: Attach) -> None:
        """Until its session is open."""
        own = [early for attaches in self._waiting.values() for early, _ in attaches if early.peer == channel.peer]
        if len(own) >= self._config.max_early_per_peer:
            own[0].on_lost(PeerLost("too many subscriptions wait", peer=channel.peer))
            own[0].close(Error(ErrorCode.NO_SESSION))
        waiting = self._waiting.setdefault(body.session, [])
        waiting.append((channel, body))

        def forget(_error: PeerError | None = None) -> None:
            if (channel, body) in waiting:
                waiting.remove((channel, body))
            if not waiting:
                self._waiting.pop(body.session, None)

        channel.on_lost = forget
        if len(waiting) > self._config.max_early_per_session:
            waiting.pop(0)[0].close(Error(ErrorCode.NO_SESSION))
        if len(self._waiting) > self._config.max_early_attaches:
            for old, _attach in self._waiting.popitem(last=False)[1]:
                old.close(Error(ErrorCode.NO_SESSION))
