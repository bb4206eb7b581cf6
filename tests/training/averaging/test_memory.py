"""What averaging costs in memory, robust where there are enough members: one copy of a span's gradients, and a bounded amount
that does not grow with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LONG, SHORT = 18 << 20, 8 << 20  # elements: 72 and 32 MiB
BESIDE_BYTES = 64 << 20  # less than one more copy of the long ones
CASES = [(2, LONG, "NONE", 1), (2, LONG, "INT8", 1), (4, SHORT, "FP16", 1), (2, LONG, "INT4", 2)]
PROGRAM = """
import json
import sys
from pathlib import Path

from swarmnode.codec.tensors import Codec
from swarmnode.net.memory.virtual_time import run_virtual
from swarmnode.training.averaging.all_reduce import Agreed
from swarmnode.swarm.records.run import Averaging
from tests.training.averaging.replicas import group_of, replicas, within


def resident_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


async def main(count, elements, codec):
    _, members = await replicas(count, elements, averaging=Averaging(codec=codec, robust=True))
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    results = await within(600, [member.reduce([group_of(members)]) for member in members])
    assert all(isinstance(result, Agreed) for result in results), results
    print((resident_bytes("VmHWM") - before) // count)


members, elements, codec = json.loads(sys.argv[1])
run_virtual(main(members, elements, Codec[codec]))
"""


def extra_bytes(members: int, elements: int, codec: str) -> int:
    """Of each member, beyond its gradients, at the worst moment; in a new process, with memory that nobody has used before."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([members, elements, codec])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks in /proc")
@pytest.mark.parametrize(("members", "elements", "codec", "vectors"), CASES)
def test_averaging_takes_a_copy_of_the_gradients_and_little_beside(
    members: int, elements: int, codec: str, vectors: int
) -> None:
    """With error feedback another one, for what is not said yet."""
    assert extra_bytes(members, elements, codec) <= vectors * 4 * elements + BESIDE_BYTES
