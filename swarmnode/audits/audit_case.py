"""One audit: every hop of a session says what it did, other peers do the same, and where they part a third decides.

The hops are asked for positions and by a seed that are chosen now. The other peers get the text as an ordinary session, which they
cannot tell from one that was moved to them after a fault: the same parameters, and inputs that are known already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from swarmnode.audits.hop_account import HopAccount, fetch_account
from swarmnode.audits.referee import RUN_S, Referee, Replays, odd_one_out
from swarmnode.codec.audit_messages import MAX_SKETCHED, SEED_BYTES
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.sketch import deviations
from swarmnode.errors import PeerRefused, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.audits.judgement import Calibration, Judgement, judge_states, judge_tokens
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.router import Route
from swarmnode.serving.client.session_spec import SessionSpec
from swarmnode.serving.session.transcript import ids_digest

log = logging.getLogger(__name__)

CodecAt = Callable[[int], Codec]


"""unit -> the coarsest codec that states have met when they enter it"""
SAME = 1e-4  # two sketches of the same bytes, on different machines


@dataclass(frozen=True)
class TextRun:
    """One way that a text went: the route, what each hop said of it, and the tokens that this route drew, by position.

    Where the route is not the session's first (`moved`), a hop may hold positions that others have sent it: those below its edge's
    base. Nobody of the route answers for them.
    """

    route: Sequence[HopSpec]
    accounts: Sequence[HopAccount]
    drawn: Mapping[int, int]
    moved: bool = False

    def base(self, index: int) -> int:
        """From which position on hop `index` has its input from the one before it."""
        return self.accounts[index].statement.received.base

    def contradiction(self, ids: Sequence[int]) -> int | None:
        """The first edge whose two ends say different things of what went over it: k is the edge into hop k, the one after the last
        hop is to us. None where there is none. Into hop 0 went `ids`, of which we were told those that are not in `drawn`."""
        taken = self.accounts[0].statement.received
        if taken.digest != ids_digest(torch.tensor(ids[: taken.length], dtype=torch.int64)):
            return 0
        apart = next((index for index in range(1, len(self.accounts)) if not self._agree(index)), None)
        return len(self.accounts) if apart is None and not self._was_told(ids) else apart

    def _was_told(self, ids: Sequence[int]) -> bool:
        """Whether the last hop signed for the tokens that it told us."""
        told = self.accounts[-1].statement.sent
        first, last = min(self.drawn, default=told.base), max(self.drawn, default=told.length - 1)
        if not told.base <= first <= last < told.length <= len(ids):
            return False
        tokens = [self.drawn.get(at, ids[at]) for at in range(told.base, told.length)]
        return told.digest == ids_digest(torch.tensor(tokens, dtype=torch.int64))

    def _agree(self, index: int) -> bool:
        sender, receiver, base = self.accounts[index - 1], self.accounts[index], self.base(index)
        if sender.sent_TK is None or receiver.received_TK is None or (base > 0 and not self.moved):
            return False
        if sender.statement.sent != receiver.statement.received:
            return False
        return max(deviations(sender.sent_TK[base:], receiver.received_TK[base:]), default=0.0) <= SAME


@dataclass(frozen=True)
class Comparison:
    """Hop by hop: `judgements` up to and with the first false one, behind which nothing can be said, each of the positions up to
    the first at which the hop's input differed beyond the tolerance. `unclear` where the runs part at positions for which nobody of
    the routes answers."""

    judgements: Sequence[Judgement] = ()
    unclear: bool = False

    @property
    def false_hop(self) -> int | None:
        """The index of the hop at which the two runs part, having agreed before it."""
        return len(self.judgements) - 1 if self.judgements and self.judgements[-1].false else None

    @property
    def near_hop(self) -> int | None:
        """The index of the first hop whose states lie so far apart at some position that it is nearly false."""
        states = self.judgements[:-1]  # the last hop sends tokens, of which some are others
        return next((index for index, judged in enumerate(states) if judged.near), None)

    def agree_at(self, index: int, compared: int = 0) -> bool | None:
        """Whether the runs agree up to and with this hop; None where they part before it, or before so many positions were
        `compared`, so that it cannot be told."""
        if self.false_hop == index:
            return False
        return True if len(self.judgements) > index and self.judgements[index].compared >= compared else None

    def is_near_miss(self, index: int, compared: int) -> bool | None:
        """Whether a hop's states lie nearly so far apart that it is false; None where it cannot be told (`agree_at`)."""
        agree = self.agree_at(index, compared)
        return None if agree is None else not agree or self.judgements[index].near


