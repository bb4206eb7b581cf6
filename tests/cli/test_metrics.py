"""Options of metrics and logs: what is refused, and how log lines look."""

from __future__ import annotations

import json
import logging

import pytest

from swarmnode.terminal.console import JsonLines, TextLines
from tests.cli.command import assert_clear, invoke

ROLES = ("run", "host", "train", "generate")
REST = {"train": ("--data", "x", "--steps", "1"), "generate": ("--ids", "1")}


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_the_options(role: str) -> None:
    told = invoke(role, "--help-all").stdout
    assert "--metrics-port" in told and "--metrics-host" in told and "--log-format" in told


@pytest.mark.parametrize("role", ROLES)
def test_a_log_format_that_is_none(role: str) -> None:
    done = invoke(role, "x.swarm", *REST.get(role, ()), "--log-format", "xml")
    assert_clear(done, 2, "--log-format xml", "text or json")


def test_a_port_that_cannot_be() -> None:
    assert invoke("run", "x.swarm", "--metrics-port", "70000").returncode == 2


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("swarmnode.node.node", logging.WARNING, "node.py", 1, message, arguments, info)


def test_a_json_line() -> None:
    text = JsonLines().format(record("peer %s\nis gone", "ü", error=ValueError("why")))
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["logger"], line["message"]) == ("warning", "swarmnode.node.node", "peer ü\nis gone")
    assert line["error"].endswith("ValueError: why") and line["time"].endswith("+00:00")
    assert "trace" not in line


def test_a_json_line_of_a_session_has_its_trace() -> None:
    one = record("session %s is slow", "5f2a61c0")
    one.trace = "5f2a61c09be34d17a8f0c2d94be17763"
    assert json.loads(JsonLines().format(one))["trace"] == "5f2a61c09be34d17a8f0c2d94be17763"


def test_a_text_line() -> None:
    assert TextLines().format(record("peer %s", "x")).endswith(" W swarmnode.node.node: peer x")


def test_levels_keep_their_names_whatever_others_call_them() -> None:
    renamed = record("x")
    renamed.levelname = "WARN"
    assert json.loads(JsonLines().format(renamed))["level"] == "warning"
