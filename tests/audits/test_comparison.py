"""What neighbours of a route and replicas say, side by side."""

from __future__ import annotations

import hashlib

import msgspec
import torch

from swarmnode.audits.audit_case import HopAccount, TextRun, compare
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.sketch import digests, sketch
from swarmnode.plan.audits import Calibration
from swarmnode.serving.session.session_streams import ids_digest
from swarmnode.swarm.records.statement import Edge, Statement

SEED = bytes(16)
IDS = list(range(64))
FED = Edge(ids_digest(torch.tensor(IDS)), 0, 64)


def states(layer: int, noise: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(64, 96, generator=generator) + noise * torch.randn(64, 96, generator=generator)


def run(first: torch.Tensor, second: torch.Tensor, drawn: list[int], name: str = "", base: int = 0) -> TextRun:
    """Three hops; `first` and `second` are what went over the edges between them. The last one held `base` positions when the
    route began."""
    digests = (hashlib.sha256(sent.numpy()).digest() for sent in (first, second))
    edges = [FED, *(Edge(digest, held, 64) for digest, held in zip(digests, (0, base), strict=True))]
    edges.append(Edge(ids_digest(torch.tensor(drawn)), 0, 64))  # to the client
    sketches = [None, sketch(first, SEED), sketch(second, SEED), None]
    route = [HopSpec(f"{name}{unit}", unit, unit + 2) for unit in (0, 2, 4)]
    accounts = [
        HopAccount(
            Statement(
                *(bytes(32), hop.peer, bytes(16), hop.start, hop.end, "float32", Codec.NONE, SEED, 0, 64),
                *(edges[index], edges[index + 1], bytes(32)),
            ),
            (),
            sketches[index],
            sketches[index + 1],
        )
        for index, hop in enumerate(route)
    ]
    return TextRun(route, accounts, dict(enumerate(drawn)), moved=base > 0)


HONEST = run(states(1), states(2), IDS)


def false_hop(other: TextRun) -> int | None:
    assert other.contradiction(IDS) is None
    return compare(HONEST, other, lambda _unit: Codec.NONE, Calibration()).false_hop


def test_the_first_hop_that_differs_is_named_and_nothing_is_said_behind_it() -> None:
    assert false_hop(run(states(1, 1e-7), states(2, 1e-7), IDS)) is None
    assert false_hop(run(states(1, 1e-3), states(2, 1e-3), IDS)) == 0
    assert false_hop(run(states(1), states(3), [9] * 64)) == 1
    assert false_hop(run(states(1), states(2), [9] * 64)) == 2


def test_two_number_formats_get_no_verdict_and_no_hop_behind_them_gets_one() -> None:
    for index in range(3):
        far = run(*(states(edge, 1e-2 * (edge > index)) for edge in (1, 2)), [9] * 64)
        lied = far.accounts[index]
        assert compare(HONEST, far, lambda _unit: Codec.NONE, Calibration()).false_hop == index
        statement = msgspec.structs.replace(lied.statement, number_format="packed")
        far.accounts[index] = HopAccount(statement, (), lied.received_TK, lied.sent_TK)  # type: ignore[index]
        found = compare(HONEST, far, lambda _unit: Codec.NONE, Calibration())
        assert (found.false_hop, found.near_hop, found.unclear, len(found.judgements)) == (None, None, True, index)


def test_who_states_something_else_than_it_sent_contradicts_its_neighbour() -> None:
    honest, lied = run(states(1), states(2), IDS), run(states(1, 1e-2), states(2), IDS)
    keeps_its_digest = HopAccount(
        honest.accounts[0].statement, (), None, lied.accounts[0].sent_TK
    )  # of what was sent, beside a sketch of what was not
    changes_both = lied.accounts[0]
    for account in (keeps_its_digest, changes_both):
        assert TextRun(honest.route, [account, *honest.accounts[1:]], {}).contradiction(IDS) == 1
    assert honest.contradiction([*IDS[:-1], 7]) == 0, "it was fed other tokens"


def test_a_last_hop_signs_for_the_tokens_that_it_told() -> None:
    told, signed = run(states(1), states(2), IDS), run(states(1), states(2), [*IDS[:-1], 9]).accounts[-1]
    assert told.contradiction(IDS) is None
    nothing = HopAccount(msgspec.structs.replace(signed.statement, sent=Edge()), (), signed.received_TK, None)
    beyond = Edge(told.accounts[-1].statement.sent.digest, 0, 65)
    more = HopAccount(msgspec.structs.replace(signed.statement, sent=beyond), (), signed.received_TK, None)
    for account in (signed, nothing, more):
        assert TextRun(told.route, [*told.accounts[:-1], account], told.drawn).contradiction(IDS) == 3


def test_nobody_answers_for_what_a_hop_had_from_one_that_has_left() -> None:
    """The last hop got its first 32 positions from a liar who was then replaced: they part there, and nobody here is false."""
    lied = states(2)
    lied[:32] = states(3)[:32]
    took_over = run(states(1), lied, [9] * 64, base=32)
    found = compare(took_over, HONEST, lambda _unit: Codec.NONE, Calibration())
    assert found.unclear
    assert found.false_hop is None
    assert found.agree_at(0) is True
    assert found.agree_at(1) is None
    lied[40:] = states(4)[40:]
    assert compare(took_over, HONEST, lambda _unit: Codec.NONE, Calibration()).false_hop is None, (
        "sketches are of what was sent"
    )
    assert compare(run(states(1), lied, IDS, base=32), HONEST, lambda _unit: Codec.NONE, Calibration()).false_hop == 1


def test_a_replaced_hops_sketches_count_from_where_it_took_over() -> None:
    """Who takes over computes all positions anew, in another format of rounding: the next hop holds those of the one before."""
    moved = run(states(1), states(2), IDS, base=32)
    sender = moved.accounts[1]
    assert sender.sent_TK is not None
    anew_TK = sender.sent_TK.clone()
    anew_TK[:32] *= 1.01
    accounts = [moved.accounts[0], HopAccount(sender.statement, (), sender.received_TK, anew_TK), moved.accounts[2]]
    assert TextRun(moved.route, accounts, {}, moved=True).contradiction(IDS) is None
    assert TextRun(moved.route, accounts, {}).contradiction(IDS) == 2, "the session's first route has no such edge"


def test_of_two_runs_that_part_earlier_nothing_can_be_said() -> None:
    found = compare(HONEST, run(states(5), states(2), IDS), lambda _unit: Codec.NONE, Calibration())
    assert (found.agree_at(0), found.agree_at(1), found.agree_at(2)) == (False, None, None)


def shifted(layer: int, at: int, size: float) -> torch.Tensor:
    """States of which one position, or all from one on, is off by so much of its length."""
    sent, off = states(layer), states(layer + 50)
    sent[at] += size * off[at]
    return sent


def test_one_position_falsified_is_found_at_the_hop_that_did_it() -> None:
    zeroed = states(1)
    zeroed[62] = 0
    swapped = states(1)
    swapped[[3, 4]] = swapped[[4, 3]]
    for lied in (zeroed, swapped, shifted(1, 0, 1e-3)):
        assert false_hop(run(lied, states(3), [9] * 64)) == 0


def test_a_hop_is_not_judged_for_what_it_was_sent_otherwise() -> None:
    """The hop before lies by less than is far at position 40, and all that follows is made of it."""
    tolerance = Calibration().tolerance("float32", Codec.NONE, units=2).deviation
    lied = shifted(1, 40, 40 * tolerance)
    behind = states(2)
    behind[40:] = states(3)[40:]
    drawn = IDS[:41] + [9] * 23
    found = compare(HONEST, run(lied, behind, drawn), lambda _unit: Codec.NONE, Calibration())
    assert (found.false_hop, found.near_hop) == (None, 0)
    assert [judged.compared for judged in found.judgements] == [64, 40, 41]
    assert found.agree_at(0, 64, closely=True) is False
    assert found.agree_at(1, 40, closely=True) is True
    assert found.agree_at(1, 64, closely=True) is None, "of what came later nothing can be said"
    assert found.agree_at(1, 64) is None

    behind[30] = states(4)[30]
    assert false_hop(run(lied, behind, drawn)) == 1, "for what it made of what was sent to it as to the other"


def exact(
    first: torch.Tensor, second: torch.Tensor, drawn: list[int], *, bits: bytes = b"1", seed: bytes = SEED
) -> TextRun:
    """As `run`, by peers of one class of equal bits, with digests by `seed`."""
    plain = run(first, second, drawn)
    found = [None, digests(first, seed), digests(second, seed), None]
    accounts = [
        HopAccount(msgspec.structs.replace(account.statement, bits=bits), (), found[at], found[at + 1], digests=True)
        for at, account in enumerate(plain.accounts)
    ]
    return TextRun(plain.route, accounts, plain.drawn)


def exact_hop(other: TextRun, mine: TextRun | None = None) -> int | None:
    mine = exact(states(1), states(2), IDS) if mine is None else mine
    assert other.contradiction(IDS) is None and mine.contradiction(IDS) is None
    return compare(mine, other, lambda _unit: Codec.NONE, Calibration()).false_hop


def one_bit(layer: int, at: int) -> torch.Tensor:
    sent = states(layer)
    sent[at, 3] = sent[at, 3].nextafter(torch.tensor(9.0))
    return sent


def test_in_a_class_one_bit_is_false_and_equal_work_proves() -> None:
    same = compare(
        exact(states(1), states(2), IDS), exact(states(1), states(2), IDS), lambda _unit: Codec.NONE, Calibration()
    )
    assert same.false_hop is None and all(judged.proves for judged in same.judgements)
    for at in (0, 31, 63):
        assert exact_hop(exact(one_bit(1, at), states(3), IDS)) == 0
        assert exact_hop(exact(states(1), one_bit(2, at), IDS)) == 1
    swapped = states(1)
    swapped[[3, 4]] = swapped[[4, 3]]
    assert exact_hop(exact(swapped, states(2), IDS)) == 0
    assert exact_hop(exact(states(1), states(2), [*IDS[:-1], 7])) == 2, "one token"


def test_two_classes_or_two_kinds_of_accounts_are_never_mixed() -> None:
    mine, other = exact(states(1), states(2), IDS), exact(states(1, 1e-7), states(2), IDS, bits=b"2")
    for run_of_others in (other, HONEST):
        found = compare(mine, run_of_others, lambda _unit: Codec.NONE, Calibration())
        assert (found.false_hop, found.near_hop, found.unclear, found.judgements) == (None, None, True, ())


def test_forged_and_replayed_digests_contradict_the_receiver() -> None:
    honest = exact(states(1), states(2), IDS)
    for lied in (exact(one_bit(1, 5), states(2), IDS), exact(states(1), states(2), IDS, seed=bytes(15) + b"1")):
        accounts = [with_digests_of(honest.accounts[0], lied.accounts[0]), *honest.accounts[1:]]
        assert TextRun(honest.route, accounts, honest.drawn).contradiction(IDS) == 1


def with_digests_of(of: HopAccount, digests_of: HopAccount) -> HopAccount:
    """The statement of one account with the digests of another."""
    return HopAccount(of.statement, (), of.received_TK, digests_of.sent_TK, digests=True)


def test_digests_do_not_depend_on_how_positions_came() -> None:
    whole = digests(states(1), SEED)
    assert torch.equal(whole, torch.cat([digests(states(1)[:5], SEED), digests(states(1)[5:], SEED)]))
    assert torch.equal(whole, digests(torch.stack([states(1), states(2)], 1)[:, 0], SEED)), "not contiguous"
    assert not (whole == digests(states(1), bytes(15) + b"1")).all(-1).any()
