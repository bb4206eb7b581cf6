"""Tells replicas what this stage did in the step in force: all of it in digests, and the microbatch that they choose."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from swarmnode.codec.frames import MAX_BODY_BYTES
from swarmnode.codec.messages import End, Error, Hello
from swarmnode.codec.spot_check_messages import (
    MAX_RECORDS,
    SPOT_CHECK_PROTOCOL,
    Accusation,
    BlockTiles,
    CommitmentReply,
    GetCommitment,
    GetMicrobatch,
    GetSketches,
    MicrobatchReply,
    SketchesReply,
)
from swarmnode.compress.values import decode_values, payload_of
from swarmnode.compute.serving.sketch import sketch_bytes, sketches
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.links.link import LinkConfig
from swarmnode.roles.question_server import Answer, QuestionServer
from swarmnode.roles.training.spot_checks.step_records import KeptMicrobatch, StepRecords, entries_of
from swarmnode.swarm.records.commitment import Commitment, sign_commitment
from swarmnode.swarm.records.signed import Sign, Verify

Question = GetCommitment | GetMicrobatch | GetSketches | Accusation
RECORDS_BYTES = MAX_BODY_BYTES // 2  # in one answer


@dataclass(frozen=True)
class Committer:
    """Who commits, in which swarm, and how signatures are made and checked."""

    peer: PeerId
    swarm: bytes
    sign: Sign
    verify: Verify


def check_server(
    network: Network,
    hello: Hello,
    link_config: LinkConfig,
    committer: Committer,
    records: StepRecords,
    may_ask: Callable[[PeerId], bool],
    on_accusation: Callable[[PeerId, Accusation], None],
) -> QuestionServer:
    """Answers from these records, which hold what a training is fed: to its stages alone."""

    async def answer(asker: Claimant, question: Question) -> Answer:
        if not may_ask(asker.peer):
            return Answer(Error(ErrorCode.REFUSED))
        if isinstance(question, Accusation):
            on_accusation(asker.peer, question)
            return Answer(End())
        kept = list(records.of(question.run, question.step).values())
        tell: Callable[[list[KeptMicrobatch]], Answer] = _sketches
        if isinstance(question, GetMicrobatch):
            kept = [one for one in kept if one.place == (question.number, question.start)]
            tell = partial(_microbatch, question.seed)
        elif isinstance(question, GetCommitment):
            tell = partial(_commit, committer, question)
        else:
            kept = kept[question.first :]
        return await asyncio.to_thread(tell, kept) if kept else Answer(Error(ErrorCode.NOT_FOUND))

    return QuestionServer(network, SPOT_CHECK_PROTOCOL, hello, link_config, Question, answer)


def _commit(committer: Committer, question: GetCommitment, kept: list[KeptMicrobatch]) -> Answer:
    entries = entries_of(one.record() for one in kept)
    digest = hashlib.sha256(entries).digest()
    said = Commitment(committer.swarm, committer.peer, question.run, question.step, len(kept), digest)
    return Answer(CommitmentReply(sign_commitment(said, committer.sign)), (entries,))


def _microbatch(seed: bytes, found: list[KeptMicrobatch]) -> Answer:
    (kept,) = found
    record = kept.record()
    edges = ((record.sent.values, kept.sent[1]), (record.returned.values, kept.returned[1]))
    crossed = [
        sketch_bytes(sketch_TK)
        for infos, payload in edges
        for sketch_TK in sketches(decode_values(infos, payload_of(payload), "cpu"), seed)
    ]
    return Answer(
        MicrobatchReply(record), (kept.received, kept.labels_payload, kept.gradients, kept.parameters, *crossed)
    )


def _sketches(kept: list[KeptMicrobatch]) -> Answer:
    """Of the first ones, as many as go into one answer."""
    told: list[KeptMicrobatch] = []
    size_bytes = 0
    for one in kept[:MAX_RECORDS]:
        size_bytes += len(msgspec.msgpack.encode(one.record()))
        if told and size_bytes > RECORDS_BYTES:
            break
        told.append(one)
    tiles = {block: count for one in told for block, count in one.tiles.items()}
    blocks = tuple(BlockTiles(*one) for one in sorted(tiles.items()))
    return Answer(SketchesReply(tuple(one.record() for one in told), blocks), [one.parameters for one in told])
