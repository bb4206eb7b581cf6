"""Passes of packed models on the CPU as graphs of ggml: what the family's forward computes, recorded, lowered and tried."""
