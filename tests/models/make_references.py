"""Make tests/models/data: tiny random models as Hugging Face's transformers saves them, with their outputs.

Run by hand, with torch and transformers installed:  python tests/models/make_references.py
Each folder holds config.json, model.safetensors and expected.npz (ids, outputs, greedy continuation). The
library and its tests need neither torch nor transformers.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

DATA = Path(__file__).parent / "data"
SMALL = {"vocab_size": 50, "initializer_range": 0.3}
LLAMA = {
    **SMALL,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=4, n_positions=32)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, head_dim=6, rms_norm_eps=1e-5)),
    "llama_tied_llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
    "llama_linear": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    ),
    "bert": lambda: BertModel(
        BertConfig(
            **SMALL,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=20,
        )
    ),
}


def main() -> None:
    """Write every folder anew."""
    for number, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases start at 1 and 0, which would hide their use
                    parameter.add_(0.3 * torch.randn_like(parameter))
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        for extra in folder.glob("generation_config.json"):
            extra.unlink()
        ids = torch.randint(0, 50, (2, 12))
        arrays = {"ids": ids.numpy()}
        with torch.no_grad():
            if name == "bert":
                segments = torch.randint(0, 2, ids.shape)
                mask = torch.arange(12) < torch.tensor([[12], [7]])
                out = model(ids, token_type_ids=segments, attention_mask=mask.long()).last_hidden_state
                arrays |= {"segments": segments.numpy(), "mask": mask.numpy(), "hidden": out.numpy()}
                arrays["plain"] = model(ids).last_hidden_state.numpy()
            else:
                arrays["logits"] = model(ids).logits.numpy()
                # without the mask, generate takes every token 0 of a prompt for padding
                options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
                for key, penalty in (("greedy", 1.0), ("penalised", 1.7)):
                    arrays[key] = model.generate(
                        ids, max_new_tokens=12, do_sample=False, repetition_penalty=penalty, **options
                    ).numpy()
        np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
