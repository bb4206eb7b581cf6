"""`protocol/vectors/v1`: what decodes to what and back to the same bytes, and what is refused with which code."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest
import torch
from referencing import Registry, Resource

from swarmnode.codec.audit_messages import MicrobatchReply, running_digest
from swarmnode.codec.frames import FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import BODIES, branch_proof, decode_body, encode_body
from swarmnode.codec.sampling import Sampling, pack_text
from swarmnode.codec.tensors import MAX_ELEMENTS, Codec, TensorInfo
from swarmnode.compress.codecs import decode, encode
from swarmnode.compute.serving.device_transfers import DeviceOutputs
from swarmnode.compute.serving.sampler import Sampler, sample, uniform
from swarmnode.compute.serving.sketch import sketch, sketch_bytes
from swarmnode.compute.training.recomputation import gradient_sketch, step_seed
from swarmnode.errors import ErrorCode, PeerLost, ProtocolError, UsageError
from swarmnode.net.direct.direct_connections import OFFER, REQUEST
from swarmnode.net.direct.direct_stream import DirectionKey, KeyPair, Occasion
from swarmnode.net.identity import Identity, SigningKey, verify
from swarmnode.swarm.records.adapter_record import open_adapter, sign_adapter
from swarmnode.swarm.records.announcement import open_announcement, sign_announcement
from swarmnode.swarm.records.invite import (
    Certificate,
    OwnedInvite,
    decode_invite,
    encode_invite,
    open_certificate,
    open_grant,
)
from swarmnode.swarm.records.manifest import decode_manifest, encode_manifest, swarm_id
from swarmnode.swarm.records.membership import open_list, sign_list
from swarmnode.swarm.records.receipt import open_receipt, open_voucher, sign_receipt, sign_voucher
from swarmnode.swarm.records.statement import (
    open_commitment,
    open_report,
    open_statement,
    sign_commitment,
    sign_report,
    sign_statement,
)
from tests.codec.schemas import FOLDER, plain

VECTORS = Path(__file__).parents[1] / "protocol" / "vectors" / "v1"
Vector = Mapping[str, Any]


def vectors(file: str, *, good: bool | None = None, of: str | None = None) -> list[Any]:
    """The vectors of a file as pytest parameters: all, or the good or the bad ones alone."""
    rows = [json.loads(line) for line in (VECTORS / f"{file}.jsonl").read_text().splitlines()]
    return [
        pytest.param(row, id=row["name"])
        for row in rows
        if (good is None or good == ("value" in row)) and (of is None or row["of"] == of)
    ]


def data_of(vector: Vector) -> bytes:
    return bytes.fromhex(vector["hex"]) + b"\0" * int(vector.get("zeros", 0))


@functools.cache
def schemas() -> Registry[Any]:
    files = [Resource.from_contents(json.loads(path.read_text())) for path in FOLDER.iterdir()]
    return Registry().with_resources((file.id() or "", file) for file in files)


def assert_fits(schema: str, value: Any) -> None:
    jsonschema.Draft202012Validator({"$ref": f"{schema}.json"}, registry=schemas()).validate(value)


# -- frames ------------------------------------------------------------------------------------------------------------


def read_frame(data: bytes) -> dict[str, Any]:
    """The one frame of a stream that ends after it. Raises what a link would raise."""
    reader = FrameReader()
    frames = list(reader.feed(data))
    if reader.pending_bytes:
        raise PeerLost("the stream ends inside a frame")
    (frame,) = frames
    body, payload = bytes(frame.body).hex(), bytes(frame.payload).hex()
    return {"kind": frame.kind, "channel": frame.channel, "seq": frame.seq, "body": body, "payload": payload}


@pytest.mark.parametrize("vector", vectors("frames", good=True))
def test_good_frames(vector: Vector) -> None:
    value, data = vector["value"], data_of(vector)
    assert read_frame(data) == value
    body, payload = bytes.fromhex(value["body"]), bytes.fromhex(value["payload"])
    assert pack_header(value["kind"], len(body), len(payload), value["channel"], value["seq"]) + body + payload == data


@pytest.mark.parametrize("vector", vectors("frames", good=False))
def test_bad_frames(vector: Vector) -> None:
    with pytest.raises((ProtocolError, PeerLost)) as caught:
        read_frame(data_of(vector))
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="frames"))
def test_tolerated_frames(vector: Vector) -> None:
    assert read_frame(data_of(vector)) == vector["value"]


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("bodies", good=True))
def test_good_bodies(vector: Vector) -> None:
    body = decode_body(FrameKind[vector["kind"]], data_of(vector))
    assert plain(body) == vector["value"]
    assert encode_body(body) == data_of(vector)
    if vector["value"]:
        assert_fits(vector["kind"].lower(), vector["value"])


@pytest.mark.parametrize("vector", vectors("bodies", good=False))
def test_bad_bodies(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_body(FrameKind[vector["kind"]], data_of(vector))
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="bodies"))
def test_tolerated_bodies(vector: Vector) -> None:
    assert plain(decode_body(FrameKind[vector["kind"]], data_of(vector))) == vector["value"]


def test_every_kind_has_good_vectors_and_every_field_a_bad_one() -> None:
    rows = [param.values[0] for param in vectors("bodies")]
    assert {row["kind"] for row in rows if "value" in row} == {kind.name for kind in BODIES}
    with_fields = {kind.name for kind, body in BODIES.items() if body.__struct_fields__}
    assert {row["kind"] for row in rows if "error" in row} >= with_fields


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensor_of(vector: Vector) -> torch.Tensor:
    info = msgspec.convert(vector["info"], TensorInfo)
    return decode(info, bytearray(data_of(vector)), max_elements=vector.get("max_elements", MAX_ELEMENTS))


def assert_equal(decoded: torch.Tensor, value: list[float | str]) -> None:
    expected = torch.tensor([float(item) for item in value], dtype=torch.float64)
    # The sums of a rotated tile may be taken in any order: `tensors.md` allows 2**-20 of the largest value.
    peak = expected.nan_to_num(0.0, 0.0, 0.0).abs().max() if len(value) else torch.tensor(0.0)
    assert torch.allclose(decoded.double().view(-1), expected, rtol=0.0, atol=float(peak) * 2**-20, equal_nan=True)


@pytest.mark.parametrize("vector", vectors("tensors", good=True))
def test_good_tensors(vector: Vector) -> None:
    decoded = tensor_of(vector)
    assert list(decoded.shape) == vector["info"][2]
    assert_equal(decoded, vector["value"])
    assert_fits("tensor", vector["info"])
    if "input" in vector and vector["input"] is None:  # no writer makes it
        return
    given = torch.tensor(vector["input"], dtype=decoded.dtype) if "input" in vector else decoded
    info, payload = encode(given, Codec(vector["info"][0]), param=vector["info"][3])
    assert plain(info) == vector["info"]
    assert bytes(payload) == data_of(vector)


@pytest.mark.parametrize("vector", vectors("tensors", good=False))
def test_bad_tensors(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        tensor_of(vector)
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="tensors"))
def test_tolerated_tensors(vector: Vector) -> None:
    assert_equal(tensor_of(vector), vector["value"])


def test_every_codec_has_good_tensors() -> None:
    assert {param.values[0]["info"][0] for param in vectors("tensors", good=True)} == set(Codec)


# -- records -----------------------------------------------------------------------------------------------------------


class SignedKind(NamedTuple):
    """Records of one kind, which their authors sign: how one is opened, and made."""

    schema: str
    open: Callable[..., Any]
    sign: Callable[..., bytes]


SIGNED = {
    "adapters": SignedKind("adapter_record", open_adapter, sign_adapter),
    "announcements": SignedKind("announcement", open_announcement, sign_announcement),
    "commitments": SignedKind("step_commitment", open_commitment, sign_commitment),
    "receipts": SignedKind("work_receipt", open_receipt, sign_receipt),
    "reports": SignedKind("report", lambda *arguments: open_report(*arguments)[0], sign_report),
    "statements": SignedKind("hop_statement", open_statement, sign_statement),
    "vouchers": SignedKind("voucher", open_voucher, sign_voucher),
}


def signed(*, good: bool) -> list[Any]:
    """(file, vector) of all kinds as pytest parameters."""
    return [
        pytest.param(file, *one.values, id=f"{file}-{one.id}") for file in SIGNED for one in vectors(file, good=good)
    ]


def open_signed(file: str, vector: Vector) -> Any:
    """The record in a vector, at the time that the vector says where that matters."""
    time = (vector["now"],) if "now" in vector else ()
    return SIGNED[file].open(data_of(vector), bytes.fromhex(vector["swarm"]), verify, *time)


@pytest.mark.parametrize(("file", "vector"), signed(good=True))
def test_good_signed_records(file: str, vector: Vector) -> None:
    record = open_signed(file, vector)
    assert plain(record) == vector["value"]
    assert SIGNED[file].sign(record, Identity(bytes.fromhex(vector["key"])).sign) == data_of(vector)
    assert_fits(SIGNED[file].schema, vector["value"])


@pytest.mark.parametrize(("file", "vector"), signed(good=False))
def test_bad_signed_records(file: str, vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_signed(file, vector)
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="announcements"))
def test_tolerated_announcements(vector: Vector) -> None:
    assert plain(open_signed("announcements", vector)) == vector["value"]


@pytest.mark.parametrize("vector", vectors("manifests", good=True))
def test_good_manifests(vector: Vector) -> None:
    manifest = decode_manifest(data_of(vector))
    assert plain(manifest) == vector["value"]
    assert encode_manifest(manifest) == data_of(vector)
    assert swarm_id(data_of(vector)).hex() == vector["id"]
    assert_fits("manifest", vector["value"])


@pytest.mark.parametrize("vector", vectors("manifests", good=False))
def test_bad_manifests(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_manifest(data_of(vector))
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="manifests"))
def test_tolerated_manifests(vector: Vector) -> None:
    assert plain(decode_manifest(data_of(vector))) == vector["value"]


@pytest.mark.parametrize("vector", vectors("sketches"))
def test_sketches(vector: Vector) -> None:
    drawn = sketch(torch.tensor([vector["hidden"]]), bytes.fromhex(vector["seed"]))
    assert sketch_bytes(drawn).hex() == vector["value"]


@pytest.mark.parametrize("vector", vectors("gradient_sketches"))
def test_gradient_sketches(vector: Vector) -> None:
    seed = step_seed(bytes.fromhex(vector["run"]), vector["step"])
    assert seed.hex() == vector["seed"]
    gradient_N = torch.arange(1, vector["elements"] + 1).remainder(7)  # sums of these are exact in any order
    assert gradient_sketch(gradient_N.float(), seed).tolist() == vector["value"]


def test_an_entry_is_of_the_record_as_it_travels() -> None:
    (row,) = (param.values[0] for param in vectors("bodies") if param.values[0]["name"] == "MICROBATCH: in the middle")
    reply = decode_body(FrameKind.MICROBATCH, data_of(row))
    assert isinstance(reply, MicrobatchReply)
    assert reply.record.digest == hashlib.sha256(data_of(row)[1:]).digest(), "behind the array of one that is the body"


@pytest.mark.parametrize("vector", vectors("digests"))
def test_running_digests(vector: Vector) -> None:
    frames = ((start, count, bytes.fromhex(payload)) for start, count, payload in vector["frames"])
    assert running_digest(frames).hex() == vector["value"]


@pytest.mark.parametrize("vector", vectors("branches"))
def test_proofs_of_branches(vector: Vector) -> None:
    source, session = bytes.fromhex(vector["source"]), bytes.fromhex(vector["session"])
    assert branch_proof(source, vector["truncations"], session, vector["length"]).hex() == vector["value"]


# -- invites -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("invites", good=True))
def test_good_invites(vector: Vector) -> None:
    invite = decode_invite(vector["text"])
    assert plain(invite) == vector["value"]
    assert encode_invite(invite) == vector["text"]
    assert_fits("owned_invite" if isinstance(invite, OwnedInvite) else "invite", vector["value"])


@pytest.mark.parametrize("vector", vectors("invites", good=False))
def test_bad_invites(vector: Vector) -> None:
    assert vector["error"] == "INVITE"  # no code: an invite never comes from a peer
    with pytest.raises(UsageError):
        decode_invite(vector["text"])


@pytest.mark.parametrize("vector", vectors("tolerated", of="invites"))
def test_tolerated_invites(vector: Vector) -> None:
    assert plain(decode_invite(vector["text"])) == vector["value"]


# -- membership ----------------------------------------------------------------------------------------------------------


def swarm_and_owner(vector: Vector) -> tuple[bytes, bytes]:
    return bytes.fromhex(vector["swarm"]), bytes.fromhex(vector["owner"])


@pytest.mark.parametrize("vector", vectors("certificates", good=True))
def test_good_certificates(vector: Vector) -> None:
    certificate = msgspec.msgpack.decode(data_of(vector), type=Certificate)
    assert plain(certificate) == vector["value"]
    assert msgspec.msgpack.encode(certificate) == data_of(vector)
    assert open_certificate(data_of(vector), *swarm_and_owner(vector)).peer == certificate.peer
    assert plain(open_grant(certificate.grant, *swarm_and_owner(vector))) == vector["grant"]
    assert_fits("certificate", vector["value"])
    assert_fits("grant", vector["grant"])


@pytest.mark.parametrize("vector", vectors("certificates", good=False))
def test_bad_certificates(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_certificate(data_of(vector), *swarm_and_owner(vector))
    assert caught.value.code.name == vector["error"]


@pytest.mark.parametrize("vector", vectors("tolerated", of="certificates"))
def test_tolerated_certificates(vector: Vector) -> None:
    certificate = msgspec.msgpack.decode(data_of(vector), type=Certificate)
    assert plain(certificate) == vector["value"]
    assert open_certificate(data_of(vector), *swarm_and_owner(vector)).home == certificate.home


@pytest.mark.parametrize("vector", vectors("revocations", good=True))
def test_good_revocation_lists(vector: Vector) -> None:
    revocations = open_list(data_of(vector), *swarm_and_owner(vector))
    assert plain(revocations) == vector["value"]
    assert sign_list(revocations, SigningKey(bytes.fromhex(vector["key"]))) == data_of(vector)
    assert_fits("revocation_list", vector["value"])


@pytest.mark.parametrize("vector", vectors("revocations", good=False))
def test_bad_revocation_lists(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_list(data_of(vector), *swarm_and_owner(vector))
    assert caught.value.code.name == vector["error"]


# -- draws -------------------------------------------------------------------------------------------------------------


DRAWING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)


@pytest.mark.parametrize("vector", vectors("draws"))
def test_draws(vector: Vector) -> None:
    prompt, drawn, position = vector.get("prompt", [0]), vector.get("drawn", []), vector["position"]
    parameters = Sampling(len(prompt), 99, **{field: vector[field] for field in DRAWING if field in vector})
    logits_V = torch.tensor(vector["logits"])
    assert uniform(vector["seed"], vector["row"], position) == vector["uniform"]
    if vector["row"] == 0:
        sampler, outputs = Sampler(parameters, position), DeviceOutputs()
        sampler.tell(pack_text([*(prompt if parameters.counts_prompt else []), *drawn]))
        draw = sampler.launch(logits_V[None, None], position, outputs)
        assert draw(outputs.fetch())[0].ids == (vector["value"],)
    else:
        assert sample(logits_V[None], parameters, position, rows=[vector["row"]]).tolist() == [vector["value"]]


# -- the vectors themselves -------------------------------------------------------------------------------------------


def test_names_are_unique_and_errors_are_codes() -> None:
    for file in VECTORS.iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        names = [row["name"] for row in rows]
        assert len(set(names)) == len(names), file.name
        assert {row["error"] for row in rows if "error" in row} <= {*ErrorCode.__members__, "INVITE"}


# -- direct connections --------------------------------------------------------------------------------------------------


def occasion(vector: Vector) -> Occasion:
    return Occasion(vector["opener"], vector["acceptor"], vector["protocol"])


@pytest.mark.parametrize("vector", vectors("direct", good=True))
def test_direct_connections(vector: Vector) -> None:
    value = {name: bytes.fromhex(text) for name, text in vector["value"].items()}
    opener, acceptor = (KeyPair(bytes.fromhex(vector[f"{side}_private"])) for side in ("opener", "acceptor"))
    agreed = opener.as_opener(acceptor.public, occasion(vector))
    assert agreed == acceptor.as_acceptor(opener.public, occasion(vector))
    for name in ("token", "welcome", "opener_key", "acceptor_key"):
        assert getattr(agreed, name) == value[name]
    protocol = vector["protocol"].encode()
    assert REQUEST.pack(opener.public, len(protocol)) + protocol == value["request"]
    assert OFFER.pack(acceptor.public, vector["port"]) == value["offer"]


@pytest.mark.parametrize("vector", vectors("direct", good=True))
def test_records_of_direct_connections(vector: Vector) -> None:
    key = bytes.fromhex(vector["value"]["opener_key"])
    seals, renewed = DirectionKey(key), DirectionKey(key, renew_after=0)
    for record in vector["records"]:
        direction = renewed if "renewed" in record else seals
        assert b"".join(direction.seal(bytes.fromhex(record["contents"]))).hex() == record["hex"]


@pytest.mark.parametrize("vector", vectors("direct", good=False))
def test_bad_direct_connections(vector: Vector) -> None:
    with pytest.raises(ProtocolError) as caught:
        KeyPair(bytes.fromhex(vector["opener_private"])).as_opener(bytes.fromhex(vector["offered"]), occasion(vector))
    assert caught.value.code.name == vector["error"]
