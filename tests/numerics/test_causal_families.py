"""Each type that transformers maps to a class of causal language models is served, or refused for a known reason."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarmnode.compute.model.family import family_of
from swarmnode.compute.serving.loading import check_family
from swarmnode.errors import CheckpointError
from tests.numerics.families import FAMILIES, RECURRENT, causal_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NO_CONFIG = {"gemma4_assistant"}  # its default config is not valid
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def refused() -> tuple[frozenset[str], frozenset[str]]:
    """Refused types by the page: of models of text, and of others."""
    text = PAGE.read_text().partition("<!-- refused families -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    others = [row for row in rows if "`gemma3`" in row]
    return tuple(frozenset(re.findall(r"`([\w-]+)`", " ".join(some))) for some in (set(rows) - set(others), others))  # type: ignore[return-value]


@pytest.mark.parametrize("model_type", [each for each in CAUSAL if each not in {**FAMILIES, **RECURRENT}])
def test_a_family_is_served_or_refused_in_a_sentence(model_type: str) -> None:
    text, others = refused()
    if model_type in NO_CONFIG:
        assert model_type in others
        return
    config = causal_config(model_type)
    if model_type not in text | others:
        check_family(family_of(config))
        return
    with pytest.raises(CheckpointError) as caught:
        check_family(family_of(config))
    assert ("images or sound" in str(caught.value)) == (model_type in others)


def test_the_page_counts_what_is_served() -> None:
    told = re.search(
        r"transformers (\S+) has (\d+) such families: (\d+) of them .* (\d+) of the (\d+)", PAGE.read_text()
    )
    assert told is not None
    text, others = refused()
    assert not (text | others) & set(FAMILIES | RECURRENT)
    if told.group(1) == transformers.__version__:
        served = len(set(CAUSAL) - text - others)
        assert [int(told.group(n)) for n in range(2, 6)] == [len(CAUSAL), served, served, len(CAUSAL) - len(others)]
