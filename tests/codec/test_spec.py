"""The tables of `protocol/*.md` say what the code does: kinds, fields, limits, codecs, dtypes, states, error texts."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT
from msgspec import inspect as types

from swarmnode.codec import (
    audit_messages,
    body,
    frames,
    handover_messages,
    measuring_messages,
    messages,
    sampling,
    tensors,
    training_messages,
    tuning_messages,
)
from swarmnode.errors import ERROR_TEXT, ErrorCode
from swarmnode.net.addressing import reachability
from swarmnode.swarm.peers import shards
from swarmnode.swarm.records import adapter_record, announcement, invite, manifest, membership, receipt, run, statement
from swarmnode.swarm.storage import content
from tests.codec.schemas import NAMES, plain

PROTOCOL = Path(__file__).parents[2] / "protocol"
MODULES = (
    *(
        body,
        frames,
        messages,
        audit_messages,
        handover_messages,
        measuring_messages,
        sampling,
        training_messages,
        tensors,
        tuning_messages,
    ),
    *(
        adapter_record,
        announcement,
        content,
        invite,
        manifest,
        run,
        shards,
        receipt,
        statement,
        membership,
    ),
)
Row = dict[str, str]


def tables(file: str) -> Iterator[tuple[str, list[Row]]]:
    """(heading above it, rows by column) of every table of a page."""
    heading, lines = "", (PROTOCOL / f"{file}.md").read_text().splitlines()
    position = 0
    while position < len(lines):
        line = lines[position]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            columns = _cells(line)
            position += 2
            rows = []
            while position < len(lines) and lines[position].startswith("|"):
                rows.append(dict(zip(columns, _cells(lines[position]), strict=True)))
                position += 1
            yield heading, rows
        position += 1


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip()[1:-1].split("|")]


def table(file: str, heading: str) -> list[Row]:
    """The one table under a heading."""
    found = [rows for title, rows in tables(file) if title == heading]
    assert len(found) == 1, f"{file}.md has {len(found)} tables under {heading!r}"
    return found[0]


@pytest.mark.parametrize(
    ("file", "heading", "enum"),
    [
        ("frames", "Kinds", frames.FrameKind),
        ("frames", "Modes", messages.Mode),
        ("frames", "Wants", messages.Want),
        ("training", "Conditions", training_messages.Condition),
        ("tensors", "Codecs", tensors.Codec),
        ("tensors", "Dtypes", tensors.DType),
        ("membership", "Roles", invite.Role),
        ("records", "States", announcement.State),
        ("records", "Reachabilities", reachability.Reachability),
        ("errors", "Codes", ErrorCode),
    ],
)
def test_numbers_and_names(file: str, heading: str, enum: type[IntEnum]) -> None:
    written = {int(row["number"]): row["name"] for row in table(file, heading)}
    assert written == {member.value: member.name for member in enum}


def test_error_texts() -> None:
    assert {row["name"]: row["text"] for row in table("errors", "Codes")} == {
        code.name: text for code, text in ERROR_TEXT.items()
    }


def hex_bytes(file: str) -> str:
    """All bytes of the indented blocks of a page, without the words beside them."""
    lines = (PROTOCOL / f"{file}.md").read_text().splitlines()
    byte = re.compile(r"(?:[0-9a-f]{2} +)*[0-9a-f]{2}(?![^ ])")
    return "".join(
        found[0].replace(" ", "") for line in lines if (found := byte.match(line.strip())) and line[:1] == " "
    )


@pytest.mark.parametrize(
    ("file", "vectors", "name"),
    [
        ("frames", "frames", "an INPUT of one float32 hidden state of width 2"),
        ("tensors", "tensors", "none: float32"),
        ("tensors", "tensors", "int8: the worked example"),
        ("tensors", "tensors", "top-k: the worked example, a bitmask"),
        ("tensors", "tensors", "top-k: short indices"),
    ],
)
def test_worked_examples_are_vectors(file: str, vectors: str, name: str) -> None:
    rows = map(json.loads, (PROTOCOL / "vectors" / "v1" / f"{vectors}.jsonl").read_text().splitlines())
    assert next(row["hex"] for row in rows if row["name"] == name) in hex_bytes(file)


def test_dtype_sizes() -> None:
    sizes = {row["name"]: int(row["bytes"]) for row in table("tensors", "Dtypes")}
    assert sizes == {dtype.name: size for dtype, size in tensors.DTYPE_BYTES.items()}


def test_header() -> None:
    rows = table("frames", "Header")
    sizes = [int(row["size"]) for row in rows]
    assert [int(row["offset"]) for row in rows] == [sum(sizes[:place]) for place in range(len(rows))]
    assert sum(sizes) == frames.HEADER_BYTES


# -- limits ------------------------------------------------------------------------------------------------------------


def written_limits() -> dict[str, str]:
    found = [row for page in PROTOCOL.glob("*.md") for _, rows in tables(page.stem) for row in rows if "limit" in row]
    assert len({row["limit"] for row in found}) == len(found)
    return {row["limit"]: row["value"] for row in found}


def constants(module: ModuleType) -> dict[str, int | float]:
    """Return the limits that `module` itself assigns, as `module.NAME`; those that it imports are another module's."""
    name = module.__name__.rsplit(".", 1)[-1]
    own = re.findall(r"^(MAX_\w+)", inspect.getsource(module), re.MULTILINE)
    return {f"{name}.{key}": getattr(module, key) for key in own if isinstance(getattr(module, key), int | float)}


