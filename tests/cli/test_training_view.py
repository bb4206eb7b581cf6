"""What a training says: the line, the log, and what is missing."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from swarmnode.compute.training.local import StepSummary
from swarmnode.counting import ranges
from swarmnode.data.samples import DataSummary
from swarmnode.errors import LocalError, UsageError
from swarmnode.swarm.records.run import Run
from swarmnode.terminal.formatting import format_duration
from swarmnode.terminal.training_view import Curve, Lines, step_json, training_view, waiting_text

RUN = Run(data=bytes(32), steps=100, batch=8, microbatch=4, sequence=16)
DATA = DataSummary(samples=1200, tokens=4800, rows=300, cut=2, epochs=2.5)


def report(step: int, loss: float = 2.5) -> StepSummary:
    return StepSummary(step, loss, step_s=0.5, tokens=128, peers=3, norm=1.0, expected_s=0.25)


def test_each_step_is_one_line_of_the_log_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    with training_view(as_json=True, log=log) as view:
        view.begun(RUN, DATA)
        view.step(report(0))
        expected = {"step": 0, "loss": 2.5, "step_s": 0.5, "expected_s": 0.25, "tokens_per_s": 256.0, "peers": 3}
        assert [json.loads(line) for line in log.read_text().splitlines()] == [expected], "flushed"
        view.waiting("unit 3", (3,))
        view.step(report(1))
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1]
    told = list(map(json.loads, capsys.readouterr().out.splitlines()))
    for step, kept in ((2, [0, 1, 2]), (0, [0])):  # a training that goes on, and another one
        with training_view(as_json=True, log=log) as view:
            assert log.read_text(), "nothing is lost before a step is written"
            view.begun(RUN, DATA)
            view.step(report(step))
        assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == kept
    assert [line.get("step") for line in told] == [0, None, 1]
    assert told[1] == {"event": "waiting", "missing": [3], "why": "unit 3"}


def test_lines_tell_what_matters_and_repeat_themselves_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    view = Lines((), clock=lambda: now_s)
    view.begun(RUN, DATA)
    view.step(report(9))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "step 10 of 100  loss 2.5000  256 tokens/s  0.50 s/step  3 peers  45 s left"
    for now_s in range(15):  # noqa: B007  (the clock reads it)
        view.waiting("units 2, 3", (2, 3))
    assert capsys.readouterr().out.splitlines() == ["waiting: no machine holds layers 2-3"] * 2
    view.step(report(10))
    assert capsys.readouterr().out.startswith("step 11 of 100")


def test_the_speed_is_that_of_the_last_steps_together() -> None:
    """A step of unknown duration, after the loss of a coordinator, does not count."""
    view = Lines(())
    view.begun(RUN, DATA)
    for step, (step_s, tokens) in enumerate([(1e6, 1), *[(1.0, 100)] * 18, (0.0, 100), (2.0, 260)]):
        view.step(replace(report(step), step_s=step_s, tokens=tokens))
    assert "103 tokens/s  1.05 s/step" in view.status()
    assert step_json(view.reports[-1])["tokens_per_s"] == 130 and step_json(view.reports[-2])["tokens_per_s"] == 0


def test_a_terminal_shows_curve_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    screen, now_s = io.StringIO(), [0.0]
    view = Curve((), Console(width=60, file=screen), lambda: now_s[0])
    view.beginning = "joining friends"
    assert _text(view.drawn()).split() == ["joining", "friends"]
    now_s[0] = 9.5
    assert _text(view.drawn()).split() == ["joining", "friends", "9", "s"], "a wait is told with its seconds"
    view.going_on("Expected: 2 s a step", "a holds layers 0-3: its owner could see [red]texts[/red]")
    assert screen.getvalue().splitlines() == [
        "Expected: 2 s a step",
        "a holds layers 0-3: its owner could see [red]texts[/red]",
    ], "a plan stays above the curve, whole"
    view.print_line("Tuning: lora of rank 16 on all-linear; 4 steps of 4 rows of 128 tokens")
    assert screen.getvalue().splitlines()[2:] == [
        "Tuning: lora of rank 16 on all-linear; 4 steps of 4 rows of",
        "128 tokens",
    ]
    view.begun(RUN, DATA)
    for step in range(20):
        view.step(report(step, loss=3.0 - step / 10))
    text = _text(view.drawn())
    assert "step 20 of 100" in text
    assert "3 " in text.splitlines()[0]
    assert any(ord(character) > 0x2800 for character in text)
    view.waiting("no peer of the swarm is ready", ())
    assert "no peer of the swarm is ready" in _text(view.drawn())


def _text(renderable: RenderableType) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_log_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    with (
        pytest.raises(LocalError, match="cannot write the log"),
        training_view(as_json=True, log=tmp_path / "no" / "log"),
    ):
        pass


def test_words_for_units_and_times() -> None:
    assert ranges([1, 3, 4, 5]) == ["1", "3-5"]
    assert waiting_text("", (0, 1, 5)) == "waiting: no machine holds layers 0-1, 5"
    assert [format_duration(seconds) for seconds in (0.4, 59, 61, 3600, 7260)] == [
        "0 s",
        "59 s",
        "1:01 min",
        "1:00 h",
        "2:01 h",
    ]


def test_what_cannot_be_told_ends_the_feeding_and_no_link() -> None:
    """A step is told from within a link to a peer, which goes on whatever becomes of the log."""
    stopped: list[bool] = []
    with pytest.raises(LocalError, match="full"), training_view(as_json=True, log=Path("/dev/full")) as view:
        view.on_failure = lambda: stopped.append(True)
        view.begun(RUN, DATA)
        view.step(report(0))
        view.step(report(1))
    assert stopped == [True]


def test_a_reader_that_has_gone_ends_the_feeding(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_value: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("swarmnode.terminal.training_view.print_json", gone)
    stopped: list[bool] = []
    with pytest.raises(BrokenPipeError), training_view(as_json=True, log=None) as view:
        view.on_failure = lambda: stopped.append(True)
        view.begun(RUN, DATA)
        view.step(report(0))
    assert stopped == [True]


def test_held_out_losses_are_told_with_their_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    view = Lines(())
    view.begun(RUN, DATA)
    assert "Data: 1,200 samples in 300 rows, 2 of them cut" in capsys.readouterr().out
    view.step(replace(report(0), held_out_loss=2.0))
    assert "held out 2.0000 (perplexity 7.389)" in capsys.readouterr().out
    view.step(report(1))
    assert "held out 2.0000" in view.status(), "until the next evaluation"
    assert step_json(replace(report(2), held_out_loss=1e4))["perplexity"] == math.inf
    assert "perplexity" not in step_json(report(2))


def test_tensorboard_gets_each_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with training_view(as_json=True, log=None, tensorboard=tmp_path) as view:
        view.begun(RUN, DATA)
        view.step(replace(report(3), held_out_loss=2.0))
    (file,) = tmp_path.iterdir()
    told = {value.tag: event.step for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert told.keys() >= {"loss", "held_out_loss", "perplexity", "tokens_per_s"} and set(told.values()) == {3}


def test_without_tensorboard_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(UsageError, match=r"package tensorboard is missing: .* --log"),
        training_view(as_json=True, log=None, tensorboard=tmp_path),
    ):
        pass
