"""Sequential: layers one after another."""

from dataclasses import dataclass
from typing import Any, ClassVar

from npattn._dropout import fold_seed
from npattn._typing import Grads, Pullback
from npattn.nn.layer import Layer, join


@dataclass(init=False, eq=False, repr=False)
class Sequential(Layer):
    """``layers[-1](… layers[1](layers[0](x)))``.

    Parameters
    ----------
    *layers : Layer
        Parameters are named ``layers.0.…``, ``layers.1.…``. One and the same layer may stand in two places:
        its gradient is then the sum of both, under the name of the first.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> rng = np.random.default_rng(0)
    >>> model = nn.Sequential(nn.Linear(4, 8, rng=rng), nn.GELU(), nn.Linear(8, 2, rng=rng))
    >>> list(model.named_parameters())
    ['layers.0.weight', 'layers.0.bias', 'layers.2.weight', 'layers.2.bias']
    """

    layers: tuple[Layer, ...]
    takes_seed: ClassVar[bool] = True

    def __init__(self, *layers: Layer) -> None:
        for index, layer in enumerate(layers):
            if not isinstance(layer, Layer):
                raise TypeError(f"Sequential takes Layers, got {type(layer).__name__} at position {index}")
        self.layers = layers

    def named_parameters(self) -> Grads:
        """Dotted name -> live array; a layer standing in two places is named once."""
        return join(
            *(
                (f"layers.{i}", layer.named_parameters())
                for i, layer in enumerate(self.layers)
                if self._at(i) == i
            )
        )

    def __call__(self, x: Any, seed: int | None = None) -> Any:
        """The last layer's output. ``seed`` switches the dropout layers on, each with a seed of its own."""
        for index, layer in enumerate(self.layers):
            x = layer(x, **self._options(index, seed))
        return x

    def vjp(self, x: Any, seed: int | None = None) -> tuple[Any, Pullback]:
        """Output and pullback: the layers' pullbacks in reverse."""
        backs: list[Pullback] = []
        for index, layer in enumerate(self.layers):
            x, back = layer.vjp(x, **self._options(index, seed))
            backs.append(back)

        def pullback(dy: Any) -> tuple[Any, Grads]:
            by_layer: dict[int, Grads] = {}
            for index in reversed(range(len(backs))):
                dy, grads = backs[index](dy)
                at = self._at(index)
                if at in by_layer:
                    grads = {name: by_layer[at][name] + grad for name, grad in grads.items()}
                by_layer[at] = grads
            return dy, join(*((f"layers.{index}", by_layer[index]) for index in sorted(by_layer)))

        return x, pullback

    def _at(self, index: int) -> int:
        """The first place where the index-th layer stands."""
        return next(i for i, layer in enumerate(self.layers) if layer is self.layers[index])

    def _options(self, index: int, seed: int | None) -> dict[str, Any]:
        if seed is None or not self.layers[index].takes_seed:
            return {}
        return {"seed": fold_seed(seed, index)}


__all__ = ["Sequential"]
