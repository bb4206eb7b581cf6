"""The Python client for whoever has no loop: the ring, and a swarm as a transformers model. More: tests/node/test_client.py."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import swarmnode
from swarmnode.errors import UsageError
from tests.real.conftest import Stages
from tests.tiny import PROMPT, TinyModel

NEW = 12


def test_a_swarm_is_used_from_threads(stages: Stages, tiny: TinyModel) -> None:
    expected = tiny.alone(PROMPT, NEW)
    ids = torch.tensor([PROMPT])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0, "num_beams": 3}
    with swarmnode.connect(stages.local.file, home=stages.local.folder / "client") as swarm:
        assert swarm.generate(PROMPT, max_new_tokens=NEW).ids == expected
        assert [piece.id for piece in swarm.stream(PROMPT, max_new_tokens=NEW)] == expected
        with pytest.raises(UsageError, match="vocabulary"):
            swarm.generate([511, 512], max_new_tokens=2)
        beams = swarm.causal_lm(hold_ends=True).generate(ids, **arguments)
    assert torch.equal(beams, AutoModelForCausalLM.from_pretrained(tiny.folder).eval().generate(ids, **arguments))
