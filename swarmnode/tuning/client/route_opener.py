"""Routes of a swarm for an adapter: found by the router, opened at their hops, and judged after faults.

Adapter in this process: the same trainer and the same steps, without a swarm.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from swarmnode.codec.body import MAX_ROWS, SESSION_ID_BYTES, HopSpec
from swarmnode.codec.tensors import AUTO, codec_named
from swarmnode.codec.tuning_messages import (
    MAX_ADAPTER_BYTES,
    MAX_RECIPE_BYTES,
    MAX_TUNED_POSITIONS,
    MAX_WINDOW,
    AdapterOpened,
    OpenAdapter,
)
from swarmnode.compute.executor import Executor
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.segment import Values
from swarmnode.counting import format_bytes
from swarmnode.errors import Busy, ErrorCode, NetworkDown, NoRoute, NotFinite, PeerError, PeerRefused, UsageError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.plan.view import Span
from swarmnode.serving.client.router import MILD, Blame, HopFault, Router, Verdict
from swarmnode.tolerances import TUNING_PAUSE_S
from swarmnode.tuning.adapter_parts import AdapterParts, AdapterPassage, TuningDevice, TuningPace, encode_recipe
from swarmnode.tuning.client.state_shapes import AdapterState, StateShapes
from swarmnode.tuning.client.tuned_route import TunedMicrobatch, TunedRoute


@dataclass(frozen=True)
class AdapterRequest:
    """Request for an adapter at every hop: its encoded recipe, and the sizes of its microbatches; see `OpenAdapter`."""

    recipe: bytes
    rows: int
    positions: int
    window: int
    codec: int = 0
    adapts: bool = False

    @classmethod
    def of(cls, recipe: AdapterRecipe, size: tuple[int, int], window: int, compress: str) -> AdapterRequest:
        """Return a request. `size` is the rows and positions of a microbatch, `compress` the name of a codec, or auto.

        Raises UsageError if a number or the recipe is beyond what OPEN_ADAPTER can carry.
        """
        encoded, (rows, positions) = encode_recipe(recipe), size
        most_positions = MAX_TUNED_POSITIONS // max(1, rows)
        for name, number, most in (
            ("rows of a microbatch (--microbatch, in Python rows)", rows, MAX_ROWS),
            ("tokens of a row (--sequence, in Python positions)", positions, most_positions),
            ("microbatches in flight (in Python window, and one)", window, MAX_WINDOW),
            ("bytes of the recipe (--targets)", len(encoded), MAX_RECIPE_BYTES),
        ):
            if not 1 <= number <= most:
                raise UsageError(f"{number:,} {name}: 1 to {most:,} are possible")
        return cls(encoded, rows, positions, window, codec_named(compress), compress == AUTO)

    def to(self, route: Sequence[HopSpec], epoch: int) -> OpenAdapter:
        """Return the message for the first hop of `route`, with a new id, which hops of earlier routes cannot know."""
        return OpenAdapter(
            secrets.token_bytes(SESSION_ID_BYTES),
            epoch,
            tuple(route),
            0,
            self.recipe,
            self.rows,
            self.positions,
            self.window,
            self.codec,
            self.adapts,
        )


class SwarmRoutes:
    """Opener of routes through a swarm for one adapter.

    `shapes` are those of the adapter's states, and `cannot_tune` returns the peers that do not lend themselves to tuning. While
    there is no route, `on_waiting` is called with the reason.
    """

    def __init__(
        self,
        board: Switchboard,
        router: Router,
        request: AdapterRequest,
        shapes: StateShapes,
        *,
        cannot_tune: Callable[[], Collection[PeerId]],
        on_waiting: Callable[[str, tuple[int, ...]], None],
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._board = board
        self._router = router
        self._request = request
        self._shapes = shapes
        self._cannot_tune = cannot_tune
        self._on_waiting = on_waiting
        self._clock = clock
        self._patience_s = patience_s
        self._blame = Blame(clock, avoid_s=TUNING_PAUSE_S)
        self._epoch = 0
        self._route: Sequence[HopSpec] = ()
        # peers that can never have room, with the need of a microbatch if known
        self._too_small: dict[PeerId, str] = {}
        self._said: list[str] = []  # faults since the last step that a route has finished
        self._opened: TunedRoute | None = None
        self._last: PeerError | NetworkDown | None = None
        self._without_since_s: float | None = None  # when the search for the next route began

    async def open(self, state: AdapterState | None) -> TunedRoute:
        """Open the adapter on the best route. Raises PeerError if a hop fails, NoRoute or Busy if none is found in `patience_s`,
        NoRoute at once if all routes lead through machines that can never have room."""
        for hop in [hop for hop in self._route if self._opened is not None and hop.peer in self._opened.leavers]:
            self._blame.judge(hop, ErrorCode.DRAINING)
        self._route = await self._find()
        self._epoch += 1
        request = self._request.to(self._route, self._epoch)
        self._opened = await TunedRoute.open(self._board, request, self._shapes, state)
        self._without_since_s = None
        return self._opened

    async def _find(self) -> Sequence[HopSpec]:
        if self._without_since_s is None:
            self._without_since_s = self._clock()
        deadline_s = self._without_since_s + self._patience_s  # also of hops that refuse the adapter again and again
        while True:
            try:
                return self._blame.best_route(self._without)
            except NoRoute as error:
                left_s = deadline_s - self._clock()
                if self._too_small and not self._has_route():
                    raise self._why_too_small() from self._last
                if left_s <= 0:
                    raise self._why(error) from self._last
                self._on_waiting(str(error), ())
                await self._blame.wait(self._router.changed(), left_s)

    def _without(self, avoid: frozenset[PeerId]) -> Sequence[HopSpec]:
        return self._router.route(avoid.union(self._cannot_tune(), self._too_small), (), SessionSize())

    def _has_route(self) -> bool:
        """Return whether there is a route of peers that may have room, also through peers that are avoided for the moment."""
        with suppress(NoRoute):
            return bool(self._router.route(frozenset(self._cannot_tune()) | self._too_small.keys(), (), SessionSize()))
        return False

    def _why_too_small(self) -> NoRoute:
        """Return the error for machines that can never have room, and forget them: the next microbatch may be smaller."""
        needs, self._too_small, self._without_since_s = [*self._too_small.values()], {}, None
        need = next((f" ({need})" for need in needs if need), "")
        return NoRoute(
            f"this tuning needs more memory at once than the machines have{need}: lower the rows or the length of a microbatch "
            "(--microbatch, --sequence; in Python the batch, rows and positions), or --rank; or wait for machines with more memory"
        )

    def _need_of(self, peer: PeerId) -> str:
        """Return what the largest microbatch takes at a hop of the opened route, as it said itself; empty if it has not."""
        opened = {} if self._opened is None else {hop.peer: one for hop, one in self._opened.sizes}
        if peer not in opened or not opened[peer].pass_bytes:
            return ""
        pass_bytes, size = opened[peer].pass_bytes, f"{self._request.rows} rows of {self._request.positions:,} tokens"
        least = "at least" if pass_bytes == MAX_ADAPTER_BYTES else "about"
        return f"{size} take {least} {format_bytes(pass_bytes // self._request.window)} at one of them"

    def _why(self, error: NoRoute) -> NoRoute | Busy:
        if isinstance(self._last, PeerRefused) and self._last.code == ErrorCode.BUSY:
            retry_s = self._last.retry_s or 1.0
            return Busy(
                f"the machines that tune have no room at the moment: {self._last}; try again later", retry_s=retry_s
            )
        if self._cannot_tune():
            return NoRoute(
                f"{error}; machines of this swarm tune only if their owners allow it (`run --tune-share 30%`)"
            )
        return error

    def failed(self, error: PeerError | NetworkDown) -> None:
        """Judge the hop that `error` names, and the neighbour that accuses it.

        Raises NotFinite or UsageError if two routes without a common hop report the same, NoRoute after too many faults.
        """
        self._last = error
        peer = getattr(error, "peer", None)
        hop = next((hop for hop in self._route if hop.peer == peer), None)
        if hop is None or not isinstance(error, PeerError):
            self._blame.leave_out(self._route)
            return
        if error.code == ErrorCode.TOO_LARGE and not (isinstance(error, HopFault) and error.suspects != {hop.peer}):
            self._too_small[hop.peer] = self._need_of(hop.peer)
        verdict = self._blame.judge(
            hop,
            ErrorCode(error.code),
            retry_s=(error.retry_s or 0.0) if isinstance(error, PeerRefused) else 0.0,
            suspects=error.suspects if isinstance(error, HopFault) else (),
            route=[one.peer for one in self._route],
        )
        if error.code not in MILD:
            self._said.append(str(error))
        if verdict is Verdict.PEER:
            self._router.suspect(hop.peer, str(error))
        if verdict is Verdict.REQUEST:
            raise _request_error(error, hop)
        if verdict is Verdict.UNDECIDED:
            raise NoRoute(
                f"the tuning failed {len(self._said)} times, and there are too few machines to tell whether one of them is at "
                "fault or the settings (--lr, --method, --targets) or the data are: "
                f"{'; '.join(dict.fromkeys(self._said))}. Try again when more machines tune"
            )

    def succeeded(self) -> None:
        """Forgive the peers of the route, which has finished a step, and suspect those that alone can have failed at that work."""
        self._last, self._said = None, []
        for peer, code in self._blame.progress(self._route):
            self._router.suspect(peer, f"it answered {code.name} to what others could compute")


def _request_error(error: PeerError | NetworkDown, hop: HopSpec) -> NotFinite | UsageError:
    """Return the error for a request that fails wherever it is computed."""
    if error.code == ErrorCode.NOT_FINITE:
        text = "the loss or a gradient is NaN or infinite wherever it is computed; lower --lr, or check the data"
        return NotFinite(text, unit=hop.start)
    if error.code == ErrorCode.INVALID_REQUEST:
        return UsageError(
            "the swarm's machines cannot tune such an adapter: check --method, --targets, --rank and --codec"
        )
    return UsageError(f"the tuning fails wherever it is computed; lately {error}")


HERE = "this machine"


class LocalRoute:
    """Adapter on a whole model in this process; see `AdapterRoute`."""

    leaving = False

    def __init__(self, parts: AdapterParts) -> None:
        self._parts = parts

    @property
    def sizes(self) -> list[tuple[HopSpec, AdapterOpened]]:
        """Bytes that the adapter takes; the only hop is this process."""
        units = self._parts.units
        hop = HopSpec(HERE, units.start, units.stop)
        return [(hop, AdapterOpened(self._parts.adapter_bytes, self._parts.pass_bytes))]

    async def compute(self, step: int, microbatches: Sequence[TunedMicrobatch]) -> dict[int, tuple[float, int]]:
        """Return for each microbatch the sum of its labels' losses, and their number."""
        found = {}
        for one in microbatches:
            passage = AdapterPassage(self._parts, one.number, one.inputs, learns=one.learns)
            passage.labels, passage.share, passage.ends_here = one.labels, one.share, True
            await passage.cross()
            found[one.number] = passage.loss, passage.counted
        return found

    async def forward(self, step: int, number: int, inputs: Values, *, learns: bool) -> Tensor:
        """Return the outputs of layers without the model's ends."""
        passage = AdapterPassage(self._parts, number, inputs, learns=learns)
        hidden_BTH: Tensor = (await passage.there(passage.leave))[0]
        if not learns:
            await self.drop(step, number)
        return hidden_BTH

    async def backward(self, step: int, number: int, gradient_BTH: Tensor) -> Tensor:
        """Return the gradient of a microbatch's hidden states, and count the adapter's gradients."""
        passage = AdapterPassage(self._parts, number, (), learns=True)
        back_BTH: Tensor = (await passage.turn_back((gradient_BTH,)))[0]
        return back_BTH

    async def drop(self, step: int, number: int) -> None:
        """Forget a microbatch that waits for its gradient."""
        self._parts.forget(number)

    async def gradient(
        self, step: int, microbatches: Sequence[TunedMicrobatch]
    ) -> tuple[dict[int, tuple[float, int]], float]:
        """Return what `compute` does, and the norm of the step's gradient."""
        return await self.compute(step, microbatches), math.sqrt(await self._parts.square())

    async def update(self, step: int, learning_rate: float, scale: float) -> None:
        """Update the adapter with its gradient times `scale`."""
        await self._parts.step(step, learning_rate, scale)

    async def fetch(self, step: int, *, gradients: bool = False) -> AdapterState:
        """Return the state at the beginning of `step`, or the sums of gradients in it."""
        give = self._parts.gradients if gradients else self._parts.state
        return AdapterState(step, {unit: await give(unit) for unit in self._parts.units})

    async def load(self, state: AdapterState, *, gradients: bool = False) -> None:
        """Go on from a state, or replace the sums of gradients."""
        for unit, raw in sorted(state.layers.items()):
            await self._parts.load(unit, raw, gradients=gradients)

    async def close(self) -> None:
        """Free the adapter."""
        self._parts.close()


class LocalOpener:
    """Opener of a `LocalRoute` on a model's span, which computes on `executor`; see `RouteOpener`."""

    def __init__(self, span: ModelSpan, executor: Executor, recipe: AdapterRecipe, size: tuple[int, int]) -> None:
        self._device = TuningDevice(span, executor, TuningPace(executor, 1.0, lambda: False))
        self._recipe = recipe
        self._size = size

    async def open(self, state: AdapterState | None) -> LocalRoute:
        """Open the adapter here. Raises Full if there is no memory."""
        span = self._device.span
        parts = await AdapterParts.open([self._device], Span(span.start, span.end), self._recipe, HERE, self._size)
        route = LocalRoute(parts)
        if state is not None:
            await route.load(state)
        return route

    def failed(self, error: PeerError | NetworkDown) -> None:
        """Raise the error: there is no other place."""
        raise error

    def succeeded(self) -> None:
        """Do nothing: no peer has to be forgiven."""
