"""Which adapters a stage has in memory: what sessions use stays, and the rest goes as soon as somebody needs the room."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, CheckpointError, ErrorCode, PeerRefused, ProtocolError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.serving.served_adapters import FAILED_S, StageAdapters
from tests.net.virtual import in_virtual_time

SIZE = 100
ROOM = 250  # two of them


class Files:
    """Adapters by name, each of so many bytes; what is an exception is raised. Bringing one takes `takes_s`."""

    def __init__(self, **known: Any) -> None:
        self.known = known
        self.takes_s = 0.0
        self.asked: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.known

    def tell(self, **_functions: object) -> None:
        """No adapter of a member is here."""

    async def bring(self, name: str, _span: object) -> Any:
        self.asked.append(name)
        await asyncio.sleep(self.takes_s)
        found = self.known[name]
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(bytes_of=lambda *_: found, load=lambda *_, **__: {})


class Place:
    """A device with room for two adapters; `spans` has those that are beside its span."""

    def __init__(self, limit: int = ROOM) -> None:
        self.ledger = MemoryLedger(limit)
        self.here: dict[str, object] = {}
        adapters = SimpleNamespace(
            add=self.here.__setitem__, copied=self.here.__getitem__, remove=lambda name: self.here.pop(name, None)
        )
        span = SimpleNamespace(
            start=0, end=3, family=None, model=None, device=None, dtype=torch.float32, adapters=adapters
        )
        self.runner = SimpleNamespace(span=span)

    def call(self, _kind: str, function: Any) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(function())
        return done

    @property
    def held(self) -> int:
        return self.ledger.accounts()[Account.ADAPTERS]


def stage(files: Files, *places: Place) -> StageAdapters:
    def crashed(error: BaseException) -> None:
        raise AssertionError(error)

    pairs: Any = [(place, place.ledger) for place in places]
    return StageAdapters(files, pairs, ServerConfig(), on_crash=crashed)  # type: ignore[arg-type]


@in_virtual_time
async def test_the_one_that_was_used_the_longest_ago_goes_first() -> None:
    files, place = Files(a=SIZE, b=SIZE, c=SIZE), Place()
    adapters = stage(files, place)
    for key, name in enumerate("ab"):
        await adapters.bring(name)
        adapters.use(name, key)
        adapters.leave(key)
    await adapters.bring("a")
    adapters.use("a", 7)
    adapters.leave(7)
    await adapters.bring("c")
    assert list(place.here) == ["a", "c"]
    assert place.held == 2 * SIZE
    assert files.asked == ["a", "b", "c"], "what is here is not brought again"
    await adapters.close()
    assert place.held == 0


@in_virtual_time
async def test_what_sessions_use_stays() -> None:
    files, place = Files(a=SIZE, b=SIZE, c=SIZE), Place()
    adapters = stage(files, place)
    for key, name in enumerate("ab"):
        await adapters.bring(name)
        adapters.use(name, key)
    assert not adapters.make_room()
    with pytest.raises(Busy):
        await adapters.bring("c")
    assert sorted(place.here) == ["a", "b"]
    adapters.leave(0)
    assert adapters.make_room(), "a session's caches come before an adapter that nobody uses"
    assert (list(place.here), place.held, "a" in adapters) == (["b"], SIZE, False)
    await adapters.close()


@in_virtual_time
async def test_what_is_only_kept_of_texts_makes_room() -> None:
    files, place = Files(a=SIZE), Place()
    adapters = stage(files, place)
    kept = [place.ledger.reserve(Account.KV_CACHE, SIZE) for _ in range(2)]

    def free_cache() -> bool:
        if kept:
            kept.pop().release()
            return True
        return False

    adapters.free_cache = free_cache
    await adapters.bring("a")
    assert (place.held, len(kept)) == (SIZE, 1), "and no more of it than is needed"
    adapters.use("a", 1)
    files.known["b"] = 2 * SIZE
    with pytest.raises(Busy):
        await adapters.bring("b")
    await adapters.close()


@in_virtual_time
async def test_one_that_never_fits_takes_nothing_with_it_of_other_devices() -> None:
    files, large, small = Files(a=SIZE), Place(), Place(limit=SIZE - 1)
    adapters = stage(files, large, small)
    with pytest.raises(Busy):
        await adapters.bring("a")
    assert large.held == small.held == 0
    await adapters.close()


@in_virtual_time
async def test_many_who_ask_wait_for_one_bringing_and_not_for_long() -> None:
    files, place = Files(a=SIZE), Place()
    files.takes_s = 5.0
    adapters = stage(files, place)
    began_s = asyncio.get_running_loop().time()
    outcomes = await asyncio.gather(*(adapters.bring("a") for _ in range(50)), return_exceptions=True)
    assert all(isinstance(one, Busy) and one.retry_s > 0 for one in outcomes)
    assert asyncio.get_running_loop().time() - began_s < 2.0, "less than a client waits for READY"
    await asyncio.sleep(4.0)
    await adapters.bring("a")
    assert files.asked == ["a"]
    await adapters.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerRefused("no peer has it", code=ErrorCode.NOT_FOUND), ErrorCode.NOT_FOUND),
        (CheckpointError("NaN"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_why_one_is_not_to_be_had_is_told_for_a_while(error: Exception, code: ErrorCode) -> None:
    @in_virtual_time
    async def told() -> None:
        files, place = Files(a=error), Place()
        adapters = stage(files, place)
        for _ in range(3):
            with pytest.raises(ProtocolError) as caught:
                await adapters.bring("a")
            assert caught.value.code == code
        assert files.asked == ["a"], "nobody may have the same thing tried again and again"
        await asyncio.sleep(FAILED_S + 1)
        files.known["a"] = SIZE
        await adapters.bring("a")
        assert place.held == SIZE
        await adapters.close()

    told()


@in_virtual_time
async def test_an_unknown_one_is_never_looked_for() -> None:
    files = Files(a=SIZE)
    adapters = stage(files, Place())
    with pytest.raises(ProtocolError) as caught:
        await adapters.bring("b")
    assert (caught.value.code, files.asked) == (ErrorCode.INVALID_REQUEST, [])
    await adapters.close()


@in_virtual_time
async def test_what_is_on_its_way_when_the_stage_ends_is_given_up() -> None:
    files, place = Files(a=SIZE), Place()
    files.takes_s = 60.0
    adapters = stage(files, place)
    with pytest.raises(Busy):
        await adapters.bring("a")
    await adapters.close()
    assert (place.held, place.here) == (0, {})


@in_virtual_time
async def test_unused_ones_wait_in_the_hosts_memory_as_long_as_it_has_room() -> None:
    files, card, host = Files(a=SIZE, b=SIZE, c=SIZE, d=SIZE), Place(), MemoryLedger(2 * SIZE)
    adapters = stage(files, card)
    adapters.host = host
    for key, name in enumerate("abc"):
        await adapters.bring(name)
        adapters.use(name, key)
        adapters.leave(key)
    assert (list(card.here), card.held, host.used_bytes) == (["b", "c"], 2 * SIZE, SIZE)
    await adapters.bring("a")
    await adapters.bring("b")
    assert (files.asked, list(card.here), host.used_bytes) == (list("abc"), ["a", "b"], SIZE), "they were in the host"
    await adapters.bring("d")
    await adapters.bring("c")
    assert (files.asked, host.used_bytes) == (list("abcd"), SIZE)
    await adapters.bring("a")
    assert files.asked == list("abcda"), "it had to give way there, too"
    await adapters.bring("c")
    adapters.expel("c", ErrorCode.ADAPTER_EXPIRED)
    assert "c" not in card.here
    await adapters.close()
    assert card.held == host.used_bytes == 0
