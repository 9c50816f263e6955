"""Kernels: what walks a plan. ``contract`` says what all of them compute, ``select`` takes one of them."""
