"""float32 products by explicit vectors: of a few rows (`_few_rows`), and of matrices (`_product`)."""

from npattn.kernels.linear.numba_cpu._few_rows import USABLE, rows_of_each
from npattn.kernels.linear.numba_cpu._product import IS_FAST, products

__all__ = ["IS_FAST", "USABLE", "products", "rows_of_each"]
