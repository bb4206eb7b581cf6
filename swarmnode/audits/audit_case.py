"""Audit of one session: each hop states its inputs and outputs, a replay over other peers is compared, and a third run
decides.

The client chooses the positions and the seed only now, so no hop can prepare for them. The other peers get the text as
an ordinary session. They cannot tell it from a session that was moved to them after a fault: it has the same
parameters, and inputs that are already known.

A hop's account of a session, fetched and verified: its signed statement and the sketches that the statement covers.

Between peers of one class of equal bits, digests take the place of sketches, and any difference is false. The client asks for
digests if it finds two more peers of the class for each hop: one to compute the text again, and one to decide.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from swarmnode import tolerances
from swarmnode.audits.referee import RUN_S, Referee, Replays, odd_one_out
from swarmnode.codec.audit_messages import (
    MAX_SKETCHED,
    POSITION_DIGEST_BYTES,
    SEED_BYTES,
    SKETCH_BYTES,
    GetStatement,
    StatementReply,
)
from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Want
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode
from swarmnode.compute.serving.sampler import may_draw
from swarmnode.compute.serving.sketch import deviations, read_digests, read_sketches
from swarmnode.errors import ErrorCode, PeerRefused, ProtocolError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.questions import BUSY_RETRY_S, ask_one
from swarmnode.plan.audits import Calibration, Judgement, judge_draws, judge_states, judge_tokens
from swarmnode.plan.findings import Kind
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route
from swarmnode.serving.client.session_spec import MAX_WIDTH, SessionSpec, ids_entry
from swarmnode.serving.session.session_streams import ids_digest
from swarmnode.swarm.records.statement import Statement, open_statement


@dataclass(frozen=True)
class HopAccount:
    """Account of one hop for positions [0, T): its last `statement`, the signed bytes of all its statements (`raws`), and the
    sketches of both edges.

    `received_TK` is None if the hop received token ids, `sent_TK` is None if the hop sent no states (the last hop). With `digests`
    both hold digests instead.
    """

    statement: Statement
    raws: tuple[bytes, ...]
    received_TK: Tensor | None
    sent_TK: Tensor | None
    digests: bool = False


async def fetch_account(
    board: Switchboard,
    peer: PeerId,
    session: bytes,
    seed: bytes,
    end: int,
    swarm: bytes,
    *,
    length: int = 0,
    digests: bool = False,
) -> HopAccount:
    """Fetch the account of `peer` for positions [0, `end`) of `session`, with sketches by `seed`, or with `digests` if the peer
    states a class of equal bits. The text has `length` positions (0: all that the session has).

    Raises ProtocolError if the account is invalid or its parts disagree; PeerLost, PeerRefused or NetworkDown if there
    is no answer.
    """
    parts: list[HopAccount] = []
    for first in range(0, end, MAX_SKETCHED):
        question = GetStatement(session, seed, first, min(MAX_SKETCHED, end - first), length, digests)
        parts.append(await _ask(board, peer, question, swarm))
    # Statements of one account differ in positions and sketches only.
    last = parts[-1].statement
    for part in parts:
        said = part.statement
        as_last = msgspec.structs.replace(said, first=last.first, count=last.count, sketches=last.sketches)
        if as_last != last or (part.sent_TK is None) != (parts[-1].sent_TK is None):
            raise ProtocolError("two of its statements about one session contradict each other", peer=last.peer)
    received = [part.received_TK for part in parts if part.received_TK is not None]
    sent = [part.sent_TK for part in parts if part.sent_TK is not None]
    received_TK, sent_TK = (torch.cat(edge) if edge else None for edge in (received, sent))
    raws = tuple(raw for part in parts for raw in part.raws)
    return HopAccount(last, raws, received_TK, sent_TK, parts[-1].digests)


async def _ask(board: Switchboard, peer: PeerId, question: GetStatement, swarm: bytes) -> HopAccount:
    """Ask one question, again while the peer is BUSY with another one. Raises ProtocolError if the answer is to another
    question."""
    while True:
        try:
            body, payload = await ask_one(board, peer, question, StatementReply)
            break
        except PeerRefused as error:
            if error.code is not ErrorCode.BUSY:
                raise
            await asyncio.sleep(error.retry_s or BUSY_RETRY_S)
    account = read_account(body.statement, payload, swarm, digests=question.digests)
    said = account.statement
    asked = (peer, question.session, question.seed, question.first, question.count)
    if (said.peer, said.session, said.seed, said.first, said.count) != asked:
        raise ProtocolError("its statement answers another question", peer=peer)
    return account


def read_account(raw: bytes, payload: Buffer, swarm: bytes, *, digests: bool = False) -> HopAccount:
    """Decode and verify a hop's answer to a question for sketches or for `digests`. Raises ProtocolError if the statement or the
    sketches are not as their author signed them."""
    statement = open_statement(raw, swarm, verify)
    if hashlib.sha256(payload).digest() != statement.sketches:
        raise ProtocolError("it did not sign these sketches", peer=statement.peer)
    digests = digests and statement.bits != b""
    read, row_bytes = (read_digests, POSITION_DIGEST_BYTES) if digests else (read_sketches, SKETCH_BYTES)
    size_bytes = statement.count * row_bytes
    received_TK = read(payload[:size_bytes], statement.count) if statement.start > 0 else None
    rest = payload[size_bytes:] if received_TK is not None else payload
    sent_TK = read(rest, statement.count) if len(rest) else None
    return HopAccount(statement, (raw,), received_TK, sent_TK, digests)


log = logging.getLogger(__name__)

CodecAt = Callable[[int], Codec]


"""Function from a unit to the coarsest codec through which states have passed when they enter that unit."""
MOST_LOOKS = 32  # positions of a text whose logits are fetched: half a megabyte each, with 128,000 tokens


@dataclass(frozen=True)
class TextRun:
    """Run of one text: its route, each hop's account of it, and the tokens drawn in it, by position.

    If the session was moved to this route (`moved`), a hop may hold positions that peers of an earlier route sent to
    it: those below the base of its edge. No hop of this route is responsible for them.
    """

    route: Sequence[HopSpec]
    accounts: Sequence[HopAccount]
    drawn: Mapping[int, int]
    moved: bool = False

    @property
    def has_digests(self) -> bool:
        """Whether all hops gave digests, so that any difference from a run of the same classes counts."""
        return all(account.digests for account in self.accounts)

    def base(self, index: int) -> int:
        """Return the first position that hop `index` received from the hop before it in this route."""
        return self.accounts[index].statement.received.base

    def contradiction(self, ids: Sequence[int]) -> int | None:
        """Return the first edge whose two ends disagree about what went over it; None if all agree.

        Edge k leads into hop k, and edge `len(route)` from the last hop to this client. The tokens `ids` were the input
        of hop 0. The client itself received only the tokens in `drawn`.
        """
        taken = self.accounts[0].statement.received
        if taken.digest != ids_digest(torch.tensor(ids[: taken.length], dtype=torch.int64)):
            return 0
        apart = next((index for index in range(1, len(self.accounts)) if not self._agree(index)), None)
        if apart is not None:
            return apart
        # The last hop must have signed for exactly the tokens that the client received from it.
        told = self.accounts[-1].statement.sent
        first, last = min(self.drawn, default=told.base), max(self.drawn, default=told.length - 1)
        if not told.base <= first <= last < told.length <= len(ids):
            return len(self.accounts)
        tokens = [self.drawn.get(at, ids[at]) for at in range(told.base, told.length)]
        is_same = told.digest == ids_digest(torch.tensor(tokens, dtype=torch.int64))
        return None if is_same else len(self.accounts)

    def _agree(self, index: int) -> bool:
        sender, receiver, base = self.accounts[index - 1], self.accounts[index], self.base(index)
        if sender.sent_TK is None or receiver.received_TK is None or (base > 0 and not self.moved):
            return False
        if sender.statement.sent != receiver.statement.received:
            return False
        return max(deviations(sender.sent_TK[base:], receiver.received_TK[base:]), default=0.0) <= tolerances.SAME


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two runs: one judgement per hop, up to and including the first false hop.

    Each judgement covers the positions up to the first whose input differed beyond the tolerance. `unclear` says that
    no hop of either route is responsible: the runs differ at positions that an earlier route's hop may have sent, or
    the next hop was computed in two number formats.
    """

    judgements: Sequence[Judgement] = ()
    unclear: bool = False

    @property
    def false_hop(self) -> int | None:
        """Index of the hop at which the two runs differ although they agree at all hops before it; None if no hop is
        false."""
        return len(self.judgements) - 1 if self.judgements and self.judgements[-1].false else None

    @property
    def near_hop(self) -> int | None:
        """Index of the first hop with a near miss; None if there is none. The last of `judgements` is left out."""
        states = self.judgements[:-1]  # the last hop sends tokens, and a few tokens may honestly differ
        return next((index for index, judged in enumerate(states) if judged.near), None)

    def agree_at(self, index: int, compared: int = 0, *, closely: bool = False) -> bool | None:
        """Return whether the runs agree at hop `index`, if `closely` also without a near miss.

        Returns None if that cannot be decided: the runs differ before this hop, or fewer than `compared` positions were
        compared.
        """
        if self.false_hop == index:
            return False
        if len(self.judgements) <= index or self.judgements[index].compared < compared:
            return None
        return not (closely and self.judgements[index].near)


