"""Receipts of texts: made while the hops of a session hold their journals, and verified at any time by peers of the same classes.

A receipt holds each hop's signed statement with the root of its digests by position. Two other peers of the hop's class
compute the text again with the same seed. Their roots are the hop's to the bit, or one of them is false. No peer's word
alone decides.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swarmnode.audits.audit_case import HopAccount, TextRun, fetch_account, run_text
from swarmnode.audits.referee import RUN_S, Referee, Replays
from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode
from swarmnode.codec.tensors import Codec
from swarmnode.errors import ProtocolError, SwarmnodeError
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route
from swarmnode.serving.client.session_spec import SessionSpec
from swarmnode.serving.session.session_streams import ids_digest
from swarmnode.swarm.records.statement import (
    MAX_RECEIPT_IDS,
    Statement,
    TextReceipt,
    open_statement,
    open_text_receipt,
    sign_text_receipt,
)

PROVED, REFUTED, NOT_PROVED = "proved", "refuted", "not proved"
_CLASSLESS = "it states no class of equal bits"


async def issue(host: Host, replays: Replays, session: ClientSession, ids: Sequence[int]) -> bytes:
    """Return a signed receipt of the text `ids` that `session` has just drawn.

    Raises ProtocolError if the session was moved, is too long or follows an adapter or a grammar, or if its hops contradict
    each other; PeerRefused if a hop no longer holds its journal.
    """
    spec = session.settled
    assert spec.sampling is not None
    if session.epoch > 1:
        raise ProtocolError("its session was moved to other peers, which did not compute all of it")
    if spec.adapter or spec.follows_grammar or len(ids) > MAX_RECEIPT_IDS:
        raise ProtocolError(f"it has an adapter, a grammar or more than {MAX_RECEIPT_IDS} tokens")
    await session.stay()
    end = len(ids) - 1
    ask = partial(_ask, replays, host.swarm.id, secrets.token_bytes(SEED_BYTES), end)
    accounts = await ask(session.id, session.route)
    drawn = {at: ids[at] for at in range(max(spec.sampling.prompt_length, session.received_end), end + 1)}
    if TextRun(session.route, accounts, drawn).contradiction(ids) is not None:
        raise ProtocolError("two of its hops contradict each other")
    receipt = TextReceipt(
        host.swarm.id,
        host.peer_id,
        host.clock.unix(),
        tuple(ids),
        spec.sampling,
        spec.codec,
        spec.codecs,
        tuple(account.raws for account in accounts),
    )
    return sign_text_receipt(receipt, host.identity.sign)


@dataclass(frozen=True)
class HopVerdict:
    """Result for the layers [start, end) of `peer`: PROVED, REFUTED or NOT_PROVED, the peers that computed them again, and why."""

    peer: PeerId
    start: int
    end: int
    result: str
    by: Sequence[PeerId] = ()
    why: str = ""


def open_receipt(raw: bytes, swarm: bytes) -> tuple[TextReceipt, list[list[Statement]]]:
    """Open a receipt of a text in this swarm. Raises ProtocolError if it is damaged, changed, or of another swarm."""
    return open_text_receipt(raw, swarm, verify, lambda ids: ids_digest(torch.tensor(ids, dtype=torch.int64)))


async def report_on(referee: Referee, replays: Replays, raw: bytes) -> dict[str, Any]:
    """Verify a receipt of a text, and return what was proved, by whom and what not, as values for scripts. Raises ProtocolError as
    `open_receipt` does."""
    receipt, hops = open_receipt(raw, referee.host.swarm.id)
    verdicts = await verify_text(referee, replays, receipt, hops)
    return {
        "proved": all(one.result == PROVED for one in verdicts),
        "client": receipt.client,
        "at": receipt.at,
        "tokens": len(receipt.ids),
        "hops": [
            {
                "peer": one.peer,
                "span": [one.start, one.end],
                "class": parts[0].bits.hex(),
                "result": one.result,
                "by": list(one.by),
                "why": one.why or None,
            }
            for one, parts in zip(verdicts, hops, strict=True)
        ],
    }


async def verify_text(
    referee: Referee, replays: Replays, receipt: TextReceipt, hops: Sequence[Sequence[Statement]]
) -> list[HopVerdict]:
    """Have two other peers of each hop's class compute the text again, and return a verdict for each hop."""
    said = [parts[0] for parts in hops]
    own = tuple(HopSpec(one.peer, one.start, one.end) for one in said)
    kinds = [(one.number_format, one.bits) for one in said]
    first = referee.another_route(own, referee.host.peer_id, same_bits=True, kinds=kinds) or own
    avoided = (referee.host.peer_id, *(hop.peer for hop in first))
    second = referee.another_route(own, *avoided, same_bits=True, kinds=kinds) or own
    moved = [new != old != other for new, old, other in zip(first, own, second, strict=True)]
    able = [*moved, False].index(False)  # hops from the first on that have two other peers
    none = "no two other peers of its class of equal bits are here"
    if able == 0:
        return [
            HopVerdict(one.peer, one.start, one.end, NOT_PROVED, (), none if one.bits else _CLASSLESS) for one in said
        ]
    sampling, ids, codec = receipt.sampling, receipt.ids, Codec(receipt.codec)
    prompt = sampling.prompt_length
    spec = SessionSpec(
        Mode.RING,
        max_length=len(ids) - 1,
        sampling=sampling,
        codec=codec,
        codecs=receipt.codecs,
        prompt_tokens=prompt - 1,
        prompt=ids[:prompt] if sampling.counts_prompt else (),
    )
    ask = partial(_ask, replays, receipt.swarm, said[0].seed, len(ids) - 1)
    runs: list[TextRun] = []
    for route in (first, second):
        try:
            runs.append(await asyncio.wait_for(run_text(replays, spec, ids, route, ask), RUN_S))
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            why = f"the text could not be computed again: {error or 'no answer in time'}"
            return [HopVerdict(one.peer, one.start, one.end, NOT_PROVED, (), why) for one in said]
    return _judge(receipt, hops, runs, able, none)


