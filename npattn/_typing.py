"""The few type names that every signature uses."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

#: A NumPy array, or a CuPy array of the same shape and dtype.
Array: TypeAlias = np.ndarray[Any, Any]

#: Dotted parameter name -> live array, in field order.
Params: TypeAlias = dict[str, Array]

#: Dotted parameter name -> gradient, the names and shapes of ``Params``.
Grads: TypeAlias = dict[str, Array]

#: Cotangents of the outputs -> cotangents of the inputs. Pure: it may be called any number of times.
Pullback: TypeAlias = Callable[..., Any]
