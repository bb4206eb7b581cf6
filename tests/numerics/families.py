"""Tiny configs of many families: small, but with everything that makes the family what it is (windows, experts, scales)."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                          "num_key_value_heads": 4}  # fmt: skip
# An indexer selects the positions that attention sees: fewer than the sequences of the tests have.
INDEXED: dict[str, Any] = {**LATENT, "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                           "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                           "n_group": 1, "topk_group": 1, "index_topk": 4, "index_head_dim": 8,
                           "index_n_heads": 16}  # fmt: skip

# What each family adds to COMMON. Windows are shorter than the sequences of the tests.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    "mixtral": {**EXPERTS, "sliding_window": 6},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]},
    "gpt2": {"n_positions": 256},
    "gpt_neox": {"rotary_pct": 0.5},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "bloom": {},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "gpt_oss": {**EXPERTS, "head_dim": 8, "sliding_window": 6},
    # and as many more as there are
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "granite_swa": {"sliding_window": 6},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 6, "sliding_window_pattern": 2},
    "stablelm": {},
    "olmo": {},
    "olmo3": {"sliding_window": 6},
    "olmoe": EXPERTS,
    "phi": {},
    "starcoder2": {"sliding_window": 6},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "kv_lora_rank": 8,
                    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2,
                    "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    "llama4_text": {**EXPERTS, "attention_chunk_size": 6, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 2,
                    "head_dim": 8},
    "mpt": {"expansion_ratio": 2, "max_seq_len": 256},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gpt_bigcode": {},
    "codegen": {"rotary_dim": 4},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    "nemotron": {},
    "persimmon": {},
    "xglm": {"attention_heads": 4, "ffn_dim": 48},
    "exaone4": {"sliding_window": 6},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "granitemoe": {**EXPERTS},
    "phimoe": {**EXPERTS},
    "minimax_m2": {**EXPERTS, "head_dim": 8},
    "arcee": {},
    "helium": {"head_dim": 8},
    "apertus": {},
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
              "topk_group": 1, "head_dim": 8},
    "biogpt": {},
    "bitnet": {},
    "diffllama": {},
    "doge": {},
    "exaone_moe": {**EXPERTS, "sliding_window": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "flex_olmo": EXPERTS,
    "gpt_neox_japanese": {},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {**EXPERTS, "head_dim": 8, "moe_topk": 2},
    "internlm3": {"head_dim": 8},
    "minicpm3": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                 "num_key_value_heads": 4},
    "nanochat": {"head_dim": 8},
    "vaultgemma": {"head_dim": 8, "sliding_window": 6},
    "ministral": {"head_dim": 8, "sliding_window": 6},
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "axk2": {**INDEXED, "gated_norm_rank": 4},
}  # fmt: skip

MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 2,
                          "mamba_expand": 2, "mamba_chunk_size": 4}  # fmt: skip
DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}  # fmt: skip
LAYERS = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}

# Families with recurrent states: what each adds to COMMON.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "expand": 2, "conv_kernel": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.0]},
    "bamba": {**MAMBA2, "attn_layer_indices": [2]},
    "granitemoehybrid": {**MAMBA2, **EXPERTS, **LAYERS, "shared_intermediate_size": 16},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 2,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                   "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4, "head_dim": 8, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
                   "n_group": 1, "topk_group": 1},
    "lfm2": {"full_attn_idxs": [2], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2},
    "lfm3": {"head_dim": 8, "sliding_window": 6},
    "qwen3_next": {**DELTA, **EXPERTS, **LAYERS, "head_dim": 8, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    "qwen3_5_text": {**DELTA, **LAYERS, "head_dim": 8},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, **LAYERS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**DELTA, **LAYERS},
    "minimax": {**EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 4},
    "kimi_linear": {**EXPERTS, **LAYERS, **LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**EXPERTS, **LAYERS, **LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1,
                       "first_k_dense_replace": 1},
    "inkling_text": {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                     "sliding_window_size": 6, "d_rel": 4, "rel_extent": 64, "n_routed_experts": 4, "n_shared_experts": 1,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                     "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"]},
    "lara_mini": {**DELTA, **EXPERTS, "head_dim": 8, "sliding_window": 6, "shared_expert_intermediate_size": 16},
}  # fmt: skip

DECODER = {"is_decoder": True, "is_encoder_decoder": False}
# The decoders of encoder-decoders as language models of their own: transformers' classes for them.
HALF: dict[str, Any] = {**DECODER, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4,
                        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32,
                        "vocab_size": 64, "max_position_embeddings": 64}  # fmt: skip

QWEN4: dict[str, Any] = {**COMMON, **DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "hc_count": 2,
                       "hc_lowrank": 8,
                       "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
                       "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 8, "ngram_size": 2, "heads_per_ngram": 2,
                       "eos_token_id": 1, "ngram_vocab_size_base": 50,
                       "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 1}  # fmt: skip

# Whole configs of families whose default config cannot be made small by changing sizes alone.
WHOLE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "mbart", "mvp", "pegasus", "plbart"), HALF),
    "bigbird_pegasus": {**HALF, "attention_type": "original_full"},
    "big_bird": {**COMMON, **DECODER, "attention_type": "original_full"},
    "marian": {**HALF, "decoder_vocab_size": 64},
    "whisper": {**HALF, "max_target_positions": 64, "pad_token_id": 0},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "vocab_size": 97,
             "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {**COMMON, **LATENT, "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {**COMMON, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2,
                            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                                "full_attention": None}},
    "xmod": {**COMMON, **DECODER, "default_language": "en_XX"},
    "dory": {**COMMON, "head_dim": 8, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
}  # fmt: skip

REFUSED: dict[str, str] = {
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "gemma3": "images or sound",
    "llama4": "images or sound",
    "qwen2_vl": "images or sound",
    "bert": "",
    "vit": "not a causal language model",
    "mixtral": "set it to false in config.json",
}


def tiny_config(model_type: str) -> Any:
    """The config of a tiny model of this type, greedy, without end-of-sequence token and without dropout."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**COMMON, **{**FAMILIES, **RECURRENT}[model_type]})
    config.eos_token_id = None
    for name in [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float)]:
        setattr(config, name, 0.0)
    return config


def causal_config(model_type: str) -> Any:
    """The config of a tiny model of any type that transformers maps to a class of causal language models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from swarmnode.compute.model.family import language_config
    from swarmnode.compute.model.fresh import tiny_config as made_small

    if model_type in FAMILIES or model_type in RECURRENT:
        return tiny_config(model_type)
    if model_type in WHOLE:
        return language_config(CONFIG_MAPPING[model_type](**WHOLE[model_type]))
    config = language_config(CONFIG_MAPPING[model_type]())
    for name, value in {**DECODER, "causal": True}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    try:
        config = made_small(config)
    except (RuntimeError, AttributeError):  # sizes that differ from layer to layer, or a config of several models
        return config
    if hasattr(config, "num_kv_shared_layers"):  # layers that use keys and values of another one
        config.num_kv_shared_layers = 2
    return config
