"""Labels come straight from the trainer, before the values or after them, once, and from nobody else."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from swarmnode.codec.messages import Error, Fault
from swarmnode.codec.training_messages import Backward, Labels, Lead, Release
from swarmnode.compress.codecs import encode_values
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.ledger import MemoryLedger
from swarmnode.training.worker.admission import LABELS_S, MAX_LABELS, LabelQueue
from tests.compute.training.toy import toy_values
from tests.training.scene import KEY, RUN, TERM, Scene, in_scene


def waiting(scene: Scene) -> str:
    return repr(scene.stage._admission_queue.labels)


NONE = "<LabelQueue of 0 waiting, 0 awaited>"


@in_scene
async def test_values_wait_for_labels(scene: Scene) -> None:
    await scene.lead()
    values, labels = await scene.talk(1), await scene.talk(1)
    values.send(*scene.forward(0))
    await asyncio.sleep(LABELS_S / 4)
    labels.send(*scene.labels(0))
    assert isinstance(await values.next(), Backward)
    assert waiting(scene) == NONE


@in_scene
async def test_labels_that_do_not_come_are_told_in_time(scene: Scene) -> None:
    await scene.lead()
    began_s = asyncio.get_running_loop().time()
    assert await (await scene.talk(1)).ask(*scene.forward(0)) == Fault(0, 0, ErrorCode.NOT_FOUND)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(LABELS_S, abs=1.0)
    assert not any(scene.stage.state.masks.values()) and waiting(scene) == NONE


@pytest.mark.parametrize(
    "changes", [{"feeder": "board"}, {"seal": bytes(16)}, {"seal": b""}, {"lease": 2}, {"number": 1}, {"step": 1}]
)
@in_scene
async def test_labels_of_somebody_elses_microbatch_are_refused(scene: Scene, changes: dict[str, object]) -> None:
    """By a hop of the route, which knows the seal, and by another trainer."""
    await scene.lead()
    body, payload = scene.labels(0)
    stranger = scene.networks[1].peer_id
    forged = msgspec.structs.replace(
        body, **{name: stranger if value == "board" else value for name, value in changes.items()}
    )
    assert await (await scene.talk(0)).ask(body, payload) == Fault(0, 0, ErrorCode.REFUSED)
    assert await (await scene.talk(0)).ask(forged, payload) == Fault(0, 0, ErrorCode.REFUSED)
    if "feeder" not in changes:
        assert await (await scene.talk(1)).ask(forged, payload) == Fault(0, 0, ErrorCode.REFUSED)
    assert waiting(scene) == NONE
    assert isinstance(await scene.feed(0), Backward), "the trainer's own are taken all the same"


@in_scene
async def test_labels_that_come_twice_count_once(scene: Scene) -> None:
    await scene.lead()
    body, _ = scene.labels(0)
    infos, payload = encode_values(toy_values(7, 4).labels)
    false = msgspec.structs.replace(body, values=infos)
    first = await scene.talk(1)
    first.send(*scene.labels(0))
    assert await (await scene.talk(1)).ask(false, payload) == Fault(0, 0, ErrorCode.BUSY)
    answer = await (await scene.talk(1)).ask(*scene.forward(0))
    again = await scene.feed(0, lease=2)
    assert isinstance(answer, Backward) and isinstance(again, Backward) and answer.loss == again.loss


@in_scene
async def test_labels_go_with_their_lease(scene: Scene) -> None:
    line = await scene.lead()
    given_up, kept = await scene.talk(1), await scene.talk(1)
    given_up.send(*scene.labels(0, lease=1))
    kept.send(*scene.labels(1, lease=2))
    await line.ask(Release((), RUN.id))
    assert waiting(scene) == "<LabelQueue of 2 waiting, 0 awaited>"
    assert given_up.channel is not None
    given_up.channel.close()
    await line.ask(Release((2,), RUN.id))
    assert waiting(scene) == NONE
    assert await (await scene.talk(1)).ask(*scene.labels(1, lease=2)) == Fault(0, 0, ErrorCode.STALE)
    kept.send(*scene.labels(2, lease=3))
    await line.ask(Lead(TERM + 1, KEY))
    assert waiting(scene) == NONE


@in_scene
async def test_a_lease_that_is_called_back_does_not_wait_on(scene: Scene) -> None:
    line = await scene.lead()
    values = await scene.talk(1)
    values.send(*scene.forward(0))
    await line.ask(Release((1,), RUN.id))
    await line.ask(Release((), RUN.id))
    assert waiting(scene) == NONE


@pytest.mark.parametrize("wrong", ["length", "rows", "none"])
@in_scene
async def test_labels_that_do_not_fit_are_the_senders_fault(scene: Scene, wrong: str) -> None:
    await scene.lead()
    body, payload = scene.labels(0)
    infos, other = encode_values(toy_values(0, 4 if wrong == "length" else 3).labels if wrong != "none" else ())
    payload = [bytes(other[0])[:-1]] if wrong == "length" else other
    (await scene.talk(1)).send(msgspec.structs.replace(body, values=infos), payload)
    answer = await (await scene.talk(1)).ask(*scene.forward(0))
    assert isinstance(answer, Fault) and answer.code in (ErrorCode.NOT_FINITE, ErrorCode.INTERNAL)
    assert isinstance(await scene.feed(0, lease=2), Backward)


@in_scene
async def test_a_first_frame_of_another_run_is_told(scene: Scene) -> None:
    await scene.lead()
    body, payload = scene.labels(0)
    answer = await (await scene.talk(1)).ask(msgspec.structs.replace(body, run=bytes(32)), payload)
    assert answer == Fault(0, 0, ErrorCode.WRONG_RUN) and not isinstance(answer, Error)


def labels_of(lease: int, step: int = 0) -> Labels:
    return Labels(1, lease, step, 0, (), (), bytes(32))


async def test_only_so_many_wait() -> None:
    ledger = MemoryLedger(100 * MAX_LABELS)
    queue = LabelQueue(ledger)
    assert [queue.put(labels_of(lease), b"1234") for lease in range(MAX_LABELS + 1)][-2:] == [None, ErrorCode.BUSY]
    assert ledger.used_bytes == 4 * MAX_LABELS
    queue.next_step(1)
    assert ledger.used_bytes == 0
    ledger.limit_bytes = 1
    assert queue.put(labels_of(1, step=1), b"12") is None, "one microbatch is always let in"
    assert queue.put(labels_of(2, step=1), b"34") == ErrorCode.BUSY, "no room in the ledger"
    queue.next_step(1)
    assert (await queue.labels_of(1, 0.0)).payload == b"12" and ledger.used_bytes == 0


async def test_half_of_a_short_lease_is_waited() -> None:
    queue = LabelQueue(MemoryLedger())
    with pytest.raises(PeerRefused, match="sent no labels"):
        await queue.labels_of(1, 0.02)
    assert repr(queue) == NONE
