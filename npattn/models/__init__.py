"""Published architectures, built from `npattn.nn` and filled from Hugging Face folders.

``Bert.from_pretrained(folder)``, ``GPT2.from_pretrained(folder)`` and ``Llama.from_pretrained(folder)`` read
config.json and every ``*.safetensors`` file; nothing is downloaded.
"""

from npattn.models.bert import Bert as Bert
from npattn.models.gpt import GPT2 as GPT2
from npattn.models.llama import Llama as Llama

__all__ = ["GPT2", "Bert", "Llama"]
