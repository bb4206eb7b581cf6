"""Gateway that serves every swarm with a name in a home: one that cannot be reached, and one that gets its name later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from swarmnode.cli.use.serve import FIRST_PAUSE_S, LOOK_S, SwarmJoiner, _asked
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import NetworkDown
from swarmnode.gateway.app import build_app
from swarmnode.gateway.gateway import Gateway
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.page.page import Page
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.swarm.storage.swarmfile import JoinedSwarms, Swarm, load_swarm
from tests.cli.command import assert_clear, invoke
from tests.cli.test_owner import founded as founders_file
from tests.gateway.conftest import serving
from tests.gateway.in_process import InProcess
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.swarm.storage.test_joined_swarms import FRIENDS


@in_virtual_time
async def test_a_swarm_that_is_named_later_is_served_beside_one_out_of_reach(
    founded: Founded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    JoinedSwarms(home).remember(FRIENDS)
    async with serving(founded, tmp_path) as served:

        async def join(swarm: Swarm) -> SwarmClient:
            return await SwarmClient.join(swarm, home=home, patience_s=2.0, platform=served.swarm.platform())

        gateway, added = Gateway({}), asyncio.Event()
        page = Page(gateway, home)

        async def add(name: str, client: SwarmClient) -> None:
            gateway.add(name, client)
            page.add(name, client)
            added.set()

        app = build_app(gateway, page)
        async with (
            SwarmJoiner(_asked([], home), join, home) as joiner,
            gateway.loading(),
            page.watching(),
            httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=None) as http,
        ):
            assert await joiner.first() == {} and (await http.get("/ready")).status_code == 503
            with pytest.raises(ApiError, match="no swarm has been reached"):
                gateway.model("friends")
            going = asyncio.ensure_future(joiner.go_on(add))
            name = JoinedSwarms(home).remember_file(served.swarm.file)
            await asyncio.wait_for(added.wait(), LOOK_S + 5.0)
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == [name] == page.names
            asked = {"model": name, "prompt": "hens", "max_tokens": 4}
            assert (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
            await asyncio.sleep(2 * FIRST_PAUSE_S)
            await cancel_and_wait(going)
    assert capsys.readouterr().err.count("friends is not served yet") == 1


@in_virtual_time
async def test_the_only_swarm_that_is_asked_for_must_be_there(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:

        async def join(swarm: Swarm) -> SwarmClient:
            return await SwarmClient.join(swarm, home=tmp_path, patience_s=2.0, platform=served.swarm.platform())

        async with SwarmJoiner({"friends": load_swarm(FRIENDS)}, join, None) as joiner:
            with pytest.raises(NetworkDown):
                await joiner.first()
        two = {"friends": load_swarm(FRIENDS), "virtual": served.swarm.load()}
        async with SwarmJoiner(two, join, None) as joiner:
            assert list(await joiner.first()) == ["virtual"]


def test_without_names_all_that_have_one_are_served(tmp_path: Path) -> None:
    assert_clear(invoke("serve", "--port", "0", home=tmp_path), 2, "which swarm?")
    joined, file = JoinedSwarms(tmp_path), founders_file(tmp_path)
    joined.remember(FRIENDS, "club")
    joined.used(str(file))  # by its path, without a name
    assert _asked([], tmp_path) == {"club": load_swarm(FRIENDS), "test": load_swarm(file)}
    file.unlink()
    assert list(_asked([], tmp_path)) == ["club"]
    assert list(_asked([FRIENDS, FRIENDS], tmp_path)) == ["friends-00000000"]
