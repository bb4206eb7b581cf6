import hashlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.tensors import Codec
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.manifest import (
    ANCHOR_FORMAT,
    BOTTLENECK_FORMAT,
    EQUAL_FORMAT,
    GRAPH,
    MAX_MANIFEST_BYTES,
    PACKED_FORMAT,
    TRAIN,
    TRAINING_CODECS,
    Manifest,
    ModelInfo,
    check_products,
    decode_manifest,
    encode_manifest,
    swarm_id,
)
from swarmnode.swarm.storage.content import MAX_SMALL_BYTES, PACKED_NAME, FileContent

NO_HUB_IDS = [
    "../x",
    "/etc/passwd",
    "a/../../b",
    "a/..",
    "..",
    ".",
    "./x",
    "~/x",
    "\\\\host\\x",
    "a/b/c",
    "a//b",
    "a/",
    "/a",
]
NO_HUB_IDS += [
    "C:/x",
    "file:///x",
    "a/b?x",
    "a/b#x",
    "a/b@main",
    "a b/c",
    "a/b\n",
    "a/\u202eb",
    "a/%2e%2e",
    "-a/b",
    "ä/b",
    "",
]


def make_manifest(**changes):
    fields = {
        "name": "test",
        "model": ModelInfo("llama", units=6, hidden=64),
        "files": (FileContent("config.json", 20, bytes(32)), FileContent("model.safetensors", 9_000_000, b"r" * 32)),
        "created": 1_790_000_000,
    }
    return Manifest(**{**fields, **changes})


def test_round_trip_and_id():
    raw = encode_manifest(make_manifest())
    assert decode_manifest(raw) == make_manifest()
    assert swarm_id(raw) == hashlib.sha256(raw).digest()
    assert encode_manifest(decode_manifest(raw)) == raw
    assert decode_manifest(raw).total_bytes == 9_000_020
    assert decode_manifest(raw).file("config.json").size == 20
    assert decode_manifest(raw).file("nope") is None


