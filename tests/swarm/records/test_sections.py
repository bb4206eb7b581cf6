"""Sections: together they are what an announcement says, each field once."""

from __future__ import annotations

from collections import Counter
from typing import get_type_hints

from msgspec import UnsetType

from swarmnode.swarm.records.announcement import Announcement, Introduction, Place, Section, ServingLoad, said

ENVELOPE = {
    "version",
    "swarm",
    "peer",
    "sequence",
    "issued_at",
    "expires_at",
    "started_at",
    "left",
}  # the directory's own
NEVER_CHANGED = {"codecs"}


def test_every_field_has_one_owner() -> None:
    owners = Counter(name for section in Section.__subclasses__() for name in section.__struct_fields__)
    assert set(owners.values()) == {1}
    assert set(owners) == set(Announcement.__struct_fields__) - ENVELOPE - NEVER_CHANGED


def test_fields_have_the_types_of_the_announcement() -> None:
    types = get_type_hints(Announcement)
    for section in Section.__subclasses__():
        for name, kind in get_type_hints(section).items():
            assert kind == types[name] | UnsetType, f"{section.__name__}.{name}"


def test_what_is_unset_stays_as_it_was() -> None:
    assert said([]) == said([Place()]) == {}
    told = said([Place(state=2, span=(0, 4)), Introduction(name="box"), ServingLoad(sessions=0), Place(span=(4, 8))])
    assert told == {"state": 2, "span": (4, 8), "name": "box", "sessions": 0}
