"""Common part of the attacks by one volunteer of a training: the losses must still be those of one process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attack import Outcome

from swarmnode.codec.frames import FrameKind
from swarmnode.errors import NotFinite
from tests.training.sabotage import Saboteur
from tests.training.test_hangs import STEPS, Scenario
from tests.training.test_not_finite import PLACES, WAYS, Sender

PAIRS = (0, 0, 1, 1, 2, 2)  # units of the volunteers: two replicas of each
LIAR = 4  # number of a volunteer that does not coordinate


Variant = tuple[int, FrameKind, str]
"""Number of the liar, kind of the frames in which it lies, and the codecs of the run (`WAYS`)."""
FEW: list[Variant] = [(*place, way) for place, way in zip(PLACES, ("int8", "bf16", "topk", "PowerSGD"), strict=True)]
EVERY: list[Variant] = [(*place, way) for place in PLACES for way in WAYS]


async def lie_in(variants: Iterable[Variant], lie: Callable[[FrameKind], Sender]) -> Outcome:
    """Train against the liar that `lie` returns for a kind of frame, once for each variant, and in two trainings without
    replicas, which must end with an error after few tries."""
    outcomes = []
    for number, kind, way in variants:
        sender = lie(kind)
        what = f"{kind.name} by {number} in {way}"
        outcomes.append(await train_against(sender, what=lambda w=what: w, number=number, settings=WAYS[way]))
    for number, kind in ((1, FrameKind.FORWARD), (2, FrameKind.BACKWARD)):
        sender = lie(kind)
        alone = await train_against(sender, what=lambda k=kind: f"{k.name} alone", number=number, units=(0, 1, 2))
        outcomes.append(Outcome("let another one hold" in alone.happened and sender.lies < 10, alone.happened))
    fell = [outcome.happened for outcome in outcomes if not outcome.held]
    return Outcome(
        not fell, "; ".join(fell) or f"{len(outcomes)} trainings went on, or ended after a second try if alone"
    )


async def train_against(
    saboteur: Saboteur,
    *,
    what: Callable[[], str],
    number: int = LIAR,
    units: tuple[int, ...] = PAIRS,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """Train with `saboteur` as volunteer `number`; `units` are the units of the volunteers, `settings` the run's. `what` returns
    in words what the saboteur did. The outcome is held if all steps were made, with the losses of one process on the same
    batches, or near them if the run's codecs lose something."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scenario(Path(folder), {number: saboteur}, **settings)
        began_s = loop.time()
        try:
            await scene.join(*units)
            await scene.train()
            held, came = True, "the losses of one process"
        except (AssertionError, asyncio.TimeoutError, NotFinite) as error:
            held, came = False, f"{len(scene.losses)} of {STEPS} steps ({str(error) or 'no end'})"
        finally:
            await scene.swarm.close()
    return Outcome(held, f"{what()}: {came}, after {loop.time() - began_s:.1f} s")
