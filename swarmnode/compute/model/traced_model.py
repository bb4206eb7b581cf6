"""Finds a family's anatomy by running its own code once on the meta device: shapes only, no weights, milliseconds."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from swarmnode.compute.carried import CachePlaces, Calls, CallsUnknown, is_of_other_media, trace_calls
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.stack import Stack, unchanged
from swarmnode.errors import CheckpointError

with lean():
    from huggingface_hub.errors import StrictDataclassError
    from transformers.cache_utils import Cache
    from transformers.initialization import no_init_weights
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAMES = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE_ARGUMENT = "cache" if "cache" in _NAMES else "past_key_values"

STATELESS_LAYERS = frozenset({"moe", "mlp"})
"""Kinds of layers in transformers' `layer_types` with neither a KV cache nor a recurrent state"""
CONV, RECURRENT = "conv", "recurrent"
StateKey = tuple[str, int]
"""Kind of a layer's state (CONV or RECURRENT), and its number among those of its kind"""

LayerState = tuple[int, StateKey]
"""A layer's number, and which of its states"""
States = dict[LayerState, Tensor]
"""States by layer, each of shape (rows, ...)"""

TRACED = "swarmnode_traced"  # the attention of a trace, by the name in transformers' table

# Errors that a family's own code may raise for a config or a use that it was not made for.
FOREIGN_ERRORS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError, ArithmeticError),
    StrictDataclassError,
)

# (with padding token, with mask), tried in turn: some families look for padding among ids or in masks, which are missing here.
_WAYS = ((True, False), (False, False), (False, True))


@dataclass(frozen=True)
class ModelTrace:
    """Structure of a transformers model, found by one trial pass. Names are those of its modules."""

    stack_name: str  # the list of layers, as in "model.layers"
    input_embedding: str  # the module that looks token ids up
    front: frozenset[str]  # modules with weights that run before the layers: embeddings, position tables
    back: frozenset[str]  # ... and after them: final norm, head
    tied: bool  # the head's matrix is the embedding's
    tuple_length: int  # number of values that a layer returns in a tuple; 0 if it returns the hidden states alone
    narrows: bool  # what follows the layers works on fewer positions than went in
    cache_shapes: tuple[tuple[tuple[int, int], ...], ...]  # per layer, (heads, dim) of each tensor cached per token
    state_shapes: tuple[tuple[tuple[int, ...], ...], ...]  # per layer, the shape of each state of one row
    calls: (
        Calls | None
    )  # of layers that hand each other more than hidden states, or keep caches that are not known here
    state_keys: tuple[tuple[StateKey, ...], ...]  # ... and which states these are


ONE_AT_A_TIME = threading.RLock()  # building a model sets switches of transformers that the whole process shares


def build_on_meta(model_class: type[Any], config: Any) -> Any:
    """Build the model without weights, on the meta device. Raises CheckpointError if its class refuses the config."""
    try:
        with ONE_AT_A_TIME, torch.device("meta"), no_init_weights():
            return model_class(config).eval()
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{model_class.__name__} cannot be built from this config: {error}; correct config.json"
        ) from error


_traces: dict[tuple[type[Any], str], ModelTrace] = {}  # a trace takes a tenth of a second and depends only on the key


def trace_model(model_class: type[Any], config: Any) -> ModelTrace:
    """Return the anatomy of a model, from a cache if it was traced before.

    Raises CheckpointError if the model has no list of layers that pass hidden states on and keep a KV cache.
    """
    key = model_class, config.to_json_string()
    if key not in _traces:
        config, found, again, first_error = copy.deepcopy(config), None, None, None
        for has_padding_token, has_mask in _WAYS:
            try:
                if not has_padding_token:
                    config.pad_token_id = None
                model = build_on_meta(model_class, config)
                again = again or trace_again(model_class, config, model)
                found = _trace_model(model_class, config, model, has_mask)
                break
            except _UnsharedHeads:
                raise
            except (CheckpointError, StrictDataclassError) as error:
                first_error = first_error or error
        if again is not None and (found is None or not (again.calls and again.calls.is_plain(config.hidden_size))):
            found = trace_again(model_class, config, with_cache=True) or again
        if found is None:
            raise CheckpointError(str(first_error)) from first_error
        _traces[key] = found
    return _traces[key]


