"""Models whose layers hand each other more than hidden states: what crosses between layers, found by one pass, and its way.

A family's forward calls its layers, and computes with what they returned. In a span of units the family's own forward runs as it
is, and only the calls of other machines are left out. A call that is left out returns what it returned on the machine that ran it,
if the forward still needs that, else zeros. So residual streams, embeddings that layers read again, keys and values that layers
share, layers that run several times, and sums between layers need no code here.

A *call* is one run of a layer, in the order of a pass. The units of such a model are the embedding, each call, and the head. *Live*
at a boundary is a tensor that an earlier call or the embedding returned, and that the family's code reads behind the boundary. The
live tensors of a position cross side by side (`pack`); the model's width is that of the widest boundary.

Where the family's code keeps all that its layers need of earlier positions in the cache that it is given, a pass is over new
positions alone. Keys and values that a later layer reads are live, too: their new positions cross, and the machine behind the
boundary caches them under the number of the layer that made them. Of other models a session keeps the inputs of its positions,
and each pass computes them again.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

ROWS, POSITIONS = 3, 7  # of the traced pass: their places in a shape tell which sizes depend on them
ID_BITS = 24  # a whole number crosses as so many signs, which any codec keeps
PLACES = ("idx", "index", "layer_id")  # in names of attributes that number a layer
SMALL_LIST = 0.1  # of the parameters of the largest list of modules: a smaller list is no list of layers

Source = tuple[str, int]
"""Call of a module: its name, and its number among the calls of that name"""
IDS: Source = ("", 0)
"""Token ids, which some layers read"""
Sources = frozenset[tuple[Source, int]]
"""Tensors that calls returned: the call, and the number among the tensors of its result"""
NO_VALUES = frozenset({"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like"})
"""Names of torch's functions whose results have no values of their arguments"""
ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: True if x.dtype == torch.bool else POSITIONS if not x.is_floating_point() else 1.0,
    "__bool__": lambda _: True,
    "__contains__": lambda _: False,
    "__int__": lambda _: POSITIONS,
    "__index__": lambda _: POSITIONS,
    "__float__": lambda _: 1.0,
    "nonzero": lambda x: x.new_empty(0, x.dim(), dtype=torch.int64),
    "tolist": lambda x: torch.zeros(x.shape, dtype=x.dtype).tolist(),
}
"""Values of tensors that have none, as families' code asks for them: of masks and of chosen experts"""
OF_THE_FIRST = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Names of torch's functions whose results have the values of their first argument alone"""


