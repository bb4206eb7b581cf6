"""Bodies of `/swarmnode/tune/1` and `/swarmnode/cotune/1`: tuning of adapters by the peers of a route (`protocol/tuning.md`).

OPEN_ADAPTER, ADAPTER_OPENED    owner and hop; their conversation carries all that follows but JOIN_ADAPTER
JOIN_ADAPTER                    a hop and the next one
TUNE_INPUT, TUNE_GRADIENT       there, and back
TUNE_LABELS                     owner and last hop
TUNE_LOSS, TUNE_COUNTED         reports of the last hop and the first one
GATHER, GATHERED                the square of the gradient, before an update
UPDATE, UPDATED                 the update itself
GET_ADAPTER, ADAPTER_PIECE      the state of a hop's layers, in pieces; the owner also sends pieces to load
JOIN_TUNING, TUNING_JOINED      a trainer and the leader of several trainers of one adapter
SHARE_PIECE                     gradients or changes of weights: a trainer's, and back the mean of all
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_PEER_CHARS, MAX_ROWS, Body, Code, Epoch, HopIndex, SessionId, Step, Unit
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_messages import (
    MAX_MASK_BYTES,
    MAX_VALUES,
    EncodedRun,
    Index,
    Norm,
    Number,
    Route,
    Values,
    check_route,
    check_rules,
    check_values,
)

TUNE_PROTOCOL = "/swarmnode/tune/1"
COTUNE_PROTOCOL = "/swarmnode/cotune/1"
MAX_RECIPE_BYTES = 4096
MAX_WINDOW = 64  # microbatches in flight
MAX_TUNED_POSITIONS = 1 << 20  # of one microbatch, all rows together
MAX_ADAPTER_BYTES = 1 << 36  # of one hop's state
MAX_INTERVAL = 1 << 16  # steps between two averagings of trainers
MAX_SHARE_LABELS = 1 << 40  # of all trainers, between two averagings
PIECE_BYTES = 1 << 20

Bytes = Annotated[int, Meta(ge=0, le=MAX_ADAPTER_BYTES)]
RecipeBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_RECIPE_BYTES)]


class OpenAdapter(Body, frozen=True):
    """Request to keep an adapter's weights and optimiser state for the receiver's layers of `route`.

    `recipe` is the encoded AdapterRecipe. Microbatches have at most `rows` rows of `positions` tokens; at most `window` of them are
    in flight. The adapter belongs to the sender, and ends with this conversation.
    """

    adapter: SessionId
    epoch: Epoch
    route: Route
    index: HopIndex  # the receiver's place in the route
    recipe: RecipeBytes
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    positions: Annotated[int, Meta(ge=1, le=MAX_TUNED_POSITIONS)]
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
    codec: Code = 0  # of the values between hops
    adapts: bool = False  # each hop chooses the codec of what it sends, as its link needs

    def check(self) -> None:
        check_route("OPEN_ADAPTER", self.route, self.index)
        check_rules(
            "OPEN_ADAPTER", {"a microbatch within its bound": self.rows * self.positions <= MAX_TUNED_POSITIONS}
        )


class AdapterOpened(Body, frozen=True):
    """Answer to OPEN_ADAPTER: the bytes that the hop keeps for the adapter, and those of passes in flight."""

    adapter_bytes: Bytes = 0
    pass_bytes: Bytes = 0


class JoinAdapter(Body, frozen=True):
    """First frame of a hop to the next one of the adapter's route. The receiver accepts it from the hop before it alone.

    `owner` is the peer that opened the adapter at the sender; empty from senders that do not know the field.
    """

    adapter: SessionId
    epoch: Epoch
    owner: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""


class TuneInput(Body, frozen=True):
    """Microbatch `number` of `step` at the boundary before the receiver's layers. The payload is the values' payloads.

    Without `learns` the microbatch goes forward only, for its loss.
    """

    step: Step
    number: Index
    values: Values
    learns: bool = True

    def check(self) -> None:
        check_values(self.values)


class TuneLabels(Body, frozen=True):
    """Labels of a microbatch, for the last hop. The sum of their losses counts `share` in the step's loss."""

    step: Step
    number: Index
    values: Values
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0

    def check(self) -> None:
        check_values(self.values)


class TuneGradient(Body, frozen=True):
    """Gradients of a TUNE_INPUT's values, in order; `present` says which values have one.

    If the owner computes the head, it sends gradients to the last hop; without any present one the microbatch is dropped.
    """

    step: Step
    number: Index
    present: Annotated[tuple[bool, ...], Meta(max_length=MAX_VALUES)]
    values: Values

    def check(self) -> None:
        check_rules("TUNE_GRADIENT", {"a gradient for each value that it names": sum(self.present) == len(self.values)})
        check_values(self.values)


