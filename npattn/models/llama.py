"""Llama: the decoder of Touvron et al., LLaMA, 2023, and of the many models that share its shape."""

import os
from typing import Any

import numpy as np

from npattn.models._folder import Config, Names, as_it_is, fill, read_tensors
from npattn.nn import Rotary, TransformerDecoder
from npattn.nn.init import BLANK


class Llama(TransformerDecoder):
    """Llama: rotary positions, RMS norm first, SwiGLU, grouped key and value heads, no biases.

    A `TransformerDecoder` in every respect: ``model(ids, cache=None) -> logits``, ``vjp``, ``new_cache``,
    ``generate``, ``stream``, ``weights``, ``attention_stats``. Llama 1 to 3.2, SmolLM, TinyLlama and others
    are of this architecture.

    Examples
    --------
    ::

        model = Llama.from_pretrained("SmolLM2-135M-Instruct")
        cache = model.new_cache(batch=1, capacity=2048)
        for token in model.stream(prompt_ids, 200, temperature=0.7, min_p=0.05, stop=2, seed=1, cache=cache):
            ...
    """

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> "Llama":
        """Read a Hugging Face folder.

        Parameters
        ----------
        folder : str or Path
            With config.json and the weights in one or several ``*.safetensors``, in any float dtype. A
            leading ``model.`` of their names is optional; tensors without a use are passed over.
        dtype : dtype
            What the parameters are converted to.

        Returns
        -------
        model : Llama

        Raises
        ------
        ValueError
            Another architecture, an unknown kind of rotary scaling, fields or tensors that are missing (all
            of them named) or do not fit.
        FileNotFoundError
            No config.json, or no ``*.safetensors``.

        Notes
        -----
        ``rope_scaling`` may be absent, ``linear`` or ``llama3``; configs of transformers 5, which keep it
        with the base in ``rope_parameters``, are read too.
        """
        needed = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_hidden_layers",
        )
        config = Config(folder, "llama", needed)
        config.refuse(attention_bias=False, mlp_bias=False, hidden_act="silu")
        tied = bool(config.get("tie_word_embeddings", False))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        rope = config.get("rope_parameters", {})
        scaling = config.get("rope_scaling", rope if rope.get("rope_type", "default") != "default" else None)
        model = cls(
            config["vocab_size"],
            config["hidden_size"],
            heads,
            config["num_hidden_layers"],
            config["intermediate_size"],
            config.get("max_position_embeddings", 2048),
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=head_dim,
            position="rotary",
            rotary=Rotary(
                head_dim, base=rope.get("rope_theta", config.get("rope_theta", 10000.0)), scaling=scaling
            ),
            norm="rms",
            mlp="swiglu",
            bias=False,
            eps=config.get("rms_norm_eps", 1e-6),
            tied=tied,
            rng=BLANK,
            dtype=dtype,
        )
        fill(model, read_tensors(folder, "model."), _names(config["num_hidden_layers"], tied), folder)
        return model


def _names(num_layers: int, tied: bool) -> Names:
    pairs = {"embedding.weight": "embed_tokens.weight"}
    for n in range(num_layers):
        for own, file_name in (
            ("attention_norm", "input_layernorm"),
            ("attention.query", "self_attn.q_proj"),
            ("attention.key", "self_attn.k_proj"),
            ("attention.value", "self_attn.v_proj"),
            ("attention.out", "self_attn.o_proj"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            pairs[f"blocks.{n}.{own}.weight"] = f"layers.{n}.{file_name}.weight"
    pairs["norm.weight"] = "norm.weight"
    if not tied:
        pairs["head.weight"] = "lm_head.weight"
    return {own: (file_name, as_it_is) for own, file_name in pairs.items()}
