"""Quantised checkpoints made plain: the matrices that GPTQ, AWQ, bitsandbytes, FP8 and GGUF stand for."""
