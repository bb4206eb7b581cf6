"""The advice of an error fits its cause."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.compute.device import probe_device
from swarmnode.errors import (
    REMEDY,
    ErrorCode,
    LocalError,
    NoRoute,
    ProtocolError,
    refusal,
    with_advice,
    with_port_advice,
    with_remedy,
)
from swarmnode.swarm.storage.chunk_folder import WeightCache, disk_error


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOSPC, "free disk space"),
        (errno.ENOENT, "reinstall"),
        (errno.ENOMEM, "free memory"),
    ],
)
def test_the_reason_decides(number: int, advice: str) -> None:
    told = with_advice(OSError(number, os.strerror(number)), "reinstall hivemind")
    assert told.startswith(os.strerror(number)) and advice in told and ("reinstall" in told) == (advice == "reinstall")


def test_another_port_helps_only_where_one_is_taken() -> None:
    assert "another port" in with_port_advice(OSError(errno.EADDRINUSE, "in use"), "choose another port")
    assert "above 1023" in with_port_advice(OSError(errno.EACCES, "denied"), "choose another port")
    for error in (OSError(errno.EADDRNOTAVAIL, "none"), socket.gaierror(socket.EAI_NONAME, "unknown")):
        assert "address of this machine" in with_port_advice(error, "choose another port")


def test_a_bound_of_the_owners_is_not_a_full_disk(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "weights", bytes(32), 1_000_000)
    with pytest.raises(LocalError, match="--disk 1MB leaves; allow more with --disk") as refused:
        cache.make_room(3_000_000)
    assert "free some" not in str(refused.value)
    cache.close()
    assert "free" not in str(disk_error(tmp_path, PermissionError(errno.EACCES, "denied")))
    assert "free disk space" in str(disk_error(tmp_path, OSError(errno.ENOSPC, "full")))


def test_only_devices_that_are_here_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LocalError, match="no device 'cuda' on this machine: use auto or cpu") as refused:
        probe_device("cuda")
    assert "cuda:N" not in str(refused.value)


def test_a_protocol_error_names_its_peer_once() -> None:
    error = ProtocolError("it sent another chunk")
    assert str(error) == "it sent another chunk"
    error.peer = "12D3KooWx"
    assert str(error) == "peer 12D3KooWx: it sent another chunk"
    assert str(ProtocolError("peer 12D3KooWx lies", peer="12D3KooWx")) == "peer 12D3KooWx lies"


def test_the_command_line_says_what_to_do() -> None:
    assert with_remedy(NoRoute("no machine has layer 3")) == f"no machine has layer 3. {NoRoute.remedy}"
    assert with_remedy(refusal(ErrorCode.VERSION)).endswith(f". {REMEDY[ErrorCode.VERSION]}")
    assert with_remedy(LocalError("port 1 is in use; choose another")) == "port 1 is in use; choose another"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_too_few_open_files_are_named_also_where_uvloop_gives_no_cause(tmp_path: Path) -> None:
    program = f"""
import os, resource, uvloop
from pathlib import Path
from swarmnode.net.libp2p.daemon import Daemon

async def start():
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2,) * 2)
    await Daemon.start(Path("/bin/true"), [], Path({str(tmp_path / "socket")!r}))

uvloop.run(start())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "cannot start p2pd" in done.stderr and "ulimit -n" in done.stderr, done.stderr
    assert "reinstall" not in done.stderr.splitlines()[-1]
