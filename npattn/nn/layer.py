"""Layer: what every layer is, and how the parameters of a tree of layers get their names.

A layer is a plain dataclass. What a field holds says what it is::

    array                            a parameter, named after the field
    Layer, or tuple of Layers        children: "field.<names of the child>", "field.0.<names of the first>"
    anything else                    configuration

``layer(x) -> y`` computes; ``layer.vjp(x) -> (y, pullback)`` computes the same and keeps what the gradient
needs inside ``pullback``, a pure function: ``pullback(dy) -> (dx, grads)``, grads a flat dict with just the
names and shapes of ``named_parameters()``. A layer never stores anything during a call, so one layer may be
used twice in a model, and by many threads at once.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from npattn._arrays import array_module, is_cupy, to_numpy
from npattn._typing import Array, Grads, Params


class Layer:
    """Base of all layers. See the module's docstring.

    Methods
    -------
    named_parameters()
        Dotted name -> live array, in field order.
    load_parameters(parameters)
        Copies values into the live arrays.
    move_to(xp)
        Moves them between NumPy and CuPy.
    num_parameters()
        How many numbers that is.
    summary()
        The same as a table.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.Linear(3, 2, rng=np.random.default_rng(0))
    >>> {name: array.shape for name, array in layer.named_parameters().items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> y, pullback = layer.vjp(np.ones((5, 3), np.float32))
    >>> dx, grads = pullback(np.ones((5, 2), np.float32))
    >>> dx.shape, grads["bias"]
    ((5, 3), array([5., 5.], dtype=float32))
    """

    #: Whether calling takes ``seed=``, that is, whether the layer or a child of it drops anything.
    takes_seed: ClassVar[bool] = False

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        """The layer's output."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__ and vjp")

    def vjp(self, x: Any, *args: Any, **options: Any) -> Any:
        """The layer's output and its pullback ``dy -> (dx, grads)``."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__ and vjp")

    def named_parameters(self) -> Params:
        """Dotted name -> live array, in field order: writing into an array changes the layer."""
        parameters: Params = {}
        for name, value in self._fields():
            if isinstance(value, Layer):
                parameters.update(prefixed(name, value.named_parameters()))
            elif isinstance(value, np.ndarray) or is_cupy(value):
                parameters[name] = value
        return parameters

    def load_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Copy values into the live arrays, converted to their dtypes.

        Parameters
        ----------
        parameters : mapping of str to ndarray
            Exactly the names and shapes of ``named_parameters()``.

        Raises
        ------
        ValueError
            When a name is missing, one is not known, or shapes differ: all of them listed at once, and
            nothing changed.
        TypeError
            When a value is not an array of real numbers.
        """
        own = self.named_parameters()
        values = {
            name: value if hasattr(value, "dtype") else np.asarray(value)
            for name, value in parameters.items()
        }
        wrong = [f"{name}: missing, expected {own[name].shape}" for name in own if name not in values]
        wrong += [f"{name}: not a parameter of this layer" for name in values if name not in own]
        wrong += [
            f"{name}: shape {values[name].shape}, expected {array.shape}"
            for name, array in own.items()
            if name in values and values[name].shape != array.shape
        ]
        if wrong:
            raise ValueError(
                f"the parameters do not fit this {type(self).__name__}; nothing was changed. "
                f"{len(wrong)} mismatch{'es' if len(wrong) > 1 else ''}:\n  " + "\n  ".join(wrong)
            )
        converted = {}
        for name, array in own.items():
            if values[name].dtype.kind not in "fiuV":  # V: how NumPy sees bfloat16
                raise TypeError(f"{name} must hold real numbers, got dtype {values[name].dtype}")
            converted[name] = array_module(array).asarray(values[name]).astype(array.dtype, copy=False)
        for name, array in own.items():
            array[...] = converted[name]

    def move_to(self, xp: Any) -> None:
        """Move every parameter to another array module's device, in place.

        Parameters
        ----------
        xp : module
            ``numpy`` or ``cupy``. The layer then takes and returns arrays of that module.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for child in value if isinstance(value, tuple | list) else (value,):
                if isinstance(child, Layer):
                    child.move_to(xp)
            if isinstance(value, np.ndarray) or is_cupy(value):
                setattr(self, field.name, to_numpy(value) if xp is np else xp.asarray(value))

    def num_parameters(self) -> int:
        """How many numbers the parameters are, a tied array counted once."""
        return sum(array.size for array in self.named_parameters().values())

    def summary(self) -> str:
        """A table of the parameters: name, shape, dtype, count, and the total.

        Examples
        --------
        >>> import numpy as np
        >>> from npattn import nn
        >>> print(nn.LayerNorm(8).summary())
        LayerNorm
        weight  (8,)  float32   8
        bias    (8,)  float32   8
        total                  16
        """
        rows = [
            (name, str(array.shape), str(array.dtype), f"{array.size:,}")
            for name, array in self.named_parameters().items()
        ]
        rows.append(("total", "", "", f"{self.num_parameters():,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                cell.rjust(width) if column == 3 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([type(self).__name__, *lines])

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) or is_cupy(value):
                parts.append(f"{field.name}={value.dtype}{list(value.shape)}")
            elif isinstance(value, tuple) and value and isinstance(value[0], Layer):
                parts.append(f"{field.name}={len(value)} × {value[0]!r}")
            else:
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _fields(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each field, the members of a tuple or list of Layers one by one."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, tuple | list):
                yield from ((f"{field.name}.{index}", item) for index, item in enumerate(value))
            else:
                yield field.name, value


def prefixed(name: str, named: Mapping[str, Array]) -> dict[str, Array]:
    """``named`` with ``name.`` before every key."""
    return {f"{name}.{key}": array for key, array in named.items()}


def join(*children: tuple[str, Grads]) -> Grads:
    """The gradients of several children as one flat dict."""
    return {f"{name}.{key}": array for name, grads in children for key, array in grads.items()}


__all__ = ["Layer", "join", "prefixed"]
