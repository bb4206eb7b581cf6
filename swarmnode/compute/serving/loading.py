"""Loads spans of tried families: split into spans, a tiny random model must give the whole model's logits.

Most families that this project has never met pass, because no code here depends on a family. A family that passes more than hidden
states from layer to layer, or keeps state outside its KV cache, fails and is refused instead of answering wrongly.
"""

from __future__ import annotations

import inspect
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.assemble import assemble, outline
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.equal_bits.equal_rows import give_equal_rows
from swarmnode.compute.model.family import Family
from swarmnode.compute.model.fresh import FamilyKey, family_key, tiny_model, tried
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.linear import speed_up_linears
from swarmnode.compute.model.span import ModelSpan, load_model
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS
from swarmnode.compute.packing.card_matrix import choose_products
from swarmnode.compute.packing.packed_weight import held_by
from swarmnode.compute.packing.quantize import quantize_layers
from swarmnode.compute.serving.cohort import Window, sliding_layers
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.serving.states import quicken_steps
from swarmnode.config import PLAIN
from swarmnode.errors import CheckpointError, LocalError, SwarmnodeError

FIRST, PROMPT, LENGTH, PADDING = 3, 5, 8, (0, 2)
TOLERANCE = 1e-3  # of the logits' standard deviation; float32 differs by 1e-6

_passed: dict[FamilyKey, tuple[Family | None, bool]] = {}
"""Families that were tried: as what to serve them if not as they are, and whether their states go on only position by position"""


@lean()
def load_span(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    quantize: str = "none",
    products: str = PLAIN,
    expert_slots: int = 0,
    card_experts: int = 0,
    equal_bits: bool = False,
    check: bool = True,
) -> ModelSpan:
    """Load layers [start, end) of a checkpoint onto a device, ready to run.

    Reads only the tensors of the span, each once, from mapped files. Nothing is copied on the CPU if the dtype stays.

    Args:
        checkpoint: The model's files.
        start: First layer.
        end: End of the layers.
        device: Device for the weights.
        dtype: Dtype to compute in; "auto" is the checkpoint's own.
        quantize: Method for the layers' matrices: "none", "int8" or "nf4".
        products: Kind of products of packed weights: "plain" dequantises them, "exact" and "fast" keep them packed.
        expert_slots: Number of each layer's packed experts that have room in memory; others are read when they are needed. 0: all.
        card_experts: Number of each layer's packed experts that have room on the card; the host computes with the others, and
            `expert_slots` are in its memory. 0: all are on the device.
        equal_bits: Give each position the same bits in any company, with plain products on a CPU.
        check: Try the family on a tiny model first (some 0.3 s, once per process).

    Returns:
        The span. Its `packings` are left to the caller: they may run beside passes.

    Raises:
        CheckpointError: The checkpoint does not make the model, or the family cannot be split.
        LocalError: The model lacks these layers, cannot be quantised so, or has no equal bits on this machine.
    """
    family = checkpoint.family
    if family.keeps_states:
        quicken_steps(family.model_class)
    if check or family.keeps_states:
        checkpoint.family = family = check_family(family)
    device = torch.device(device)
    model = load_model(
        checkpoint,
        start,
        end,
        dtype=dtype,
        products=products,
        packed_on=device,
        expert_slots=expert_slots,
        card_experts=card_experts,
    )
    stack = model.get_submodule(family.stack_name)
    quantization = (
        quantize_layers(stack, quantize, device) if quantize != "none" and len(list(stack.children())) else None
    )
    model.to(device)
    choose_products(part for weight in held_by(model) for part in weight.card_parts)
    if equal_bits:
        if quantization is not None or family.keeps_states:
            raise LocalError(
                "--equal-bits: quantised weights and recurrent states have other bits in company; leave the option out"
            )
        give_equal_rows(model)
    packings = None if equal_bits else speed_up_linears(model)
    span = ModelSpan(family, model, start, end, quantization, packings)
    span.steps_singly = _passed.get(family_key(family), (None, False))[1]
    return span


