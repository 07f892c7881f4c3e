"""Makes families.json and families.npz: what transformers computes for small random models of every family.

    python -m tests.goldens.make        (needs torch; the tests that read the files do not)

A model's weights are a function of its tensors' names and shapes, so only configs, tokens and results are kept.
"""

from __future__ import annotations

import copy
import json
import pathlib
import zlib

import numpy as np

HERE = pathlib.Path(__file__).parent
LENGTH, GREEDY, VOCAB = 16, 64, 61

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 12,
}


def llama(**keys):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BASE, **keys}


def qwen2(**keys):
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **BASE, **keys}


def qwen3(**keys):
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **BASE, "head_dim": 16, **keys}


def mistral(**keys):
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **BASE, **keys}


def gemma3(**keys):
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3}
    return {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **BASE, **sizes, **keys}


CASES = {
    "llama2": llama(rms_norm_eps=1e-5),
    "llama3": llama(rope_theta=500.0, rope_scaling=LLAMA3),
    "smollm2": llama(rope_theta=100_000.0, tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1,
                     hidden_size=24),
    "llama-head-dim": llama(head_dim=20, rms_norm_eps=1e-2),
    "llama-biases": llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-linear-rope": llama(rope_scaling={"type": "linear", "factor": 3.0}),
    "mistral": mistral(rope_theta=1e6, sliding_window=None),
    "mistral-window": mistral(sliding_window=5, head_dim=12),
    "qwen2": qwen2(rope_theta=1e6, tie_word_embeddings=True),
    "r1-distill-qwen": qwen2(rope_theta=10_000, tie_word_embeddings=False, use_sliding_window=False, sliding_window=5),
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": qwen3(rope_theta=1e6, tie_word_embeddings=True),
    "qwen3-bias": qwen3(attention_bias=True, rms_norm_eps=1e-3),
    "gemma3": gemma3(),
    "gemma3-planted": gemma3(
        rope_theta=5e4, rope_local_base_freq=300.0, query_pre_attn_scalar=40, final_logit_softcapping=3.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, attention_bias=True,
    ),
    "rope-parameters": qwen3(rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
}  # fmt: skip
"""name -> config.json. Both the older keys (rope_theta, rope_scaling) and the present one (rope_parameters) occur."""


def weights(shapes: dict[str, tuple[int, ...]], config: dict) -> dict[str, np.ndarray]:
    """float32 tensors by name. Norm weights lie about 1 (Gemma's about 0), biases about 0."""
    made = {}
    for name, shape in shapes.items():
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        gemma = config["model_type"] == "gemma3_text"
        if name == "model.norm.weight":  # of both signs, or a tied model repeats its input for ever
            value = noise - 1.0 if gemma else noise
        elif name.endswith("norm.weight"):
            value = 0.3 * noise if gemma else 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif name == "model.embed_tokens.weight":
            value = noise * (0.1 if gemma else 1.0)
        else:
            value = 1.4 * noise * shape[-1] ** -0.5
        made[name] = value.astype(np.float32)
    return made


def tokens(name: str) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(name.encode())).randint(0, VOCAB, LENGTH)


def derive(name: str) -> tuple[np.ndarray, list[int]]:
    """transformers' logits [LENGTH, VOCAB] and greedy continuation of a case."""
    import torch
    import transformers

    config = copy.deepcopy(CASES[name])  # transformers writes into it
    keys = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    hf = transformers.AutoConfig.for_model(config["model_type"], **keys)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32).eval()
    state = model.state_dict()
    state.pop("lm_head.weight" if hf.tie_word_embeddings else "", None)
    made = weights({k: tuple(v.shape) for k, v in state.items()}, config)
    missing = model.load_state_dict({k: torch.from_numpy(v) for k, v in made.items()}, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    ids = torch.from_numpy(tokens(name))[None]
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0
        )
    return logits, out[0, LENGTH:].tolist()


def main() -> None:
    derived = {name: derive(name) for name in CASES}
    records = {name: {"config": CASES[name], "greedy": derived[name][1]} for name in CASES}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items())
    (HERE / "families.json").write_text("{\n" + text + "\n}\n")
    np.savez_compressed(HERE / "families.npz", **{name: logits for name, (logits, _) in derived.items()})


if __name__ == "__main__":
    main()
