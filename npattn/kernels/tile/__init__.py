"""Attention over the tiles of a plan: one module for each way to compute it."""
