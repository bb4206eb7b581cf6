"""Inference on any module: stateless forward passes through the units of a graph, hop by hop."""
