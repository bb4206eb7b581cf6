"""Range checks: numbers that operators use as indices into a table, or as probabilities, are checked before their use.

These numbers come from samples and from other peers. On a CPU one out of range is an IndexError. On a CUDA device it is a failed
assertion, and with it the whole process loses the device. So they are compared on the device, without waiting for it. Those out of
range are replaced by valid ones, and the pass is refused when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.graph.operators import INSTEAD_OF_OPERATOR

Given = Mapping[str, Any]
"""Arguments of an operator, by their names in its schema"""


class RangeCheck:
    """Check that the indexes and numbers that a graph's operators take from samples and from other peers are in range, for one
    pass at a time."""

    def __init__(self) -> None:
        self._wrong: Tensor | None = None  # bool, on the device

    def guarded(self, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function of an operator, like "aten.gather.default", so that its arguments are made safe first.

        Operators without a rule are returned unchanged.
        """
        rule = _RULES.get(operator.split(".")[1])
        if rule is None:
            return function
        computes = INSTEAD_OF_OPERATOR.get(operator, function)
        arguments = function._schema.arguments  # type: ignore[attr-defined]
        names = [argument.name for argument in arguments]
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return computes(**given | rule(self, defaults | given))

        return call

    def begin(self) -> None:
        """Begin another pass: forget the faults of the one before."""
        self._wrong = None

    def all_well(self) -> bool:
        """Return whether everything was in range since `begin`. Waits for the device if anything was compared."""
        return self._wrong is None or not bool(self._wrong)

    def places(self, places: Tensor, low: int, high: int, *, passes: int | None = None) -> Tensor:
        """Return the indices with those outside [low, high) replaced by 0; `passes` is one more that is valid."""
        wrong = (places < low) | (places >= high)
        return self._replaced(places, wrong if passes is None else wrong & (places != passes))

    def probabilities(self, values: Tensor) -> Tensor:
        """Return the probabilities with those outside [0, 1], and NaN, replaced by 0."""
        return self._replaced(values, ~((values >= 0) & (values <= 1)))

    def weights(self, values: Tensor) -> Tensor:
        """Return the weights of a draw with invalid ones replaced by 1: those negative, infinite or NaN, and rows of zeros."""
        wrong = ~((values >= 0) & (values < float("inf")))
        nothing = values.masked_fill(wrong, 0).sum(-1, keepdim=True) == 0
        return self._replaced(values, wrong | nothing, 1)

    def together(self, values: Tensor, wrong: Tensor, instead: Tensor | int) -> Tensor:
        """Return the values, all replaced by `instead` if any of `wrong` is true."""
        return torch.where(self._found(wrong), torch.as_tensor(instead).to(values), values)

    def _replaced(self, values: Tensor, wrong: Tensor, instead: int = 0) -> Tensor:
        self._found(wrong)
        return values.masked_fill(wrong, instead)

    def _found(self, wrong: Tensor) -> Tensor:
        found = wrong.any()
        self._wrong = found if self._wrong is None else self._wrong | found
        return found


def _rows(check: RangeCheck, given: Given) -> dict[str, Any]:
    return {"indices": check.places(given["indices"], 0, given["weight"].shape[0])}


