"""A swarm's name or a gateway's model id runs a command when the user sources the file that `swarmnode config tool` wrote."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.errors import UsageError
from swarmnode.gateway.integrations.configurations import TOOLS, Endpoint

VIRTUAL, FAST = True, True
NAMES = (
    "x$(touch pwned)",
    "x`touch pwned`",
    "x; touch pwned",
    "x\ntouch pwned",
    "x && touch pwned",
    "'; touch pwned; '",
)
SOURCED = [name for name, tool in TOOLS.items() if tool.file.suffix == ".env"]


def runs(tool: str, name: str) -> bool:
    """Return whether the command in `name` runs."""
    try:
        text = TOOLS[tool].configuration(Endpoint("http://127.0.0.1:8000/v1", [name], "none", embedders=[name]))
    except UsageError:
        return False
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.env").write_text(text)
        subprocess.run(["sh", "-c", "set -a; . ./x.env"], cwd=folder, capture_output=True, timeout=10)
        return (Path(folder) / "pwned").exists()


async def attack() -> Outcome:
    ran = sum(runs(tool, name) for tool in SOURCED for name in NAMES)
    return Outcome(not ran, f"{ran} of {len(SOURCED) * len(NAMES)} names ran their command")


main(__name__, attack, virtual=VIRTUAL)
