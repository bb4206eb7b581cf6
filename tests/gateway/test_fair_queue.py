"""Who waits gets a place in turns with other keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.gateway.access.keys import ApiKey, FairQueue, KeyFile, KeyLimits, new_key
from swarmnode.gateway.http.api_error import ApiError
from tests.net.virtual import in_virtual_time

WORK_S = 1.0


async def work(queue: FairQueue, key: ApiKey) -> float:
    """Hold a place for a second; when it was over."""
    async with queue.place(key):
        await asyncio.sleep(WORK_S)
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_one_of_a_key_waits_for_one_of_another_however_many_there_are() -> None:
    queue, greedy, modest = FairQueue(running=2, waiting=100, wait_s=60.0), ApiKey("greedy"), ApiKey("modest")
    many = [asyncio.ensure_future(work(queue, greedy)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert await work(queue, modest) <= 2 * WORK_S
    assert max(await asyncio.gather(*many)) == pytest.approx(11 * WORK_S, abs=0.2)
    assert (queue.running, queue.waiting) == (0, 0)


@in_virtual_time
async def test_a_keys_own_limit_leaves_places_to_others() -> None:
    queue, limited = FairQueue(running=4, waiting=100, wait_s=60.0), ApiKey("limited", KeyLimits(concurrent=1))
    many = [asyncio.ensure_future(work(queue, limited)) for _ in range(3)]
    assert await work(queue, ApiKey("other")) == pytest.approx(WORK_S)
    assert await asyncio.gather(*many) == pytest.approx([1.0, 2.0, 3.0])


@in_virtual_time
async def test_who_waits_in_vain_or_goes_leaves_nothing_behind() -> None:
    queue, key = FairQueue(running=1, waiting=2, wait_s=0.5), ApiKey("one")
    first, waiting, leaving = (asyncio.ensure_future(work(queue, key)) for _ in range(3))
    await asyncio.sleep(0.1)
    with pytest.raises(ApiError, match="already waiting"):
        await work(queue, key)
    leaving.cancel()
    with pytest.raises(ApiError, match="no place") as refused:
        await waiting
    assert refused.value.status_code == 429 and refused.value.retry_s
    await first
    assert (queue.running, queue.waiting) == (0, 0)
    assert await work(queue, key) == pytest.approx(2.0)


def test_a_keys_requests_come_at_its_rate() -> None:
    now = [0.0]
    key = ApiKey("one", KeyLimits(per_minute=3), clock=lambda: now[0])
    assert [key.count_request() for _ in range(3)] == [0, 0, 0]
    assert key.count_request() == pytest.approx(20) == key.count_request(), "what is refused is not counted"
    now[0] += 20
    assert key.count_request() == 0


@pytest.mark.parametrize(
    "line", ["alice", "alice xyz", f"alice {'0' * 64} per_minute=many", f"a {'0' * 64} colour=1", ""]
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{line}\n")
    with pytest.raises(UsageError):
        KeyFile(file)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "keys"
    alice = new_key(file, "alice")
    keys = KeyFile(file, clock=lambda: now[0])
    before = keys.find(alice)
    bob = new_key(file, "bob")
    assert keys.find(bob) is None, "it is not looked at for each request"
    now[0] = 1.0
    assert keys.find(bob) is not None and keys.find(alice) is before, "what alice has asked for counts still"
    file.write_text(file.read_text() + "carol\n")
    now[0] = 2.0
    assert keys.find(bob) is not None, "one line is wrong: nobody is locked out for it"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if line.startswith("bob")))
    now[0] = 3.0
    assert keys.find(alice) is None and keys.find(bob) is not None
    file.unlink()
    now[0] = 4.0
    assert keys.find(bob) is not None and keys.find(None) is None