class TuneLoss(Body, frozen=True):
    """Report of the last hop to the owner: the sum of the losses of a microbatch's `labels` labels."""

    step: Step
    number: Index
    loss: Number
    labels: Annotated[int, Meta(ge=0, le=MAX_TUNED_POSITIONS)]


class TuneCounted(Body, frozen=True):
    """Report of the first hop to the owner: all hops have added the gradients of a microbatch to their sums."""

    step: Step
    number: Index


class Gather(Body, frozen=True):
    """Question for the square of a step's gradient, once `microbatches` of the step are counted."""

    step: Step
    microbatches: Annotated[int, Meta(ge=0, le=8 * MAX_MASK_BYTES)] = 0


class Gathered(Body, frozen=True):
    """Answer to GATHER: the gradient's sum of squares at the hop, and the counted microbatches as bits (little-endian)."""

    step: Step
    square: Norm
    counted: Annotated[bytes, Meta(max_length=MAX_MASK_BYTES)]


class Update(Body, frozen=True):
    """Command to update the adapter with its gradient times `scale`, and to begin the next step."""

    step: Step
    learning_rate: Norm
    scale: Norm


class Updated(Body, frozen=True):
    """Answer to UPDATE, and to the last piece of a state that the client sent: the hop is at the beginning of `step`."""

    step: Step


class GetAdapter(Body, frozen=True):
    """Question for the weights and the optimiser state of the hop's layers, layer by layer, or for the sums of gradients."""

    step: Step
    gradients: bool = False


class AdapterPiece(Body, frozen=True):
    """Piece of the tensors of one layer, as bytes of a safetensors file of `size` bytes. `last`: of the last layer.

    Sent by the hop as the answer to GET_ADAPTER; sent by the client to load a state of the beginning of `step`, or `gradients` that
    replace the hop's sums of that step. The leader of several trainers sends its state likewise.
    """

    step: Step
    unit: Unit
    offset: Bytes
    size: Bytes
    last: bool = False
    gradients: bool = False

    def check(self) -> None:
        check_rules("ADAPTER_PIECE", {"an offset within its size": self.offset <= self.size})


class JoinTuning(Body, frozen=True):
    """First frame of a trainer to the leader of an adapter's trainers: the `adapter` and the `secret` of the leader's ticket."""

    adapter: SessionId
    secret: SessionId


class TuningJoined(Body, frozen=True):
    """Answer to JOIN_TUNING: the encoded AdapterRecipe and Run, and how the trainers average.

    With `every` 1 they average the gradients of each step, else the changes of their weights in `every` steps, encoded by `codec`.
    """

    recipe: RecipeBytes
    run: EncodedRun
    every: Annotated[int, Meta(ge=1, le=MAX_INTERVAL)] = 1
    codec: Code = 0


class SharePiece(Body, frozen=True):
    """Piece of a vector of `size` bytes that ends `step`: a trainer's for the leader, or the mean for the trainers.

    The vector strings together the tensors of all layers. `labels` is the number of labels that it is the mean over, and `loss` the
    mean loss over them.
    """

    step: Step
    offset: Bytes
    size: Bytes
    labels: Annotated[int, Meta(ge=0, le=MAX_SHARE_LABELS)]
    loss: Number

    def check(self) -> None:
        check_rules("SHARE_PIECE", {"an offset within its size": self.offset <= self.size})


TUNING_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.OPEN_ADAPTER: OpenAdapter,
    FrameKind.ADAPTER_OPENED: AdapterOpened,
    FrameKind.JOIN_ADAPTER: JoinAdapter,
    FrameKind.TUNE_INPUT: TuneInput,
    FrameKind.TUNE_LABELS: TuneLabels,
    FrameKind.TUNE_GRADIENT: TuneGradient,
    FrameKind.TUNE_LOSS: TuneLoss,
    FrameKind.TUNE_COUNTED: TuneCounted,
    FrameKind.GATHER: Gather,
    FrameKind.GATHERED: Gathered,
    FrameKind.UPDATE: Update,
    FrameKind.UPDATED: Updated,
    FrameKind.GET_ADAPTER: GetAdapter,
    FrameKind.ADAPTER_PIECE: AdapterPiece,
    FrameKind.JOIN_TUNING: JoinTuning,
    FrameKind.TUNING_JOINED: TuningJoined,
    FrameKind.SHARE_PIECE: SharePiece,
}