def compare(
    first: TextRun, other: TextRun, codec_at: CodecAt, calibration: Calibration, *, adapted: bool = False
) -> Comparison:
    """Compare two runs of the same text hop by hop: the states that the next hop received, and for the last hop the
    drawn tokens.

    A hop's result at a position depends on its inputs up to it. Therefore no hop is judged by positions from the
    first whose input differed on. Deviations of a hop without a position beyond the tolerance are noted in `calibration`,
    unless `adapted`. Hops that state two number formats get no verdict, and neither do the hops behind them. If both runs have
    digests, there is no tolerance, and hops that state two classes of equal bits get no verdict either.

    Args:
        codec_at: Gives the coarsest codec through which states have passed when they enter a layer.
        adapted: Whether the text was computed with a LoRA adapter, whose noise is larger.
    """
    judgements: list[Judgement] = []
    alike: int | None = None  # positions up to the first whose input differed
    exact = first.has_digests
    if exact != other.has_digests:
        return Comparison(unclear=True)
    for index in range(len(first.route)):
        said, again_said = first.accounts[index].statement, other.accounts[index].statement
        if said.number_format != again_said.number_format or (exact and said.bits != again_said.bits):
            return Comparison(tuple(judgements), unclear=True)
        codec = codec_at(said.end)
        if index + 1 == len(first.route):
            tolerance = calibration.tolerance(said.number_format, codec, units=said.end)
            tolerance = replace(tolerance, other_tokens=0.0) if exact else tolerance
            both = [at for at in first.drawn if at in other.drawn and (alike is None or at <= alike)]
            drawn, again = ([run.drawn[at] for at in both] for run in (first, other))
            judgements.append(judge_tokens(drawn, again, tolerance))
            break
        mine_TK, yours_TK = first.accounts[index + 1].received_TK, other.accounts[index + 1].received_TK
        assert mine_TK is not None and yours_TK is not None, "only the first hop takes ids in"
        apart = deviations(mine_TK[:alike], yours_TK[:alike])
        tolerance = calibration.tolerance(said.number_format, codec, units=said.end, deviations=apart, adapted=adapted)
        judged = judge_states(apart, tolerance)
        if judged.beyond:
            was_false = judged.false
            judged = judge_states(apart[max(first.base(index + 1), other.base(index + 1)) :], tolerance)
            if was_false and not judged.false:  # a hop of an earlier route sent it, and all that follows depends on it
                return Comparison(tuple(judgements), unclear=True)
        elif not adapted and not exact:
            calibration.record(first.route[index].peer, said.number_format, codec, apart, units=said.end)
        judgements.append(judged)
        if judged.false:
            break
        alike = next((at for at, one_apart in enumerate(apart) if not one_apart <= tolerance.deviation), alike)
    return Comparison(tuple(judgements))


