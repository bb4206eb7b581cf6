"""contrib/benchmarks/gpu.py on a machine without a card."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contrib.script import CONTRIB, load

gpu: Any = load(CONTRIB / "benchmarks" / "gpu.py")


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_comes_to_its_end_on_a_cpu(part: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", part, "--tiny", "--device", "cpu", "--seconds", "0"])
    gpu.main()
    told = json.loads(capsys.readouterr().out)
    assert told["part"] == part and told["found"]


def test_a_device_that_is_not_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", "text", "--device", "cuda:x"])
    with pytest.raises(SystemExit) as caught:
        gpu.main()
    assert caught.value.code == 2
    assert "devices are numbered, as in cuda:1" in capsys.readouterr().err
