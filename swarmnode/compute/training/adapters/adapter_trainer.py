"""Trainer of one adapter on one span: passes of microbatches through the frozen base, gradients, and updates.

Each pass goes piece by piece, some layers with a graph of their own, so that other work of the device can run in between. What the
way back needs is kept under the microbatch's number. The head runs with the loss, on those positions whose next token has a label.

Bytes that a pass keeps for its way back, measured on two short passes, so that they are known before a long one begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.training.adapters.adapter_recipe import MOST_FLOAT, AdapterRecipe
from swarmnode.compute.training.adapters.held_ends import LabelledPositions
from swarmnode.compute.training.adapters.layers import (
    FLOAT_BYTES,
    PROMPT,
    VECTORS,
    AdapterLayers,
    AdapterWeights,
    TrainedDora,
)
from swarmnode.compute.training.lm import NullCache, check_labels, check_values, documents
from swarmnode.compute.training.saved_activations import check_finite, check_shapes, is_finite
from swarmnode.errors import NotFinite, ProtocolError
from swarmnode.ledger import Account, Full, Reservation

SHORT, LONG = 8, 24  # tokens of the measured passes


class SavedStorage:
    """Storages that autograd keeps while `watching` is entered, each once, without those of `excluded` tensors (weights)."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._saved: dict[int, tuple[int, Tensor]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all kept storages."""
        return sum(size for size, _ in self._saved.values())

    def record(self, tensor: Tensor) -> Tensor:
        """Count the storage of `tensor`, and return it. It stays alive, so that no other takes its address."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._excluded:
            self._saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that counts each tensor that autograd saves."""
        return torch.autograd.graph.saved_tensors_hooks(self.record, lambda tensor: tensor)


@dataclass(frozen=True)
class ActivationSize:
    """Bytes that a row of T positions keeps: `linear` * T + `square` * T * T."""

    linear: float
    square: float

    @classmethod
    def measured(cls, saved_bytes: Callable[[int], ByPiece[int]], prompt_tokens: int = 0) -> ByPiece[ActivationSize]:
        """Return the size that fits `saved_bytes`, which runs a row of some positions and returns the bytes that it keeps.

        A row begins with the `prompt_tokens` of a soft prompt.
        """
        short, long = SHORT + prompt_tokens, LONG + prompt_tokens
        short_bytes = (yield from saved_bytes(short)) / short
        long_bytes = (yield from saved_bytes(long)) / long
        square = max(0.0, (long_bytes - short_bytes) / (long - short))
        return cls(max(short_bytes, long_bytes) - square * short, square)

    def of(self, rows: int, positions: int) -> int:
        """Return the bytes of a microbatch."""
        return round(rows * positions * (self.linear + self.square * positions))


MOST_LOGITS = 1 << 24  # in memory at once
LOGIT_COPIES = 4  # of float32, at once: logits, their softmax, and the gradients of both
PIECE_POSITIONS = {"cpu": 512, "cuda": 8192}
"""Most positions of a piece of a pass, by the type of the device; a longer row is a piece of its own"""


@dataclass
class _Piece:
    """Units [start, end) of some rows of a pass: `entering` begins its graph and `leaving` ends it."""

    start: int
    end: int
    entering: Tensor
    leaving: Tensor


@dataclass
class _Pass:
    """Pass of one microbatch that waits for its loss or its gradient.

    `tokens` is the shape (B, S) without a soft prompt, `leaving_BTH` the result without its graph. `back_BTH` is the gradient of
    the loss, once it is known, and `gradients` are those of tensors in the head. A pass that `evaluates` has neither.
    """

    tokens: torch.Size
    evaluates: bool
    memory: Reservation
    pieces: list[list[_Piece]] = field(default_factory=list)  # of each group of rows
    leaving_BTH: Tensor | None = None
    back_BTH: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)


