"""What the optimisers share: checked steps, and a state that can be saved and restored bit for bit."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from npattn._arrays import accumulation_dtype, array_module
from npattn._typing import Array, Grads, Params


class Optimizer:
    """Updates named arrays in place.

    Parameters
    ----------
    parameters : dict of str to ndarray
        Live arrays, as ``dict(model.named_parameters())``.
    lr : float
    """

    #: Names of the arrays kept for each parameter.
    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: Mapping[str, Array], lr: float) -> None:
        if not isinstance(parameters, Mapping):
            raise TypeError(
                f"parameters must be a dict of names and arrays, got {type(parameters).__name__}; pass "
                "model.named_parameters()"
            )
        self.parameters: Params = dict(parameters)
        self.lr = not_negative("lr", lr)
        self.steps = 0
        self._slots: dict[str, dict[str, Array]] = {
            slot: {
                name: array_module(p).zeros(p.shape, accumulation_dtype(p.dtype))
                for name, p in self.parameters.items()
            }
            for slot in self.slots
        }

    def step(self, grads: Grads, lr: float | None = None) -> None:
        """Update every parameter in place.

        Parameters
        ----------
        grads : dict of str to ndarray
            Exactly the names and shapes of the parameters. Not written to.
        lr : float, optional
            For this step; None: the optimiser's own.

        Raises
        ------
        ValueError
            When names or shapes differ: all of them listed, and nothing updated.
        """
        check_same(grads, self.parameters, "gradients")
        rate = self.lr if lr is None else not_negative("lr", lr)
        self.steps += 1
        self._update(rate, grads)

    def state(self) -> dict[str, Array]:
        """Everything a resumed run needs, as a flat dict of copies: "steps" and "<slot>.<parameter>"."""
        state = {"steps": np.array(self.steps, np.int64)}
        for slot, arrays in self._slots.items():
            state.update({f"{slot}.{name}": array.copy() for name, array in arrays.items()})
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state; the next steps are those of the optimiser it came from, bit for bit.

        Raises
        ------
        ValueError
            When names or shapes differ: all of them listed, and nothing changed.
        """
        own = {f"{slot}.{name}": array for slot, kept in self._slots.items() for name, array in kept.items()}
        check_same(
            {k: np.asarray(v) if np.isscalar(v) else v for k, v in state.items()},
            {"steps": np.array(0), **own},
            "state",
        )
        for name, array in own.items():
            array[...] = array_module(array).asarray(state[name])
        self.steps = int(state["steps"])

    def _update(self, lr: float, grads: Grads) -> None:
        """Update all parameters and what is kept for them, in place."""
        raise NotImplementedError


def check_same(given: Mapping[str, Any], expected: Mapping[str, Array], what: str) -> None:
    """Raise one ValueError that lists every missing, unknown or misshapen name."""
    wrong = [
        f"{name}: missing, expected {array.shape}" for name, array in expected.items() if name not in given
    ]
    wrong += [f"{name}: unknown" for name in given if name not in expected]
    wrong += [
        f"{name}: {_described(given[name])}, expected {array.shape}"
        for name, array in expected.items()
        if name in given and getattr(given[name], "shape", None) != array.shape
    ]
    if wrong:
        raise ValueError(
            f"the {what} do not fit the parameters; nothing was changed:\n  " + "\n  ".join(wrong)
        )


def _described(value: Any) -> str:
    return f"shape {value.shape}" if hasattr(value, "shape") else type(value).__name__


def not_negative(name: str, value: float) -> float:
    """``value`` itself, finite and at least 0."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    return float(value)


def in_unit(name: str, value: float) -> float:
    """``value`` itself, in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)


__all__ = ["Optimizer", "check_same", "in_unit", "not_negative"]