@lean()
def prepare_span(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    products: str = PLAIN,
) -> None:
    """Do the parts of loading that need no weights, while these are on their way: try the family, and time matrix products.

    Raises CheckpointError if the family cannot be split.
    """
    checkpoint.family = check_family(checkpoint.family)
    if torch.device(device).type == "cpu" and products == PLAIN:
        speed_up_linears(outline(checkpoint.family, start, end, dtype=dtype))


@lean()
def check_family(family: Family) -> Family:
    """Return the family as it is to be served: with its caches, or computed again in each pass.

    Raises CheckpointError if a split tiny model of this class and config does not give the whole one's logits in either way.
    """
    key = family_key(family)
    if key in _passed:
        return _passed[key][0] or family
    name, problem = family.model_class.__name__, ""
    with tried(family) as tiny:
        ways: list[tuple[bool | None, bool]] = [(None, False), (True, False), (False, False)]
        if family.keeps_states:
            ways.insert(1, (None, True))
        for with_cache, singly in ways:
            way = tiny if with_cache is None else tiny.followed(with_cache)
            if way is None:
                continue
            try:
                error = _largest_difference(way, singly)
            except (SwarmnodeError, *FOREIGN_ERRORS) as failure:
                problem = problem or f"could not be tried on a tiny model: {failure}"
                continue
            if error < TOLERANCE:
                chosen = None if with_cache is None else family.followed(with_cache)
                _passed[key] = chosen, singly
                return chosen or family
            problem = problem or f"cannot be split: a tiny model in spans differs from the whole by {error:.1%}"
    raise CheckpointError(f"{name} {problem}; choose another model")


@torch.inference_mode()
def _largest_difference(family: Family, singly: bool) -> float:
    """Return the largest difference of logits between spans with cohort caches and one pass of the whole model.

    It is in units of the whole model's standard deviation. The whole model's pass has no cache. `singly` is
    `ModelSpan.steps_singly` of the spans.
    """
    whole = tiny_model(family)
    ids_BT = torch.randint(2, family.config.vocab_size, (2, LENGTH))
    mask_BT = (torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None]).to(torch.int64)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(whole.forward).parameters
    positions = {"position_ids": positions_BT} if takes_positions else {}
    if family.calls is not None:  # such families need not know padding
        rows = [
            whole(input_ids=ids_BT[row : row + 1, skip:], use_cache=False).logits[0] for row, skip in enumerate(PADDING)
        ]
        expected_BTV = torch.stack([functional.pad(each, (0, 0, LENGTH - len(each), 0)) for each in rows])
    else:
        expected_BTV = whole(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **positions).logits
    logits_BTV = _split_logits(family, whole.state_dict(), ids_BT, singly)
    difference_BT = (logits_BTV - expected_BTV).abs().amax(dim=-1) * mask_BT
    return float(difference_BT.max() / expected_BTV.std())


def _split_logits(family: Family, tensors: dict[str, Tensor], ids_BT: Tensor, singly: bool) -> Tensor:
    """Return the logits of three spans, for a prompt in two parts and then single positions.

    Sliding layers keep no position beyond their window.
    """
    cuts = sorted({0, 2, max(2, family.layer_count), family.units})
    runners = []
    for start, end in pairwise(cuts):
        wanted = {n: t for n, t in tensors.items() if any(start <= u < end for u in family.units_of_tensor(n))}
        span = ModelSpan(family, assemble(family, wanted, start, end, dtype=torch.float32), start, end)
        span.steps_singly = singly
        windows = {layer: Window(size, slack=0, room=2) for layer, size in sliding_layers(family.config).items()}
        runners.append(StageRunner(span, RunnerConfig(cache_bytes=1 << 26, windows=windows)))
        runners[-1].open(0, rows=len(ids_BT), max_length=LENGTH, padding=PADDING)
    outputs = []
    for begin, end in [(0, FIRST), (FIRST, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))]:
        x = ids_BT[:, begin:end]
        for runner in runners:
            (result,) = runner.run([StepInput(0, x, want=2)])
            x = result.output
        outputs.append(x)
    return torch.cat(outputs, dim=1)
