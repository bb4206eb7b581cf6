"""What the commands that ask a swarm share: whom they trust, and a start without torch."""

from __future__ import annotations

import os
import sys

import typer

TRUST = typer.Option(
    [],
    "--trust",
    metavar="PEER|group:NAME|net:CIDR",
    help="Let only these compute; see docs/security.md for what it protects. Repeatable.",
)


def leave_torch_out() -> None:
    """This process computes nothing, and transformers' tokenizers take a fourth of the time where they find no torch. Not for one
    that stays: audits of what others have computed need it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it tells that it has not found it
