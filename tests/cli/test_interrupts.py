"""Ctrl-C while a thread does what nothing stops: real processes, which end as others do, at once and without a stack trace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from swarmnode.terminal.console import Interrupted, joined

ROOT = Path(__file__).parents[2]
IMPORTING = """
    import asyncio, threading
    from swarmnode.terminal import console
    from swarmnode.terminal.console import leave_threads, run_async

    console.THREADS_S = 0.05

    async def command(stop):
        loading = asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))  # as long as Python would wait for it
        print("begun", flush=True)
        await stop.wait()
        loading.cancel()
        print("over")

    run_async(command)
    leave_threads({code})
    print("not reached")
"""


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_stop_waits_for_no_thread(code: int, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(IMPORTING).format(code=code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    said, errors = process.communicate(timeout=240)
    assert (process.returncode, said, errors) == (code, "over\n", "")


def test_who_ends_by_itself_waits_for_its_threads() -> None:
    """What they write is to be there."""
    script = """
        import asyncio, threading, time
        from swarmnode.terminal.console import leave_threads, run_async

        def write(begun):
            begun.set()
            time.sleep(0.2)
            print("written")

        async def command(stop):
            begun = threading.Event()
            writing = asyncio.ensure_future(asyncio.to_thread(write, begun))
            await asyncio.to_thread(begun.wait)
            writing.cancel()

        run_async(command)
        leave_threads(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "written\n", "")


WRITING = """
    import asyncio, pathlib
    from swarmnode.terminal.console import run_async, say

    async def command(stop):
        say("begun")
        await asyncio.to_thread(input)  # until the terminal closes
        say("to nobody")
        print("nor this", flush=True)
        say("nor this", err=True)

    try:
        run_async(command)
    except EOFError:
        pass
    except OSError:
        say("to nobody")
        print("nor this", flush=True)
    pathlib.Path({path!r}).write_text("over")
"""


def test_who_was_left_to_itself_goes_on_where_its_terminal_closes(tmp_path: Path) -> None:
    """As after `disown`: nothing tells it of the closing but an error as it writes."""
    master, slave = os.openpty()
    path = tmp_path / "over"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITING).format(path=str(path))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    assert os.read(master, 16).startswith(b"begun")
    os.close(master)
    assert process.wait(240) == 0 and path.read_text() == "over"


async def _said(word: str) -> str:
    return word


def test_who_is_asked_to_stop_while_joining_joins_no_more() -> None:
    ended: list[bool] = []

    async def join() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return "never"

    async def command() -> None:
        stop = asyncio.Event()
        assert await joined(_said("client"), stop) == "client"
        asyncio.get_running_loop().call_soon(stop.set)
        with pytest.raises(Interrupted):
            await joined(join(), stop)

    asyncio.run(command())
    assert ended == [True]