def number(text: str) -> float:
    """`4096`, `16,777,216`, `2**31`, `2**63 - 1` or `3600.0`."""
    text = text.replace(",", "")
    power = re.fullmatch(r"(\d+)\*\*(\d+)(?: - (\d+))?", text)
    return float(text) if power is None else int(power[1]) ** int(power[2]) - int(power[3] or 0)


def test_limits_are_the_ones_of_the_code() -> None:
    written = {name: number(value) for name, value in written_limits().items()}
    defined = {name: value for module in MODULES for name, value in constants(module).items()}
    assert written == defined


# -- fields ------------------------------------------------------------------------------------------------------------

STRUCTS = {name: struct for struct, name in NAMES.items()}
PARTS = (
    training_messages.Counted,
    training_messages.Group,
    training_messages.MemberSpec,
    training_messages.PathRate,
    training_messages.Form,
    training_messages.Wait,
)
PAGES = {
    **dict.fromkeys(
        (
            "announcement",
            "manifest",
            "model",
            "file",
            "adapter",
            "adapter_record",
            "hop_statement",
            "edge",
            "report",
            "step_commitment",
            "work_receipt",
            "voucher",
        ),
        "records",
    ),
    **{NAMES[body]: "training" for body in (*training_messages.TRAINING_BODIES.values(), *PARTS) if body in NAMES},
    **{NAMES[body]: "tuning" for body in tuning_messages.TUNING_BODIES.values()},
    **{NAMES[body]: "training" for body in audit_messages.SPOT_CHECK_BODIES.values()},
    **dict.fromkeys(
        (
            "run",
            "averaging",
            "compression",
            "recipe",
            "parameter_group",
            "microbatch_record",
            "crossing",
            "block_tiles",
        ),
        "training",
    ),
    "tensor": "tensors",
    **dict.fromkeys(("invite", "owned_invite"), "invites"),
    **dict.fromkeys(("grant", "certificate", "revocation_list"), "membership"),
}
CHECKED_ELSEWHERE = {
    "announcement",
    "manifest",
    "model",
    "file",
    "adapter",
    "adapter_record",
    "tensor",
    "invite",
    "run",
    "averaging",
    "compression",
    "hop_statement",
    "edge",
    "report",
    "step_commitment",
    "work_receipt",
    "voucher",
} | {*("owned_invite", "grant", "certificate", "revocation_list")}


@pytest.mark.parametrize("name", STRUCTS)
def test_fields(name: str) -> None:
    rows = table(PAGES.get(name, "frames"), f"{name.upper()} fields")
    info = types.type_info(STRUCTS[name])
    assert isinstance(info, types.StructType)
    assert [row["field"] for row in rows] == [field.name for field in info.fields]
    assert [row["type"] for row in rows] == [type_text(field.type) for field in info.fields]
    assert [row["default"] for row in rows] == [default_text(field) for field in info.fields]
    if name not in CHECKED_ELSEWHERE:
        assert [row["limits"] for row in rows] == [limits_text(field.type) for field in info.fields]


def type_text(info: types.Type) -> str:
    if isinstance(info, types.Metadata):
        return type_text(info.type)
    if isinstance(info, types.StructType):
        return NAMES[info.cls].upper()
    if isinstance(info, types.UnionType):
        return " or ".join(type_text(member) for member in info.types)
    if isinstance(info, types.VarTupleType):
        return f"array of {type_text(info.item_type)}"
    if isinstance(info, types.TupleType):
        return f"[{', '.join(type_text(item) for item in info.item_types)}]"
    if isinstance(info, types.DictType):
        return f"map of {type_text(info.key_type)} to {type_text(info.value_type)}"
    words = {types.StrType: "text", types.NoneType: "nil"}
    return words.get(type(info)) or type(info).__name__.removesuffix("Type").lower()


def default_text(field: types.Field) -> str:
    if field.required:
        return "-"
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        return "absent"
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return json.dumps(plain(default))


def limits_text(info: types.Type) -> str:
    if isinstance(info, types.VarTupleType):
        items = limits_text(info.item_type)
        return _lengths(info, "") + (f" of {items}" if items != "-" else "")
    if isinstance(info, types.BytesType | types.StrType):
        return _lengths(info, " bytes" if isinstance(info, types.BytesType) else " characters")
    if isinstance(info, types.Metadata):
        return "any"
    if isinstance(info, types.UnionType):
        return limits_text(next(member for member in info.types if not isinstance(member, types.NoneType)))
    if isinstance(info, types.FloatType):
        return f"over 0 to {info.le:g}" if info.gt is not None else f"{info.ge:g}..{info.le:g}"
    if isinstance(info, types.IntType):
        assert info.ge is not None
        highest = info.le if info.le is not None else (info.lt or 0) - 1
        return f"{info.ge}..{highest}"
    return "-"


def _lengths(info: Any, noun: str) -> str:
    if info.min_length == info.max_length:
        return f"{info.max_length}{noun}"
    return f"{info.min_length or 0}..{info.max_length}{noun}"


def test_struct_field_counts_cover_all_bodies() -> None:
    assert {body for body in messages.BODIES.values() if body.__struct_fields__} <= set(NAMES)
    assert issubclass(messages.Body, msgspec.Struct)