def trace_again(
    model_class: type[Any], config: Any, model: Any = None, *, with_cache: bool = False
) -> ModelTrace | None:
    """Return the anatomy of a `model` on the meta device (None: it is built) whose calls are followed: with the family's caches, or
    with the inputs of each call's positions in their place. None if that cannot be done."""
    recorder = _Recorder(has_mask=False)
    try:
        model = build_on_meta(model_class, config) if model is None else model
        calls = trace_calls(model, recorder, **({CACHE_ARGUMENT: recorder} if with_cache else {}))
    except (CallsUnknown, CheckpointError, *FOREIGN_ERRORS):
        return None
    count = len(calls.layers)
    names = {id(module): name for name, module in model.named_modules()}
    kept: list[tuple[Any, ...]] = [(((1, calls.width),), (), ())] * count
    if calls.cached is not None:
        by_call = ([recorder.kept_by(layer) for layer in sorted(layers)] for layers in calls.cached)
        kept = [tuple(sum((some[part] for some in parts), ()) for part in range(3)) for parts in by_call]
    shapes, states, keys = zip(*kept, strict=True)
    return ModelTrace(
        stack_name=calls.layers[0][0].rpartition(".")[0],
        input_embedding=names[id(model.get_input_embeddings())],
        front=calls.embedding,
        back=calls.head,
        tied=bool(getattr(config, "tie_word_embeddings", False) and model.all_tied_weights_keys),
        tuple_length=0,
        narrows=False,
        cache_shapes=shapes,
        state_shapes=states,
        calls=calls,
        state_keys=keys,
    )


def _trace_model(model_class: type[Any], config: Any, model: Any, has_mask: bool) -> ModelTrace:
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.config._attn_implementation = TRACED
    model.config._experts_implementation = TRACED
    stack_name = _find_stack(model, config.num_hidden_layers)
    layers = list(model.get_submodule(stack_name))
    recorder = _Recorder(has_mask)
    probes = {number: _Probe(layer, number, recorder) for number, layer in enumerate(layers)}
    stack = Stack(probes, total=len(layers), tuple_length=0)
    stack.select(0, len(layers))
    model.set_submodule(stack_name, stack)
    front, back = _run(model, stack, stack_name, recorder)
    names = {id(module): name for name, module in model.named_modules()}
    kept = (recorder.kept.get(number, ((), (), ())) for number in range(len(layers)))
    shapes, states, keys = zip(*kept, strict=True)
    _check_layers(model_class, config, shapes, states)
    narrows = True  # unless the modules behind the layers need all positions: some restore the shape of the input
    try:
        _pass(model, stack, recorder, keep_last=1)
        _pass(model, stack, recorder, keep_last=0)
    except FOREIGN_ERRORS:
        narrows = False
    return ModelTrace(
        stack_name=stack_name,
        input_embedding=names[id(model.get_input_embeddings())],
        front=frozenset(front),
        back=frozenset(back),
        tied=bool(getattr(config, "tie_word_embeddings", False) and model.all_tied_weights_keys),
        tuple_length=recorder.tuple_length,
        narrows=narrows,
        cache_shapes=shapes,
        state_shapes=states,
        calls=None,
        state_keys=keys,
    )


