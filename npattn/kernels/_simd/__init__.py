"""Explicit vectors inside Numba: LLVM's auto-vectoriser leaves two thirds of the machine unused.

======== ============================================================================================
_host    how wide vectors are here, which instructions there are; NPATTN_VECTOR_WIDTH forces a width
vectors  the vector type: load, store, arithmetic, selection, reductions, records at an address
exp      exp and tanh
storage  float16 and bfloat16 converted while loading and storing
transpose a square transposed in registers
hashing  the dropout generator
matmul   the register-tile matrix product
======== ============================================================================================
"""
