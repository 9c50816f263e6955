"""Adam and AdamW."""

import math
from collections.abc import Collection, Mapping
from typing import ClassVar

from npattn._typing import Array, Grads
from npattn.kernels.pointwise import implementations
from npattn.optim.optimizer import Optimizer, in_unit, not_negative


class Adam(Optimizer):
    """Adam, with weight decay as part of the gradient (L2 regularisation).

    At step t::

        g  = grad + weight_decay · p
        m  = β₁ m + (1 − β₁) g
        v  = β₂ v + (1 − β₂) g²
        p −= lr / (1 − β₁ᵗ) · m / (sqrt(v / (1 − β₂ᵗ)) + eps)

    Parameters
    ----------
    parameters : dict of str to ndarray
        Updated in place.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.0

    References
    ----------
    Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import optim
    >>> p = {"w": np.array([1.0, 2.0])}
    >>> optim.Adam(p, lr=0.1).step({"w": np.array([5.0, -0.001])})
    >>> p["w"].round(4)
    array([0.9, 2.1])
    """

    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    _decays_gradient: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Mapping[str, Array],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr)
        self.betas = (in_unit("betas[0]", betas[0]), in_unit("betas[1]", betas[1]))
        self.eps = not_negative("eps", eps)
        self.weight_decay = not_negative("weight_decay", weight_decay)

    def _update(self, lr: float, grads: Grads) -> None:
        names = list(self.parameters)
        parameters = [self.parameters[name] for name in names]
        gs = [grads[name] for name in names]
        decay = self.weight_decay
        if decay and self._decays_gradient:
            gs = [g + decay * p for g, p in zip(gs, parameters, strict=True)]
        ms, vs = ([self._slots[slot][name] for name in names] for slot in self.slots)
        shrinks = [self._shrink(lr, name) for name in names]
        step_size = lr / (1.0 - self.betas[0] ** self.steps)
        root = 1.0 / math.sqrt(1.0 - self.betas[1] ** self.steps)
        columns = (parameters, gs, ms, vs)
        for module, rows in implementations(*columns):
            chosen = [[column[row] for row in rows] for column in (*columns, shrinks)]
            module.adam(*chosen, self.betas, step_size, root, self.eps)

    def _shrink(self, lr: float, name: str) -> float:
        """What the parameter is multiplied by, beside Adam's step."""
        return 1.0


class AdamW(Adam):
    """Adam with decoupled weight decay: ``p −= lr · weight_decay · p`` beside Adam's step.

    Parameters
    ----------
    parameters : dict of str to ndarray
        Updated in place.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.01
    decay : collection of str, optional
        Names of the parameters that decay. None: the arrays of two or more axes (matrices and embeddings, not
        biases and norms).

    Raises
    ------
    ValueError
        When ``decay`` names something that is not a parameter.

    References
    ----------
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import optim
    >>> p = {"w": np.array([[1.0]]), "b": np.array([1.0])}
    >>> optim.AdamW(p, lr=0.1, weight_decay=0.5).step({"w": np.zeros((1, 1)), "b": np.zeros(1)})
    >>> float(p["w"][0, 0]), float(p["b"][0])
    (0.95, 1.0)
    """

    _decays_gradient = False

    def __init__(
        self,
        parameters: Mapping[str, Array],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decay: Collection[str] | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay)
        if decay is None:
            decay = [name for name, array in self.parameters.items() if array.ndim >= 2]
        unknown = [name for name in decay if name not in self.parameters]
        if unknown:
            raise ValueError(f"decay names parameters there are not: {', '.join(unknown)}")
        self.decay = frozenset(decay)

    def _shrink(self, lr: float, name: str) -> float:
        return 1.0 - lr * self.weight_decay if name in self.decay else 1.0


__all__ = ["Adam", "AdamW"]
