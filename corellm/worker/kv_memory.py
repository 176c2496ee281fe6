"""The KV region of a slab as K and V blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corellm.kernels.inputs import KVCache
from corellm.models.llama.spec import LlamaSpec


def kv_bytes(spec: LlamaSpec, tp: int, num_blocks: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that `num_blocks` blocks take on one of `tp` ranks, with the padding block behind them."""
    return 2 * math.prod(_shape(spec, tp, num_blocks, page_size)) * dtype.itemsize


def kv_cache(memory: Tensor, spec: LlamaSpec, tp: int, num_blocks: int, page_size: int, dtype: torch.dtype) -> KVCache:
    """Lay `num_blocks` blocks and the padding block out at the start of `memory` (uint8, one dimension).

    On a GPU they are zeroed: kernels there multiply masked values by 0, so none may be NaN. On a CPU nothing is
    written, since a page takes no physical memory before it is touched. Raises `ValueError` if they do not fit.
    """
    needed = kv_bytes(spec, tp, num_blocks, page_size, dtype)
    if needed > memory.numel():
        raise ValueError(
            f"{num_blocks} KV blocks take {needed} bytes; the slab has {memory.numel()} behind the weights"
        )
    region = memory[:needed].view(dtype)
    if memory.device.type != "cpu":
        region.zero_()
    k, v = region.view(2, *_shape(spec, tp, num_blocks, page_size))
    return KVCache(k, v)


def _shape(spec: LlamaSpec, tp: int, num_blocks: int, page_size: int) -> tuple[int, int, int, int, int]:
    return spec.layers, num_blocks + 1, page_size, spec.kv_heads // tp, spec.head_dim