def _check_layers(model_class: type[Any], config: Any, shapes: Sequence[Any], states: Sequence[Any]) -> None:
    """Raise CheckpointError if a layer keeps neither a KV cache nor a state and is not of a kind without them, or if `layer_types`
    is too short."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(shapes)
    if len(kinds) < len(shapes):
        raise CheckpointError(
            f"{model_class.__name__}: layer_types names {len(kinds)} layers, the model has {len(shapes)}; correct config.json"
        )
    for layer, (kind, kept, state) in enumerate(zip(kinds, shapes, states, strict=False)):
        if not kept and not state and kind not in STATELESS_LAYERS:
            raise CheckpointError(
                f"{model_class.__name__}: layer {layer} keeps no KV cache and no recurrent state of its own that can be "
                "followed, so the model cannot be split; choose another model"
            )


def _find_stack(model: nn.Module, layer_count: int) -> str:
    """Return the name of the list of all layers: the one with most parameters if several have its length.

    Raises CheckpointError if there is none.
    """
    found = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layer_count and not is_of_other_media(f"{name}.")
    ]
    if not found:
        raise CheckpointError(
            f"{type(model).__name__} has no list of its {layer_count} layers: it cannot be split; choose another model"
        )
    name: str = max(found)[1]
    return name


def _run(model: Any, stack: Stack, stack_name: str, recorder: _Recorder) -> tuple[list[str], list[str]]:
    """Run a pass on the meta device. Returns the modules with weights called before and after the layers.

    Raises CheckpointError if the model's code fails.
    """
    front: list[str] = []
    back: list[str] = []

    def watch(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda *_: (back if stack.leaving_BTH is not None else front).append(name))

    outside = (item for item in model.named_modules() if not item[0].startswith(stack_name))
    handles = [watch(name, module) for name, module in outside if any(True for _ in module.parameters(recurse=False))]
    try:
        _pass(model, stack, recorder)
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{type(model).__name__} cannot be looked into without weights: {error}; choose another model"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return front, back


def check_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Raise ValueError if attention is not defined for queries (B, H, T, D), keys (B, G, C, D) and values (B, G, C, W).

    ggml asserts all of this, or divides by it, and ends the process.
    """
    heads, groups = query[1], key[1]
    if min(*query, *key, *value) < 1:
        raise ValueError(f"attention of queries {(*query,)} to keys {(*key,)} and values {(*value,)} has an empty side")
    if heads % groups:
        raise ValueError(
            f"{heads} attention heads (num_attention_heads) cannot share {groups} heads of keys and values "
            "(num_key_value_heads): the first must be a multiple of the second"
        )
    if (query[0], query[3]) != (key[0], key[3]) or (*key[:3],) != (*value[:3],):
        raise ValueError(
            f"attention of queries {(*query,)} to keys {(*key,)} and values {(*value,)} does not fit together"
        )


class _UnsharedHeads(CheckpointError):
    """Config whose attention heads cannot share the heads of keys and values: no way of computing it is left to try."""


def _traced_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return torch's attention. Raises CheckpointError if the config's heads do not fit together."""
    try:
        check_attention(query.shape, key.shape, value.shape)
    except ValueError as error:
        is_shared = bool(key.shape[1]) and not query.shape[1] % key.shape[1]
        kind = CheckpointError if is_shared else _UnsharedHeads  # torch knows more shapes than ggml, but not those
        raise kind(f"{type(module).__name__}: {error}; correct config.json") from None
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(TRACED, _traced_attention)
ALL_EXPERTS_FUNCTIONS.register(
    TRACED, lambda _module, hidden, *_, **__: torch.empty_like(hidden)
)  # states may follow them
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, sdpa_mask)


def _pass(model: Any, stack: Stack, recorder: _Recorder, keep_last: int = -1) -> None:
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        CACHE_ARGUMENT: recorder,
    }
    if recorder.has_mask:  # families use a mask of four dimensions unchanged
        inputs["attention_mask"] = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
        inputs["position_ids"] = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    suit_cache(recorder, type(model))
    with torch.inference_mode():
        stack.pass_through(lambda: model(**inputs, use_cache=True), None, keep_last=keep_last)


def suit_cache(cache: Any, model_class: type[Any]) -> None:
    """Let `cache` pass for the family's own class of caches, if the family accepts no other (MiniMax). Its methods stay."""
    module = sys.modules[model_class.__module__]
    own = next((each for name, each in vars(module).items() if name.endswith("Cache") and _is_own(each)), None)
    if own is not None and not isinstance(cache, own):
        cache.__class__ = type(type(cache).__name__, (type(cache), own), {})


