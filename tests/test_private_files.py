"""What a node writes beside its keys is its owner's alone, whatever umask it was started with."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from swarmnode.files import lock_alone, write_private
from swarmnode.gateway import gateway_address as gateway
from swarmnode.net.identity import IdentitySlot
from swarmnode.terminal.console import is_recorded


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
def test_the_pages_token_is_told_to_a_terminal_alone(
    tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others read a journal, a file, and what Docker keeps of a pipe."""
    with (tmp_path / "log").open("w") as log:
        assert is_recorded(log)
    for one, other in (os.pipe(), os.openpty()):
        with os.fdopen(other, "w") as stream:
            assert is_recorded(stream) is not os.isatty(other)
        os.close(one)
    monkeypatch.setattr(gateway, "is_recorded", lambda _stream: kept)
    gateway.GatewayAddress(tmp_path, 1)._tell(1, "secret-token", ["tiny"])
    printed, link = capsys.readouterr(), tmp_path / "page-link"
    assert ("secret-token" in printed.out) is not kept
    assert "secret-token" not in printed.err and (f"cat {link}" in printed.err) is kept
    assert link.read_text() == "http://127.0.0.1:1/#owner=secret-token\n" and stat.S_IMODE(link.stat().st_mode) == 0o600