def test_a_graph_has_units_of_its_own_and_no_width():
    manifest = make_manifest(
        model=ModelInfo("resnet", units=1, hidden=0),
        files=(FileContent("graph.json", 20, bytes(32)), FileContent("model.safetensors", 9_000_000, b"r" * 32)),
        kind=GRAPH,
        mode=TRAIN,
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_unknown_fields_are_ignored_and_missing_ones_take_defaults():
    fields = msgspec.msgpack.decode(encode_manifest(make_manifest()))
    del fields["mode"], fields["owner"]
    fields["training"] = {"batch": 3}
    fields["model"]["colour"] = "blue"
    assert decode_manifest(msgspec.msgpack.encode(fields)) == make_manifest()


def packed_manifest(**changes):
    files = (FileContent(PACKED_NAME, 20, bytes(32)), FileContent("weights.gguf", 9_000_000, b"r" * 32))
    return make_manifest(files=files, format=PACKED_FORMAT, **changes)


@pytest.mark.parametrize("products", ["exact", "fast"])
def test_least_products_of_packed_weights(products):
    manifest = packed_manifest(products=products)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for wrong in (make_manifest(products=products), packed_manifest(products="plain"), packed_manifest(products="")):
        with pytest.raises(ProtocolError, match="a least kind of products"):
            encode_manifest(wrong)


def test_equal_products_are_of_a_served_language_model_in_a_format_of_their_own():
    equal = {"format": EQUAL_FORMAT, "products": "equal"}
    manifest = make_manifest(**equal)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    check_products("equal", "bfloat16", b"12345678")
    with pytest.raises(ProtocolError, match="equal bits"):
        check_products("equal", "bfloat16", b"")
    for changes in ({"format": 1}, {"format": PACKED_FORMAT}, {"products": "fast"}, {"mode": TRAIN}, {"kind": GRAPH}):
        with pytest.raises(ProtocolError, match="it needs"):
            encode_manifest(make_manifest(**{**equal, **changes}))


def test_a_bottleneck_is_of_a_trained_language_model_in_a_format_of_its_own():
    model = ModelInfo("llama", units=2, hidden=64)
    thin = {"model": model, "mode": TRAIN, "format": BOTTLENECK_FORMAT, "bottleneck": 8}
    manifest = make_manifest(**thin)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert (manifest.width, make_manifest().width) == (8, 64)
    wrong = [
        {"bottleneck": 0},
        {"bottleneck": -1},
        {"bottleneck": 65},
        {"mode": "serve"},
        {"format": 1},
        {"kind": GRAPH},
    ]
    for changes in (*wrong, {"bottleneck": msgspec.UNSET}, {"format": PACKED_FORMAT}):
        with pytest.raises(ProtocolError, match="it needs"):
            encode_manifest(make_manifest(**{**thin, **changes}))
    with pytest.raises(ProtocolError, match="units"):
        encode_manifest(make_manifest(model=model))
    anchored = {**thin, "format": ANCHOR_FORMAT, "anchor": 16, "codecs": TRAINING_CODECS}
    manifest = make_manifest(**anchored)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.session_codecs == (Codec.NONE, Codec.BF16, Codec.FP16) != manifest.codecs
    assert make_manifest(**thin).session_codecs == make_manifest(**thin).codecs
    wrong += [{"anchor": 0}, {"anchor": -1}, {"anchor": 65}, {"anchor": msgspec.UNSET}, {"format": BOTTLENECK_FORMAT}]
    for changes in (*wrong, {"bottleneck": msgspec.UNSET}):
        with pytest.raises(ProtocolError, match="it needs"):
            encode_manifest(make_manifest(**{**anchored, **changes}))


@pytest.mark.parametrize(
    ("least", "passing", "failing"),
    [
        ("exact", ["float32"], ["packed", "bfloat16", "float32-nf4", "float32+kv8", ""]),
        ("fast", ["float32", "packed", "bfloat16", "packed+kv8"], ["bfloat16-nf4", "float32-int8", ""]),
        ("", ["bfloat16-nf4", ""], []),
        ("unknown", ["bfloat16-nf4", ""], []),
    ],
)
def test_number_formats_below_the_least_products(least, passing, failing):
    for number_format in passing:
        check_products(least, number_format)
    for number_format in failing:
        with pytest.raises(ProtocolError, match="and this swarm asks for"):
            check_products(least, number_format)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "x" * 65},
        {"name": "a\x1b[2J"},
        {"kind": "diffusion"},
        {"mode": "mine"},
        {"kind": GRAPH, "mode": TRAIN, "model": ModelInfo("resnet", units=0, hidden=0)},
        {"model": ModelInfo("llama", units=1, hidden=64)},
        {"model": ModelInfo("llama", units=10**6, hidden=64)},
        {"model": ModelInfo("llama", units=6, hidden=0)},
        {"files": ()},
        {"files": (FileContent("../x.safetensors", 1, bytes(32)),)},
        {"files": (FileContent("config.json", -1, bytes(32)),)},
        {"files": (FileContent("config.json", 1, bytes(31)),)},
        {"files": (FileContent("tokenizer.json", MAX_SMALL_BYTES + 1, bytes(32)),)},  # which each peer takes whole
        *(
            {"model": ModelInfo("llama", units=6, hidden=64, title=title)}
            for title in ("", "x" * 65, "a\x1b[2J", "a\nb")
        ),
        {"model": ModelInfo("llama", units=6, hidden=64, hub_id="o/" + "m" * 127)},
        {"model": ModelInfo("llama", units=6, hidden=64, hub_id="o/m\x1b[2J")},
        {"model": ModelInfo("llama", units=6, hidden=64, hub_id="o/m", revision="")},
        *({"model": ModelInfo("llama", units=6, hidden=64, hub_id=path)} for path in NO_HUB_IDS),
        *({"model": ModelInfo("llama", units=6, hidden=64, hub_id="o/m", revision=path)} for path in NO_HUB_IDS[:9]),
        {"model": ModelInfo("llama", units=6, hidden=64, hub_id="o/m", revision="r" * 129)},
        {"files": (FileContent("config.json", 1, bytes(32)),) * 2},
        {"chunk_bytes": 1},
        {"codecs": ()},
    ],
)
def test_outside_the_bounds_is_refused(changes):
    manifest = make_manifest(**changes)
    with pytest.raises(ProtocolError, match="not valid"):
        encode_manifest(manifest)
    with pytest.raises(ProtocolError, match="not valid"):
        decode_manifest(msgspec.msgpack.encode(manifest))


def test_newer_format_says_upgrade():
    with pytest.raises(ProtocolError, match="upgrade swarmnode") as caught:
        decode_manifest(msgspec.msgpack.encode({"format": 2, "everything": "else"}))
    assert caught.value.code == ErrorCode.VERSION


def test_too_large_is_refused_unread():
    with pytest.raises(ProtocolError) as caught:
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))
    assert caught.value.code == ErrorCode.TOO_LARGE


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode_manifest(data)


def test_flipped_bytes_never_crash():
    raw = bytearray(encode_manifest(make_manifest()))
    chance = random.Random(5)
    for _ in range(500):
        at = chance.randrange(len(raw))
        damaged = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
        try:
            decode_manifest(damaged)
        except ProtocolError:
            continue
