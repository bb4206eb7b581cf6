"""CacheBudget: the largest claim is what the ledger holds."""

from __future__ import annotations

import pytest

from swarmnode.compute.serving.cache import CacheBudget, Claim, OutOfCache
from swarmnode.ledger import Account, MemoryLedger


def test_a_claim_is_in_the_ledger_up_to_the_limit() -> None:
    ledger = MemoryLedger()
    budget = CacheBudget(1000, ledger)
    budget.claim(Claim.PROMISED, 400)
    assert ledger.accounts()[Account.KV_CACHE] == 400
    with pytest.raises(OutOfCache):
        budget.claim(Claim.PROMISED, 1001)
    assert budget.claimed(Claim.PROMISED) == 400


def test_promises_make_padding_go() -> None:
    ledger = MemoryLedger(1000)
    budget = CacheBudget(1000, ledger)
    budget.claim(Claim.PROMISED, 300)
    budget.claim(Claim.ALLOCATED, 900)
    assert budget.free_bytes == 700
    budget.claim(Claim.PROMISED, 800)
    assert ledger.used_bytes == 900
    budget.claim(Claim.ALLOCATED, 700)
    assert ledger.used_bytes == 800
    budget.close()
    assert ledger.used_bytes == 0


def test_what_others_took_from_the_ledger_is_not_promised() -> None:
    ledger = MemoryLedger(1000)
    budget = CacheBudget(1000, ledger)
    budget.claim(Claim.PROMISED, 100)
    ledger.reserve(Account.ACTIVATIONS, 700)
    assert budget.free_bytes == 200
    with pytest.raises(OutOfCache, match="no room"):
        budget.claim(Claim.PROMISED, 400)
    with pytest.raises(OutOfCache):
        budget.claim(Claim.ALLOCATED, 400)
    budget.claim(Claim.PROMISED, 300)
    assert ledger.used_bytes <= 1000
