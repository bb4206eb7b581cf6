"""Layers of a causal language model, ready to be trained: a span whose weights are its own memory.

Values at boundary 0: (ids_BT,). In between: (hidden_BTH,). At the end: the loss. Labels: (labels_BT,), ids
or -100 where none counts. If boundaries have anchors, digits_BTD of the tokens' ids (`stack.py`) follow the hidden states.
Rows of several documents carry one more value to every boundary, positions_BT: each token's place in its own document. In runs
with losses of routers the last value at every boundary but the first is sums_S (`losses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.codec.body import SHARED
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import check_trains_at_layers
from swarmnode.compute.model.linear import release_pages, speed_up_linears
from swarmnode.compute.model.span import ModelSpan, load_model
from swarmnode.compute.model.stack import digits_of, ids_of
from swarmnode.compute.serving.cohort import AttentionCache, Window, sliding_layers
from swarmnode.compute.serving.loading import check_family
from swarmnode.compute.training.losses import RouterWatch, next_token_loss
from swarmnode.compute.training.randomness import CounterDropout, draws_dropout, reseed
from swarmnode.compute.training.segment import Segment, Shares, Values
from swarmnode.data.rows import NO_LABEL
from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.run import Recipe, Run

MOST_PACKED = 4096
PACKING_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "phi3", "gemma"})
PACKING_FAMILIES |= {"gpt2", "gpt_neox", "mixtral", "granite", "smollm3"}
"""Model types whose attention and positions take rows of several documents exactly (`tests/compute/training/test_packing.py`)"""


def can_pack(config: Any, length: int) -> bool:
    """Return whether a model of this config trains on rows of several documents as on each document alone.

    A window or chunk of attention that is shorter than a row would be lost in the mask of documents. That of a longer row than
    `MOST_PACKED` tokens would take more memory than its activations.
    """
    if length > MOST_PACKED:
        return False
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    short = any(isinstance(size, int) and size < length for size in windows)
    return config.model_type in PACKING_FAMILIES and not (short and sliding_layers(config))


class NullCache(AttentionCache):
    """Cache that keeps nothing, for a model of this transformers config: attention gets back its own keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__({layer: Window(size) for layer, size in sliding_layers(config).items()}, 0)

    def __repr__(self) -> str:
        return "NullCache()"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values unchanged, since training caches nothing. Called by attention."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: there are no earlier positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of the attention mask, and the first position that it covers."""
        return query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Always false: nothing is held."""
        return False


class SpanSegment(Segment):
    """Layers of a causal language model. Takes over the span's model: training mode, gradients, seeded dropout."""

    def __init__(self, span: ModelSpan) -> None:
        self.span = span
        self.start, self.end = span.start, span.end
        self.units = span.family.units
        self.device = span.device
        self.means = 1
        self._seed = 0
        self._recipe = Recipe()
        self._routers: RouterWatch | None = None
        self._dropout = CounterDropout()
        self._drops = draws_dropout(span.model, span.config)
        self._cache = NullCache(span.config)
        span.model.train().requires_grad_(True)
        for number in span.layers_of(span.start, span.end):
            span.stack.get_submodule(str(number)).register_forward_pre_hook(self._reseeding(number + 1))
        span.stack.when_left = self._reseeding(span.family.layer_count + 1)

    def __repr__(self) -> str:
        return f"SpanSegment([{self.start}:{self.end}) of {self.units} units on {self.device})"

    @property
    def positions(self) -> int | None:
        """Most positions of the family's position table; None if positions have no limit."""
        return self.span.position_limit

    def aim(self, recipe: Recipe) -> None:
        self._recipe = recipe
        if self._routers is not None:
            self._routers.close()
        self._routers = RouterWatch(self.span.model, recipe) if recipe.watches_routers else None

    def mask_bytes(self, run: Run) -> int:
        """Return the bytes of the mask of a microbatch's documents, float32. Only rows of samples may hold several."""
        packs = run.weighs_labels and can_pack(self.span.config, run.sequence)
        return run.microbatch * run.sequence**2 * torch.float32.itemsize if packs else 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn dropout off in the `with` block, and the terms of the objective that are for training alone."""
        drops, recipe = self._drops, self._recipe
        self._drops, self._recipe = False, Recipe()
        if drops:
            self.span.model.eval()
        try:
            yield
        finally:
            self._drops, self._recipe = drops, recipe
            if drops:
                self.span.model.train()

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """Return the parameters by block, see `Segment`. A tied head's matrix has the embedding's name, wherever it is held."""
        ties = self.span.model.all_tied_weights_keys
        blocks: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in self.span.model.named_parameters():
            source = ties.get(name, name)
            units = self.span.family.units_of_tensor(source)
            blocks.setdefault(units[0] if len(units) == 1 else SHARED, {})[source] = parameter
        return blocks

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return the persistent buffers by layer, see `Segment`. Most families have none."""
        persistent = self.span.model.state_dict().keys()
        units: dict[int, dict[str, Tensor]] = {}
        for name, buffer in self.span.model.named_buffers():
            if name in persistent:
                held = [unit for unit in self.span.family.units_of_tensor(name) if self.start <= unit < self.end]
                units.setdefault(held[0], {})[name] = buffer
        return units

    def forward(
        self, values: Values, start: int, end: int, seed: int, labels: Values = (), shares: Shares = ()
    ) -> Values:
        """Run layers [start, end), as `Segment.forward` describes. The loss is the mean over the tokens that have a label and a
        token before them, times its share; 0 if there are none."""
        # Raise ProtocolError if the values are not those of the boundary.
        sums = values[-1:] if self._routers is not None and start else ()
        if self._routers is not None and sums:
            self._routers.check(*sums)
        check_values(self.span, values[: len(values) - len(sums)], start)
        if end == self.units:
            check_labels(self.span, labels, values[0].shape[:2])
        self._seed = seed
        self._begin(self.span.layers_of(start, start).start + 1 if start else 0)
        x, digits, positions, sums_S = self._apart(values, start)
        places_BT, mask_B1TT = documents(self._here(*positions)) if positions else (None, None)
        if self._routers is not None:
            self._routers.begin(sums_S, has_token(*positions) if positions else None)
        with self._dropout if self._drops else nullcontext():
            output = self.span.forward(
                x,
                cache=self._cache,
                attention_mask=mask_B1TT,
                position_ids=places_BT,
                start=start,
                end=end,
                ids_BT=self._here(ids_of(digits[0])) if digits else None,
            )
        sums_S = self._routers.end() if self._routers is not None else sums_S
        if end < self.units:
            return (output, *digits, *positions, *(() if self._routers is None else (sums_S,)))
        return (self._loss(output, labels[0], shares, sums_S),)

    def _apart(self, values: Values, start: int) -> tuple[Tensor, Values, Values, Tensor]:
        """Return the ids_BT or hidden_BTH, the digits_BTD if boundaries have anchors, the positions_BT if there are any, and the
        routers' sums_S of earlier layers."""
        x, *more = values
        sums_S = torch.empty(0)
        if self._routers is not None:
            sums_S = more.pop() if start else self._routers.no_sums(self.device)
        digits: Values = ()
        if self.span.digits:
            digits = (more.pop(0) if start else digits_of(x, self.span.digits),)
        return x if start else self._here(x), digits, tuple(more), sums_S

    def _loss(self, logits_BTV: Tensor, labels_BT: Tensor, shares: Shares, sums_S: Tensor) -> Tensor:
        recipe = self._recipe
        loss = next_token_loss(logits_BTV, labels_BT, smoothing=recipe.label_smoothing, z_loss=recipe.z_loss)
        loss = loss * shares[0] if shares else loss
        if recipe.watches_routers and self._routers is not None:  # not if data are held out
            router_loss, self.expert_load = self._routers.judge(sums_S)
            loss = loss + router_loss  # each microbatch counts the same, whatever its labels
        return loss

    def dummies(self, boundary: int, batch: int, sequence: int) -> tuple[Values, Values]:
        """Return made-up values: ids from the whole vocabulary, hidden states of usual size. See `Segment`."""
        chance = torch.Generator().manual_seed(boundary)
        ids_BT = torch.randint(self.span.vocab_size, (batch, sequence), generator=chance)
        hidden_BTH = torch.randn(batch, sequence, self.span.width - self.span.digits, generator=chance)
        digits = (digits_of(ids_BT, self.span.digits),) if self.span.digits and boundary else ()
        sums = () if self._routers is None or not boundary else (self._routers.no_sums(),)
        return (hidden_BTH if boundary else ids_BT, *digits, *sums), (ids_BT,)

    def _here(self, ids_BT: Tensor) -> Tensor:
        return ids_BT.to(self.device, non_blocking=self.device.type == "cuda")

    def _reseeding(self, place: int) -> Any:
        """Return a hook that reseeds before a layer's own code: earlier code may have drawn, and another split runs less of it."""

        def hook(*_: Any) -> None:
            self._begin(place)

        return hook

    def _begin(self, place: int) -> None:
        """Draw random numbers of a place: 0 is the embedding, then one for each layer and one for the head."""
        reseed(self._seed, place, self.device)
        self._dropout.begin(self._seed, place)


