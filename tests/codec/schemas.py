"""JSON Schema of the msgpack structures, from the types that decode them. Bytes are written as lower-case hex.

`python -m tests.codec.schemas` writes them anew, after a field was added.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as types

from swarmnode.codec.audit_messages import BlockTiles, Crossing, MicrobatchRecord
from swarmnode.codec.body import HopSpec
from swarmnode.codec.handover_messages import CachePart
from swarmnode.codec.measuring_messages import DraftCount, TraceStep
from swarmnode.codec.messages import BODIES, AdapterTicket, Branch, StateEntry
from swarmnode.codec.sampling import Grammar, Sampling
from swarmnode.codec.tensors import TensorInfo
from swarmnode.codec.training_messages import Counted, Form, Group, MemberSpec, PathRate, Wait
from swarmnode.swarm.records.adapter_record import AdapterRecord
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.invite import Certificate, Grant, Invite, OwnedInvite
from swarmnode.swarm.records.manifest import AdapterInfo, Manifest, ModelInfo
from swarmnode.swarm.records.membership import RevocationList
from swarmnode.swarm.records.receipt import Receipt, Voucher
from swarmnode.swarm.records.run import Averaging, Compression, ParameterGroup, Recipe, Run
from swarmnode.swarm.records.statement import Commitment, Edge, Report, Statement
from swarmnode.swarm.storage.content import FileContent

FOLDER = Path(__file__).parents[2] / "protocol" / "schema"
NAMES: dict[type[msgspec.Struct], str] = {
    **{body: kind.name.lower() for kind, body in BODIES.items() if body.__struct_fields__},
    HopSpec: "hop",
    Branch: "branch",
    CachePart: "cache_part",
    AdapterTicket: "adapter_ticket",
    Sampling: "sampling",
    Grammar: "grammar",
    StateEntry: "state_entry",
    TraceStep: "trace_step",
    DraftCount: "draft_count",
    Counted: "counted",
    MemberSpec: "member",
    Group: "group",
    PathRate: "path_rate",
    Form: "form",
    Wait: "wait",
    TensorInfo: "tensor",
    Announcement: "announcement",
    Manifest: "manifest",
    ModelInfo: "model",
    AdapterInfo: "adapter",
    AdapterRecord: "adapter_record",
    FileContent: "file",
    Run: "run",
    Averaging: "averaging",
    Compression: "compression",
    Recipe: "recipe",
    ParameterGroup: "parameter_group",
    Invite: "invite",
    OwnedInvite: "owned_invite",
    Grant: "grant",
    Certificate: "certificate",
    RevocationList: "revocation_list",
    MicrobatchRecord: "microbatch_record",
    Crossing: "crossing",
    BlockTiles: "block_tiles",
    Commitment: "step_commitment",
    Statement: "hop_statement",
    Edge: "edge",
    Report: "report",
    Receipt: "work_receipt",
    Voucher: "voucher",
}


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of one structure; structures inside it are referred to by their files."""
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{NAMES[struct]}.json",
        "title": NAMES[struct],
    }
    required = [field for field in info.fields if field.required]
    if info.array_like:
        fields = [{"title": field.name, **_field(field)} for field in info.fields]
        return {**head, "type": "array", "prefixItems": fields, "minItems": len(required)}
    properties = {field.encode_name: _field(field) for field in info.fields}
    return {**head, "type": "object", "properties": properties, "required": [field.encode_name for field in required]}


def _field(field: types.Field) -> dict[str, Any]:
    schema = _schema(field.type)
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        return schema
    default = field.default_factory() if field.default is NODEFAULT else field.default
    return {**schema, "default": plain(default)}


def _schema(info: types.Type) -> dict[str, Any]:
    if isinstance(info, types.StructType):
        return {"$ref": f"{NAMES[info.cls]}.json"}
    if isinstance(info, types.UnionType):
        return {"anyOf": [_schema(member) for member in info.types]}
    if isinstance(info, types.VarTupleType):
        return {"type": "array", "items": _schema(info.item_type), **_lengths(info, "Items")}
    if isinstance(info, types.TupleType):
        items = [_schema(item) for item in info.item_types]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(info, types.DictType):
        return {"type": "object", "additionalProperties": _schema(info.value_type)}
    if isinstance(info, types.BytesType):
        return {"type": "string", "pattern": "^([0-9a-f]{2})*$", **_lengths(info, "Length", factor=2)}
    if isinstance(info, types.StrType):
        return {"type": "string", **_lengths(info, "Length")}
    if isinstance(info, types.Metadata):  # a float that may be anything
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    if isinstance(info, types.IntType | types.FloatType):
        return {"type": "integer" if isinstance(info, types.IntType) else "number", **_bounds(info)}
    return {"type": {types.BoolType: "boolean", types.NoneType: "null"}[type(info)]}


def _bounds(info: types.IntType | types.FloatType) -> dict[str, Any]:
    words = {"minimum": info.ge, "exclusiveMinimum": info.gt, "maximum": info.le, "exclusiveMaximum": info.lt}
    return {word: bound for word, bound in words.items() if bound is not None}


def _lengths(info: Any, what: str, factor: int = 1) -> dict[str, int]:
    words = {f"min{what}": info.min_length, f"max{what}": info.max_length}
    return {word: length * factor for word, length in words.items() if length is not None}


def plain(value: Any) -> Any:
    """A decoded structure as JSON knows it: arrays, bytes in hex, and texts for numbers that are not finite."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value, builtin_types=(bytes,))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


if __name__ == "__main__":
    for struct, name in NAMES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(schema_of(struct), indent=2) + "\n")
