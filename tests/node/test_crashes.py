"""A model that ends the process in a library twice is not loaded a third time. All deaths are real, in forked children of a process
without pytest's own `faulthandler`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.llama import save_llama

ROOT = Path(__file__).parents[2]
SETUP = """
    import asyncio, ctypes, json, os, signal, sys
    from pathlib import Path
    from swarmnode.errors import UsageError
    from swarmnode.node.stage_loader import CrashLog, StageLoader

    folder = Path(sys.argv[1])

    def run(life):
        "The signal or exit code of a child that lives `life`, and the UsageError that ended it."
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                life()
            except UsageError as error:
                os.write(tell, str(error).encode())
            os._exit(0)
        os.close(tell)
        with open(told) as ending:
            text = ending.read()
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]
"""


def in_process(script: str, folder: Path) -> Any:
    """What a script printed as JSON, after SETUP."""
    code = textwrap.dedent(SETUP) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DEATHS = """
    def ends(file, kill, model="model", forgets=False, leaves=False):
        def life():
            log = CrashLog.start(folder / "crashes" / file, model)
            log.record("it held layer 3")
            if forgets:
                log.forget()
            kill()
            if leaves:
                log.close()
        return run(life)

    def by(number):
        return lambda: (signal.signal(number, signal.SIG_DFL), os.kill(os.getpid(), number))

    nothing = lambda: None
"""


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The three ends of each kind of death, and other rows of ends."""
    script = """
    kinds = {"abort": os.abort, "null": lambda: ctypes.string_at(0)}
    kinds |= {name: lambda name=name: os.kill(os.getpid(), getattr(signal, name)) for name in ("SIGFPE", "SIGILL", "SIGBUS")}
    kinds |= {name: by(getattr(signal, name)) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")}
    kinds["exit"] = lambda: os._exit(1)
    found = {name: [ends(name, kill) for _ in range(3)] for name, kill in kinds.items()}
    found["other model"] = [ends("a", os.abort, model) for model in ("one", "one", "two", "one", "one")]
    found["computed between"] = [ends("b", os.abort), ends("b", os.abort, forgets=True), ends("b", os.abort), ends("b", nothing)]
    found["left between"] = [ends("c", os.abort), ends("c", nothing, forgets=True, leaves=True), ends("c", os.abort)]
    found["failed between"] = [ends("d", os.abort), ends("d", nothing, leaves=True), ends("d", os.abort), ends("d", nothing)]
    ends("gone", nothing, leaves=True)
    (folder / "crashes" / "noise").write_bytes(bytes(range(256)) * 9000)
    found["noise"] = [ends("noise", nothing)]
    found["files"] = [sorted(path.name for path in (folder / "crashes").iterdir())]
    print(json.dumps(found))
    """
    return in_process(DEATHS + script, tmp_path_factory.mktemp("deaths"))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("abort", "Aborted"),
        ("null", "Segmentation fault in string_at (__init__.py, line "),
        ("SIGFPE", "Floating"),
        ("SIGILL", "Illegal instruction"),
        ("SIGBUS", "Bus error"),
    ],
)
def test_two_crashes_of_a_library_are_enough(deaths: Any, kind: str, named: str) -> None:
    first, second, third = deaths[kind]
    assert first[0] == second[0] < 0 and not first[1] + second[1]  # the process still dies of its signal
    assert third[0] == 0 and named in third[1] and "while it held layer 3" in third[1]
    assert f"crashes/{kind} to try again" in third[1] and "2 times" in third[1]


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "exit"])
def test_ends_from_outside_do_not_count(deaths: Any, kind: str) -> None:
    assert not any(text for _, text in deaths[kind])


def test_only_crashes_of_the_same_model_without_a_pass_between_count(deaths: Any) -> None:
    refused = {name: [bool(text) for _, text in ends] for name, ends in deaths.items() if name != "files"}
    assert refused["other model"] == [False] * 5  # another model, version or option forgets them
    assert refused["computed between"] == [False, False, False, True]
    assert refused["left between"] == [False, False, False]
    assert refused["failed between"] == [False, False, False, True]  # an error of Python proves nothing
    assert refused["noise"] == [False]
    assert "gone" not in deaths["files"][0]


def test_a_node_does_not_load_a_model_a_third_time(tmp_path: Path) -> None:
    """Whether it dies while it measures, while it loads, or in a pass after that."""
    save_llama(tmp_path / "model", 2)
    script = """
    from tests.net.virtual import run_virtual
    from tests.node.virtual_swarm import VirtualSwarm
    from swarmnode.measuring.hardware import Hardware

    def abort(*_, **__):
        os.abort()

    async def live(name, home):
        async with VirtualSwarm(home) as swarm:
            if not swarm.file.exists():
                swarm.create(folder / "model")
            await swarm.bootstrap()
            member = swarm.node("alice", None, device="cpu")
            await member.wait_for("ready")
            if name == "pass":
                os.abort()
            await member.stop()

    def life(name):
        where = {"load": (StageLoader, "load"), "measure": (Hardware, "probe")}
        if name in where:
            setattr(*where[name], abort)
        run_virtual(live(name, folder / ("well" if name == "nothing" else name)))

    found = {name: [run(lambda: life(name)) for _ in range(3)] for name in ("measure", "load", "pass")}
    found["nothing"] = run(lambda: life("nothing"))
    found["left"] = [str(path) for path in (folder / "well").rglob("crashes/*")]
    print(json.dumps(found))
    """
    found = in_process(script, tmp_path)
    for name in ("measure", "load", "pass"):
        assert [code for code, _ in found[name]] == [-6, -6, 0], name
        doing = "measured this machine" if name == "measure" else "held layers"
        assert "Aborted" in found[name][2][1] and doing in found[name][2][1], found[name]
    assert found["nothing"] == [0, ""] and not found["left"]
