"""Statistics of attention weights without the matrix of weights: contract, NumPy, Numba."""
