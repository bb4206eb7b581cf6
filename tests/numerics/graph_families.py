"""Tiny models of many transformers families as modules that give their loss, each with its example batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    CLIPModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Batch = dict[str, Tensor]
B, T, V = 4, 8, 61  # samples, tokens, vocabulary
TEXT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "use_cache": False, "type_vocab_size": 2,
}  # fmt: skip
TWO = {"num_hidden_layers": 2}  # of families whose layers differ, or are one
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": V, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None, "use_cache": False,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def ids() -> Tensor:
    return torch.randint(3, V, (B, T))


def masked_labels() -> Tensor:
    labels = ids()
    labels[:, ::3] = -100
    return labels


def padded() -> Tensor:
    mask = torch.ones(B, T, dtype=torch.int64)
    for row in range(B):
        mask[row, T - row :] = 0
    return mask


def text(**more: Any) -> Callable[[], Batch]:
    return lambda: {"input_ids": ids(), **{name: make() for name, make in more.items()}}


def classes() -> Tensor:
    return torch.randint(0, 3, (B,))


TOKENS, MASKED = text(labels=ids), text(attention_mask=padded, labels=masked_labels)
SENTENCE = text(attention_mask=padded, labels=classes)


def image(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": torch.randn(B, 3, size, size), "labels": classes()}


class Contrast(nn.Module):
    """CLIP, which gives its loss on demand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids, pixel_values, attention_mask, return_loss=True)


def clip() -> nn.Module:
    text = {**TEXT, "projection_dim": 8}
    vision = {**IMAGE, "projection_dim": 8}
    return Contrast(CLIPModel(CONFIG_MAPPING["clip"](text_config=text, vision_config=vision, projection_dim=8)))


def made(auto: Any, kind: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = auto.from_config(CONFIG_MAPPING[kind](**config), dtype=torch.float32)
        return model

    return make


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    **{
        kind: (made(AutoModelForMaskedLM, kind, **{**TEXT, **more}), MASKED)
        for kind, more in {
            "bert": {},
            "albert": {"embedding_size": 16, **TWO},
            "deberta-v2": {"position_buckets": 8, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            "modernbert": TWO,
            "fnet": {},
        }.items()
    },
    "distilbert": (
        made(
            AutoModelForSequenceClassification,
            "distilbert",
            **{
                **TEXT,
                "dim": 16,
                "hidden_dim": 32,
                "n_layers": 1,
                "n_heads": 2,
                "dropout": 0.0,
                "seq_classif_dropout": 0.0,
            },
        ),
        SENTENCE,
    ),
    **{
        kind: (made(AutoModelForCausalLM, kind, **{**TEXT, **more}), batch)
        for kind, more, batch in [
            ("llama", {}, MASKED),
            (
                "gpt2",
                {
                    "n_positions": 64,
                    "n_embd": 16,
                    "n_layer": 1,
                    "n_head": 2,
                    "resid_pdrop": 0,
                    "embd_pdrop": 0,
                    "attn_pdrop": 0,
                },
                TOKENS,
            ),
            ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}, MASKED),
            ("gemma2", {**TWO, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4}, TOKENS),
            ("bloom", {}, TOKENS),
            ("falcon", {}, TOKENS),
            ("qwen3_moe", EXPERTS, TOKENS),
            ("gpt_oss", {**EXPERTS, **TWO}, TOKENS),
            ("mixtral", EXPERTS, TOKENS),
            ("gpt_neox", {}, TOKENS),
            ("mamba", {"state_size": 4}, TOKENS),
            ("lfm2", {**TWO, "full_attn_idxs": [1], "num_key_value_heads": 2, "block_multiple_of": 8}, TOKENS),
        ]
    },
    "mixtral with router logits": (
        made(AutoModelForCausalLM, "mixtral", **TEXT, **EXPERTS, output_router_logits=True),
        TOKENS,
    ),
    **{
        kind: (made(AutoModelForSeq2SeqLM, kind, **SEQ2SEQ, **more), TOKENS)
        for kind, more in {"bart": {}, "marian": {}}.items()
    },
    "t5": (
        made(
            AutoModelForSeq2SeqLM,
            "t5",
            vocab_size=V,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        TOKENS,
    ),
    "whisper": (
        made(
            AutoModelForSpeechSeq2Seq,
            "whisper",
            **{**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        ),
        lambda: {"input_features": torch.randn(B, 8, 16), "labels": ids()},
    ),
    "wav2vec2": (
        made(
            AutoModelForAudioClassification,
            "wav2vec2",
            **{
                **TEXT,
                "conv_dim": (8, 8),
                "conv_stride": (5, 2),
                "conv_kernel": (10, 3),
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "feat_proj_dropout": 0.0,
                "activation_dropout": 0.0,
                "layerdrop": 0.0,
                "apply_spec_augment": False,
                "classifier_proj_size": 8,
            },
        ),
        lambda: {"input_values": torch.randn(B, 200), "labels": classes()},
    ),
    "clip": (clip, lambda: {"input_ids": ids(), "attention_mask": padded(), "pixel_values": torch.randn(B, 3, 16, 16)}),
    **{
        kind: (made(AutoModelForImageClassification, kind, **{**IMAGE, **more}), image(size))
        for kind, size, more in [
            ("vit", 16, {}),
            ("dinov2", 16, {}),
            ("resnet", 32, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
            ("convnext", 32, {**TWO, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
            (
                "swin",
                32,
                {
                    "patch_size": 4,
                    "image_size": 32,
                    "embed_dim": 8,
                    "depths": [1, 1],
                    "num_heads": [2, 2],
                    "num_attention_heads": [2, 2],
                    "window_size": 4,
                    "drop_path_rate": 0.0,
                },
            ),
            (
                "segformer",
                32,
                {
                    "hidden_sizes": [8, 8, 8, 8],
                    "depths": [1, 1, 1, 1],
                    "num_attention_heads": [1, 1, 1, 1],
                    "drop_path_rate": 0.0,
                },
            ),
        ]
    },
}


def build(family: str) -> tuple[nn.Module, Batch]:
    """A model in training mode, and its example batch."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]
    return model().train(), batch()
