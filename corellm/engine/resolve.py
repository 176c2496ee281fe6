"""From what the user said to what the engine runs with: every default but those that only a GPU's memory can tell."""

from __future__ import annotations

import secrets
from pathlib import Path

from corellm.checkpoint import Checkpoint
from corellm.comms.settings import Launch, Settings
from corellm.config import EngineOptions
from corellm.device import cpu_count, gpu_count
from corellm.errors import OptionError

MAX_TOKENS = 2**31 - 2  # of a request: positions, and the one behind the last, are 32-bit integers


def resolve(launch: Launch, checkpoint: Checkpoint) -> Settings:
    """Decide the open options. Raises `OptionError` for one that the model or the machine cannot meet."""
    options, spec = launch.options, checkpoint.spec
    device = _device(options)
    spec.check_tp(options.tp)
    if device == "cuda" and options.tp > gpu_count():
        raise OptionError(f"--tp is {options.tp}; this machine has {gpu_count()} GPUs")
    longest = min(spec.max_positions, MAX_TOKENS)
    length = options.max_model_len or longest
    if length > longest:
        raise OptionError(f"--max-model-len is {length}; this model allows up to {longest}")
    on_gpu = device == "cuda"
    max_seqs, max_batch_tokens = _batch(options, *((None, 8192) if on_gpu else (64, 1024)))
    return Settings(
        model=options.model or launch.model_path,
        model_path=launch.model_path,
        name=options.name or f"{Path(launch.model_path).name}-{secrets.token_hex(2)}",
        tp=options.tp,
        device=device,
        dtype=options.dtype if options.dtype != "auto" else (spec.dtype if on_gpu else "float32"),
        max_model_len=length,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
        kv_cache=options.kv_cache,
        page_size=options.page_size or (64 if on_gpu else 16),
        kv_blocks=options.kv_blocks,
        gpu_memory=options.gpu_memory,
        load_format=options.load_format,
        seed=options.seed,
        log_level=options.log_level,
        threads=max(1, cpu_count() // options.tp),
    )


def _batch(options: EngineOptions, seqs: int | None, tokens: int) -> tuple[int | None, int]:
    """Sequences and tokens of a step, which must have room to prefill while every sequence decodes.

    seqs, tokens: what they are unless options say; None leaves it open.
    """
    if options.max_batch_tokens is None:
        max_seqs = options.max_seqs or seqs
        return max_seqs, max(tokens, 2 * (max_seqs or 0))
    if options.max_batch_tokens < 2:
        raise OptionError(
            f"--max-batch-tokens is {options.max_batch_tokens}; it must be at least 2, and above --max-seqs"
        )
    max_seqs = options.max_seqs or (seqs and min(seqs, max(1, options.max_batch_tokens // 2)))
    if max_seqs and options.max_batch_tokens <= max_seqs:
        raise OptionError(
            f"--max-batch-tokens is {options.max_batch_tokens}; with --max-seqs {max_seqs} it must be at least "
            f"{max_seqs + 1}"
        )
    return max_seqs, options.max_batch_tokens


def _device(options: EngineOptions) -> str:
    if options.device == "auto":
        return "cuda" if gpu_count() else "cpu"
    if options.device == "cuda" and not gpu_count():
        raise OptionError(
            "--device is cuda, but no NVIDIA GPU is visible; use --device cpu or check CUDA_VISIBLE_DEVICES"
        )
    return options.device
