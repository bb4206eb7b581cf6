"""The replicas of a node's span, and which of them takes a session: the one that has least to do for its speed, and room.

Most nodes have one. Several are on devices of their own, and a session stays where its cache is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from swarmnode.codec.messages import Open
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, ProtocolError
from swarmnode.metrics.metric import Readings
from swarmnode.net.limits.address_group import Claimant
from swarmnode.plan.view import Span
from swarmnode.roles.serving.adapters import StageAdapters
from swarmnode.roles.serving.opened import journal_bytes
from swarmnode.roles.serving.pipeline import Pipeline

if TYPE_CHECKING:
    from swarmnode.roles.serving.session import StageSession


class Replicas:
    """The pipelines of one stage. `sessions` are the server's, by their ids; `adapters` and caches make room for one another where
    nobody uses them."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        sessions: Mapping[bytes, StageSession],
        config: ServerConfig,
        adapters: StageAdapters,
    ) -> None:
        self._pipelines = pipelines
        self._sessions = sessions
        self._config = config
        self._adapters = adapters
        adapters.free_cache = self._free_kept
        runner = pipelines[0].workers[0].runner
        self.span: Span = pipelines[0].span
        self.vocab_size: int = runner.span.vocab_size
        self.position_limit: int | None = runner.span.position_limit  # of every session
        self.meter = pipelines[0].workers[0].meter

    def __repr__(self) -> str:
        return f"<Replicas {self._pipelines!r}>"

    def of(self, key: int) -> Pipeline:
        """Return the pipeline that computes for the session of this key."""
        return next(pipeline for pipeline in self._pipelines if key in pipeline)

    @property
    def stalled(self) -> list[Pipeline]:
        """Those whose devices stand still."""
        return [pipeline for pipeline in self._pipelines if pipeline.stalled]

    @property
    def idle(self) -> list[StageSession]:
        """Sessions that have had no input for a while and wait for nothing, the longest first."""
        since_s = asyncio.get_running_loop().time() - self._config.idle_s
        waiting = {key for pipeline in self._pipelines for key in pipeline.watch.waiting}
        idle = [one for one in self._sessions.values() if one.moved_s <= since_s and one.key not in waiting]
        return sorted(idle, key=lambda session: session.moved_s)

    @property
    def free_cache_tokens(self) -> int:
        """Positions that a new session may have, of the replica that has most."""
        kept = [session.key for session in self._sessions.values() if session.kept]
        return max(pipeline.free_cache_tokens(kept) for pipeline in self._pipelines)

    def readings(self) -> Readings:
        """What their devices do and hold."""
        for pipeline in self._pipelines:
            yield from pipeline.readings()

    def describe(self, body: Open) -> tuple[str, ...]:
        """The memory that there is, and what a session asks for, in sentences."""
        budgets = [worker.runner.pool.budget for pipeline in self._pipelines for worker in pipeline.workers]
        free_bytes, limit_bytes = sum(one.free_bytes for one in budgets), sum(one.limit_bytes for one in budgets)
        asked_bytes = sum(self._pipelines[0].cache_bytes(body)) if body.index < len(body.route) else 0
        return (
            f"{asked_bytes / 1e6:.1f} MB of cache are asked for",
            f"{free_bytes / 1e6:.1f} of {limit_bytes / 1e6:.1f} MB of cache are free now",
        )

    def reserve(self, key: int, claimant: Claimant, body: Open, *, beside: int | None = None) -> Pipeline:
        """Promise memory to a session, new or already here, `beside` another one where it can be. Raises ProtocolError if it can
        never be had here, Busy if not now."""
        able = [pipeline for pipeline in self._pipelines if key in pipeline] or self._pipelines
        able = [pipeline for pipeline in able if not pipeline.stalled]
        able.sort(key=lambda pipeline: (beside not in pipeline, pipeline.load))
        fitting = [pipeline for pipeline in able if pipeline.may_hold(pipeline.cache_bytes(body))]
        if able and not fitting:
            raise ProtocolError("no device here has so much memory", code=ErrorCode.TOO_LARGE)
        for pipeline in fitting:
            if _take(pipeline, key, claimant, body):
                return pipeline
        while fitting and (self._adapters.make_room() or self._make_room(fitting[0], key, claimant, body)):
            if _take(fitting[0], key, claimant, body):
                return fitting[0]
        raise Busy("there is no room for the session", retry_s=self._config.retry_s)

    def _free_kept(self) -> bool:
        """Whether a session that is only kept for another text has made room, the one that was used the longest ago."""
        return _free_oldest([session for session in self._sessions.values() if session.kept])

    def _make_room(self, pipeline: Pipeline, key: int, claimant: Claimant, body: Open) -> bool:
        """Whether somebody gave way: one that nobody is bound to, one that is kept for another text, then those of peers that have
        more."""
        here = [session for session in self._sessions.values() if session.key in pipeline]
        orphans = [session for session in here if session.orphaned and session.key != key]
        if _free_oldest(orphans or [session for session in here if session.kept]):
            return True
        idle = [session.key for session in self.idle if session.key in pipeline]
        ended = pipeline.memory.who_gives_way(claimant, *_sizes(pipeline, body), idle)
        for session in [session for session in here if session.key in ended]:
            session.give_up(ErrorCode.BUSY, retry_s=self._config.retry_s)
        return bool(ended)


def _free_oldest(sessions: Sequence[StageSession]) -> bool:
    """Whether there was one to be freed: the one that was used the longest ago."""
    if sessions:
        min(sessions, key=lambda session: session.moved_s).free()
    return bool(sessions)


def _take(pipeline: Pipeline, key: int, claimant: Claimant, body: Open) -> bool:
    """Promise a session memory; whether there was room."""
    cache_bytes, journal = _sizes(pipeline, body)
    return pipeline.memory.take(key, claimant, cache_bytes=cache_bytes, journal_bytes=journal)


def _sizes(pipeline: Pipeline, body: Open) -> tuple[tuple[int, ...], int]:
    """Return what a session takes of each device's cache, and of the host for its journal, in bytes."""
    return pipeline.cache_bytes(body), journal_bytes(body, pipeline.hidden_size)