def compare(
    one: TextRun, other: TextRun, codec_at: CodecAt, calibration: Calibration, *, adapted: bool = False
) -> Comparison:
    """What came out of each hop in two runs of the same text, whose states had met no coarser codec than `codec_at` says: as the
    next hop got them, and in the end tokens. `adapted`: through an adapter.

    What a hop makes of a position depends on what came in up to it: behind the first that came in otherwise nothing is its own."""
    judgements: list[Judgement] = []
    alike: int | None = None  # positions up to the first that came in otherwise
    for index in range(len(one.route)):
        said = one.accounts[index].statement
        codec = codec_at(said.end)
        if index + 1 == len(one.route):
            tolerance = calibration.tolerance(said.number_format, codec, units=said.end)
            both = [at for at in one.drawn if at in other.drawn and (alike is None or at <= alike)]
            drawn, again = ([run.drawn[at] for at in both] for run in (one, other))
            judgements.append(judge_tokens(drawn, again, tolerance))
            break
        mine_TK, yours_TK = one.accounts[index + 1].received_TK, other.accounts[index + 1].received_TK
        assert mine_TK is not None and yours_TK is not None, "only the first hop takes ids in"
        apart = deviations(mine_TK[:alike], yours_TK[:alike])
        tolerance = calibration.tolerance(said.number_format, codec, units=said.end, deviations=apart, adapted=adapted)
        judged = judge_states(apart, tolerance)
        if judged.beyond:
            was_false = judged.false
            judged = judge_states(apart[max(one.base(index + 1), other.base(index + 1)) :], tolerance)
            if (
                was_false and not judged.false
            ):  # a hop that has left the route sent it, and whatever follows is made of it
                return Comparison(tuple(judgements), unclear=True)
        elif not adapted:
            calibration.note(one.route[index].peer, said.number_format, codec, apart, units=said.end)
        judgements.append(judged)
        if judged.false:
            break
        alike = next((at for at, one_apart in enumerate(apart) if not one_apart <= tolerance.deviation), alike)
    return Comparison(tuple(judgements))


