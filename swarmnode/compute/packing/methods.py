"""Methods of quantisation by their name in a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarmnode.compute.packing.ggml import FORMATS
from swarmnode.compute.packing.packed_matrix import Method
from swarmnode.compute.packing.quantisation_methods import (
    AWQ_BITS,
    NESTED,
    SCALES,
    STATES,
    WORD_BITS,
    Awq,
    Bytes,
    CompressedIntegers,
    FourBit,
    Fp8,
    Gptq,
    Mxfp4,
    gptq_format,
    group_size_of,
    one_of,
    settings_of_groups,
)
from swarmnode.errors import CheckpointError

ADVICE = "take the model's unquantised checkpoint, and --quantize nf4 on the volunteers to hold it small"
GPTQ_BITS = (2, 3, 4, 8)
COMPRESSED_BITS = (4, 8)
PACKING = frozenset({"bits", "group_size", "sym", "desc_act", "format", "checkpoint_format"})  # of GPTQ, by layer
COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def method_of(settings: Mapping[str, Any]) -> Method:
    """Return the method that a quantization_config names. Raises CheckpointError if it is damaged or not supported, or has a key
    that may change the weights and that is not read here. A key without a value (null, false, empty) changes nothing."""
    older = settings.get("load_in_4bit") or settings.get("load_in_8bit")  # bitsandbytes' older configs name no method
    name = str(settings.get("quant_method") or ("bitsandbytes" if older else "unknown")).lower()
    if name not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantised ({name}), and only {', '.join(METHODS)} can be read: {ADVICE}"
        )
    try:
        make, read, harmless = METHODS[name]
        for key, value in settings.items():
            if key not in read and key not in harmless and key not in EVERYWHERE and value:
                raise CheckpointError(
                    f"the checkpoint's quantization_config ({name}) has {str(key)[:40]}: {str(value)[:40]}, which may change the "
                    f"weights and is not supported: {ADVICE}"
                )
        return make(settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint's quantization_config ({name}) is damaged: {error}; fetch config.json again"
        ) from None


def _value_bytes(bits: int, *, symmetric: bool) -> float:
    """Return the bytes that a number takes in the smallest format of GGUF that holds all of them; 0 if none is nearly as small."""
    name = {(4, True): "Q4_0", (4, False): "Q5_0", (3, True): "Q4_0", (3, False): "Q4_0", (8, True): "Q8_0"}
    form = FORMATS.get(name.get((bits, symmetric), ""))
    return 0.0 if form is None else form.block_bytes / form.block


def _of_gptq(settings: Mapping[str, Any]) -> Method:
    bits, form = settings.get("bits"), gptq_format(settings)
    if bits not in GPTQ_BITS or form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"the checkpoint is GPTQ of {bits} bits in the format {form!r}, which is not supported: {ADVICE}"
        )
    _check_group_size(settings)
    # Rules by name that pack some layers otherwise than the others; those that begin with "-:" leave layers unpacked, as the
    # tensors show themselves.
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise ValueError(f"its dynamic rules are {str(rules)[:40]!r}, not a table")
    for pattern, changed in rules.items():
        differs = not isinstance(changed, dict) or any(
            key in PACKING and settings.get(key) != value for key, value in changed.items()
        )
        if differs and not pattern.startswith("-:"):
            raise CheckpointError(
                f"the checkpoint is GPTQ with other settings for layers like {pattern[:60]!r} ({str(changed)[:60]}), which is not "
                f"supported: {ADVICE}"
            )
    value_bytes = _value_bytes(bits, symmetric=settings.get("sym") is True)
    beside = (".qzeros", ".scales", ".g_idx")
    return Gptq(("I32",), ".qweight", ".weight", beside, WORD_BITS / bits, value_bytes, bits)


def _of_awq(settings: Mapping[str, Any]) -> Method:
    bits = one_of(settings, "bits", "w_bit", AWQ_BITS)
    version = str(settings.get("version", "gemm")).lower()
    if bits != AWQ_BITS or version != "gemm":
        raise CheckpointError(
            f"the checkpoint is AWQ of {bits} bits, version {version}, which is not supported: {ADVICE}"
        )
    _check_group_size(settings)
    value_bytes = _value_bytes(bits, symmetric=settings.get("zero_point") is False)
    return Awq(("I32",), ".qweight", ".weight", (".qzeros", ".scales"), WORD_BITS / AWQ_BITS, value_bytes)


def _check_group_size(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the number of inputs in a group is no whole number."""
    size = group_size_of(settings)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"its group_size is {str(size)[:40]!r}, not a whole number")


def _of_bitsandbytes(settings: Mapping[str, Any]) -> Method:
    if settings.get("load_in_8bit"):
        value_bytes = _value_bytes(8, symmetric=True)
        return Bytes(("I8",), ".weight", ".weight", (".SCB", ".weight_format"), 1, value_bytes)
    return FourBit(("U8",), "", "", (".absmax", ".quant_map", *NESTED, *STATES), 2)


def _of_fp8(settings: Mapping[str, Any]) -> Method:
    return _fp8(settings.get("weight_block_size"))