@dataclass(frozen=True)
class LiveTensor:
    """Tensor that is live at a boundary: the call that returned it, its number among the tensors of the result, and its sizes.

    `rows` and `positions` are the dimensions of these sizes; `others` are the other sizes, in order. `cached` is the place in the
    pass's cache that returned the tensor, which then holds earlier positions, too: a layer's number there, and 0 for its keys or 1
    for its values.
    """

    source: Source
    number: int
    rows: int
    positions: int
    others: tuple[int, ...]
    streams: int  # behind each other in the dimension of positions; several count as a dimension before it
    is_whole: bool  # whole numbers or truth values
    cached: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Numbers of a position that cross."""
        return prod(self.others) * (ID_BITS if self.is_whole else 1)


@dataclass(frozen=True)
class Result:
    """Shape of what a call returns, and of the entries that it writes into tables among its arguments.

    `leaves` are tensors on the meta device, or other values, which are returned as they are.
    """

    leaves: tuple[Any, ...]
    tree: TreeSpec


@dataclass(frozen=True)
class Calls:
    """Calls of a model's layers, in order, and what crosses between them.

    `embedding` names the modules that only the first unit runs, `head` those that only the last one runs. All other modules
    outside the layers belong to each unit. `live` are the tensors that cross at each boundary; at boundary N that is after call N.
    """

    layers: tuple[Source, ...]
    embedding: frozenset[str]
    head: frozenset[str]
    results: dict[Source, Result]
    live: tuple[tuple[LiveTensor, ...], ...]
    tied: dict[str, str]  # parameters of layers that are others'
    cached: tuple[frozenset[int], ...] | None  # by call, the layers whose caches it fills; None: without a cache

    def held(self, first: int, end: int) -> frozenset[str]:
        """Return the names of the layers that calls [first, end) run."""
        return frozenset(name for name, _ in self.layers[first:end])

    def calls_of(self, tensor: str) -> list[int]:
        """Return the numbers of the calls that need a tensor, by its name in a checkpoint: those of its layer, and of layers with a
        parameter that is tied to it."""
        own = {tensor, *(target for target, source in self.tied.items() if is_one_of(tensor, [source]))}
        return [
            number
            for number, (name, _) in enumerate(self.layers)
            if any(is_one_of(found.group(1), [name]) for each in own if (found := _NUMBERED.match(each)))
        ]

    @property
    def width(self) -> int:
        """Numbers of a position that cross the widest boundary."""
        return max(sum(place.width for place in places) for places in self.live)

    @property
    def names(self) -> frozenset[str]:
        """Names of the layers."""
        return frozenset(name for name, _ in self.layers)

    def received(self, first: int) -> dict[int, list[tuple[int, int]]]:
        """Return the caches that calls from `first` on need of earlier calls: (heads, dim) of keys and of values, by the number of
        the layer; empty for a model without a cache."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place in self.live[first]:
            if place.cached is not None:
                heads, dim = place.others
                found.setdefault(place.cached[0], [(heads, 1), (heads, 1)])[place.cached[1]] = heads, dim
        return found

    @property
    def has_own_caches(self) -> bool:
        """Whether each call fills the cache of the layer of its own number alone, or none."""
        return self.cached is not None and all(some <= {number} for number, some in enumerate(self.cached))

    def is_plain(self, hidden: int) -> bool:
        """Return whether each layer runs once, and only `hidden` numbers of a position cross between layers. Positions that an
        indexer chose do not count: most layers choose their own."""
        widths = {sum(place.width for place in places if not place.is_whole) for places in self.live[1:]}
        return widths == {hidden} and len(self.names) == len(self.layers)


_NUMBERED = re.compile(r"(.*?\.?\d+)\.")


_OF_OTHER_MEDIA = re.compile(r"(?:^|\.)(?:vision|visual|audio|image|multi_modal)\w*\.")


def is_of_other_media(name: str) -> bool:
    """Return whether a tensor, or a module if a dot follows its name, is for images or sound."""
    return _OF_OTHER_MEDIA.search(name) is not None


def is_one_of(module: str, names: Iterable[str]) -> bool:
    """Return whether a module's name is one of `names`, if either may lack the beginning of the other."""
    return any(module == name or name.endswith("." + module) or module.endswith("." + name) for name in names)


class CallsUnknown(Exception):
    """The calls of a model's layers cannot be followed."""


class _Sources(TorchFunctionMode):
    """Mode that follows which calls' results a tensor was computed from, between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.follows = True  # between calls
        self.known: dict[int, tuple[Tensor, Sources]] = {}  # with the tensor, so that no other gets its id

    def of(self, values: Any) -> Sources:
        """Return the sources of all tensors in a nested value."""
        found = (self.known.get(id(leaf)) for leaf in _leaves(values))
        return frozenset[Any]().union(*(each[1] for each in found if each is not None))

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ANSWERS and isinstance(args[0], Tensor) and args[0].is_meta:
            return ANSWERS[name](args[0])
        result = function(*args, **(kwargs or {}))
        if name in NO_VALUES or not self.follows:
            return result
        sources = self.of(args[:1] if name in OF_THE_FIRST else (args, kwargs))
        if sources:
            changed = args[:1] if name == "__setitem__" else ()
            for leaf in (*_leaves(result), *_leaves(changed)):
                if leaf.numel():
                    self.known[id(leaf)] = leaf, self.of(leaf) | sources
        return result


def _leaves(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _tables(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tables (dictionaries of any class) among the arguments of a call."""
    return [each for each in (*args, *kwargs.values()) if hasattr(each, "keys") and hasattr(each, "__setitem__")]


def _call(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[dict[Any, Any]]]:
    """Return the result of a call, and the entries that it wrote into each table among its arguments."""
    tables = _tables(args, kwargs)
    before = [{key: id(value) for key, value in table.items()} for table in tables]
    result = forward(*args, **kwargs)
    return result, [
        {key: value for key, value in table.items() if old.get(key) != id(value)}
        for table, old in zip(tables, before, strict=True)
    ]


