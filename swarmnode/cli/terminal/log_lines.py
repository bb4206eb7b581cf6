"""How a log line looks: one line per event, whatever was logged, as text or as JSON."""

from __future__ import annotations

import logging
from datetime import datetime, timezone

from swarmnode.cli.terminal.printable import json_line, printable

LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
"""Under names of our own: hivemind renames logging's."""


class TextLines(logging.Formatter):
    """For people: `2026-11-21 08:15:00,123 W swarmnode.node.node: message`. A stack trace follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """A message may name what a stranger chose."""
        return printable(super().format(record))


class JsonLines(logging.Formatter):
    """For log collectors: one JSON object per event, stack traces inside it."""

    def format(self, record: logging.LogRecord) -> str:
        """`time` is UTC, ISO 8601; `trace` names the session, `error` is there where an exception was logged."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": LEVELS.get(record.levelno, str(record.levelno)),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (trace := getattr(record, "trace", None)) is not None:
            line["trace"] = trace
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_line(line)
