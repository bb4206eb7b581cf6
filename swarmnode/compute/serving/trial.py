"""A loaded span, tried on its device before anybody is served by it.

Numbers of a bfloat16 checkpoint may be too large for float16, which older cards compute in, and some attention kernels make NaN of
positions that see nothing, as left padding does. Who served all the same would be blamed by everybody, for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.runner import WANT_ALL, StageRunner, StepInput
from swarmnode.errors import PrecisionError

TRIAL_SESSION = -2
PROMPT, PADDING = 8, (0, 5)  # positions of two rows, and how many of each are padding


def try_span(runner: StageRunner) -> None:
    """A short prompt and a step. Raises PrecisionError where what comes out is not finite. The session is closed again."""
    span = runner.span
    runner.open(TRIAL_SESSION, rows=len(PADDING), max_length=PROMPT + 1, padding=PADDING)
    try:
        outputs = [
            runner.run([StepInput(TRIAL_SESSION, _inputs(span, count), WANT_ALL)])[0].output[:, -1]
            for count in (PROMPT, 1)
        ]
    finally:
        runner.close(TRIAL_SESSION)
    if not bool(torch.stack(outputs).isfinite().all()):
        name = str(span.dtype).removeprefix("torch.")
        raise PrecisionError(f"units [{span.start}:{span.end}) compute NaN or infinity in {name} on {span.device}")


def _inputs(span: ModelSpan, count: int) -> Tensor:
    """ids_BT or hidden_BTH, the same every time."""
    generator = torch.Generator().manual_seed(count)
    if span.has_embedding:
        return torch.randint(0, span.vocab_size, (len(PADDING), count), generator=generator)
    return torch.randn(len(PADDING), count, span.hidden_size, generator=generator).to(span.dtype)
