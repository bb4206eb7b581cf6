"""contrib/fuzz: a small share of the inputs that every decoder takes, and of the frames that a whole node is sent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarmnode.errors import ProtocolError
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from tests.contrib.script import CONTRIB, load

FOLDER = CONTRIB / "fuzz"
sys.path.append(str(FOLDER))  # scripts import what stands beside them


def test_every_decoder_takes_or_refuses() -> None:
    found = load(FOLDER / "decoders.py").fuzz(2_000, seed=1)
    assert found["refused"] > 1_000 and found["taken"] > 100


def test_a_node_outlives_frames_in_any_order(tmp_path: Path) -> None:
    found = run_virtual(load(FOLDER / "handlers.py").fuzz(500, 0, tmp_path))
    assert found["frames"] >= 500 and found["computed_unit_tokens"] > 100


def test_a_run_without_samples_in_a_microbatch_is_refused() -> None:
    """It divided by zero, as a million inputs found."""
    with pytest.raises(ProtocolError, match="a microbatch of at least one sample"):
        decode_run(encode_run(Run(data=bytes(32), steps=1, batch=8, microbatch=0)))
