"""GPT2: the decoder of Radford et al., Language Models are Unsupervised Multitask Learners, 2019."""

import os
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.models._folder import Config, Names, as_it_is, both, fill, read_tensors
from npattn.nn import TransformerDecoder
from npattn.nn.init import BLANK


class GPT2(TransformerDecoder):
    """GPT-2: learned positions, layer norm first, GELU by tanh, the head tied to the embedding.

    A `TransformerDecoder` in every respect: ``model(ids, cache=None) -> logits``, ``vjp``, ``new_cache``,
    ``generate``, ``stream``, ``weights``, ``attention_stats``.

    Examples
    --------
    ::

        model = GPT2.from_pretrained("gpt2")            # a folder with config.json and model.safetensors
        ids = model.generate(prompt_ids, 40, temperature=0.8, top_p=0.95, seed=1)
    """

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> "GPT2":
        """Read a Hugging Face folder.

        Parameters
        ----------
        folder : str or Path
            With config.json and the weights in ``*.safetensors``, in any float dtype. A leading
            ``transformer.`` of their names is optional; tensors without a use are passed over.
        dtype : dtype
            What the parameters are converted to.

        Returns
        -------
        model : GPT2

        Raises
        ------
        ValueError
            Another architecture, fields or tensors that are missing (all of them named) or do not fit.
        FileNotFoundError
            No config.json, or no ``*.safetensors``.
        """
        config = Config(folder, "gpt2", ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions"))
        config.refuse(
            scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
        )
        tied = bool(config.get("tie_word_embeddings", True))
        model = cls(
            config["vocab_size"],
            config["n_embd"],
            config["n_head"],
            config["n_layer"],
            config.get("n_inner", 4 * config["n_embd"]),
            config["n_positions"],
            position="learned",
            mlp=config.activation("activation_function", "gelu_new"),
            eps=config.get("layer_norm_epsilon", 1e-5),
            tied=tied,
            rng=BLANK,
            dtype=dtype,
        )
        fill(model, read_tensors(folder, "transformer."), _names(config["n_layer"], tied), folder)
        return model


def _names(num_layers: int, tied: bool) -> Names:
    """Our parameters in the files: Conv1D weights are (in, out), and one holds query, key and value."""
    names: Names = {"embedding.weight": ("wte.weight", as_it_is), "position.weight": ("wpe.weight", as_it_is)}
    for n in range(num_layers):
        block, layer = f"blocks.{n}", f"h.{n}"
        names |= both(f"{block}.attention_norm", f"{layer}.ln_1")
        for third, which in enumerate(("query", "key", "value")):
            names |= both(f"{block}.attention.{which}", f"{layer}.attn.c_attn", _Third(third))
        names |= both(f"{block}.attention.out", f"{layer}.attn.c_proj", _transposed)
        names |= both(f"{block}.mlp_norm", f"{layer}.ln_2")
        names |= both(f"{block}.mlp.up", f"{layer}.mlp.c_fc", _transposed)
        names |= both(f"{block}.mlp.down", f"{layer}.mlp.c_proj", _transposed)
    names |= both("norm", "ln_f")
    return names if tied else names | {"head.weight": ("lm_head.weight", as_it_is)}


def _transposed(array: Array) -> Array:
    return array.T


class _Third:
    """The ``which``-th third of a Conv1D's outputs, in our orientation."""

    def __init__(self, which: int) -> None:
        self.which = which

    def __call__(self, array: Array) -> Array:
        third: Array = np.split(array, 3, axis=-1)[self.which]
        return third.T
