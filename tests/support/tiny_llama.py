"""Small random Llama checkpoints, written by transformers, which is thereby the truth for what they hold."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def make_tiny_llama(
    folder: Path,
    *,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    intermediate: int = 96,
    vocab: int = 258,
    max_positions: int = 512,
    tied: bool = False,
    rope: str = "llama3",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard_size: str = "5GB",
    eos_token_id: int | list[int] = 257,
    spread: float = 0.2,
) -> LlamaForCausalLM:
    """Write config.json, generation_config.json and safetensors into `folder`; return the model that was written.

    `rope` is "llama3" or "default"; `shard_size`, such as "50KB", splits the weights over files with an index. `spread`
    is the standard deviation of the weights, wide enough that greedy tokens do not hang on the last bits.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        rope_parameters=dict(LLAMA3_ROPE if rope == "llama3" else DEFAULT_ROPE),
        initializer_range=spread,
        bos_token_id=vocab - 2,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
    torch.nn.Module.to(model, dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def tiny_prompts(count: int, vocab: int) -> list[list[int]]:
    """Random ids, 1 to 400 of them a prompt; many prompts begin alike."""
    rng = random.Random(1)
    common = [rng.randrange(vocab) for _ in range(400)]
    return [
        common[: rng.randrange(100)] + [rng.randrange(vocab) for _ in range(int(300 ** rng.random()))]
        for _ in range(count)
    ]