def _is_own(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Cache) and hasattr(kind, "get_linear_cache")


class PassStates:
    """States of all rows of a cohort (sessions computed together), and the copies that the present pass changes.

    A family's code changes states in place. So a pass works on copies, which take the states' place only when the pass has
    succeeded, and only for the rows that it was for.
    """

    def __init__(self) -> None:
        self.committed: States = {}
        self.changed: States = {}
        self._is_first = True

    def begin(self, is_first: bool) -> None:
        """Begin a pass. What a failed pass left is forgotten. If `is_first`, the rows of the pass have no positions yet."""
        self.changed = {}
        self._is_first = is_first

    def has(self, layer: int) -> bool:
        """Return whether the pass has a state of this layer: of earlier positions, or of its own."""
        return any(key[0] == layer for key in (self.changed if self._is_first else {**self.committed, **self.changed}))

    def get(self, layer: int, kind: StateKey) -> Tensor | None:
        """Return the pass's own copy of a state; None if no position came before."""
        key = layer, kind
        if key not in self.changed and not self._is_first and key in self.committed:
            self.changed[key] = self.committed[key].clone()
        return self.changed.get(key)

    def set(self, layer: int, kind: StateKey, state: Tensor) -> Tensor:
        """Set the pass's state to `state`, in the dtype of the earlier one, and return it."""
        before = self.get(layer, kind)
        if before is not None and before.shape != state.shape:
            raise ValueError(
                f"layer {layer}: the {kind[0]} state has shape {(*before.shape,)}, and not {(*state.shape,)}"
            )
        if state is not before:
            # A part of a larger tensor would keep all of it in memory.
            own = state if before is None else state.to(before.dtype)
            is_part = own.untyped_storage().nbytes() > own.nbytes
            self.changed[layer, kind] = own.clone() if is_part or own is state else own
        return self.changed[layer, kind]

    def commit(self, rows: int, written: Sequence[slice]) -> None:
        """Let the pass's states count for the rows `written`. Other rows of all `rows` keep theirs."""
        is_whole = sum(part.stop - part.start for part in written) == rows
        for key, state in self.changed.items():
            if is_whole:
                self.committed[key] = state
                continue
            kept = self.committed.setdefault(key, torch.zeros_like(state))
            for part in written:
                kept[part] = state[part]
        self.changed = {}

    def copy_rows(self, rows: slice) -> States:
        """Return copies of the states of some rows."""
        return {key: state[rows].clone() for key, state in self.committed.items()}

    def put_rows(self, rows: slice, states: Mapping[LayerState, Tensor]) -> None:
        """Set the states of some rows."""
        for key, state in states.items():
            self.committed[key][rows] = state

    def reorder(self, rows: slice, order: Tensor) -> None:
        """Let row r of `rows` have the states of their row `order[r]`."""
        for state in self.committed.values():
            state[rows] = state[rows].index_select(0, order)

    def update_conv(self, new: Tensor, layer: int, index: int, size: int | None) -> Tensor:
        """Keep the last `size` columns of a convolution's inputs (rows, channels, T), and return them behind the earlier ones."""
        before = self.get(layer, (CONV, index))
        if before is None:
            size = size or new.shape[-1]
            whole = pad(new, (max(0, size - new.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, new], dim=-1)
        self.set(layer, (CONV, index), whole[..., whole.shape[-1] - size :])
        return whole


class StateCache:
    """Methods of transformers' caches for layers with recurrent states. `states` are those of the rows in the pass."""

    states: PassStates
    update: Callable[..., tuple[Tensor, Tensor]]

    def __len__(self) -> int:
        return 0

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's state in MiniMax's own cache; None if no position came before."""
        return self.states.get(layer_idx, (RECURRENT, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep a layer's state in MiniMax's own cache."""
        self.states.set(layer_idx, (RECURRENT, 0), linear_cache)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a layer's convolution; None if no position came before."""
        return self.states.get(layer_idx, (CONV, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Keep the last inputs (rows, channels, T) of a convolution, and return all behind the earlier ones."""
        return self.states.update_conv(conv_states, layer_idx, state_idx, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state; None if no position came before."""
        return self.states.get(layer_idx, (RECURRENT, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> Tensor:
        """Keep a layer's recurrent state, and return it."""
        return self.states.set(layer_idx, (RECURRENT, state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer, or any layer, has a state."""
        return any(
            map(self.states.has, [layer_idx] if layer_idx is not None else {key[0] for key in self.states.committed})
        )

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Keep the keys (rows, T, dim) by which a layer selects positions, and return all up to them. They are kept as keys of a
        layer with the number `~layer_idx`, with one number of each in the place of values."""
        keys = indexer_key_states[:, None]
        kept: Tensor = self.update(keys, keys[..., :1], ~layer_idx)[0][:, 0]
        return kept

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: a pass keeps only its newest states."""
        return False


class _Recorder(StateCache, Cache):
    """A cache that keeps only shapes, and other findings that the probes share."""

    def __init__(self, has_mask: bool) -> None:
        Cache.__init__(self, layers=[])
        self.states = PassStates()
        self.has_mask = has_mask
        self.shapes: dict[int, tuple[tuple[int, int], ...]] = {}
        self.places: CachePlaces = {}
        self.tuple_length = 0
        self.kept: dict[int, tuple[tuple[Any, ...], ...]] = {}  # by layer; see `kept_by`
        self.seen: dict[tuple[Any, ...], tuple[tuple[Any, ...], ...]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Record the number of heads and the head size of the keys and values of a layer."""
        self.shapes[layer_idx] = tuple((states.shape[1], states.shape[3]) for states in (key_states, value_states))
        for index, states in enumerate((key_states, value_states)):
            self.places.setdefault(id(states), (states, (layer_idx, index)))
        return key_states, value_states

    def filled(self) -> frozenset[int]:
        """Return the numbers of the layers that keep something; an indexer's keys count as their layer's."""
        return frozenset(max(layer, ~layer) for layer in (*self.shapes, *(layer for layer, _ in self.states.changed)))

    def kept_by(self, layer: int) -> tuple[tuple[Any, ...], ...]:
        """Return what a layer that ran keeps: (heads, dim) of its tensors per token, the shapes of one row's states, their keys."""
        states = {key: (*state.shape[1:],) for (of, key), state in self.states.changed.items() if of == layer}
        return (*self.shapes.get(layer, ()), *self.shapes.get(~layer, ())), (*states.values(),), (*states,)


class _Probe(nn.Module):
    """Wrapper that runs a layer for its shapes, once for all layers alike. Parts after attention may fail on meta (experts)."""

    def __init__(self, layer: nn.Module, number: int, recorder: _Recorder) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self.recorder = recorder
        self.signature = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, or the input in its place if the layer fails or a like one was run."""
        recorder = self.recorder
        if self.signature in recorder.seen:
            recorder.kept[self.number] = recorder.seen[self.signature]
            return unchanged(hidden_states, recorder.tuple_length)
        try:
            output = self.layer(hidden_states, *args, **kwargs)
            recorder.tuple_length = len(output) if isinstance(output, tuple) else 0
        except RuntimeError:
            output = unchanged(hidden_states, recorder.tuple_length)
        kept = recorder.kept_by(self.number)
        if any(kept):
            recorder.kept[self.number] = recorder.seen[self.signature] = kept
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)
