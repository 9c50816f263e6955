from pathlib import Path

import numpy as np
import pytest

from npattn.models import GPT2, Bert, Llama

DATA = Path(__file__).parent / "data"
CLASSES = {"gpt2": GPT2, "llama": Llama, "llama_tied_llama3": Llama, "llama_linear": Llama, "bert": Bert}
DECODERS = [name for name in CLASSES if name != "bert"]


@pytest.fixture(scope="session")
def load():
    """load(name) -> (model, what transformers computed)."""

    def loaded(name, **options):
        model = CLASSES[name].from_pretrained(DATA / name, **options)
        with np.load(DATA / name / "expected.npz") as archive:
            return model, {key: archive[key] for key in archive}

    return loaded