def _judge(
    receipt: TextReceipt, hops: Sequence[Sequence[Statement]], runs: Sequence[TextRun], able: int, none: str
) -> list[HopVerdict]:
    """Compare the roots of a receipt's hops with those of two runs over other peers, up to the first hop that differs."""
    verdicts: list[HopVerdict] = []
    parted = ""
    for index, parts in enumerate(hops):
        said, by = parts[0], tuple(run.route[index].peer for run in runs)
        place = said.peer, said.start, said.end
        if parted or index >= able:
            verdicts.append(HopVerdict(*place, NOT_PROVED, (), parted or (none if said.bits else _CLASSLESS)))
            continue
        asked = [[open_statement(raw, receipt.swarm, verify) for raw in run.accounts[index].raws] for run in runs]
        if any(one.bits != said.bits for other in asked for one in other):
            parted = "a peer that announced its class computed in another one"
            verdicts.append(HopVerdict(*place, NOT_PROVED, by, parted))
            continue
        is_last = index + 1 == len(hops)
        mine = [one.sketches for one in parts], [receipt.ids[at] for at in sorted(runs[0].drawn)] if is_last else []
        others = [
            ([one.sketches for one in other], [run.drawn[at] for at in sorted(run.drawn)] if is_last else [])
            for run, other in zip(runs, asked, strict=True)
        ]
        if others[0] != others[1]:
            parted = "two peers of its class differ from each other, so one of them is false"
            verdicts.append(HopVerdict(*place, NOT_PROVED, by, parted))
        elif mine != others[0]:
            parted = "a hop before it is refuted, so its inputs were others"
            verdicts.append(
                HopVerdict(*place, REFUTED, by, "two peers of its class agree with each other, and not with it")
            )
        else:
            verdicts.append(HopVerdict(*place, PROVED, by))
    return verdicts


async def _ask(
    replays: Replays, swarm: bytes, seed: bytes, end: int, session: bytes, route: Route
) -> Sequence[HopAccount]:
    """Fetch the digests of a session's first `end` positions from all its hops. Raises the first error of a fetch."""
    asked = (session, seed, end, swarm)
    fetching = (fetch_account(replays.statements, hop.peer, *asked, length=end, digests=True) for hop in route)
    return await asyncio.gather(*fetching)
