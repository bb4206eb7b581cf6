"""Hops that join the next one: also hops of an older version, which name no owner, and a second one of the same route."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from swarmnode.codec.messages import Error
from swarmnode.codec.tuning_messages import JoinAdapter
from swarmnode.errors import ErrorCode, PeerRefused
from tests.net.virtual import in_virtual_time
from tests.training.scene import Talk
from tests.tuning.hops import hops_of, loss_of

OWNER, OTHER = 0, 1


@in_virtual_time
async def test_a_hop_that_names_no_owner_is_taken_if_one_adapter_expects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_an_older_version(adapter: bytes, epoch: int, _owner: str) -> JoinAdapter:
        return JoinAdapter(adapter, epoch)

    async with hops_of(tmp_path, hops=2, others=2) as scene:
        request = scene.opening(scene.peers, bytes(range(16)))
        newer = await scene.open(OWNER, request)
        wanted = await loss_of(newer)
        await newer.close()
        monkeypatch.setattr("swarmnode.tuning.held_adapter.JoinAdapter", of_an_older_version)
        older = await scene.open(OWNER, request)
        assert await loss_of(older) == wanted
        twin = await scene.open(OTHER, request)
        with pytest.raises(PeerRefused, match="NO_SESSION"):
            await loss_of(twin)
        assert await loss_of(older, 1) == wanted, "the adapter that was fed first is fed alone"
        await twin.close()
        await older.close()


@in_virtual_time
async def test_a_second_conversation_does_not_replace_the_first(tmp_path: Path) -> None:
    async with hops_of(tmp_path, hops=1, others=2) as scene:
        previous = scene.others[OTHER]
        request = scene.opening([previous, scene.peers[0]])
        owner = await Talk.begin(scene.boards[OWNER], scene.peers[0])
        request = msgspec.structs.replace(request, index=1)
        await owner.ask(request)
        join = JoinAdapter(request.adapter, request.epoch, scene.others[OWNER])
        first = await Talk.begin(scene.boards[OTHER], scene.peers[0])
        first.send(join)
        second = await Talk.begin(scene.boards[OTHER], scene.peers[0])
        assert await second.ask(join) == Error(ErrorCode.NO_SESSION)
        (adapter,) = scene.servers[0]._adapters.values()
        assert adapter._before is not None and adapter._before.open and first.channel is not None
        assert adapter._before.number == first.channel.number and first.channel.open
