"""Reports in the table: where they lie, for how long, and how many of one author."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId, Record
from swarmnode.swarm.records.announcement import Verify, peer_digest
from swarmnode.swarm.records.report import Report, open_report
from swarmnode.swarm.records.statement import Statement

LIFE_S = 3600.0
SLOTS = 4  # reports of one author; another one of the same accused replaces the first
REPORT = b"report:"


def report_key(swarm: bytes) -> bytes:
    """Where all of a swarm's lie."""
    return swarm + b":reports"


def report_subkey(author: PeerId, accused: PeerId) -> bytes:
    """Where one author's of one accused lies."""
    return b"%b%d:%b" % (REPORT, peer_digest(accused)[0] % SLOTS, author.encode())


def reports_in(records: Iterable[Record], swarm: bytes, verify: Verify) -> Iterator[tuple[Report, Statement]]:
    """Those that hold."""
    for record in records:
        try:
            yield open_report(record.value, swarm, verify)
        except ProtocolError:
            continue  # whoever stored it is not our concern: the table's validator refuses it
