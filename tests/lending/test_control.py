"""Commands over the socket: who may give them, and what comes of those that are none."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import LocalError
from swarmnode.lending import control
from swarmnode.lending.control import NODES, ControlServer, is_listening, running_nodes, tell_node
from swarmnode.lending.lending import Keep, Lending, LendingEvent, LendingState
from tests.cli.command import assert_clear, invoke


def server_of(lending: Lending, stop: asyncio.Event | None = None) -> ControlServer:
    return ControlServer(lending, stop or asyncio.Event(), lambda: {"swarm": "friends", "span": [0, 3], "sessions": 2})


async def tell(path: Path, command: str, **more: Any) -> dict[str, Any]:
    answer = await asyncio.to_thread(tell_node, path, command, **more)
    assert answer is not None
    return answer


async def test_an_owner_pauses_and_resumes(tmp_path: Path) -> None:
    lending, stop = Lending(), asyncio.Event()
    lending.happened(LendingEvent.LOADED)
    async with server_of(lending, stop).listening(tmp_path, "my friends/") as path:
        assert path is not None and running_nodes(tmp_path) == {"my-friends": path}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        pausing = asyncio.ensure_future(tell(path, "pause", reason="a film", keep="memory", wait_s=30))
        await lending.until(LendingState.DRAINING)
        lending.happened(LendingEvent.DRAINED)
        answer = await pausing
        assert answer["state"] == "paused" and answer["reason"] == "a film" and answer["sessions"] == 2
        assert lending.keep is Keep.MEMORY
        assert (await tell(path, "resume"))["state"] == "waiting"
        assert (await tell(path, "finish"))["reason"] == control.OWNER_ASKED
        await tell(path, "stop")
        assert stop.is_set()
    assert running_nodes(tmp_path) == {} and tell_node(path, "state") is None


@pytest.mark.parametrize(
    "line",
    [b"\n", b"pause\n", b'{"command": "dance"}\n', b'{"command": "pause", "keep": "cloud"}\n', b"[" * 4000 + b"\n"],
)
async def test_what_is_no_command_is_told_so_and_changes_nothing(tmp_path: Path, line: bytes) -> None:
    lending = Lending()
    async with server_of(lending).listening(tmp_path, "a") as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        assert b"not a command" in await reader.readline()
        writer.close()
        assert not lending.reason and (await tell(path, "state"))["state"] == "waiting"  # type: ignore[arg-type]


async def test_who_sends_no_end_of_line_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    async with server_of(Lending()).listening(tmp_path, "a") as path:
        for sent in (b"", b"x" * 3 * control.MAX_LINE_BYTES):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()


async def test_two_nodes_of_one_name_and_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(tmp_path / "control" / "a.sock"))
    killed.close()
    async with server_of(Lending()).listening(tmp_path, "a") as first:
        path = await asyncio.to_thread(control._free_path, tmp_path / NODES, "a")
        assert first == tmp_path / "control" / "a.sock" and path == tmp_path / "control" / "a-2.sock"


async def test_the_socket_of_a_process_that_is_silent_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stopped, or load a model: its owner shall still find it afterwards."""
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.05)
    (tmp_path / "control").mkdir()
    path = tmp_path / "control" / "a.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(1)
        assert tell_node(path, "state") is None and is_listening(path)
        async with server_of(Lending()).listening(tmp_path, "a") as second:
            assert second == tmp_path / "control" / "a-2.sock" and path.is_socket()
        done = invoke("pause", "a", home=tmp_path)
        assert_clear(done, 1, "a: it does not answer")
        assert "no answer" in invoke("ps", home=tmp_path).stdout


async def test_a_folder_that_leads_elsewhere_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "control").symlink_to(elsewhere)
    with pytest.raises(LocalError, match="is a link"):
        async with server_of(Lending()).listening(tmp_path, "a"):
            pass
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


async def test_a_pause_that_is_taken_back_before_it_is_done_is_waited_for_no_longer(tmp_path: Path) -> None:
    lending = Lending()
    lending.happened(LendingEvent.LOADED)
    async with server_of(lending).listening(tmp_path, "a") as path:
        pausing = asyncio.ensure_future(tell(path, "pause", wait_s=30))  # type: ignore[arg-type]
        await lending.until(LendingState.DRAINING)
        lending.resume()
        lending.happened(LendingEvent.DRAINED)
        await lending.until(LendingState.WAITING)
        lending.happened(LendingEvent.LOADED)
        assert (await pausing)["state"] == "running"


async def test_a_path_that_no_socket_can_have_costs_the_commands_alone(tmp_path: Path) -> None:
    async with server_of(Lending()).listening(tmp_path / ("x" * 120), "a") as path:
        assert path is None
