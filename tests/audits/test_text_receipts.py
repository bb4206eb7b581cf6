"""Receipts of texts: what two other peers of a class prove, and what no receipt and no peer can pretend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarmnode.audits.text_receipts import open_receipt, verify_text
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.errors import ProtocolError
from swarmnode.ledger import Account
from swarmnode.net.identity import Identity
from swarmnode.plan.findings import Kind
from swarmnode.swarm.records.statement import sign_statement, sign_text_receipt
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import tamper, three_by_two
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel


@asynccontextmanager
async def with_receipt(folder: Path, **options: Any) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient, bytes]]:
    """Two stages of three replicas of one class, and a receipt of one text."""
    model = TinyModel.save(folder / "model").folder
    stages: Any = {"dtype": "bfloat16", "equal_bits": True}
    async with three_by_two(lambda swarm: swarm.create(model), folder, **stages) as (swarm, client):
        kept: list[tuple[bytes, str]] = []
        hosts = [member.node._host for member in swarm.members.values() if member.node._host is not None]
        held: list[int] = []  # number of hops whose ledgers count journals when the receipt is written

        def holders() -> int:
            return sum(host.link_config.ledger.accounts().get(Account.JOURNALS, 0) > 0 for host in hosts)

        def keep(raw: bytes, why: str) -> None:
            kept.append((raw, why))
            held.append(holders())

        client.auditor.on_receipt = keep
        await client.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=3, **options)
        await client.auditor.idle()
        client.auditor.on_receipt = None
        assert kept[0][1] == "" and held == [2]
        await asyncio.sleep(5.0)
        assert holders() == 0
        yield swarm, client, kept[0][0]


async def verdicts(client: SwarmClient, raw: bytes) -> list[str]:
    receipt, hops = open_receipt(raw, client.swarm.id)
    found = await verify_text(client.auditor, client.auditor.replays, receipt, hops)
    assert all(len(set(one.by)) == 2 for one in found if one.result in ("proved", "refuted"))
    return [one.result for one in found]


def changed(raw: bytes, author: Identity, **changes: Any) -> bytes:
    """The receipt with other contents, signed by `author`."""
    receipt, _ = raw_parts(raw)
    return sign_text_receipt(msgspec.structs.replace(receipt, **changes), author.sign)


def raw_parts(raw: bytes) -> tuple[Any, Any]:
    from swarmnode.swarm.records.statement import TextReceipt

    body, signature = msgspec.msgpack.decode(raw)
    return msgspec.msgpack.decode(body, type=TextReceipt), signature


def one_bit(hidden_BTH: Tensor) -> Tensor:
    hidden_BTH = hidden_BTH.clone()
    hidden_BTH[0, 0, 5].view(torch.int16).bitwise_xor_(1)
    return hidden_BTH


@in_virtual_time
async def test_honest_work_is_proved_and_one_bit_refuted(tmp_path: Path) -> None:
    async with with_receipt(tmp_path) as (swarm, client, raw):
        assert await verdicts(client, raw) == ["proved", "proved"]
        receipt, hops = open_receipt(raw, client.swarm.id)
        # The first hop states another root than that of its digests, and signs it.
        liar = next(member for member in swarm.members.values() if member.peer == hops[0][0].peer)
        false = msgspec.structs.replace(hops[0][0], sketches=bytes(32))
        accounts = ((sign_statement(false, liar.node._host.identity.sign),), *receipt.accounts[1:])  # type: ignore[union-attr]
        forged = changed(raw, client._host.identity, accounts=accounts)
        assert await verdicts(client, forged) == ["refuted", "not proved"]


@in_virtual_time
async def test_a_lying_verifier_proves_and_refutes_nothing_alone(tmp_path: Path) -> None:
    async with with_receipt(tmp_path) as (swarm, client, raw):
        _, hops = open_receipt(raw, client.swarm.id)
        own = {parts[0].peer for parts in hops}
        liar = next(swarm.members[name] for name in ("a0", "a1", "a2") if swarm.members[name].peer not in own)
        tamper(liar, one_bit)
        assert await verdicts(client, raw) == ["not proved", "not proved"]


@in_virtual_time
async def test_too_few_peers_of_a_class_prove_nothing(tmp_path: Path) -> None:
    async with with_receipt(tmp_path) as (swarm, client, raw):
        _, hops = open_receipt(raw, client.swarm.id)
        others = [one.peer for name, one in swarm.members.items() if name[0] == "b" and one.peer != hops[1][0].peer]
        client.auditor.standing.add(others[0], Kind.FALSE, "by this test")
        assert await verdicts(client, raw) == ["proved", "not proved"]


@in_virtual_time
async def test_false_receipts_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Changed, of another swarm, of another text, with statements of other sessions, hops left out or turned round."""
    async with with_receipt(tmp_path) as (_swarm, client, raw):
        swarm_id, own = client.swarm.id, client._host.identity
        receipt, hops = open_receipt(raw, swarm_id)
        kept: list[bytes] = []
        client.auditor.on_receipt = lambda other, _why: kept.append(other)
        await client.generate([*PROMPT, 7], max_new_tokens=12)
        await client.auditor.idle()
        other, _ = open_receipt(kept[0], swarm_id)
        ids = (*receipt.ids[:-1], (receipt.ids[-1] + 1) % 64)
        false = {
            "signature": bytes(raw[:-1]) + bytes([raw[-1] ^ 1]),
            "text": changed(raw, own, ids=ids),
            "prompt": changed(raw, own, ids=(receipt.ids[0] + 1, *receipt.ids[1:])),
            "replayed": changed(raw, own, accounts=other.accounts),
            "mixed": changed(raw, own, accounts=(receipt.accounts[0], *other.accounts[1:])),
            "left out": changed(raw, own, accounts=receipt.accounts[:1]),
            "turned round": changed(raw, own, accounts=receipt.accounts[::-1]),
            "unsigned": changed(raw, own, accounts=((b"x" * 90,), *receipt.accounts[1:])),
            "other client": changed(raw, own, client=hops[0][0].peer),
            "damaged": raw[: len(raw) // 2],
            "empty": b"",
            "too large": raw + bytes(1 << 21),
        }
        for name, one in false.items():
            with pytest.raises(ProtocolError):
                open_receipt(one, swarm_id)
                pytest.fail(name)
        with pytest.raises(ProtocolError, match="swarm"):
            open_receipt(raw, bytes(32))


@in_virtual_time
async def test_hops_that_hold_their_journals_no_longer_give_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel.save(tmp_path / "model").folder
    async with three_by_two(lambda swarm: swarm.create(model), tmp_path) as (swarm, client):
        kept: list[tuple[bytes, str]] = []
        client.auditor.on_receipt = lambda raw, why: kept.append((raw, why))
        for member in swarm.members.values():
            stage = member.node._stage
            if stage is not None:
                monkeypatch.setattr(stage.server, "session", lambda _id: None)  # type: ignore[union-attr]
                await stage.statements.close()  # type: ignore[union-attr]
        await client.generate(PROMPT, max_new_tokens=6)
        await asyncio.wait_for(client.auditor.idle(), 300)
        assert kept[0][0] == b"" and "no receipt of this text" in kept[0][1]
