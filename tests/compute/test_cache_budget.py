"""CacheBudget: the largest claim is what the ledger holds."""

from __future__ import annotations

import pytest

from swarmnode.compute.cache_budget import CacheBudget, Claim, OutOfCache
from swarmnode.ledger import Account, MemoryLedger


def test_one_layer_is_kept_for_regrouping() -> None:
    ledger = MemoryLedger()
    budget = CacheBudget(1000, 4, ledger)
    assert budget.usable_bytes == 800
    budget.claim(Claim.PROMISED, 400)
    assert ledger.accounts()[Account.KV_CACHE] == 500
    with pytest.raises(OutOfCache):
        budget.claim(Claim.PROMISED, 801)
    assert budget.claimed(Claim.PROMISED) == 400


def test_promises_make_padding_go() -> None:
    ledger = MemoryLedger(1000)
    budget = CacheBudget(1000, 1000, ledger)
    budget.claim(Claim.PROMISED, 300)
    budget.claim(Claim.ALLOCATED, 900)
    assert budget.free_bytes >= budget.usable_bytes - 301
    budget.claim(Claim.PROMISED, 800)
    assert ledger.used_bytes == 901
    budget.claim(Claim.ALLOCATED, 700)
    assert ledger.used_bytes == 801
    budget.close()
    assert ledger.used_bytes == 0


def test_what_others_took_from_the_ledger_is_not_promised() -> None:
    ledger = MemoryLedger(1000)
    budget = CacheBudget(1000, 1000, ledger)
    budget.claim(Claim.PROMISED, 100)
    ledger.reserve(Account.ACTIVATIONS, 700)
    assert budget.free_bytes == 198
    with pytest.raises(OutOfCache, match="no room"):
        budget.claim(Claim.PROMISED, 400)
    with pytest.raises(OutOfCache):
        budget.claim(Claim.ALLOCATED, 400)
    budget.claim(Claim.PROMISED, 290)
    assert ledger.used_bytes <= 1000
