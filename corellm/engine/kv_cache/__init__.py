"""KV block allocators: which block of the pool holds whose tokens."""

from __future__ import annotations

from corellm.engine.kv_cache.allocator import Allocation, KVCacheAllocator
from corellm.engine.kv_cache.naive_cache_alloc import NaiveCacheAllocator
from corellm.engine.kv_cache.radix_cache_alloc import RadixCacheAllocator
from corellm.errors import OptionError

__all__ = ["Allocation", "KVCacheAllocator", "NaiveCacheAllocator", "RadixCacheAllocator", "make_allocator"]

_ALLOCATORS: dict[str, type[NaiveCacheAllocator] | type[RadixCacheAllocator]] = {
    "naive": NaiveCacheAllocator,
    "radix": RadixCacheAllocator,
}


def make_allocator(kind: str, num_blocks: int, page_size: int) -> KVCacheAllocator:
    """The allocator that `--kv-cache` names, over `num_blocks` blocks of `page_size` tokens.

    Raises `OptionError` for an unknown kind or a size below 1.
    """
    if kind not in _ALLOCATORS:
        raise OptionError(f"--kv-cache is {kind!r}; choose one of {', '.join(_ALLOCATORS)}")
    if num_blocks < 1:
        raise OptionError(f"--kv-blocks is {num_blocks}; it must be at least 1")
    if page_size < 1:
        raise OptionError(f"--page-size is {page_size}; it must be at least 1")
    return _ALLOCATORS[kind](num_blocks, page_size)
