"""SGD with momentum."""

from collections.abc import Mapping
from typing import ClassVar

from npattn._typing import Array, Grads
from npattn.optim.optimizer import Optimizer, in_unit, not_negative


class SGD(Optimizer):
    """Stochastic gradient descent.

    ``g = grad + weight_decay · p``; with momentum ``b = momentum · b + g`` and ``p −= lr · b``, else
    ``p −= lr · g``.

    Parameters
    ----------
    parameters : dict of str to ndarray
        Updated in place.
    lr : float
    momentum : float, default 0.0
    weight_decay : float, default 0.0

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import optim
    >>> p = {"w": np.array([1.0, 2.0])}
    >>> optim.SGD(p, lr=0.5).step({"w": np.array([1.0, -1.0])})
    >>> p["w"]
    array([0.5, 2.5])
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(
        self, parameters: Mapping[str, Array], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr)
        self.momentum = in_unit("momentum", momentum)
        self.weight_decay = not_negative("weight_decay", weight_decay)

    def _update(self, lr: float, grads: Grads) -> None:
        for name, parameter in self.parameters.items():
            b = self._slots["momentum"][name]
            b *= self.momentum
            b += grads[name]
            if self.weight_decay:
                b += self.weight_decay * parameter
            parameter -= lr * b


__all__ = ["SGD"]
