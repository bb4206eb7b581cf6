"""How tokens' vectors become a text's, as a checkpoint's files say, and files that say what is not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.compute.model.encoder import CLS, LAST, MAX, MEAN, Pooling, SmallFile, read_pooling
from swarmnode.errors import CheckpointError

HIDDEN_TH = torch.tensor([[3.0, 4.0], [0.0, 8.0]])


def files(folder: Path, **contents: Any) -> SmallFile:
    """A checkpoint's small files: modules, pooling, length."""
    names = {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "length": "sentence_bert_config.json",
    }
    for key, content in contents.items():
        path = folder / names[key]
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return lambda name: folder / name if (folder / name).is_file() else None


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]


@pytest.mark.parametrize(
    ("mode", "pooled"), [(CLS, [3.0, 4.0]), (MEAN, [1.5, 6.0]), (MAX, [3.0, 8.0]), (LAST, [0.0, 8.0])]
)
def test_modes(mode: str, pooled: list[float]) -> None:
    assert Pooling(mode, normalize=False)(HIDDEN_TH).tolist() == pooled
    assert float(Pooling(mode)(HIDDEN_TH).norm()) == pytest.approx(1.0)


def test_the_mean_of_length_1_where_nothing_is_said(tmp_path: Path) -> None:
    assert read_pooling(files(tmp_path)) == Pooling(MEAN, normalize=True)


def test_as_the_files_say(tmp_path: Path) -> None:
    said = files(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        length={"max_seq_length": 256},
    )
    assert read_pooling(said) == Pooling(CLS, normalize=True, positions=256)


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        ({"modules": modules("Transformer", "Pooling", "Dense")}, "asks for Dense"),
        ({"modules": modules("Transformer", "WordEmbeddings")}, "asks for WordEmbeddings"),
        ({"modules": "["}, "cannot be read"),
        ({"modules": {}}, "not as sentence-transformers writes it"),
        (
            {
                "modules": modules("Transformer", "Pooling"),
                "pooling": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            },
            "cls_token, max_tokens",
        ),
        (
            {"modules": modules("Transformer", "Pooling"), "pooling": {"pooling_mode_weightedmean_tokens": True}},
            "weightedmean_tokens",
        ),
    ],
)
def test_what_is_not_computed(tmp_path: Path, contents: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read_pooling(files(tmp_path, **contents))
