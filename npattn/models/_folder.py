"""Reading a Hugging Face folder: config.json, and the tensors of every safetensors file beside it."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from npattn._typing import Array
from npattn.io import load_safetensors
from npattn.nn import Layer

#: Names of activations in config.json -> names in ``nn.MLP``.
ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

#: Name of a parameter in our model -> its name in the files, and what turns the file's array into ours.
Names: TypeAlias = dict[str, tuple[str, Callable[[Array], Array]]]


class Config:
    """config.json, whose missing or unknown fields are errors that name them.

    Parameters
    ----------
    folder : str or Path
    model_type : str
        What config.json must call itself, if it does.
    required : iterable of str
        Fields without a default.
    """

    def __init__(self, folder: str | os.PathLike[str], model_type: str, required: Iterable[str]) -> None:
        self.path = Path(folder) / "config.json"
        try:
            self.fields: Mapping[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON: {error}") from None
        if not isinstance(self.fields, dict):
            raise ValueError(f"{self.path} must hold a JSON object")
        found = self.fields.get("model_type", model_type)
        if found != model_type:
            raise ValueError(f"{self.path} describes the architecture {found!r}, not {model_type!r}")
        missing = [name for name in required if name not in self.fields]
        if missing:
            raise ValueError(f"{self.path} lacks the fields {', '.join(missing)}")

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The field; ``default`` when absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def activation(self, name: str, default: str) -> str:
        """The activation in field ``name``, as ``nn.MLP`` calls it."""
        value = self.get(name, default)
        if value not in ACTIVATIONS:
            raise ValueError(f"{self.path}: {name} is {value!r}; known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def refuse(self, **expected: Any) -> None:
        """Each field must be absent or have the given value: anything else is another architecture."""
        for name, value in expected.items():
            if self.get(name, value) != value:
                raise ValueError(
                    f"{self.path}: {name} = {self.fields[name]!r} is another model; this one has {value!r}"
                )


def read_tensors(folder: str | os.PathLike[str], prefix: str) -> dict[str, Array]:
    """Every tensor of every ``*.safetensors`` file in ``folder``, memory-mapped; ``prefix`` cut off names."""
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{Path(folder)} holds no *.safetensors file")
    tensors: dict[str, Array] = {}
    for path in paths:
        for name, array in load_safetensors(path).items():
            short = name.removeprefix(prefix)
            if short in tensors:
                raise ValueError(f"{path}: the tensor {name!r} is there twice")
            tensors[short] = array
    return tensors


def fill(model: Layer, tensors: Mapping[str, Array], names: Names, folder: str | os.PathLike[str]) -> None:
    """Make tensors the model's parameters, each converted once; all faults in one ValueError."""
    parameters = model.named_parameters()
    assert parameters.keys() == names.keys(), parameters.keys() ^ names.keys()
    missing = sorted({file_name for file_name, _ in names.values() if file_name not in tensors})
    if missing:
        raise ValueError(f"{Path(folder)} lacks the tensors {', '.join(missing)}")
    arrays = {}
    wrong = []
    for own, (file_name, convert) in names.items():
        try:
            arrays[own] = convert(tensors[file_name])
        except (ValueError, IndexError):
            arrays[own] = tensors[file_name]
        if arrays[own].shape != parameters[own].shape:
            wrong.append(
                f"{file_name} of shape {tensors[file_name].shape} gives {arrays[own].shape} for {own}, "
                f"expected {parameters[own].shape}"
            )
        elif arrays[own].dtype.kind not in "fV":  # V: how NumPy sees bfloat16
            wrong.append(f"{file_name} holds {arrays[own].dtype}, floats wanted")
    if wrong:
        raise ValueError(f"{Path(folder)} does not fit its config.json:\n  " + "\n  ".join(wrong))
    _into_one_block(model, parameters, arrays)


def _into_one_block(model: Layer, parameters: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Copy ``arrays`` into one block of memory and make the model's parameters views of it.

    One block lies in large pages, which separate arrays of a few megabytes do not: decoding, one reading of
    all weights, runs 1.5 times as fast.
    """
    dtype = next(iter(parameters.values())).dtype
    step = -(-64 // dtype.itemsize)  # every array starts at a cache line
    block = np.empty(sum(-(-array.size // step) * step for array in parameters.values()), dtype)
    start = 0
    for name, array in parameters.items():
        view = block[start : start + array.size].reshape(array.shape)
        view[...] = arrays[name]
        start += -(-array.size // step) * step
        *path, field = name.split(".")
        layer: Any = model
        for part in path:
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        setattr(layer, field, view)


def as_it_is(array: Array) -> Array:
    """The file's array is ours."""
    return array


def both(own: str, file_name: str, convert: Callable[[Array], Array] = as_it_is) -> Names:
    """The weight and the bias of a layer."""
    return {f"{own}.{part}": (f"{file_name}.{part}", convert) for part in ("weight", "bias")}
