import asyncio, sys, tempfile, logging, time
from pathlib import Path
import numpy as np
from swarmnode.net.fake import FakeWorld
from swarmnode.net.link import LinkConfig
from swarmnode.net.switchboard import Switchboard
from swarmnode.codec.messages import VERSION, Hello
from swarmnode.roles.training.stage import TrainingStage, TRAIN_PROTOCOL
from swarmnode.roles.training.keeper import Keeper
from swarmnode.roles.training.conductor import Conductor
from swarmnode.roles.training.loopback import Loopback
from swarmnode.roles.training.trainer import Trainer
from swarmnode.compute.training.batches import ArrayBatches
from swarmnode.compute.training.local import train_locally
from swarmnode.swarm.run import Run
from tests.compute.training.toy import ToySegment, FEATURES, CLASSES
logging.basicConfig(level=logging.INFO if '-v' in sys.argv else logging.WARNING)
STEPS = 600
HELLO = Hello(VERSION, bytes(32), "toy")
def digits():
    g = np.random.default_rng(0)
    return ArrayBatches({"x": g.normal(size=(48, FEATURES)).astype(np.float32), "labels": g.integers(0, CLASSES, 48)})
async def main(replicas, kill, join=False):
    batches = digits()
    run = Run(data=batches.fingerprint, steps=STEPS, batch=24, microbatch=4, learning_rate=1e-2)
    local = [r.loss for r in train_locally(ToySegment(), run, batches)]
    world = FakeWorld()
    tmp = Path(tempfile.mkdtemp())
    stages = []
    nets = []
    for unit in range(3):
        for r in range(replicas):
            net = world.join(); nets.append(net)
            keeper = Keeper(net, HELLO, LinkConfig(), tmp / f"{unit}-{r}")
            stage = TrainingStage(net, HELLO, LinkConfig(), ToySegment(unit, unit + 1), keeper)
            await stage.start(); stages.append(stage)
    for net in nets[1:]:
        await net.connect(await nets[0].addresses(), timeout_s=1)
    first, own = stages[0], nets[0].peer_id
    async def dial(peer, on_frame, on_lost):
        if peer != own: return await first.switchboard.call(peer, on_frame, on_lost)
        here, there = Loopback.pair(peer); here.on_frame, here.on_lost = on_frame, on_lost
        first.follow(there); return here
    conductor = Conductor(1, 3, dial, resigned=lambda t: print("resigned", t))
    first.on_work = conductor.work
    conductor.start(); conductor.enlist([n.peer_id for n in nets])
    losses = {}
    joins = []
    async def newcomer():
        net = world.join(); nets.append(net); await net.connect(await nets[0].addresses(), timeout_s=1)
        keeper = Keeper(net, HELLO, LinkConfig(), tmp / "new")
        stage = TrainingStage(net, HELLO, LinkConfig(), ToySegment(1, 2), keeper)
        await stage.start(); stages.append(stage)
        conductor.enlist([net.peer_id])
        while stage.condition != 1: await asyncio.sleep(0.01)
        print("newcomer ready at", stage.step, "of", conductor.step)
    tnet = world.join(); await tnet.connect(await nets[0].addresses(), timeout_s=1)
    board = Switchboard(tnet, TRAIN_PROTOCOL, HELLO, LinkConfig())
    def on_step(report):
        if report.missing: print("missing", report.missing); return
        losses[report.step] = report.loss
        if join and report.step == 4:
            joins.append(asyncio.ensure_future(newcomer()))
        if kill and report.step == 6: world.kill(nets[kill].peer_id); print("killed", kill)
    trainer = Trainer(board, lambda: [own], run, batches, on_step)
    t = time.time()
    try:
        done = await asyncio.wait_for(trainer.train(asyncio.Event()), 30)
    except asyncio.TimeoutError:
        print("TIMEOUT", conductor, conductor._grants, conductor._ledger, stages); return
    print("done", done, round(time.time() - t, 2), "s; worst rel", max(abs(losses[s] / local[s] - 1) for s in range(STEPS)) if len(losses) == STEPS else sorted(losses))
    await asyncio.sleep(0.3)
    for unit in range(3):
        a = [s for s in stages if s.segment.start == unit]
        if len(a) > 1:
            print(unit, max(float((p - q).abs().max()) for p, q in zip(a[0].segment.modules[unit].parameters(), a[1].segment.modules[unit].parameters())))
asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3))
import os; os._exit(0)
