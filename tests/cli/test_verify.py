"""`swarmnode verify`: exit codes for files that are no receipts, and the words of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.cli.use.verify import _tell
from tests.cli.command import invoke
from tests.cli.test_owner import founded


@pytest.mark.parametrize("content", [None, b"", bytes((1 << 21) + 1), b"Once upon a time", bytes(300)])
def test_a_file_that_cannot_be_a_receipt_is_a_usage_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "story.receipt"
    if content is not None:
        path.write_bytes(content)
    told = invoke("verify", str(path), str(founded(tmp_path)))
    assert told.returncode == 2 and "story.receipt" in told.stderr and "Traceback" not in told.stderr


def test_a_report_says_what_was_proved_by_whom_and_what_not(capsys: pytest.CaptureFixture[str]) -> None:
    hops = [
        {"peer": "peer-aaaaaaaa", "span": [0, 3], "result": "proved", "by": ["x-bbbbbbbb", "x-cccccccc"], "why": None},
        {"peer": "peer-dddddddd", "span": [3, 6], "result": "not proved", "by": [], "why": "no class"},
    ]
    _tell({"tokens": 20, "client": "peer-eeeeeeee", "at": 1.0, "hops": hops})
    told = " ".join(capsys.readouterr().out.split())
    assert "layers 0 to 2, aaaaaaaa: proved by bbbbbbbb and cccccccc" in told
    assert "layers 3 to 5, dddddddd: not proved: no class" in told
