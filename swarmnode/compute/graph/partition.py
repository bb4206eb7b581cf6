"""Partition: the cuts of a graph into units, and of a chain of units into stages of equal time.

A good place to cut is crossed by few bytes, compared with the places around it. Among good places the cuts are chosen that the
fewest bytes cross in all, while no unit has more than a small share of the time or of the weights. Equal graphs are cut alike, on
any machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from swarmnode.compress.codecs import DTYPE_OF
from swarmnode.compute.graph.boundary import constant_values, value_types, wire_dtype
from swarmnode.compute.graph.costs.estimate import estimate_nodes, reference_seconds, type_bytes
from swarmnode.compute.graph.graph import BUFFER, PARAMETER, Graph, Ref
from swarmnode.compute.graph.label_count import label_means

UNITS = 64
"""No unit shall have more than 1 / UNITS of the time or of the weights, if there is a good place to cut."""

_NEIGHBOURHOOD = 1 / 16  # of the time, on either side of a place
_SLACK = 1.1  # a good place is crossed by at most this multiple of the bytes of the best one around
_CRUMB = 1 / 4  # of the largest share: a piece below it, in time and in weights, is no unit of its own
_FAR = 0.5  # of the time: users of a weight further apart than this let it be shared by the first and the last unit


@dataclass(frozen=True)
class Partition:
    """Graph cut into pieces that peers can hold, and remarks about the cuts for the person who creates the swarm."""

    graph: Graph
    remarks: tuple[str, ...]


def partition(graph: Graph, units: int = UNITS) -> Partition:
    """Cut a graph into pieces of at most about 1 / `units` of its time and weights each, and return it with remarks.

    The last piece computes all means over labels, since it receives their shares.
    """
    # Means over labels, and the nodes that depend on them, move to the end.
    moved = {mean.node.name for mean in label_means(graph)}
    for node in graph.nodes:
        if any(ref.name in moved for ref in node.refs()):
            moved.add(node.name)
    first = [node for node in graph.nodes if node.name not in moved]
    last = [node for node in graph.nodes if node.name in moved]
    graph, sums = msgspec.structs.replace(graph, nodes=(*first, *last)), len(first)
    batch = graph.batch
    seconds = [0.0, *accumulate(reference_seconds(estimate_nodes(graph, batch).values()))]
    # The bytes of the parameters that each node is the first to use.
    sizes = {weight.name: type_bytes(weight.type, 1) for weight in graph.weights if weight.kind == PARAMETER}
    new = (sum(sizes.pop(ref.name, 0) for ref in node.refs()) for node in graph.nodes)
    weights = [0.0, *accumulate(new)]
    crossing = crossing_bytes(graph)
    closed, remarks = _closed_places(graph, seconds)
    closed |= _places_that_no_frame_crosses(graph) | set(range(sums + 1, len(graph.nodes)))
    good = _good_places(crossing, seconds, closed)
    places = _without_crumbs([0, *good, len(graph.nodes)], crossing, [seconds, weights], _CRUMB / units)
    cuts = _choose(places, crossing, [seconds, weights], 1 / units)
    return Partition(msgspec.structs.replace(graph, cuts=tuple(cuts)), tuple(remarks))


def crossing_bytes(graph: Graph) -> list[int]:
    """Return for every place k, between nodes k - 1 and k, the bytes of values that exist before it and are needed after it.

    Labels count, too, although they go straight to the last unit: they add the same everywhere.
    """
    constants = constant_values(graph)
    made = {Ref(item.name): 0 for item in graph.inputs}
    types = {Ref(item.name): item.type for item in graph.inputs} | value_types(graph.nodes)
    last: dict[Ref, int] = {}
    number_of = {node.name: number for number, node in enumerate(graph.nodes)}
    for ref in types:
        if ref.name in number_of and ref.name not in constants:
            made[ref] = number_of[ref.name] + 1
    for number, node in enumerate(graph.nodes):
        last.update(dict.fromkeys((ref for ref in node.refs() if ref in made), number))
    last.update(dict.fromkeys((ref for ref in graph.results if ref in made), len(graph.nodes)))
    change = [0] * (len(graph.nodes) + 2)
    for ref, end in last.items():
        size = type_bytes(types[ref], graph.batch)
        change[made[ref]] += size
        change[end + 1] -= size
    return list(accumulate(change))[: len(graph.nodes) + 1]


def balance(
    seconds: Sequence[float], boundary_bytes: Sequence[int], stages: int, bytes_per_s: float = 1e9
) -> list[int]:
    """Return the units at which the stages after the first begin, such that the slowest stage is as fast as possible.

    A stage takes its units' time, and the time to send the values that enter it. Raises ValueError if there are fewer units than
    stages.
    """
    units = len(seconds)
    if not 0 < stages <= units:
        raise ValueError(f"{units} layers cannot be cut into {stages} stages")
    before = [0.0, *accumulate(seconds)]

    def time(start: int, end: int) -> float:
        return before[end] - before[start] + (boundary_bytes[start] / bytes_per_s if start else 0.0)

    never = (float("inf"), ())
    best: list[tuple[float, tuple[int, ...]]] = [(time(0, end), ()) for end in range(units + 1)]
    for stage in range(1, stages):
        best = [
            min(
                ((max(best[start][0], time(start, end)), (*best[start][1], start)) for start in range(stage, end)),
                default=never,
            )
            for end in range(units + 1)
        ]
    return list(best[units][1])


def _closed_places(graph: Graph, seconds: list[float]) -> tuple[set[int], list[str]]:
    """Return the places that no cut may take, and remarks for the founder.

    A trained weight or a buffer must be used within one unit; a trained weight may also be shared by the first and the last.
    """
    held = {weight.name: weight for weight in graph.weights if weight.trained or weight.kind == BUFFER}
    users: dict[str, list[int]] = {name: [] for name in held}
    number_of = {node.name: number for number, node in enumerate(graph.nodes)}
    for number, node in enumerate(graph.nodes):
        for ref in node.refs():
            if ref.name in held and (not users[ref.name] or users[ref.name][-1] != number):
                users[ref.name].append(number)
    for move in graph.moves:
        users[move.buffer] = sorted({*users[move.buffer], number_of[move.value.name]})
    closed: set[int] = set()
    remarks: list[str] = []
    spread: list[tuple[float, str]] = []  # share of the time that lies between the users of a tensor
    for name, numbers in users.items():
        gaps = [(seconds[after] - seconds[before + 1], before, after) for before, after in pairwise(numbers)]
        widest, before, after = max(gaps, default=(0.0, 0, 0))
        if widest > _FAR * seconds[-1] and held[name].trained:
            closed |= {*range(1, before + 1), *range(after + 1, len(graph.nodes))}
            remarks.append(f"{held[name].tensor} is shared by the first and the last layer")
        elif len(numbers) > 1:
            closed |= set(range(numbers[0] + 1, numbers[-1] + 1))
            spread.append(((seconds[numbers[-1] + 1] - seconds[numbers[0]]) / seconds[-1], held[name].tensor))
    share, tensor = max(spread, default=(0.0, ""))
    if share > _NEIGHBOURHOOD:
        remarks.append(f"{tensor} is used all over {share:.0%} of the model, which therefore stays in one layer")
    return closed, remarks


def _places_that_no_frame_crosses(graph: Graph) -> set[int]:
    """Return the places that a value would cross whose dtype cannot be sent, such as a complex one."""
    constants = constant_values(graph)
    last = {ref: number for number, node in enumerate(graph.nodes) for ref in node.refs()}
    closed: set[int] = set()
    for number, node in enumerate(graph.nodes):
        for ref, kind in value_types([node]).items():
            if node.name not in constants and wire_dtype(kind) not in DTYPE_OF:
                closed |= set(range(number + 1, last.get(ref, number) + 1))
    return closed


def _good_places(crossing: list[int], seconds: list[float], closed: set[int]) -> list[int]:
    """Return the open places that few bytes cross, compared with the open places around."""
    reach = _NEIGHBOURHOOD * seconds[-1]
    open_places = [place for place in range(1, len(crossing) - 1) if place not in closed]
    good = []
    for place in open_places:
        first = bisect_left(open_places, seconds[place] - reach, key=seconds.__getitem__)
        end = bisect_left(open_places, seconds[place] + reach, key=seconds.__getitem__)
        if crossing[place] <= _SLACK * min(crossing[near] for near in open_places[first : max(end, first + 1)]):
            good.append(place)
    return good


def _without_crumbs(places: list[int], crossing: list[int], sums: Sequence[list[float]], share: float) -> list[int]:
    """Keep, of two places with almost nothing between them, the one that fewer bytes cross. The two ends stay."""

    def is_crumb(start: int, end: int) -> bool:
        return all(numbers[end] - numbers[start] < share * numbers[-1] for numbers in sums if numbers[-1])

    kept = [places[0]]
    for place in places[1:-1]:
        if not is_crumb(kept[-1], place):
            kept.append(place)
        elif len(kept) > 1 and crossing[place] < crossing[kept[-1]]:
            kept[-1] = place
    while len(kept) > 1 and is_crumb(kept[-1], places[-1]):
        kept.pop()
    return [*kept, places[-1]]


def _choose(places: list[int], crossing: list[int], sums: Sequence[list[float]], share: float) -> list[int]:
    """Choose the inner places that fewest bytes cross, with at most `share` of every sum between two neighbours.

    More lies between neighbours only if there is no place between them. It is a shortest path: the best way to each place follows
    from those to the places before it.
    """
    bounds = [share * numbers[-1] for numbers in sums]
    best: list[tuple[int, int]] = [(0, 0)]  # (bytes, place before) by number of the place
    for number in range(1, len(places)):
        ways = []
        for earlier in range(number - 1, -1, -1):
            fits = all(
                numbers[places[number]] - numbers[places[earlier]] <= bound
                for numbers, bound in zip(sums, bounds, strict=True)
            )
            if not fits and earlier < number - 1:
                break
            ways.append((best[earlier][0] + crossing[places[number]] + 1, earlier))
        best.append(min(ways))
    cuts: list[int] = []
    number = best[-1][1]
    while number:
        cuts.append(places[number])
        number = best[number][1]
    return cuts[::-1]