def documents(positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions, and the mask_B1TT of rows of several documents: a token sees those before it in its own one.

    The mask is added to scores. Of a mask of truth values torch would keep such a copy for the backward pass of each layer.
    """
    documents_BT = (positions_BT == 0).cumsum(1)
    hidden_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril().logical_not_()
    mask_BTT = torch.zeros(hidden_BTT.shape, device=positions_BT.device).masked_fill_(hidden_BTT, -torch.inf)
    return positions_BT, mask_BTT[:, None]


def check_values(span: ModelSpan, values: Values, start: int) -> None:
    """Raise ProtocolError if the values are not those of boundary `start` of the span's model."""
    if len(values) - (start > 0 < span.digits) not in (1, 2):
        raise ProtocolError(
            f"{len(values)} values at boundary {start} of a language model, which are too many or too few"
        )
    if start > 0 < span.digits:
        x, digits_BTD, *places = values
        if digits_BTD.dtype != torch.uint8 or digits_BTD.shape != (*x.shape[:2], span.digits):
            raise ProtocolError(
                f"digits of tokens have the wrong dtype or shape: {digits_BTD.dtype} {tuple(digits_BTD.shape)}"
            )
        check_ids(span, ids_of(digits_BTD))
        values = (x, *places)
    if len(values) == 2:
        _check_places(span, values[1], values[0].shape[:2])
    if start == 0:
        check_ids(span, values[0])
    elif values[0].dim() != 3 or not values[0].is_floating_point() or values[0].shape[2] != span.width - span.digits:
        raise ProtocolError(f"hidden states have the wrong dtype or shape: {values[0].dtype} {tuple(values[0].shape)}")
    limit, count = span.position_limit, values[0].shape[1]
    if limit is not None and count > limit:
        raise ProtocolError(f"the microbatch has {count} positions, but the model only {limit}")


def check_labels(span: ModelSpan, labels: Values, shape: torch.Size) -> None:
    """Raise ProtocolError unless there is one tensor of labels, of this shape, with ids of the vocabulary or NO_LABEL."""
    if len(labels) != 1 or labels[0].shape != shape:
        shapes = ", ".join(str(tuple(label.shape)) for label in labels)
        raise ProtocolError(f"the labels have the shape {shapes or None}, but the microbatch has {tuple(shape)}")
    check_ids(span, labels[0].masked_fill(labels[0] == NO_LABEL, 0))


def check_ids(span: ModelSpan, ids_BT: Tensor) -> None:
    """Raise ProtocolError if token ids are not int64_BT of at least two tokens, or not of the model's vocabulary."""
    if ids_BT.dtype != torch.int64 or ids_BT.dim() != 2 or ids_BT.shape[1] < 2 or ids_BT.numel() == 0:
        raise ProtocolError(f"token ids have the wrong dtype or shape: {ids_BT.dtype} {tuple(ids_BT.shape)}")
    low, high = int(ids_BT.min()), int(ids_BT.max())
    if low < 0 or high >= span.vocab_size:
        raise ProtocolError(
            f"token ids from {low} to {high}, but the model's vocabulary has {span.vocab_size}: "
            "the data was made with another tokenizer"
        )


def _check_places(span: ModelSpan, positions_BT: Tensor, shape: torch.Size) -> None:
    """Raise ProtocolError if positions do not count up from 0 in each document, or the family takes one document a row."""
    if not can_pack(span.config, shape[1]):
        raise ProtocolError("the model takes rows of one document only; train with --no-pack")
    if positions_BT.dtype != torch.int64 or positions_BT.shape != shape:
        raise ProtocolError(
            f"positions have the wrong dtype or shape: {positions_BT.dtype} {tuple(positions_BT.shape)}"
        )
    next_BT = positions_BT[:, 1:]
    counts_up = (next_BT == 0) | (next_BT == positions_BT[:, :-1] + 1)
    if not (bool(counts_up.all()) and bool((positions_BT[:, 0] == 0).all())):
        raise ProtocolError("positions do not count up from 0 in each document")


def has_token(positions_BT: Tensor) -> Tensor:
    """Return for each position of rows of documents whether a document has a token there, bool_BT. Padding is at position 0, and
    not followed by position 1."""
    is_followed_BT = functional.pad(positions_BT[:, 1:], (0, 1)) == 1
    return (positions_BT > 0) | is_followed_BT


def load_segment(checkpoint: Checkpoint, start: int, end: int, *, device: torch.device | str = "cpu") -> SpanSegment:
    """Load layers [start, end) to train them, in float32. Raises CheckpointError, LocalError."""
    check_trains_at_layers(checkpoint.family)
    check_family(checkpoint.family)
    model = load_model(checkpoint, start, end, dtype=torch.float32)
    model.to(device)
    mapped = checkpoint.dtype == torch.float32 and torch.device(device).type == "cpu"
    for parameter in model.parameters():  # a mapped file would be copied page by page during training
        stored, parameter.data = parameter.data, parameter.data.clone(memory_format=torch.contiguous_format)
        if mapped:  # otherwise the whole file would stay resident beside the copies until the last one
            release_pages(stored)
    return SpanSegment(ModelSpan(checkpoint.family, model, start, end))


def load_twin(checkpoint: Checkpoint, segment: SpanSegment) -> ModelSpan:
    """Load a span for serving that shares a segment's memory, and so answers with the present state of the training.

    It has no dropout and no gradients.
    """
    model = load_model(checkpoint, segment.start, segment.end, dtype=torch.float32).eval()
    trained = dict(segment.span.model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = trained[name].data
    held = dict(segment.span.model.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.data = held[name].data
    speed_up_linears(model)
    return ModelSpan(checkpoint.family, model, segment.start, segment.end)