AskHops = Callable[[bytes, Route], Awaitable[Sequence[HopAccount]]]
"""Function that fetches the accounts of a session from all hops of a route"""


async def run_text(replays: Replays, spec: SessionSpec, ids: Sequence[int], route: Route, ask: AskHops) -> TextRun:
    """Compute the text `ids` again over `route`, as `spec` says, and return the run with the hops' accounts. The last token is
    drawn and not fed. Raises the error that ended the session."""
    assert spec.sampling is not None
    prompt, end = spec.sampling.prompt_length, len(ids) - 1
    sampling = msgspec.structs.replace(spec.sampling, max_new_tokens=end + 1 - prompt)  # the session ends there
    async with replays.session(route, replace(spec, sampling=sampling, max_length=end)) as session:
        drawn = await replays.draw(session, ids[:end], prompt, lambda received: received.position == end)
        await session.stay()
        return TextRun(route, await ask(session.id, route), drawn)


class AuditCase:
    """Audit of one text `ids`, which begins with a prompt; `spec` says how its tokens are drawn.

    The text is judged from position 0 on, because a hop's result at a position depends on all positions before it. If a
    part were left out, a hop that lies there could make other hops look false behind it.
    """

    def __init__(self, referee: Referee, replays: Replays, spec: SessionSpec, ids: Sequence[int]) -> None:
        assert spec.sampling is not None
        self.accused: HopAccount | None = None  # the first run's account of the hop that was found false
        self._exact = False  # whether digests are asked for, of peers of one class of equal bits
        self._referee = referee
        self._findings = referee.standing
        self._replays = replays
        self._spec = spec
        self.ids = ids
        self._sampling = spec.sampling
        held = len(ids) - 1  # positions: the last token is drawn and not fed
        part = referee.dice.randrange(-(-held // MAX_SKETCHED)) + 1
        self._end = max(self._sampling.prompt_length, min(held, part * MAX_SKETCHED))
        self._seed = referee.dice.randbytes(SEED_BYTES)
        self._name = f"text {self._seed.hex()[:8]}"

    async def audit(self, session: ClientSession) -> str:
        """Audit the hops of `session`, which has drawn the last token of `ids`, and update the standings of the peers.

        Returns `passed`, `false` (a peer is shunned), `doubt` (one or two peers are in doubt) or `void` (no result).
        Closes `session` as soon as its hops have answered. Raises SwarmnodeError or asyncio.TimeoutError if the audit
        could not be carried out.
        """
        await session.stay()
        again, self._exact = self._referee.audit_route(session.route, moved=session.epoch > 1)
        accounts = await asyncio.wait_for(self._ask(session.id, session.route), RUN_S)
        if not all(account.digests for account in accounts):  # a hop has computed in two ways, or its class has changed
            self._exact = False
        await session.close()
        prompt = self._sampling.prompt_length
        drawn = {at: self.ids[at] for at in range(max(prompt, session.received_end), self._end + 1)}
        return await self._decide(TextRun(session.route, accounts, drawn, moved=session.epoch > 1), again)

    async def _decide(self, original: TextRun, again: Route | None) -> str:
        if (edge := original.contradiction(self.ids)) is not None:  # its two ends are in doubt
            if edge in (0, len(original.route)) and original.moved:
                return "void"  # a lost hop may have sent a token to one of the two, which was then drawn a second time
            if edge == len(original.route):  # this edge leads straight to the client
                log.info("peer %s did not sign for the tokens that it sent", original.route[-1].peer)
                return "false" if self._findings.doubt(original.route[-1].peer, self._name) else "doubt"
            self._findings.contradict(
                original.route[edge - 1].peer, original.route[edge].peer
            )  # the last hop feeds the first
            return "doubt"
        for index, account in enumerate(original.accounts[:-1]):
            said = account.statement
            if said.codec != self._spec.codec_into(
                said.end, said.sent.length
            ):  # not the codec that the client knows of
                # A hop's choice of codec reaches the client through the hops before it, so the hop and the one before it are in
                # doubt. Without the choice the text cannot be computed again.
                if original.moved:
                    return "void"  # a lost hop may have kept the choice to itself
                log.info("peer %s sent in a codec that the client was not informed of", original.route[index].peer)
                if index:
                    self._findings.contradict(original.route[index].peer, original.route[index - 1].peer)
                else:
                    self._findings.doubt(original.route[0].peer, self._name)
                return "doubt"
        second = await self._run(again)
        if second is None or second.contradiction(self.ids) is not None:
            return "void"  # without a doubt: a token may have come back to this route sooner than its input did
        comparison = self._compare(original, second)
        agreed = comparison.judgements if comparison.false_hop is None else comparison.judgements[:-1]
        near = comparison.near_hop
        for judgement, first_hop, second_hop in zip(agreed, original.route, second.route, strict=False):
            asked = {first_hop.peer, second_hop.peer}
            right = f"two peers agree on {judgement.compared} positions of {self._name}"
            for peer in asked if len(asked) == 2 and judgement.proves else ():
                self._findings.add(peer, Kind.RIGHT, right, weight=judgement.compared)
        if near is not None and await self._who(original, second, near, comparison.judgements[near]) == "false":
            return "false"
        if comparison.false_hop is not None:
            return await self._who(original, second, comparison.false_hop, comparison.judgements[-1])
        return "void" if comparison.unclear else "passed"

    async def _who(self, original: TextRun, second: TextRun, index: int, judged: Judgement) -> str:
        """Find out by a third run which of two runs deviates at hop `index`, where their comparison is false or a near miss.

        Returns `false` if a peer is shunned for it, `doubt` if the third run does not tell which result is false, `void` if
        rounding explains the tokens, `passed` after a near miss. A comparison with the third run must have at least as many
        positions as `judged`, that of the two runs.
        """
        near, suspects = not judged.false, (original.route[index].peer, second.route[index].peer)
        if suspects[0] == suspects[1]:  # a single time may be noise that was never measured
            return "passed" if near else "false" if self._findings.doubt(suspects[0], self._name) else "doubt"
        another = self._referee.another_route(original.route, suspects[1], same_bits=self._exact)
        third, alone = await self._run(another), None
        if third is not None and third.route[index].peer not in suspects and third.contradiction(self.ids) is None:
            agree = [
                self._compare(run, third).agree_at(index, judged.compared, closely=near) for run in (original, second)
            ]
            alone = odd_one_out(agree)
        if third is None or alone is None:
            if not near:
                self._findings.contradict(*suspects)
                return "doubt"
            for peer in suspects:
                self._findings.add(
                    peer, Kind.UNCLEAR, f"its result or another's for {self._name} deviates more than most"
                )
            return "passed"
        run, peer = (original, second)[alone], suspects[alone]
        if near:
            text = hashlib.sha256(struct.pack(f"<{judged.at + 1}q", *self.ids[: judged.at + 1])).hexdigest()
            deviates = f"its result for {self._name} deviates more than most"
            is_shunned = self._findings.add(peer, Kind.NEAR, deviates, weight=judged.compared, other=text)
        elif await self._drew_honestly(run, third, index):
            log.info("rounding explains the tokens that peer %s drew of %s", peer, self._name)
            return "void"
        else:
            two = f"{third.route[index].peer} and another peer agree on {self._name}, and this peer differs"
            is_shunned = self._findings.add(peer, Kind.FALSE, two)
        if is_shunned:
            self.accused = run.accounts[index]
        return "false" if is_shunned else "passed"

    async def _drew_honestly(self, run: TextRun, third: TextRun, index: int) -> bool:
        """Return whether the tokens that a last hop drew in `run`, and `third` did not, follow from the same likelihoods but for
        rounding. A draw goes by cumulated likelihood, so where many tokens are about as likely, rounding moves each.

        False for other hops, at temperature 0, and for draws that depend on the tokens before (penalties, grammars).
        """
        sampling, spec = self._sampling, self._spec
        depends = sampling.temperature <= 0 or sampling.counts_tokens or spec.follows_grammar
        if run.has_digests or index + 1 < len(run.route) or depends:
            return False
        judged = self._compare(run, third).judgements[index]
        others = [at for at in sorted(run.drawn) if run.drawn[at] != third.drawn.get(at, run.drawn[at])]
        said = run.accounts[index].statement
        codec = spec.coarsest(said.end, self._end)
        tolerance = self._replays.calibration.tolerance(said.number_format, codec, units=said.end)
        looked = {at: run.drawn[at] for at in others[:MOST_LOOKS]}
        honest = await asyncio.wait_for(self._may_have_drawn(tuple(third.route), looked, tolerance.deviation), RUN_S)
        return not judge_draws(judged.beyond, judged.compared, honest, tolerance).false

    async def _may_have_drawn(self, route: Route, drawn: Mapping[int, int], deviation: float) -> list[bool]:
        """Return for each of the tokens `drawn`, by position, whether it follows from logits within the relative `deviation` of
        those that the peers of `route` compute. Raises the error that ended their session if the logits do not come."""
        settled, size = replace(self._spec, max_length=self._end), self._replays.prompt_chunk_tokens
        driven = replace(settled, mode=Mode.DRIVEN, sampling=None, proposer="", width=MAX_WIDTH)
        honest: list[bool] = []
        async with self._replays.session(route, driven) as session:
            await session.start()
            for at in sorted(drawn):
                while session.length < at:
                    start, end = session.length, min(at, session.length + size)
                    want, expect = (Want.LAST, at) if end == at else (Want.NOTHING, None)
                    session.send(ids_entry(start, [self.ids[start:end]], want), expect=expect)
                received = await session.receive()
                assert received.output.tensor is not None
                logits_V = decode(received.output.tensor, received.payload)[0, -1].float()
                spread = tolerances.LOGITS_SPREAD * deviation * float(logits_V.square().mean().sqrt())
                known = drawn[at] < len(logits_V)
                honest.append(known and may_draw(drawn[at], logits_V, self._sampling, at, spread=spread))
        return honest

    def _compare(self, first: TextRun, other: TextRun) -> Comparison:
        spec, calibration = self._spec, self._replays.calibration
        return compare(
            first, other, lambda unit: spec.coarsest(unit, self._end), calibration, adapted=bool(spec.adapter)
        )

    # -- asking

    async def _ask(self, session: bytes, route: Route) -> list[HopAccount]:
        """Fetch from every hop of the route its signed account of the session: with digests if they are asked for and all hops have
        them, else with sketches. Raises the first error of a fetch."""
        for digests in (True, False) if self._exact else (False,):
            accounts = await asyncio.gather(*(self._fetch(hop.peer, session, digests=digests) for hop in route))
            if all(account.digests for account in accounts):
                break
        return list(accounts)

    async def _fetch(self, peer: PeerId, session: bytes, *, digests: bool) -> HopAccount:
        referee = self._referee
        try:
            asked = (session, self._seed, self._end, referee.host.swarm.id)
            board, length = self._replays.statements, len(self.ids) - 1
            account = await fetch_account(board, peer, *asked, length=length, digests=digests)
        except PeerRefused:
            # A peer that is present and refuses may have had to drop the session.
            self._findings.add(peer, Kind.SILENT, f"it gave no account of {self._name}")
            raise
        except ProtocolError:
            self._findings.doubt(peer, self._name)
            raise
        announced = referee.host.directory.peers().get(peer)
        if announced is not None and announced.number_format != account.statement.number_format:
            self._findings.add(peer, Kind.SILENT, "its statement has another number format than it announced")
            raise ProtocolError("its statement has another number format than it announced", peer=peer)
        return account

    async def _run(self, route: Route | None) -> TextRun | None:
        """Run the text over another route; None if there is none. Raises the error that ended the run."""
        text = self.ids[: self._end + 1]
        if route is None:
            return None
        return await asyncio.wait_for(run_text(self._replays, self._spec, text, route, self._ask), RUN_S)
