"""Command `swarmnode network`: write the machines and links that a live swarm has measured, as a network for planning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarmnode.cli.options.asking import ask
from swarmnode.cli.options.files import output_path, write_output
from swarmnode.cli.options.swarm import SWARM
from swarmnode.counting import counted
from swarmnode.terminal.console import HOME, Verbosity, command, print_json, say
from swarmnode.terminal.option import path_option


@command
def network(
    *,
    swarm: str = SWARM,
    output: Path = path_option("Write to this file; default: print.", "--output", "-o", parse=output_path),
    home: Path = HOME,
    logs: Verbosity,
) -> None:
    """Write a swarm's measured machines and links, for planning.

    `plan` and `simulate` read this file of machines, speeds, delays and bandwidths.

    Example: swarmnode network friends.swarm -o network.json
    """
    logs.begin()
    found = ask(swarm, home, lambda client: client.network())
    if output is None:
        print_json(found)
    else:
        _write(output, found)


def _write(output: Path, found: dict[str, Any]) -> None:
    write_output(output, json.dumps(found) + "\n")
    pairs = found["devices"] * (found["devices"] - 1)
    delays, bandwidths = (pairs - len(found["estimated"][field]) for field in ("delay_ms", "bandwidth_gbps"))
    say(
        f"Wrote {output}: {counted(found['devices'], 'machine')}; of {counted(pairs, 'link')} {counted(delays, 'delay')} and "
        f"{counted(bandwidths, 'bandwidth')} were "
        "measured, the others are estimated."
    )