class AuditCase:
    """Of one text `ids`, whose first tokens were a prompt, and which `spec` says how to draw.

    It is judged from the beginning on, as what a hop makes of a position depends on all before it: were a part left out, who lies
    there could make others look false behind it.
    """

    def __init__(self, referee: Referee, replays: Replays, spec: SessionSpec, ids: Sequence[int]) -> None:
        assert spec.sampling is not None
        self.accused: HopAccount | None = None  # of whoever was found false, what it said in the first run
        self._referee = referee
        self._replays = replays
        self._spec = spec
        self.ids = ids
        self._sampling = spec.sampling
        held = len(ids) - 1  # positions: the last token is told and not fed
        part = referee.dice.randrange(-(-held // MAX_SKETCHED)) + 1
        self._end = max(self._sampling.prompt_length, min(held, part * MAX_SKETCHED))
        self._seed = referee.dice.randbytes(SEED_BYTES)
        self._name = f"text {self._seed.hex()[:8]}"

    def __repr__(self) -> str:
        return f"<AuditCase of {self._name} up to position {self._end - 1}>"

    async def audit(self, session: ClientSession) -> str:
        """Judge the hops of a session that has brought forth the last of the tokens, and keep their standings; the session ends.

        Returns `passed`, `false`, `doubt` or `void`. Raises what made the audit come to nothing."""
        await session.stay()
        accounts = await asyncio.wait_for(self._ask(session.id, session.route), RUN_S)
        await session.close()
        prompt = self._sampling.prompt_length
        drawn = {at: self.ids[at] for at in range(max(prompt, session.known), self._end + 1)}
        return await self._decide(TextRun(session.route, accounts, drawn, moved=session.epoch > 1))

    async def _decide(self, original: TextRun) -> str:
        if original.contradiction(self.ids) is not None:
            return self._contradicted(original)
        if (index := self._untold(original)) is not None:
            return self._concealed(original, index)
        second = await self._run_again(original.route)
        if second is None or second.contradiction(self.ids) is not None:
            return "void"  # and no doubt: what it drew may have come back to it sooner than what it was sent
        found = self._compare(original, second)
        agreed = found.judgements if found.false_hop is None else found.judgements[:-1]
        near = found.near_hop
        for index, (judgement, hop, other) in enumerate(zip(agreed, original.route, second.route, strict=False)):
            for peer in {hop.peer, other.peer} if hop.peer != other.peer and index != near else ():
                self._referee.standing.pass_audit(peer, judgement.compared)
                self._referee.note(
                    "finds it right", peer, f"{judgement.compared} positions of {self._name} were computed by two alike"
                )
        if near is not None and await self._is_shunned_for(near, found.judgements[near].compared, original, second):
            return "false"
        if found.false_hop is not None:
            return await self._who(original, second, found.false_hop, found.judgements[-1].compared)
        return "void" if found.unclear else "passed"

    async def _is_shunned_for(self, near: int, compared: int, original: TextRun, second: TextRun) -> bool:
        """Two runs lie a little too far apart at the hop `near`: which of the two it was a third one tells. It lowers that
        one's trust (where nobody can tell, both) and adds to its earlier near misses."""
        suspects = original.route[near].peer, second.route[near].peer
        if suspects[0] == suspects[1]:
            return False
        third = await self._third_run(original.route, near, suspects)
        votes = [third and self._compare(run, third).is_near_miss(near, compared) for run in (original, second)]
        alone = odd_one_out([None if vote is None else not vote for vote in votes])
        if alone is None:
            for peer in suspects:
                self._referee.standing.come_near(peer)
            return False
        if not self._referee.standing.near_miss(suspects[alone], compared):
            self._referee.note("trusts it less", suspects[alone], f"{self._name} of it lies farther off than most")
            return False
        self.accused = (original, second)[alone].accounts[near]
        self._shun(suspects[alone], "several texts of it lie farther off from what others compute than chance has it")
        return True

    async def _third_run(self, route: Sequence[HopSpec], index: int, suspects: tuple[PeerId, PeerId]) -> TextRun | None:
        """The text once more, with neither of the two at hop `index`; None where there is nobody, or who contradicts itself."""
        third = await self._run_again(route, suspects[1])
        is_of_use = third is not None and third.route[index].peer not in suspects
        return third if third is not None and is_of_use and third.contradiction(self.ids) is None else None

    async def _who(self, original: TextRun, second: TextRun, index: int, compared: int) -> str:
        """Two runs part at a hop, of which so many positions were `compared`: a third one, by other peers, says which of the two is
        false."""
        suspects = original.route[index].peer, second.route[index].peer
        if suspects[0] == suspects[1]:  # one time may be noise that nobody has measured
            return "false" if self._referee.doubt(suspects[0], self._name) else "doubt"
        third = await self._third_run(original.route, index, suspects)
        if third is not None:
            alone = odd_one_out([self._compare(run, third).agree_at(index, compared) for run in (original, second)])
            if alone is not None:
                self.accused = (original, second)[alone].accounts[index]
                by = third.route[index].peer
                self._shun(suspects[alone], f"{by} computed {self._name} as another peer did, and not as it")
                return "false"
        self._referee.doubt_both(*suspects)
        return "doubt"

    def _compare(self, one: TextRun, other: TextRun) -> Comparison:
        spec, calibration = self._spec, self._replays.calibration
        return compare(one, other, lambda unit: spec.coarsest(unit, self._end), calibration, adapted=bool(spec.adapter))

    def _untold(self, run: TextRun) -> int | None:
        """The first hop that says that it sent in another codec than the client was told; None where there is none."""
        for index, account in enumerate(run.accounts[:-1]):
            said = account.statement
            if said.codec != self._spec.codec_into(said.end, said.sent.length):
                return index
        return None

    def _concealed(self, run: TextRun, index: int) -> str:
        """Its choice went to the client by the hops before it: nobody can compute the text again, and one of them is to be
        doubted. Where hops were lost, one of them may have chosen and not told it."""
        if run.moved:
            return "void"
        one, other = run.route[index].peer, run.route[max(0, index - 1)].peer
        log.info("peer %s sent in another codec than was told", one)
        if one == other:
            self._referee.doubt(one, self._name)
        else:
            self._referee.doubt_both(one, other)
        return "doubt"

    def _contradicted(self, run: TextRun) -> str:
        """Two neighbours of a route say different things of what went between them: one of the two is to be doubted."""
        edge = run.contradiction(self.ids)
        assert edge is not None
        if edge in (0, len(run.route)) and run.moved:
            return "void"  # a token may have been drawn twice: who was lost told it to one of us
        if edge == len(run.route):  # between it and us is nobody
            log.info("peer %s did not sign for the tokens that it told", run.route[-1].peer)
            return "false" if self._referee.doubt(run.route[-1].peer, self._name) else "doubt"
        one, other = run.route[edge - 1].peer, run.route[edge].peer  # into the first hop the last one feeds
        log.info("peers %s and %s contradict one another", one, other)
        self._referee.doubt_both(one, other)
        return "doubt"

    def _shun(self, peer: PeerId, fact: str) -> None:
        log.warning("peer %s computes falsely: it is left out from now on", peer)
        self._referee.standing.shun(peer)
        self._referee.note("leaves it out for a week", peer, f"it computes falsely: {fact}")

    # -- asking

    async def _ask(self, session: bytes, route: Route) -> list[HopAccount]:
        """What every hop says. Raises what the first one raised that does not say it."""
        return list(await asyncio.gather(*(self._fetch(hop.peer, session) for hop in route)))

    async def _fetch(self, peer: PeerId, session: bytes) -> HopAccount:
        referee = self._referee
        try:
            account = await fetch_account(
                self._replays.statements, peer, session, self._seed, self._end, referee.host.swarm.id
            )
        except PeerRefused:
            referee.standing.forfeit(peer)  # who is there and does not answer may have had to let go of it
            raise
        except ProtocolError:
            referee.doubt(peer, self._name)
            raise
        announced = referee.host.directory.peers().get(peer)
        if announced is not None and announced.number_format != account.statement.number_format:
            referee.standing.forfeit(peer)
            raise ProtocolError("a statement in another number format than announced", peer=peer)
        return account

    async def _run_again(self, route: Sequence[HopSpec], *avoided: PeerId) -> TextRun | None:
        """The text along another route. None where nobody else is there; raises what made it fail."""
        again = self._referee.another_route(route, *avoided)
        return None if again is None else await asyncio.wait_for(self._run(again), RUN_S)

    async def _run(self, route: Route) -> TextRun:
        prompt, end = self._sampling.prompt_length, self._end
        sampling = msgspec.structs.replace(self._sampling, max_new_tokens=end + 1 - prompt)  # and then it stands
        spec = replace(self._spec, sampling=sampling, max_length=end)
        async with self._replays.session(route, spec) as session:
            drawn = await self._replays.draw(session, self.ids[:end], prompt, lambda received: received.position == end)
            await session.stay()
            return TextRun(route, await self._ask(session.id, route), drawn)