def _bags(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check offsets: they begin at 0, never decrease, and lie within the indices."""
    offsets, count = given["offsets"], len(given["indices"])
    wrong = (offsets < 0) | (offsets > count)
    wrong[:1] |= offsets[:1] != 0
    wrong[1:] |= offsets.diff() < 0
    return {**_rows(check, given), "offsets": check.together(offsets, wrong, 0)}


def _repeats(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check repeats: they are not negative, and make up the declared size of the result."""
    repeats, size = given["repeats"], given["output_size"]
    if not isinstance(repeats, Tensor) or size is None:
        return (
            {"repeats": check.places(repeats, 0, torch.iinfo(torch.int32).max)} if isinstance(repeats, Tensor) else {}
        )
    times = 1
    if "self" in given and repeats.numel() == 1:  # repeats each element
        source, dim = given["self"], given["dim"]
        times = source.numel() if dim is None else source.shape[dim]
    wrong = (repeats < 0).any() | (repeats.sum() * times != size)
    instead = torch.zeros_like(repeats)
    instead[:1] = size // times
    return {"repeats": check.together(repeats, wrong, instead)}


def _shares(check: RangeCheck, given: Given) -> dict[str, Any]:
    return {"self": check.weights(given["self"])}


def _along(check: RangeCheck, given: Given) -> dict[str, Any]:
    source = given["self"]
    size = source.shape[given["dim"]] if source.dim() else 1
    return {"index": check.places(given["index"], 0, size)}


def _fill(check: RangeCheck, given: Given) -> dict[str, Any]:
    size = given["self"].shape[given["dim"]]
    return {"index": check.places(given["index"], -size, size)}


def _take(check: RangeCheck, given: Given) -> dict[str, Any]:
    size = given["self"].numel()
    return {"index": check.places(given["index"], -size, size)}


def _take_along(check: RangeCheck, given: Given) -> dict[str, Any]:
    source, dim = given["self"], given["dim"]
    size = source.numel() if dim is None else source.shape[dim]
    return {"indices": check.places(given["indices"], 0, size)}


def _index(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check one index for each of the first dimensions. A mask covers as many dimensions as it has."""
    indices: list[Any] = []
    dim = 0
    for index in given["indices"]:
        is_places = index is not None and index.dtype not in (torch.bool, torch.uint8)
        size = given["self"].shape[dim]
        indices.append(check.places(index, -size, size) if is_places else index)
        dim += 1 if index is None or is_places else index.dim()
    return {"indices": indices}


def _classes(check: RangeCheck, given: Given) -> dict[str, Any]:
    scores, target = given["self"], given["target"]
    if target.is_floating_point():
        return {}
    count = scores.shape[1 if scores.dim() > 1 else 0]
    return {"target": check.places(target, 0, count, passes=given.get("ignore_index"))}


def _labels(check: RangeCheck, given: Given) -> dict[str, Any]:
    return {"target": check.places(given["target"], -1, given["self"].shape[-1])}


def _one_hot(check: RangeCheck, given: Given) -> dict[str, Any]:
    count = given["num_classes"]
    return {"self": check.places(given["self"], 0, count if count > 0 else torch.iinfo(torch.int32).max)}


def _probabilities(check: RangeCheck, given: Given) -> dict[str, Any]:
    return {"self": check.probabilities(given["self"])}


def _drawn(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check a tensor of probabilities, unless one number is given for all elements."""
    return {} if "p" in given else _probabilities(check, given)


def _masked(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check a mask: it may not choose more places than the source has elements."""
    mask = given["mask"].expand(torch.broadcast_shapes(given["mask"].shape, given["self"].shape))
    beyond = mask & (mask.flatten().cumsum(0).view(mask.shape) > prod(given["source"].shape))
    return {"mask": check._replaced(mask, beyond)}


def _asserted(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check an assertion that the export assumed for every batch."""
    truth = given["self"]
    return {"self": check.together(truth, ~truth.bool(), 1)}


def _transcripts(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check labels against the number of classes, and lengths against the scores and the labels."""
    scores, targets = given["log_probs"], given["targets"]
    if targets.dim() > 1:  # labels behind a row's end are never read
        lengths = torch.as_tensor(given["target_lengths"], device=targets.device)
        behind = torch.arange(targets.shape[1], device=targets.device) >= lengths[:, None]
        targets = targets.masked_fill(behind, 0)
    safe: dict[str, Any] = {"targets": check.places(targets, 0, scores.shape[-1])}
    if isinstance(given["input_lengths"], Tensor):
        safe["input_lengths"] = check.places(given["input_lengths"], 0, scores.shape[0] + 1)
    lengths = given["target_lengths"]
    if isinstance(lengths, Tensor):
        most = targets.shape[1] if targets.dim() > 1 else targets.numel()
        wrong = (lengths < 0) | (lengths > most)
        if targets.dim() == 1:
            wrong = wrong | (lengths.sum() != most)
        safe["target_lengths"] = check.together(lengths, wrong.any(), 0)
    return safe


def _groups(check: RangeCheck, given: Given) -> dict[str, Any]:
    """Check the ends of groups of rows: they never decrease, and lie within the rows."""
    ends = given["offs"]
    if ends is None:
        return {}
    left, right = given["self"], given["mat2"]
    count = left.shape[0] if right.dim() == 3 else left.shape[-1] if left.dim() == 2 else right.shape[-1]
    wrong = (ends < 0) | (ends > count)
    wrong[1:] |= ends.diff() < 0
    return {"offs": check.together(ends, wrong.any(), count)}


_RULES: dict[str, Callable[[RangeCheck, Given], dict[str, Any]]] = {
    "embedding": _rows,
    "embedding_bag": _bags,
    "repeat_interleave": _repeats,
    "multinomial": _shares,
    **dict.fromkeys(("index_select", "gather", "index_add", "index_copy"), _along),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _along),
    **dict.fromkeys(("index", "index_put"), _index),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _classes),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes),
    "multilabel_margin_loss": _labels,
    "index_fill": _fill,
    "take": _take,
    "take_along_dim": _take_along,
    "one_hot": _one_hot,
    "binary_cross_entropy": _probabilities,
    "bernoulli": _drawn,
    "masked_scatter": _masked,
    "_assert_async": _asserted,
    "ctc_loss": _transcripts,
    "_grouped_mm": _groups,
}