class AdapterTrainer:
    """Trainer of one adapter's tensors on one span, used from the device's thread only.

    Several trainers share a span and its frozen base, and sessions go on between their pieces. `start_by_piece` is due before
    anything else. All passes compute as in serving, without dropout. A pass computes some rows at a time through all layers, at
    most `PIECE_POSITIONS` unless a row is longer.

    Args:
        span: Frozen base. The adapter is loaded beside it.
        recipe: Recipe of the training.
        name: Name of the adapter among those of the span.
        piece_units: Number of layers in a piece.

    Raises:
        Full: The ledger of the span's adapters has no room; nothing is allocated then.
    """

    def __init__(self, span: ModelSpan, recipe: AdapterRecipe, *, name: str, piece_units: int = 1) -> None:
        self.span, self.recipe, self.name = span, recipe, name
        self._ledger = span.adapters.ledger
        self._layers = AdapterLayers(span, recipe)
        with ExitStack() as reserved:
            for account, size_bytes in self._layers.memory_bytes().items():
                reserved.enter_context(self._ledger.reserve(account, size_bytes))
            with torch.inference_mode(False), torch.no_grad():
                self._frozen = {
                    key: torch.zeros(shape, device=span.device) for key, shape in self._layers.frozen.items()
                }
                self._weights = AdapterWeights(self._layers.trained, span.device, unit=span.start)
                self._changes = self._layers.changes({**self._frozen, **self._weights.tensors})
                self._corrections: dict[str, Tensor] = {}
            self._memory = reserved.pop_all()
        span.adapters.add(name, self._changes)
        self._working = self._ledger.count(Account.ACTIVATIONS)
        self._loss_positions = max(1, MOST_LOGITS // span.vocab_size)
        self._cache = NullCache(span.config)
        self._passes: dict[int, _Pass] = {}
        head = span.family.units - 1
        first, last = span.start, min(span.end, head)
        inner = range(max(first, 1) + piece_units, last, piece_units)
        self._cuts = [first, *inner, last] if first < last else []
        self._size: ActivationSize | None = None

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapter's tensors, gradients and moments."""
        return sum(self._layers.memory_bytes().values())

    @property
    def in_flight(self) -> int:
        """Number of forward passes that wait for their loss or their gradient."""
        return len(self._passes)

    def start_by_piece(self) -> ByPiece[None]:
        """Set the adapter's tensors to their values before the first step, and compute DoRA's norms."""
        yield from self._layers.start_by_piece({**self._frozen, **self._weights.tensors})
        yield from self._refresh()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that passes in flight keep for their way back."""
        return sum(one.memory.size_bytes for one in list(self._passes.values()))

    @torch.no_grad()
    def prepare_by_piece(self) -> ByPiece[None]:
        """Compute what updates multiply LoRA-FA's gradients with, layer by layer. The first update does it if nobody has."""
        if not self._corrections:
            found = {}
            for name, factor_RR in self._layers.corrections(self._frozen):
                found[name] = factor_RR
                yield
            self._corrections = found

    # -- passes

    def forward_by_piece(
        self, number: int, inputs: Tensor, positions_BS: Tensor | None = None, *, evaluates: bool = False
    ) -> ByPiece[Tensor]:
        """Run a microbatch forward through the span's layers, and keep what the way back needs under `number`.

        Args:
            number: Number of the microbatch, which no pass in flight has.
            inputs: ids_BS (int64) if the span has the embedding, else hidden_BTH; T is S and the length of a soft prompt.
            positions_BS: Place of each token in its document (int64), if rows hold several documents; None if each row is one.
            evaluates: Keep nothing for gradients.

        Returns:
            hidden_BTH as it leaves the span's last layer, without a graph.

        Raises:
            ProtocolError: The inputs are not those of the boundary, or `number` is in flight.
            NotFinite: The result is NaN or infinite.
            Full: There is no room for the activations at the moment.
        """
        tokens = self._check_inputs(number, inputs, positions_BS)
        rows, length = inputs.shape[0], tokens[1] + self.recipe.prompt_positions
        saved_bytes = 0 if evaluates else (yield from self.activation_bytes_by_piece(rows, length))
        current = self._passes[number] = _Pass(tokens, evaluates, self._reserve(saved_bytes, rows * length))
        try:
            leaving = []
            for group in self._groups(rows, length):
                x = inputs[group].to(self.span.device)
                x = x.to(self.span.dtype) if x.is_floating_point() else x  # the sender may compute in another one
                current.pieces.append([])
                for start, end in pairwise(self._cuts):
                    x = self._run(current, start, end, x, None if positions_BS is None else positions_BS[group])
                    yield
                if not is_finite([x]):
                    raise NotFinite(
                        "the hidden states hold NaN or infinity; lower --lr or --clip, or check the data",
                        unit=self.span.start,
                    )
                leaving.append(x)
            current.leaving_BTH = torch.cat(leaving) if len(leaving) > 1 else leaving[0]
        except BaseException:
            self.forget(number)
            raise
        return current.leaving_BTH

    def _groups(self, rows: int, length: int) -> Iterator[slice]:
        """Yield the rows that are computed together, of rows with `length` positions."""
        most = max(1, PIECE_POSITIONS.get(self.span.device.type, PIECE_POSITIONS["cpu"]) // length)
        return (slice(first, min(first + most, rows)) for first in range(0, rows, most))

    def loss_by_piece(self, number: int, labels_BS: Tensor, share: float) -> ByPiece[tuple[float, int]]:
        """Compute a microbatch's loss after its forward pass, on the span that has the head.

        Args:
            number: Number of the microbatch.
            labels_BS: Token ids (int64), -100 for positions without a label. Each is predicted at the position before it.
            share: Factor of the loss in the step's: 1 / the number of labels of all its microbatches, so that a split step's
                gradient is the whole batch's.

        Returns:
            The sum of the labels' cross-entropies, without the factor, and the number of labels that count.

        Raises:
            ProtocolError: The labels do not fit, `share` is not from 0 to 1, or no pass of this number waits for its loss.
            NotFinite: The loss is NaN or infinite. The pass is forgotten.
        """
        current = self._passes.get(number)
        if not self.span.has_head or current is None or current.leaving_BTH is None or current.back_BTH is not None:
            raise ProtocolError(f"microbatch {number} does not wait for its loss")
        if not 0 <= share <= 1:
            raise ProtocolError(f"a share of {share} in the step's loss: it must be from 0 to 1")
        check_labels(self.span, (labels_BS,), current.tokens)
        hidden_BTH, total = current.leaving_BTH, 0.0
        labelled = LabelledPositions.of(labels_BS.to(self.span.device), hidden_BTH.shape[1])
        back_BTH = torch.zeros_like(hidden_BTH)
        try:
            for places_N, labels_N in labelled.split(self._loss_positions):
                loss, back_NH = self._head_loss(current, hidden_BTH.flatten(0, 1)[places_N], labels_N, share)
                back_BTH.view(-1, hidden_BTH.shape[2])[places_N] = back_NH
                total += loss
                yield
            if not math.isfinite(total):
                raise NotFinite(
                    "the loss is NaN or infinite; lower --lr or --clip, or check the data", unit=self.span.end - 1
                )
        except BaseException:
            self.forget(number)
            raise
        current.back_BTH = back_BTH
        if current.evaluates:
            self.forget(number)
        return total, len(labelled)

    def backward_by_piece(self, number: int, gradient_BTH: Tensor | None = None) -> ByPiece[Tensor | None]:
        """Take a microbatch's gradient back through the span, and add the adapter's gradients to the step's sums.

        They are added together at the end, or not at all. The pass is forgotten in any case.

        Args:
            number: Number of the microbatch.
            gradient_BTH: Gradient of the result of `forward`; None on the span that has the head, which takes its loss's.

        Returns:
            The gradient of the hidden states that entered the span; None if it has the embedding.

        Raises:
            ProtocolError: The gradient does not fit, or no pass of this number waits for one.
            NotFinite: A gradient is NaN or infinite; nothing is counted.
        """
        current = self._passes.get(number)
        if current is None or current.evaluates or current.leaving_BTH is None:
            raise ProtocolError(f"microbatch {number} does not wait for its gradient")
        back = current.back_BTH if gradient_BTH is None else gradient_BTH
        if back is None or self.span.has_head != (gradient_BTH is None):
            raise ProtocolError(
                f"microbatch {number} takes its gradient from its loss, if and only if the head is here"
            )
        try:
            check_shapes((back,), (current.leaving_BTH.shape,), self.span.end)
            check_finite((back,), self.span.end)
            came, entered = back.to(current.leaving_BTH), []
            for group, pieces in zip(self._groups(len(came), came.shape[1]), current.pieces, strict=True):
                flowing: Tensor | None = came[group]
                while pieces:
                    flowing = self._run_back(current, pieces.pop(), flowing)
                    yield
                entered.append(flowing)
            found = [current for current in entered if current is not None]  # all of them, or none
            back = torch.cat(found) if len(found) > 1 else found[0] if found else None
            if back is not None:
                check_finite((back,), self.span.start)
            yield from self._weights.accumulate(current.gradients)
        finally:
            self.forget(number)
        return None if self.span.has_embedding else back

    def forget(self, number: int) -> None:
        """Forget a pass that will not come back; does nothing if there is none."""
        one = self._passes.pop(number, None)
        if one is not None:
            one.memory.release()
        if not self._passes:
            self._working.release()

    # -- the end of a step

    def gradient_square_by_piece(self) -> ByPiece[float]:
        """Return the square of the norm of the gradient that is summed here. Raises NotFinite if it is NaN or infinite.

        The sum over all spans is the square of the global norm. LoRA-FA's gradients are not corrected yet, as in peft.
        """
        return self._weights.gradient_square()

    def step_by_piece(self, number: int, learning_rate: float, scale: float) -> ByPiece[None]:
        """Update the adapter by AdamW, and begin the next step.

        Args:
            number: Number of updates before this one.
            learning_rate: Rate of this update.
            scale: Factor of the gradient, which clips it: the same on all spans.

        Raises:
            ProtocolError: `number` is not the present step's, or a rate or factor is no float32 from 0 on.
        """
        if number != self._weights.step:
            raise ProtocolError(f"an update after {number} steps, but the adapter has had {self._weights.step}")
        if not all(0 <= value <= MOST_FLOAT for value in (learning_rate, scale)):
            raise ProtocolError(
                f"a learning rate of {learning_rate} and a scale of {scale}: both must be from 0 on, in float32"
            )
        self._forget_all()
        yield from self.prepare_by_piece()
        yield from self._weights.update(self.recipe, learning_rate, self._corrections, scale)
        yield from self._refresh()

    # -- state

    def state(self) -> dict[str, Tensor]:
        """Return the trained tensors, their moments and the number of updates: references, which the next update changes."""
        return self._weights.state()

    def gradients(self) -> dict[str, Tensor]:
        """Return the step's sums of gradients, by the names that `state` has for the weights: references."""
        return {f"{VECTORS[0]}/{name}": gradient for name, gradient in self._weights.gradients.items()}

    def load_gradients(self, state: Mapping[str, Tensor]) -> ByPiece[None]:
        """Replace the step's sums of gradients by those of `state`, which has the names that `gradients` gives.

        Raises CheckpointError, changing nothing, if tensors are missing or do not fit.
        """
        begin = f"{VECTORS[0]}/"
        return self._weights.load_gradients({name.removeprefix(begin): tensor for name, tensor in state.items()})

    def load_by_piece(self, state: Mapping[str, Tensor]) -> ByPiece[None]:
        """Load a state bit for bit; tensors of other spans in it are ignored. Passes in flight are forgotten.

        Raises CheckpointError, changing nothing, if tensors are missing or do not fit.
        """
        yield from self._weights.load(state)
        self._forget_all()
        yield from self._refresh()

    def close(self) -> None:
        """Forget the adapter and release its memory. The trainer cannot be used afterwards."""
        self._forget_all()
        self.span.adapters.remove(self.name)
        self._memory.close()

    # -- memory

    def activation_bytes(self, rows: int, positions: int) -> int:
        """Return the bytes that a pass keeps until its gradient comes, for rows of some positions with the soft prompt."""
        return drain(self.activation_bytes_by_piece(rows, positions))

    def activation_bytes_by_piece(self, rows: int, positions: int) -> ByPiece[int]:
        """Do `activation_bytes`."""
        if self._size is None:
            self._size = yield from ActivationSize.measured(self._saved_bytes, self.recipe.prompt_positions)
        return self._size.of(rows, positions)

    def _reserve(self, saved_bytes: int, positions: int) -> Reservation:
        """Reserve the bytes that a pass keeps, and those that its largest piece takes meanwhile, once for all passes.

        Raises Full, reserving nothing.
        """
        logits = LOGIT_COPIES * min(self._loss_positions, positions) * self.span.vocab_size if self.span.has_head else 0
        working_bytes = self.span.pass_bytes(positions, 0) + FLOAT_BYTES * logits
        memory = self._ledger.reserve(Account.ACTIVATIONS, saved_bytes)
        try:
            self._working.resize(max(self._working.size_bytes, working_bytes))
        except Full:
            memory.release()
            raise
        return memory

    def _saved_bytes(self, positions: int) -> ByPiece[int]:
        """Return the bytes that a row of some positions keeps for its way back, by running such a row."""
        known = [*self.span.model.parameters(), *self.span.model.buffers(), *self._frozen.values()]
        kept = SavedStorage([*known, *self._weights.tensors.values()])
        one = _Pass(torch.Size(()), False, self._ledger.count(Account.ACTIVATIONS), [[]])
        x = torch.zeros(1, positions - self.recipe.prompt_positions, dtype=torch.int64, device=self.span.device)
        if not self.span.has_embedding:
            x = torch.zeros(1, positions, self.span.hidden_size, dtype=self.span.dtype, device=self.span.device)
        for start, end in pairwise(self._cuts):
            with kept.watching():  # not in between, where others compute
                x = kept.record(self._run(one, start, end, x, None))
            yield
        return kept.size_bytes

    # -- pieces

    def _check_inputs(self, number: int, inputs: Tensor, positions_BS: Tensor | None) -> torch.Size:
        """Return the shape (B, S) of a microbatch's tokens. Raises ProtocolError if inputs do not fit."""
        if number in self._passes:
            raise ProtocolError(f"microbatch {number} is in flight already")
        if positions_BS is not None and self.recipe.prompt_positions:
            raise ProtocolError("a soft prompt goes before rows of one document only; train with --no-pack")
        check_values(self.span, (inputs,) if positions_BS is None else (inputs, positions_BS), self.span.start)
        rows, length = inputs.shape[:2]
        tokens = length if self.span.has_embedding else length - self.recipe.prompt_positions
        limit = self.span.position_limit
        if tokens < 1 or (limit is not None and tokens + self.recipe.prompt_positions > limit):
            raise ProtocolError(
                f"rows of {tokens} tokens behind a prompt of {self.recipe.prompt_positions} do not fit the model"
            )
        return torch.Size((rows, tokens))

    def _run(self, current: _Pass, start: int, end: int, x: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Run units [start, end), add them to the pass's pieces, and return their result without its graph."""
        with torch.inference_mode(False), torch.set_grad_enabled(not current.evaluates):
            entering = x.clone() if x.is_inference() else x.detach()
            if start > 0 and not current.evaluates:
                entering.requires_grad_()
            leaving_BTH = self._through(start, end, self._embedded(entering) if start == 0 else entering, positions_BS)
            if not current.evaluates:
                current.pieces[-1].append(_Piece(start, end, entering, leaving_BTH))
            return leaving_BTH.detach()

    def _embedded(self, ids_BS: Tensor) -> Tensor:
        """Return the inputs of the first unit: ids, or the soft prompt and the embeddings of ids."""
        if not self.recipe.prompt_positions:
            return ids_BS
        embedded_BSH: Tensor = self.span.model.get_input_embeddings()(ids_BS)
        prompt_PH = self._weights.tensors[PROMPT].to(embedded_BSH.dtype)
        return torch.cat((prompt_PH.expand(len(ids_BS), *prompt_PH.shape), embedded_BSH), dim=1)

    def _through(self, start: int, end: int, x: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        places_BS, mask_B1SS = (None, None) if positions_BS is None else documents(positions_BS.to(self.span.device))
        return self.span.forward(
            x,
            cache=self._cache,
            attention_mask=None if mask_B1SS is None else mask_B1SS.to(self.span.dtype),
            position_ids=places_BS,
            start=start,
            end=end,
            adapters=(self.name,) * len(x),
        )

    def _head_loss(self, current: _Pass, hidden_NH: Tensor, labels_N: Tensor, share: float) -> tuple[float, Tensor]:
        """Return the sum of the labels' cross-entropies, and the gradient of the hidden states for it times `share`."""
        names = self._layers.names_in(self.span.end - 1, self.span.end)
        with torch.inference_mode(False), torch.set_grad_enabled(not current.evaluates):
            entering_NH = hidden_NH.detach().requires_grad_(not current.evaluates)
            logits_NV = self._through(self.span.end - 1, self.span.end, entering_NH[None])[0]
            loss = functional.cross_entropy(logits_NV.float(), labels_N, reduction="sum")
            if current.evaluates:
                return loss.item(), torch.zeros_like(hidden_NH)
            wanted = [entering_NH, *(self._weights.tensors[name] for name in names)]
            back_NH, *found = torch.autograd.grad(loss * share, wanted, allow_unused=True)
        self._gather(current, names, found)
        return loss.item(), back_NH

    def _run_back(self, current: _Pass, piece: _Piece, back: Tensor | None) -> Tensor | None:
        """Take the gradient back through a piece. Returns that of what entered it; None if that takes none."""
        names = self._layers.names_in(piece.start, piece.end)
        wanted = [self._weights.tensors[name] for name in names]
        entering = [piece.entering] if piece.entering.requires_grad else []
        if back is None or not piece.leaving.requires_grad or not (entering or wanted):
            return None
        found = torch.autograd.grad(piece.leaving, [*entering, *wanted], back, allow_unused=True)
        self._gather(current, names, found[len(entering) :])
        return found[0] if entering else None

    @staticmethod
    def _gather(current: _Pass, names: list[str], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients to those of the pass. A tensor that the pass did not use has none."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                current.gradients[name] = current.gradients[name] + gradient if name in current.gradients else gradient

    def _forget_all(self) -> None:
        for number in list(self._passes):
            self.forget(number)

    def _refresh(self) -> ByPiece[None]:
        for change in self._changes.values():
            if isinstance(change, TrainedDora):
                yield from change.refresh_by_piece()
