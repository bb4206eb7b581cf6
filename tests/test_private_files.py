"""What a node writes beside its keys is its owner's alone, whatever umask it was started with."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from swarmnode.cli.options import gateway
from swarmnode.cli.terminal.console import is_kept
from swarmnode.files import lock_alone, write_private
from swarmnode.net.identity import IdentitySlot


def test_under_an_open_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        lock = lock_alone(tmp_path / "a.lock")
        write_private(tmp_path / "new" / "folder" / "file", b"", make_folder=True)
        slot = IdentitySlot(tmp_path / "home", "node")
    finally:
        os.umask(before)
    assert lock is not None and not slot.path.is_dir()
    lock.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes.pop("new") == modes.pop("folder") == modes.pop("home") == 0o700
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("kept", [True, False])
def test_the_pages_token_is_not_told_to_a_journal(
    tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w") as log:
        assert is_kept(log)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        assert not is_kept(pipe)
    os.close(reader)
    monkeypatch.setattr(gateway, "is_kept", lambda _stream: kept)
    gateway.GatewayAddress(tmp_path, 1)._tell(1, "secret-token", ["tiny"])
    assert ("secret-token" in capsys.readouterr().out) is not kept
