"""What the examples share: ``--device cpu|gpu``, and the arrays to go with it."""

import argparse
import sys
from types import ModuleType


def parse(description: str, **options: dict) -> tuple[argparse.Namespace, ModuleType]:
    """Read the command line; return the arguments and the array module (numpy or cupy) of the device.

    ``options`` are further arguments: ``length={"type": int, "default": 256, "help": "..."}``.
    """
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where attention is computed")
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    arguments = parser.parse_args()
    return arguments, arrays(arguments.device)


def arrays(device: str) -> ModuleType:
    """The array module of ``device``; ends the program with one line when there is no usable GPU."""
    if device == "cpu":
        import numpy

        return numpy
    try:
        import cupy
    except ImportError:
        sys.exit('--device gpu needs CuPy: pip install "npattn[cuda13]" (or cuda12)')
    if not cupy.cuda.is_available():
        sys.exit("--device gpu needs an NVIDIA GPU and its driver; CuPy is installed but finds no device")
    return cupy


def to_numpy(array):
    """``array`` as a NumPy array, wherever it is."""
    return array.get() if hasattr(array, "get") else array
