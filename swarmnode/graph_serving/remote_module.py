"""Remote module: a swarm as a function from arrays to arrays, with every layer computed by another peer.

The client leads the pass: it sends each hop's results to the next hop. If a hop fails, the client asks another peer with the same
values.

Audits of passes: another peer recomputes some of them; if its results differ, a third peer decides which of the two is wrong.

Audits run in the background after the pass has gone on. A hop cannot know which of its passes are recomputed elsewhere, and the
recomputing peer cannot know that it takes part in an audit.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swarmnode import tolerances
from swarmnode.audits.referee import Referee, odd_one_out
from swarmnode.codec.body import SESSION_ID_BYTES, HopSpec
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES
from swarmnode.codec.messages import INFER_PROTOCOL, Infer, Inferred
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.graph.boundary import (
    Layout,
    batch_of,
    check_values,
    described,
    descriptions_of,
    from_wire,
    input_values,
    output_arrays,
    to_wire,
)
from swarmnode.compute.graph.costs.estimate import values_bytes
from swarmnode.compute.training.saved_activations import has_nan
from swarmnode.compute.training.segment import Values
from swarmnode.errors import Busy, ErrorCode, NetworkDown, NoRoute, PeerError, PeerRefused, UsageError, blaming
from swarmnode.ledger import Account
from swarmnode.net.clock import Deadline
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.questions import ask_one, board_of
from swarmnode.plan.findings import Kind
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.plan.view import Span
from swarmnode.serving.client.router import ARGUABLE, Blame, Router, Verdict
from swarmnode.serving.passage import read_from

if TYPE_CHECKING:
    import numpy as np


Ask = Callable[[HopSpec, Values, int], Awaitable[Values]]
"""Function that has one peer compute a hop: `(hop, input values, batch) -> output values`"""

MAX_BYTES = 64 << 20  # input and output values of one pass; larger passes are not audited


class PassAuditor(Referee):
    """Auditor of one client's passes: has a `share` of the passes at each hop recomputed by another peer, through `ask`."""

    def __init__(self, host: Host, ask: Ask, share: float) -> None:
        super().__init__(host, "audits of passes")
        self._ask = ask
        self._share = share

    def sample(self, hop: HopSpec, inputs: Values, computed: Values, batch: int) -> None:
        """Audit with probability `share`, in the background, whether `hop` computed `computed` correctly from `inputs`.

        No audit starts if too many are under way, the values exceed `MAX_BYTES`, or no other peer can take the hop.
        """
        size_bytes = sum(value.nbytes for value in (*inputs, *computed))
        if self.dice.random() >= self._share or self.is_busy or size_bytes > MAX_BYTES:
            return
        second = self.another_route((hop,))
        if second is not None:
            held = self.host.link_config.ledger.count(Account.MESSAGES, size_bytes)
            case = self.settle(self._decide(hop, second[0], inputs, computed, batch))
            task = self._tasks.spawn(case, f"of peer {hop.peer}")
            task.add_done_callback(lambda _: held.release())

    async def _decide(self, hop: HopSpec, second: HopSpec, inputs: Values, computed: Values, batch: int) -> str:
        again = await self._ask(second, inputs, batch)
        if await asyncio.to_thread(alike, computed, again):
            for peer in (hop.peer, second.peer):
                self.standing.add(peer, Kind.RIGHT, "two peers agree on a pass", weight=batch)
            return "passed"
        third, alone = self.another_route((hop,), second.peer), None
        if third is not None:
            deciding = await self._ask(third[0], inputs, batch)
            alone = odd_one_out([await asyncio.to_thread(alike, other, deciding) for other in (computed, again)])
        if alone is None:
            self.standing.contradict(hop.peer, second.peer)
        else:  # a single doubt may be chance, if a module decides between equal values
            self.standing.doubt((hop, second)[alone].peer, f"two peers that agree on a pass, {secrets.token_hex(4)}")
        return "doubt"


def alike(first: Values, other: Values) -> bool:
    """Return whether two peers can have computed these values from the same input.

    Only floats are compared: integers derived from almost equal floats may differ.
    """
    return all(_close(a, b) for a, b in zip(first, other, strict=True) if a.is_floating_point())


def _close(first: Tensor, other: Tensor) -> bool:
    """Compare the norms over all samples: true if the difference is within the tolerance and any NaN are in the same places."""
    if torch.isnan(first).any() or torch.isnan(other).any():
        return bool(torch.equal(torch.isnan(first), torch.isnan(other)))
    tolerance = tolerances.PASS if first.dtype in (torch.float32, torch.float64) else tolerances.COARSE_PASS
    finite = first.double().nan_to_num(), other.double().nan_to_num()
    size = max(float(value.norm()) for value in finite)
    return float((finite[0] - finite[1]).norm()) <= tolerance * size


Served = Callable[[PeerId, bytes, int], None]
"""(peer, id of a pass, units x samples that it computed)"""

HOP = Deadline(floor_s=10.0, ceiling_s=120.0, slack=8.0)
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
            check_values(self.layout, hop.end, descriptions_of(body.values), batch)
            results = await asyncio.to_thread(read_from, hop.peer, body.values, reply, "cpu", bounded=False)
            computed = from_wire(self.layout, hop.end, results)
        if has_nan(computed) and not has_nan(values):
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
        self._blame = Blame(module.clock, avoid_s=tolerances.PASS_PAUSE_S)
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
                # Wait until the directory changes or an avoided peer may be asked again. Raises the last error if another
                # peer would not help or the pass has waited for too long.
                last = self._last
                code = last.code if isinstance(last, PeerRefused) else None
                if code in ARGUABLE or code is ErrorCode.TOO_LARGE:  # no other peer is there to confirm or refute it
                    raise _request_error(code) from last
                left_s = self._progress_s + self._module.patience_s - self._module.clock()
                if left_s <= 0 and code is ErrorCode.BUSY:
                    raise Busy(
                        "the peers that hold the model have no room at the moment", retry_s=tolerances.PASS_PAUSE_S
                    ) from last
                if left_s <= 0:
                    raise error from last
                await self._blame.wait(router.changed(), left_s)
                continue
            for hop in route:
                if not await self._run_hop(hop, router):
                    break
        return self._values

    async def _run_hop(self, hop: HopSpec, router: Router) -> bool:
        """Have `hop` compute its layers. Returns whether the pass can go on along its route."""
        module, began_s = self._module, self._module.clock()
        try:
            values = await module.ask(hop, self._values, self._batch)
        except (PeerError, NetworkDown) as error:
            self._fail(hop, router, error)
            return False
        module.auditor.sample(hop, self._values, values, self._batch)
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
