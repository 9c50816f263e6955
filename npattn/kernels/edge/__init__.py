"""Attention along the edges of a graph: the contract of the edge kernels and what computes it."""