def _repeat(like: Result, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[dict[Any, Any]]]:
    """Return the result of a traced call, and what it wrote into tables, as that of another call with these arguments."""
    leaves = [leaf.new_empty(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in like.leaves]
    return _fill(leaves, like.tree, args, kwargs)


def _fill(
    leaves: Sequence[Any], tree: TreeSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[dict[Any, Any]]]:
    """Return a call's result that has these leaves, and the entries that it writes into the tables among the arguments."""
    result, written = tree_unflatten(list(leaves), tree)
    for table, entries in zip(_tables(args, kwargs), written, strict=True):
        table.update(entries)
    return result, written


def find_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's layers: the modules in its outermost lists, except lists with few parameters."""
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) and not is_of_other_media(f"{name}.")
        if is_list and not any(name.startswith(f"{each}.") for each in lists):
            lists[name] = sum(parameter.numel() for parameter in module.parameters())
    least = SMALL_LIST * max(lists.values(), default=0)
    return [
        f"{name}.{number}"
        for name, size in lists.items()
        if size >= least
        for number in range(len(model.get_submodule(name)))  # type: ignore[arg-type]
    ]


CachePlaces = dict[int, tuple[Tensor, tuple[int, int]]]
"""Tensors that a cache returned, by their ids, each with the number of its layer, and 0 for keys or 1 for values"""


class CacheRecord(Protocol):
    """Cache of a traced pass."""

    places: CachePlaces

    def filled(self) -> frozenset[int]:
        """Return the numbers of the layers that keep something."""


