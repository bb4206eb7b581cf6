"""Dequantisation of checkpoints: from GPTQ, AWQ, bitsandbytes, FP8 and GGUF to plain matrices."""
