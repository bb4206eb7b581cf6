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
import os
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


for members, elements, codec, _ in json.loads(sys.argv[1]):
    if os.fork() == 0:  # memory that nobody has used before, and what is imported already
        run_virtual(main(members, elements, Codec[codec]))
        sys.stdout.flush()
        os._exit(0)
    _, status = os.wait()
    assert status == 0
"""


@pytest.fixture(scope="module")
def extra_bytes() -> dict[str, int]:
    """By codec: of each member, beyond its gradients, at the worst moment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return {codec: int(line) for (_, _, codec, _), line in zip(CASES, done.stdout.split(), strict=True)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks in /proc")
@pytest.mark.parametrize(("_members", "elements", "codec", "vectors"), CASES)
def test_averaging_takes_a_copy_of_the_gradients_and_little_beside(
    extra_bytes: dict[str, int], _members: int, elements: int, codec: str, vectors: int
) -> None:
    """With error feedback another one, for what is not said yet."""
    assert extra_bytes[codec] <= vectors * 4 * elements + BESIDE_BYTES