def trace_calls(model: Any, record: CacheRecord, **inputs: Any) -> Calls:
    """Return the calls of a model on the meta device, from one pass with `record` as the cache among `inputs`, or without a cache
    if there are no `inputs`.

    Raises CallsUnknown if no layer runs, a tensor crosses without a row and a position, or the cache is filled between layers or
    not at all, and any error of the model's code.
    """
    names = find_layers(model)
    mode, counts = _Sources(), Counter[str]()
    order: list[Source] = []
    results: dict[Source, Result] = {}
    seen: dict[Any, Result] = {}  # like calls are made once
    reads: list[Sources] = []  # by call: what the family's code hands to it
    times: dict[str, set[int]] = {}  # of modules outside: numbers of calls before them
    constant: set[str] = set()  # modules outside that depend on no id
    cached: list[frozenset[int]] = []

    def watched(name: str, forward: Callable[..., Any], is_layer: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            source = name, counts[name]
            counts[name] += 1
            handed = mode.of((args, kwargs, [dict(table) for table in _tables(args, kwargs)]))
            if not is_layer:
                times.setdefault(name, set()).add(len(order))
                constant.update([name] if not handed else [])
                if order or not handed:
                    return forward(*args, **kwargs)
            else:
                order.append(source)
                reads.append(handed)
            mode.follows = False
            like = None if not is_layer else source if inputs else _likeness(model.get_submodule(name), args, kwargs)
            before = record.filled()
            try:
                result, written = (
                    _call(forward, args, kwargs) if like not in seen else _repeat(seen[like], args, kwargs)
                )
            except RuntimeError:  # experts that want real numbers
                result, written = next(_leaves((args, kwargs))).clone(), [{} for _ in _tables(args, kwargs)]
            finally:
                mode.follows = True
            leaves, tree = tree_flatten((result, written))
            results[source] = Result(tuple(leaves), tree)
            if is_layer:
                seen[like] = results[source]
                cached.append(record.filled() - before)
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    mode.known[id(leaf)] = leaf, frozenset([(source, number)])
            return result

        return call

    experts = model.config._experts_implementation
    model.config._experts_implementation = "eager"  # others want real numbers
    modules = [(model.get_submodule(name), name) for name in (*names, *_outside(model, names))]
    ids_BT = torch.zeros(ROWS, POSITIONS, dtype=torch.int64, device="meta")
    mode.known[id(ids_BT)] = ids_BT, frozenset([(IDS, 0)])
    results[IDS] = Result((ids_BT,), tree_flatten(ids_BT)[1])
    for number, (module, name) in enumerate(modules):
        module.forward = watched(name, module.forward, number < len(names))
    try:
        with torch.inference_mode(), mode:
            output = model(input_ids=ids_BT, use_cache=bool(inputs), **inputs)
    finally:
        model.config._experts_implementation = experts
        for module, _ in modules:
            del module.forward
    if not order or (inputs and (not any(cached) or record.filled() - frozenset[int]().union(*cached))):
        raise CallsUnknown("no layer of its lists runs, or they do not fill the cache that they are given")
    reads.append(mode.of(output.logits))
    return Calls(
        layers=tuple(order),
        embedding=frozenset(name for name, at in times.items() if at == {0}) - constant,
        head=frozenset(name for name, at in times.items() if at == {len(order)}),
        results=results,
        live=_live(order, reads, results, record.places),
        tied=_tied_layers(model, names),
        cached=tuple(cached) if inputs else None,
    )


def _live(
    order: Sequence[Source], reads: Sequence[Sources], results: dict[Source, Result], cached: CachePlaces
) -> tuple[tuple[LiveTensor, ...], ...]:
    """Return the tensors that cross before each call, and behind the last one. `reads` are what each call and the head read."""
    numbers = {source: number for number, source in enumerate(order)}
    live: list[tuple[LiveTensor, ...]] = []
    for boundary in range(len(order) + 1):
        needed = frozenset[tuple[Source, int]]().union(*reads[boundary:])
        crossing = sorted(
            (numbers.get(source, -1), source, leaf) for source, leaf in needed if numbers.get(source, -1) < boundary
        )
        # The hidden states of the call before lead.
        live.append(tuple(_place(source, leaf, results[source], cached) for _, source, leaf in reversed(crossing)))
    return tuple(live)


def _outside(model: Any, names: Sequence[str]) -> list[str]:
    """Return the names of the modules with weights of their own that are not in the layers `names`, nor hold them."""
    inside = tuple(f"{name}." for name in names)
    return [
        name
        for name, module in model.named_modules()
        if name not in names
        and not name.startswith(inside)
        and not any(each.startswith(f"{name}." if name else "") for each in names)
        and next(module.parameters(recurse=False), None) is not None
    ]


def _tied_layers(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the parameters of the layers `names` that are tied to another layer's, and that one."""
    inside, tied = tuple(f"{name}." for name in names), model.all_tied_weights_keys
    return {name: other for name, other in tied.items() if name.startswith(inside) and other.startswith(inside)}


def _likeness(layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a key of what a layer does with arguments of these shapes: layers with the same key return the same shapes."""
    settings = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not any(word in key for word in PLACES)
    )
    leaves, tree = tree_flatten((args, kwargs, [dict(table) for table in _tables(args, kwargs)]))
    told = tuple(tuple(each.shape) if isinstance(each, Tensor) else str(type(each)) for each in leaves)
    numbers = tuple(each for each in leaves if isinstance(each, (bool, int, float, str)))
    return settings, tuple(tuple(each.shape) for each in layer.parameters()), told, numbers, str(tree)


def _place(source: Source, number: int, result: Result, cached: CachePlaces) -> LiveTensor:
    leaf = result.leaves[number]
    sizes = list(leaf.shape)
    if id(leaf) in cached:
        return LiveTensor(source, number, 0, 2, (sizes[1], sizes[3]), 1, False, cached[id(leaf)][1])
    rows, positions = _dimensions(sizes)
    if rows is None or positions is None:
        raise CallsUnknown(f"{source[0]} returns a tensor of {(*sizes,)} that has no row and position of its own")
    streams = sizes[positions] // POSITIONS
    if streams > 1:
        sizes[positions : positions + 1] = streams, POSITIONS
        rows, positions = rows + (rows > positions), positions + 1
    others = tuple(size for at, size in enumerate(sizes) if at not in (rows, positions))
    return LiveTensor(source, number, rows, positions, others, streams, not leaf.is_floating_point())


def _dimensions(sizes: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the dimensions of rows and of positions in the sizes of a traced tensor; None for one that it lacks."""
    rows = next((at for at, size in enumerate(sizes) if size == ROWS), None)
    whole = [at for at, size in enumerate(sizes) if size == POSITIONS]
    several = [at for at, size in enumerate(sizes) if size and size % POSITIONS == 0 and at > 0]
    return rows, next(iter([*whole, *several]), None)


class _Left(BaseException):
    """The last call of a range of units has returned. The family's forward is left here, whatever errors it handles."""


class LeftOut(nn.Module):
    """Stand-in for a module that is not held. The family's code may read the attributes of the missing one, without its weights."""

    def __init__(self, missing: nn.Module) -> None:
        super().__init__()
        self.__dict__["missing"] = missing.to("meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["missing"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError: calls of the module are left out."""
        raise RuntimeError("a module of another machine was called")


class Carrier:
    """Passes of some units through a family's own forward, in a model that holds the modules of these units at least.

    `start` and `end` are the units of the present pass.
    """

    def __init__(self, model: Any, calls: Calls) -> None:
        self._model = model
        self._calls = calls
        self._numbers = {source: number for number, source in enumerate(calls.layers)}
        self._is_passing = False
        self._start = self._end = 0
        self._has_head = False
        self._counts = Counter[str]()
        self._returned: dict[tuple[Source, int], Tensor] = {}  # live tensors
        self._wanted: set[tuple[Source, int]] = set()
        self._sizes = 0, 0
        watched = calls.names | calls.embedding | calls.head | {name for name, _ in calls.results if name}
        for name in sorted(watched):
            module = model.get_submodule(name)
            module.forward = self._call(name, module.forward)
        self._takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters

    def _call(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_passing:
                return forward(*args, **kwargs)
            source = name, self._counts[name]
            self._counts[name] += 1
            number = self._numbers.get(source)
            if (number is not None and number >= self._end) or (name in self._calls.head and not self._has_head):
                raise _Left
            result = self._calls.results.get(source)
            if result is None:
                return forward(*args, **kwargs)
            if self._start > 0 and (number is None or number < self._start - 1):
                given = tuple(self._given(source, at, leaf) for at, leaf in enumerate(result.leaves))
                return _fill(given, result.tree, args, kwargs)[0]
            output, written = _call(forward, args, kwargs)
            self._note(source, (output, written))
            return output

        return call

    def _note(self, source: Source, values: Any) -> None:
        for at, leaf in enumerate(tree_leaves(values)):
            if (source, at) in self._wanted:
                self._returned[source, at] = leaf.clone()  # the family's code may change it

    def _given(self, source: Source, at: int, leaf: Any) -> Any:
        """Return a tensor of a call that is left out: as it came, or zeros."""
        if not isinstance(leaf, Tensor):
            return leaf
        if (source, at) in self._returned:
            return self._returned[source, at].clone()
        sizes, (rows, positions) = list(leaf.shape), _dimensions(leaf.shape)
        if rows is not None:
            sizes[rows] = self._sizes[0]
        if positions is not None:
            sizes[positions] = sizes[positions] // POSITIONS * self._sizes[1]
        dtype = self._model.dtype if leaf.is_floating_point() else leaf.dtype
        return torch.zeros(sizes, dtype=dtype, device=self._model.device)

    def run(self, x: Tensor, start: int, end: int, keep_last: int, cache: Any = None, inputs: Any = None) -> Tensor:
        """Run units [start, end) on positions of some rows: ids_BT if `start` is 0, else packed_BTW. Without a cache they are the
        first ones, else those behind the positions of `cache`. `inputs` are those of the family's forward besides token ids.

        Returns logits of the last `keep_last` positions (-1: of all) if the range has the head, else what crosses, packed.
        """
        calls, count = self._calls, len(self._calls.layers)
        self._start, self._end, self._has_head = start, min(end - 1, count), end == count + 2
        self._sizes = x.shape[0], x.shape[1]
        self._counts.clear()
        leaving = () if self._has_head else calls.live[self._end]
        self._wanted = {(place.source, place.number) for place in leaving}
        self._returned = {} if start == 0 else unpack(x, calls.live[start - 1])
        for layer in calls.received(start - 1) if start > 0 and cache is not None else ():
            held = {
                place: place.cached[1] for place in calls.live[start - 1] if place.cached and place.cached[0] == layer
            }
            new = {index: self._returned[place.source, place.number] for place, index in held.items()}
            other = next(iter(new.values()))[..., :1]  # stands in for keys or values that no layer reads
            whole = cache.update(new.get(0, other), new.get(1, other), layer)
            self._returned |= {(place.source, place.number): whole[index] for place, index in held.items()}
        ids_BT = x if start == 0 else self._returned.get((IDS, 0))
        if ids_BT is None:
            ids_BT = torch.zeros(self._sizes, dtype=torch.int64, device=x.device)
        self._returned[IDS, 0] = ids_BT
        options: dict[str, Any] = dict(inputs or {"use_cache": False})
        if self._takes_count and self._has_head and keep_last > 0:
            # With a number, Gemma 4 leaves out other positions before some layers, of which this machine may run only the last.
            options["logits_to_keep"] = torch.arange(max(0, x.shape[1] - keep_last), x.shape[1], device=x.device)
        self._is_passing = True
        try:
            logits_BTV: Tensor = self._model(input_ids=ids_BT, **options).logits
            return logits_BTV[:, -keep_last:] if keep_last > 0 else logits_BTV
        except _Left:
            crossing = {place: self._returned[place.source, place.number] for place in leaving}
            sent = (each[:, :, -x.shape[1] :] if place.cached else each for place, each in crossing.items())
            return pack(sent, leaving, calls.width)
        finally:
            self._is_passing = False
            self._returned = {}


def pack(tensors: Iterable[Tensor], places: Sequence[LiveTensor], width: int) -> Tensor:
    """Return live tensors side by side as packed_BTW, behind them zeros up to `width`.

    A whole number becomes the signs of its bits, as large as the largest number of its position, so that a codec keeps them.
    """
    parts: list[Tensor] = []
    whole: list[Tensor] = []
    for tensor, place in zip(tensors, places, strict=True):
        if place.streams > 1:
            tensor = tensor.unflatten(place.positions - 1, (place.streams, -1))
        rest = [at for at in range(tensor.dim()) if at not in (place.rows, place.positions)]
        for at, size in zip(
            rest, place.others, strict=True
        ):  # a short text may choose fewer positions: its last one again
            tensor = tensor.index_select(at, torch.arange(size, device=tensor.device).clamp(max=tensor.shape[at] - 1))
        part_BTX = tensor.permute(place.rows, place.positions, *rest)
        (whole if place.is_whole else parts).append(part_BTX.reshape(*part_BTX.shape[:2], -1))
    packed_BTW = torch.cat(parts, -1)
    if whole:
        bits = torch.arange(ID_BITS, device=packed_BTW.device)
        signs_BTE = (torch.cat([each.long() for each in whole], -1).unsqueeze(-1) >> bits & 1).flatten(2) * 2 - 1
        largest_BT1 = packed_BTW.abs().amax(-1, keepdim=True).clamp(min=1)
        packed_BTW = torch.cat([packed_BTW, signs_BTE * largest_BT1], -1)
    return nn.functional.pad(packed_BTW, (0, width - packed_BTW.shape[-1]))


def unpack(packed_BTW: Tensor, places: Sequence[LiveTensor]) -> dict[tuple[Source, int], Tensor]:
    """Return the live tensors of packed_BTW by their places; see `pack`."""
    found: dict[tuple[Source, int], Tensor] = {}
    at = 0
    for place in sorted(places, key=lambda each: each.is_whole):
        part_BTE = packed_BTW[..., at : at + place.width]
        at += place.width
        if place.is_whole:
            bits = torch.arange(ID_BITS, device=part_BTE.device)
            part_BTE = ((part_BTE.unflatten(-1, (-1, ID_BITS)) > 0).long() << bits).sum(-1)
        tensor = part_BTE.reshape(*part_BTE.shape[:2], *place.others)
        rest = iter(range(2, tensor.dim()))
        order = [0 if at == place.rows else 1 if at == place.positions else next(rest) for at in range(tensor.dim())]
        tensor = tensor.permute(order)
        found[place.source, place.number] = (
            tensor if place.streams == 1 else tensor.flatten(place.positions - 1, place.positions)
        )
    return found
