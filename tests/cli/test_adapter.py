"""`swarmnode adapter`: what needs no swarm that runs. The rest is in `tests/real/test_adapters.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.swarm.storage.own_adapters import BlockedAdapters
from tests.cli.command import assert_clear, invoke
from tests.cli.test_owner import founded

ID = "0123456789abcdef" * 4


def test_an_id_is_blocked_and_unblocked(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    assert "Blocked 01234567 on this machine." in invoke("adapter", "block", ID.upper(), *home).stdout
    assert BlockedAdapters(tmp_path).ids() == {ID}
    assert json.loads(invoke("adapter", "unblock", ID, *home, "--json").stdout) == {"unblocked": ID}
    assert BlockedAdapters(tmp_path).ids() == frozenset()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("block", "verse"), "an adapter's id has 64 digits"),
        (("unblock", ID), "is not blocked here"),
        (("remove", "SWARM", "verse"), "you have added no adapter 'verse'"),
        (("add", "SWARM", "verse", "--share", "friends"), "choose one of private, members, all"),
        (("add", "SWARM", "verse", "--expires", "91d"), "at most 90d"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    swarm = str(founded(tmp_path)) if "SWARM" in arguments else ""
    given = [swarm if one == "SWARM" else one for one in arguments]
    done = invoke("adapter", *given, "--home", str(tmp_path / "home"))
    assert_clear(done, 2, told)
