"""How many KV blocks and sequences fit a rank's memory, decided before anything large is allocated."""

from __future__ import annotations

import torch

from corellm.comms.settings import Settings
from corellm.device import available_memory
from corellm.errors import OutOfMemoryError
from corellm.models.llama.spec import LlamaSpec

_CPU_SHARE = 0.25  # of the memory available: a laptop has other things to do
USEFUL_TOKENS = 2048
MOST_SEQS = 1024
_SEQ_SHARE = 64 << 20  # bytes of a GPU for each sequence that may run: its tables and logits take a few percent of it
_GIB = 1 << 30


def seq_budget(settings: Settings, device: torch.device) -> int:
    """Sequences that may run at once: what the user said, or what a GPU of this size keeps busy and has tables for.

    A step always has room to prefill beside them.
    """
    if settings.max_seqs is not None:
        return settings.max_seqs
    _, total = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_SEQS, total // _SEQ_SHARE, settings.max_batch_tokens // 2))


def block_budget(settings: Settings, spec: LlamaSpec, weight_bytes: int, device: torch.device) -> int:
    """Blocks of one rank: what the user said, or what memory holds, never more than every slot at full length needs.

    Raises `OutOfMemoryError` when the weights and the KV of `USEFUL_TOKENS` do not fit, or when not even the tables do.
    """
    dtype: torch.dtype = getattr(torch, settings.dtype)
    seqs = seq_budget(settings, device)
    _check_tables(settings, seqs, spec, dtype, device)
    per_block = spec.kv_bytes_per_token(dtype.itemsize, settings.tp) * settings.page_size
    if settings.kv_blocks is not None:
        return settings.kv_blocks
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = int(min(free, total * settings.gpu_memory)) - workspace_bytes(settings, seqs, spec, dtype)
    else:
        free = available_memory()
        room = weight_bytes + int((free - weight_bytes * settings.tp) * _CPU_SHARE) // settings.tp
    blocks = (room - weight_bytes) // per_block - 1  # the executor pads with one block of its own
    least = -(-min(settings.max_model_len, USEFUL_TOKENS) // settings.page_size)
    if blocks < least:
        on_gpu = "raise --gpu-memory, lower --max-batch-tokens or raise --tp"
        option = on_gpu if device.type == "cuda" else "free memory, lower --max-model-len or set --kv-blocks"
        raise OutOfMemoryError(
            f"weights take {weight_bytes / _GIB:.1f} GiB and a useful KV cache {least * per_block / _GIB:.2f} GiB; "
            f"{room / _GIB:.1f} GiB of {free / _GIB:.1f} GiB free may be used: {option}"
        )
    return min(blocks, seqs * -(-settings.max_model_len // settings.page_size))


def _check_tables(settings: Settings, seqs: int, spec: LlamaSpec, dtype: torch.dtype, device: torch.device) -> None:
    """The length of a request has no bound of its own: a config.json may name any."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    needed = table_bytes(settings, seqs, spec, dtype)
    if needed > free:
        raise OutOfMemoryError(
            f"the tables for {seqs} requests of up to {settings.max_model_len} tokens take "
            f"{needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free: lower --max-model-len or --max-seqs"
        )


def table_bytes(settings: Settings, seqs: int, spec: LlamaSpec, dtype: torch.dtype) -> int:
    """The token and block tables of every slot and of the spare one, and cosines and sines of every position."""
    length = settings.max_model_len
    slots = (seqs + 1) * (length + -(-length // settings.page_size)) * 4
    return slots + 2 * length * spec.head_dim * dtype.itemsize


def workspace_bytes(settings: Settings, seqs: int, spec: LlamaSpec, dtype: torch.dtype) -> int:
    """Activations of the widest step, float32 logits of every slot, the token table, and a margin for libraries."""
    widest = 2 * spec.intermediate // settings.tp + 4 * spec.hidden + 2 * spec.heads * spec.head_dim // settings.tp
    activations = settings.max_batch_tokens * widest * dtype.itemsize
    logits = 4 * seqs * spec.vocab * 4
    tables = seqs * settings.max_model_len * 4
    return activations + logits + tables + _GIB
