"""Remote module: a swarm as a function from arrays to arrays, with every layer computed by another peer.

The client leads the pass: it sends each hop's results to the next hop. If a hop fails, the client asks another peer with the same
values.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarmnode.codec.body import SESSION_ID_BYTES, HopSpec
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES
from swarmnode.codec.inference_messages import INFER_PROTOCOL, Infer, Inferred
from swarmnode.compress.codecs import decode_values, encode_values
from swarmnode.compute.graph.boundary import (
    batch_of,
    check_values,
    described,
    from_wire,
    input_values,
    output_arrays,
    to_wire,
    told,
)
from swarmnode.compute.graph.costs.estimate import values_bytes
from swarmnode.compute.graph.layout import Layout
from swarmnode.errors import (
    Busy,
    ErrorCode,
    NetworkDown,
    NoRoute,
    PeerError,
    PeerRefused,
    UsageError,
    blaming,
)
from swarmnode.graph_serving.pass_auditor import PassAuditor
from swarmnode.net.deadlines import Deadline
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.local_peer import board_of
from swarmnode.peer.questions import ask_one
from swarmnode.plan.routes.lattice import SessionSize
from swarmnode.plan.view import Span
from swarmnode.serving.client.blame import ARGUABLE, Blame, Verdict
from swarmnode.serving.client.router import Router

if TYPE_CHECKING:
    import numpy as np

Values = tuple[Tensor, ...]

Served = Callable[[PeerId, bytes, int], None]
"""(peer, id of a pass, units x samples that it computed)"""

HOP = Deadline(floor_s=10.0, ceiling_s=120.0, slack=8.0)
AVOID_S = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RemoteModule:
    """Leader of passes through the graph of `layout`. Several passes may run at once. Ended by `close`.

    `router` finds routes over a span of layers. `on_served` receives the work that each peer has done. Other peers recompute
    `audit_share` of the passes. `patience_s` limits how long a pass waits for holders without progress.
    """

    host: Host
    layout: Layout
    router: Callable[[Span], Router]
    _: KW_ONLY
    patience_s: float
    on_served: Served
    audit_share: float

    def __post_init__(self) -> None:
        self.graph = self.layout.graph
        self.auditor = PassAuditor(self.host, self.ask, self.audit_share)
        self.clock = self.host.clock.monotonic
        self.observed_latency = self.host.observed_latency
        self._board = board_of(self.host, INFER_PROTOCOL, on_peer_lost=self.host.lost_neighbour)

    def __repr__(self) -> str:
        return f"<RemoteModule {self.graph!r}>"

    async def close(self) -> None:
        """End all links and running audits."""
        await self.auditor.close()
        await self._board.close()

    def output_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs by name, for `batch` samples."""
        types = {value.ref: value.type for value in self.layout.boundaries[-1]}
        return {output.name: types[output.value].sizes(batch) for output in self.graph.outputs}

    async def infer(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the outputs by name for inputs by name.

        Raises UsageError if the inputs do not fit or cannot be computed, NoRoute if layers have no holder for `patience_s`, Busy if
        their holders have no room for as long.
        """
        values = await asyncio.to_thread(input_values, self.graph, arrays)
        return output_arrays(self.graph, await _Pass(self, values).run())

    async def ask(self, hop: HopSpec, values: Values, batch: int) -> Values:
        """Have one peer compute `hop` on `values` and return its results.

        Raises NetworkDown or PeerError, also if the results hold NaN that the inputs do not.
        """
        infos, payload = encode_values(to_wire(values))
        unit_s = self.observed_latency.unit_s(hop.peer)
        within_s = HOP.wait_s(
            rtt_s=self._board.rtt_s(hop.peer),
            work_s=None if unit_s is None else unit_s * batch * (hop.end - hop.start),
            size_bytes=2 * sum(map(len, payload)),
            bytes_per_s=(self._board.bandwidth_bps(hop.peer) or 0.0) / 8 or None,
        )
        question = Infer(hop.start, hop.end, infos, within_s, secrets.token_bytes(SESSION_ID_BYTES))
        body, reply = await ask_one(self._board, hop.peer, question, Inferred, payload=payload, silence_s=within_s)
        with blaming(hop.peer):
            check_values(self.layout, hop.end, told(body.values), batch)
            results = await asyncio.to_thread(decode_values, body.values, reply, "cpu")
            computed = from_wire(self.layout, hop.end, results)
        if _has_nan(computed) and not _has_nan(values):
            raise PeerRefused(f"the results of peer {hop.peer} hold NaN", code=ErrorCode.NOT_FINITE, peer=hop.peer)
        self.on_served(hop.peer, question.work, (hop.end - hop.start) * batch)
        return computed


class _Pass:
    """State of one pass through all layers, from its inputs to its results."""

    def __init__(self, module: RemoteModule, values: Values) -> None:
        self._module = module
        self._values = values
        self._batch = batch_of(module.layout, 0, described(values))
        if values_bytes(module.layout.boundaries[0], self._batch) > MAX_PAYLOAD_BYTES:
            raise _request_error(ErrorCode.TOO_LARGE)
        self._unit = 0
        self._blame = Blame(module.clock, avoid_s=AVOID_S)
        self._answered: list[HopSpec] = []  # hops since errors of peers were last judged
        self._contested = 0  # end of the furthest unit range that a peer failed in
        self._last: PeerError | NetworkDown | None = None  # why the last peer did not answer
        self._progress_s = module.clock()

    async def run(self) -> Values:
        units = len(self._module.layout.units)
        while self._unit < units:
            router = self._module.router(Span(self._unit, units))
            try:
                route = router.route(self._blame.avoided, (), SessionSize())
            except NoRoute as error:
                await self._wait(router, error)
                continue
            for hop in route:
                if not await self._take(hop, router):
                    break
        return self._values

    async def _take(self, hop: HopSpec, router: Router) -> bool:
        """Have `hop` compute its layers. Returns whether the pass can go on along its route."""
        module, began_s = self._module, self._module.clock()
        try:
            values = await module.ask(hop, self._values, self._batch)
        except (PeerError, NetworkDown) as error:
            self._fail(hop, router, error)
            return False
        module.auditor.take(hop, self._values, values, self._batch)
        self._values, self._unit, self._last = values, hop.end, None
        self._progress_s = module.clock()
        module.observed_latency.saw(hop.peer, (self._progress_s - began_s) / ((hop.end - hop.start) * self._batch))
        self._answered.append(hop)
        if self._unit >= self._contested:  # not earlier: the fault may be in one of the remaining contested units
            for peer, code in self._blame.progress(self._answered):
                router.suspect(peer, f"it answered {code.name} to what others could compute")
            self._answered.clear()
        return True

    def _fail(self, hop: HopSpec, router: Router, error: PeerError | NetworkDown) -> None:
        """Record that `hop` failed. Raises UsageError if the request itself is at fault."""
        self._last = error
        code = error.code if isinstance(error, PeerRefused) else ErrorCode.PEER_LOST
        log.info("layers %d:%d: %s", hop.start, hop.end, error)
        self._contested = max(self._contested, hop.end)
        retry_s = (error.retry_s or 0.0) if isinstance(error, PeerRefused) else 0.0
        verdict = self._blame.judge(hop, code, retry_s=retry_s)
        if verdict is Verdict.REQUEST:
            raise _request_error(code)
        if verdict is Verdict.PEER and isinstance(error, PeerError):
            router.suspect(hop.peer, str(error))

    async def _wait(self, router: Router, error: NoRoute) -> None:
        """Wait until the directory changes or an avoided peer may be asked again.

        Raises the last error if another peer would not help or the pass has waited for too long.
        """
        last = self._last
        code = last.code if isinstance(last, PeerRefused) else None
        if code in ARGUABLE or code is ErrorCode.TOO_LARGE:  # no other peer is there to confirm or refute it
            raise _request_error(code) from last
        left_s = self._progress_s + self._module.patience_s - self._module.clock()
        if left_s <= 0 and code is ErrorCode.BUSY:
            raise Busy("the peers that hold the model have no room at the moment", retry_s=AVOID_S) from last
        if left_s <= 0:
            raise error from last
        pardon_s = self._blame.pardon_s
        changed = asyncio.ensure_future(router.changed())
        try:
            await asyncio.wait([changed], timeout=left_s if pardon_s is None else min(left_s, pardon_s + 0.01))
        finally:
            changed.cancel()


def _request_error(code: ErrorCode | None) -> UsageError:
    """Return the error for a request that no peer of the swarm can compute."""
    if code is ErrorCode.NOT_FINITE:
        return UsageError("the model gives NaN for this input; give smaller or other numbers")
    if code is ErrorCode.TOO_LARGE:
        return UsageError("no machine of the swarm has memory for so large an input: give fewer samples at a time")
    if code is ErrorCode.INTERNAL:
        return UsageError("the swarm's machines fail with this input: their logs say why")
    return UsageError(
        "the model cannot work with this input: a number in it is out of range, such as an index into a table"
    )


def _has_nan(values: Sequence[Tensor]) -> bool:
    return any(value.is_floating_point() and bool(torch.isnan(value).any()) for value in values)