def _fp8(block: object) -> Method:
    sizes = block if isinstance(block, list) and len(block) == 2 else []
    whole = sizes and all(isinstance(size, int) and size > 0 for size in sizes)
    if block is not None and not whole:
        raise CheckpointError(
            f"the checkpoint is FP8 in blocks of {str(block)[:40]!r}, where two whole numbers are supported, such as [128, 128]: "
            f"{ADVICE}"
        )
    return Fp8(("F8_E4M3", "F8_E5M2"), "", "", SCALES, 1, 0.0, (sizes[0], sizes[1]) if whole else None)


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Method:
    form = settings.get("format")
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"the checkpoint's weights are stored sparsely ({str(sparsity['format'])[:40]}), which is not supported: {ADVICE}"
        )
    if form not in COMPRESSED_FORMATS or settings.get("transform_config"):
        how = f"in the format {form!r}" if form not in COMPRESSED_FORMATS else "with transforms of its activations"
        raise CheckpointError(f"the checkpoint is of compressed-tensors {how}, which is not supported: {ADVICE}")
    if form == "float-quantized" and not settings.get("config_groups"):
        return _fp8(None)
    if not isinstance(settings.get("config_groups"), dict):
        raise ValueError(f"it has no config_groups, as the format {form} needs")
    weights = settings_of_groups(settings)
    kind, bits, group_size = weights["type"], weights["num_bits"], weights["group_size"] or 0
    if kind == "float" and bits == 8 and form != "pack-quantized":
        return _fp8(weights["block_structure"])
    if kind not in ("int", None) or bits not in COMPRESSED_BITS or not isinstance(group_size, int):
        raise CheckpointError(
            f"the checkpoint is of compressed-tensors with numbers of type {kind} and {bits} bits, "
            f"which is not supported: {ADVICE}"
        )
    value_bytes = _value_bytes(bits, symmetric=weights["symmetric"])
    beside: tuple[str, ...] = (".weight_scale", ".weight_zero_point")
    if form != "pack-quantized":
        return Bytes(("I8",), ".weight", ".weight", beside, 1, value_bytes)
    beside = (*beside, ".weight_shape", ".weight_g_idx")
    elements = WORD_BITS / bits
    return CompressedIntegers(("I32",), ".weight_packed", ".weight", beside, elements, value_bytes, bits, group_size)


def _of_mxfp4(_settings: Mapping[str, Any]) -> Method:
    form = FORMATS["MXFP4"]
    return Mxfp4(("U8",), "_blocks", "", ("_scales",), 2, form.block_bytes / form.block)


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


EVERYWHERE = _keys("quant_method modules_to_not_convert ignored_layers ignore lm_head meta version quantization_status")
"""Keys that are read, or that only say which layers are left plain: the tensors show that themselves."""
CALIBRATION = _keys(
    "damp_percent damp_auto_increment static_groups true_sequential mse dataset tokenizer batch_size desc_act model_seqlen "
    "block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize pad_token_id max_input_length "
    "cache_block_outputs model_name_or_path model_file_base_name use_exllama disable_exllama exllama_config use_cuda_fp16 "
    "backend pack_dtype act_group_aware autoround_version seqlen nsamples iters lr minmax_lr amp enable_minmax_tuning seed "
    "enable_quanted_input low_gpu_mem_usage to_quant_block_names scale_dtype data_type gradient_accumulate_steps "
    "enable_norm_bias_tuning not_use_best_mse dynamic_max_gap offload_to_disk vram_strategy gc_mode"
)
"""Keys of GPTQ and AWQ for how values were found, how inputs are ordered (`g_idx` shows it), or how kernels use them."""
METHODS: dict[str, tuple[Callable[[Mapping[str, Any]], Method], frozenset[str], frozenset[str]]] = {
    "gptq": (
        _of_gptq,
        _keys("bits group_size sym format checkpoint_format dynamic desc_act static_groups"),
        CALIBRATION,
    ),
    "awq": (
        _of_awq,
        _keys("bits w_bit group_size q_group_size zero_point version"),
        CALIBRATION | _keys("do_fuse fuse_max_seq_len modules_to_fuse"),
    ),
    "bitsandbytes": (
        _of_bitsandbytes,
        _keys("load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit"),
        _keys(
            "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_threshold "
            "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules"
        ),
    ),
    "fp8": (_of_fp8, _keys("weight_block_size"), _keys("activation_scheme fmt scale_fmt dequantize")),
    "fbgemm_fp8": (_of_fp8, _keys("weight_block_size"), _keys("activation_scale_ub")),
    "compressed-tensors": (
        _of_compressed_tensors,
        _keys("format config_groups transform_config sparsity_config"),
        _keys("global_compression_ratio kv_cache_scheme run_compressed quantization_config"),
    ),
    "mxfp4": (_of_mxfp4, frozenset[str](), _keys("dequantize swizzled")),
}
"""By method: its maker, keys that are read, and keys without meaning here.

kv_cache_scheme, activation_scheme and llm_int8_threshold change how activations are rounded, which weights alone do not need.
"""
