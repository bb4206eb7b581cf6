"""Small encoders with a tokenizer of words, as a user would hand them to `create --model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

WORDS = (
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "red",
    "blue",
    "hens",
    "lay",
)
POSITIONS = 24
LABELS = {0: "calm", 1: "wild", 2: "odd"}


def save_encoder(
    folder: Path,
    family: str = "bert",
    *,
    classifies: bool = False,
    labels: int = len(LABELS),
    pooling: str | None = None,
    **settings: Any,
) -> Any:
    """A random model of the family; `pooling` as sentence-transformers writes it. Returns it, to compare with."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model(
        family, **sizes, vocab_size=len(WORDS), max_position_embeddings=POSITIONS, pad_token_id=0, **settings
    )
    torch.manual_seed(3)
    if classifies:
        config.id2label = {number: LABELS[number] for number in range(labels)}
        config.label2id = {label: number for number, label in config.id2label.items()}
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    model.float().eval().save_pretrained(folder)
    _save_tokenizer(folder)
    if pooling is not None:
        kinds = ("Transformer", "Pooling")
        modules = [{"idx": idx, "type": f"sentence_transformers.models.{kind}"} for idx, kind in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, f"pooling_mode_{pooling}": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS - 4}))
    return model


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(folder)
