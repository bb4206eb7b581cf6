"""What a coordinator makes of stages that break the rules."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.training_messages import Condition, Lead, Status
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.training.worker.training_stage import TRAIN_PROTOCOL
from tests.net.virtual import in_virtual_time
from tests.peer.training_swarm import HELLO, TrainingSwarm, toy_batches, toy_run, until

STEPS = 3


@in_virtual_time
async def test_a_stage_that_is_in_no_run_stops_no_training(tmp_path: Path) -> None:
    """It says that it is further than all others, in a run that cannot be read."""
    swarm = TrainingSwarm(tmp_path)
    liar = swarm.world.join()

    def answer(channel: Channel, _frame: Frame, body: Body) -> None:
        asked.append(body)
        if isinstance(body, Lead):
            channel.send(Status(body.term, Condition.READY, 0, 3, b"no run", step=2, answers=FrameKind.LEAD))

    asked: list[Body] = []
    board = Switchboard(liar, TRAIN_PROTOCOL, HELLO, LinkConfig(), accept=answer)
    await board.start()
    try:
        honest = await swarm.join(0, 3)
        await liar.connect(await honest.network.addresses(), timeout_s=1)
        swarm.announced.add(liar.peer_id, (0, 3))
        await until(lambda: any(isinstance(body, Lead) for body in asked), "the coordinator's call")
        _, trainer = await swarm.trainer(toy_run(toy_batches(), STEPS), toy_batches(), lambda _report: None)
        assert await trainer.train(asyncio.Event()) == STEPS
        assert honest.stage.state.step == STEPS
    finally:
        await board.close()
        await liar.close()
        await swarm.close()
