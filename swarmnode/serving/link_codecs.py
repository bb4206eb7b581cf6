"""Link codecs: the encoding of the states that a hop sends on, chosen for the link or set by the client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.codec.messages import Input, LinkCodec, Mode, Open
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.compress.codecs import DTYPE_OF
from swarmnode.errors import ErrorCode
from swarmnode.links.link_config import LinkConfig
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.plan.compression import PROMPT, STEPS, CodecSchedule, LinkCodecs
from swarmnode.plan.serving.scheduler import PassCost
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.manifest import SERVING_CODECS


@dataclass(frozen=True)
class CodecRules:
    """A node's rules for codecs: the codecs that its swarm allows, the dtype of its states, and the bandwidth to each
    peer.

    `bandwidth_bps` returns None if the bandwidth to a peer is not known.
    """

    allowed: frozenset[int] = frozenset(SERVING_CODECS)
    dtype: DType = DType.FLOAT32
    bandwidth_bps: Callable[[PeerId], float | None] = lambda _peer: None

    def refusal(self, opened: Open) -> ErrorCode | None:
        """Return INVALID_REQUEST if an OPEN asks for codecs that the swarm does not allow or that are sparse; None if
        it does not."""
        asked = {opened.codec, *(one.codec for one in opened.codecs)}
        return None if asked <= self.allowed and not SPARSE_CODECS & asked else ErrorCode.INVALID_REQUEST

    def wrong(self, body: Input) -> ErrorCode | None:
        """Return MALFORMED if the input has a codec that the swarm does not allow; None otherwise."""
        return None if body.tensor.codec in self.allowed else ErrorCode.MALFORMED


class SessionCodecs:
    """Codecs that one session uses at one hop, not the last. Written on the event loop, read by the compute thread."""

    def __init__(self, opened: Open, rules: CodecRules, width: int) -> None:
        self.schedule = CodecSchedule(Codec(opened.codec))
        self._opened = opened
        self._rules = rules
        self._width = width
        self._begin = 0  # first position of the present text that it does not share with the text before

    def rebound(self, opened: Open, accepted: int) -> None:
        """Take over the choices of a new epoch; positions below `accepted` were computed here."""
        if opened.sampling != self._opened.sampling:
            self._begin = accepted
        self._opened = opened
        unit = opened.route[opened.index].end
        self.schedule.merge((one.start, Codec(one.codec)) for one in opened.codecs if one.unit == unit)

    def choose(self, start: int, end: int, rtt_s: float, cost: PassCost) -> list[LinkCodec]:
        """Choose codecs for positions [start, end), which are about to be computed.

        Returns the new choices. It is empty if the client fixed the codecs, they were chosen before, or the bandwidth
        is not known.
        """
        opened, rules = self._opened, self._rules
        if not opened.adapts or self.schedule.full:
            return []
        # The prompt ends where steps begin. In DRIVEN mode only the client knows that position.
        steps_from = opened.max_length if opened.sampling is None else opened.sampling.prompt_length
        # Positions that led to drawn tokens must be sent again as they were, even if no codec had been chosen.
        settled = opened.known if opened.mode == Mode.DRIVEN or opened.known > steps_from else 0
        unit, receiver = opened.route[opened.index].end, opened.route[opened.index + 1].peer
        news = []
        for begin, until in ((self._begin, steps_from), (steps_from, opened.max_length)):
            at, end_of_phase = max(start, begin, settled), min(end, until)
            if at >= end_of_phase or self.schedule.is_chosen(begin, until):
                continue
            is_step = begin == steps_from
            count = 1 if is_step else end_of_phase - at  # guesses behind a step do not change its codec
            bandwidth_bps = rules.bandwidth_bps(receiver)
            if bandwidth_bps is None:
                continue
            states = TensorInfo(Codec.NONE, rules.dtype, (opened.rows, count, self._width))
            room_s = cost.seconds(opened.rows * count) + (rtt_s if is_step else 0.0)
            codecs = LinkCodecs[PeerId](rules.allowed, demands=STEPS if is_step else PROMPT)
            codec = codecs.choose(receiver, [states], bandwidth_bps, room_s).codec
            self.schedule.change(at, codec)
            news.append(LinkCodec(unit, at, codec))
        return news


def codec_rules_of(host: Host, dtype: torch.dtype) -> CodecRules:
    """Return the rules of a node that computes in `dtype` for choosing the codecs of hidden states."""
    manifest, links, directory = host.swarm.manifest, host.link_config, host.directory
    allowed = SERVING_CODECS if manifest is None else manifest.session_codecs
    return CodecRules(frozenset(allowed), DTYPE_OF[dtype], lambda peer: bandwidth_to(peer, links, directory))


def bandwidth_to(peer: PeerId, links: LinkConfig, directory: Directory) -> float | None:
    """Return the bits per second at which this node can send to `peer`; None if nothing is known.

    That is the measured bandwidth, else the slower of this node's upload and the peer's announced download; never more
    than the node's own limit.
    """
    measured_bps = links.link_statistics.up_bps_to(peer)
    announced = directory.peers().get(peer)
    lines_bps = links.link_statistics.up_bps, 0.0 if announced is None else announced.down_bps
    limit_bps = 0.0 if links.rate_limiter is None else links.rate_limiter.rate_bps
    known_bps = [limit_bps, measured_bps] if measured_bps else [limit_bps, *lines_bps]
    return min((bps for bps in known_bps if bps > 0), default=None)
