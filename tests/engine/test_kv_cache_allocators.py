"""What the scheduler may rely on, one behaviour of the KV allocators a test."""

from __future__ import annotations

import time

import numpy as np
import pytest

from corellm.engine.kv_cache import Allocation, KVCacheAllocator, make_allocator
from corellm.errors import OptionError

PAGE = 4


@pytest.fixture(params=["naive", "radix"])
def either(request: pytest.FixtureRequest) -> KVCacheAllocator:
    return make_allocator(request.param, num_blocks=8, page_size=PAGE)


@pytest.fixture
def radix() -> KVCacheAllocator:
    return make_allocator("radix", num_blocks=8, page_size=PAGE)


def pages(*values: int) -> np.ndarray:
    """Tokens of whole pages, each filled with one value, and one token more."""
    return np.repeat(np.array([*values, 0], np.int32), PAGE)[: len(values) * PAGE + 1]


def opened(kv: KVCacheAllocator, owner: int, tokens: np.ndarray, salt: str = "") -> Allocation:
    allocation = kv.open(owner, tokens, salt)
    assert allocation is not None
    return allocation


def cache(kv: KVCacheAllocator, owner: int, tokens: np.ndarray, salt: str = "") -> list[int]:
    """Open, publish and close; returns the blocks of the whole pages."""
    blocks = opened(kv, owner, tokens, salt).blocks
    kv.publish(owner, tokens)
    kv.close(owner)
    kv.check()
    return blocks[: len(tokens) // kv.page_size]


def test_blocks_cover_the_tokens(either: KVCacheAllocator) -> None:
    assert [len(opened(either, owner, np.zeros(n, np.int32)).blocks) for owner, n in enumerate([1, 4, 5])] == [1, 1, 2]
    stats = either.stats()
    assert (stats.total, stats.free, stats.in_use, stats.cached) == (8, 4, 4, 0)
    assert either.available == 4


def test_opening_twice_raises(either: KVCacheAllocator) -> None:
    opened(either, 7, pages(1))
    with pytest.raises(ValueError, match="owner 7 is open already"):
        either.open(7, pages(1))


def test_a_double_free_raises(either: KVCacheAllocator) -> None:
    opened(either, 7, pages(1))
    either.close(7)
    with pytest.raises(ValueError, match="owner 7 is not open"):
        either.close(7)
    either.check()


def test_an_unknown_owner_raises(either: KVCacheAllocator) -> None:
    with pytest.raises(ValueError, match="owner 3 is not open"):
        either.extend(3)
    with pytest.raises(ValueError, match="owner 3 is not open"):
        either.publish(3, pages(1))


def test_misuse_of_an_open_owner_raises(either: KVCacheAllocator) -> None:
    opened(either, 1, pages(1))
    with pytest.raises(ValueError, match="count is -1"):
        either.extend(1, -1)
    with pytest.raises(ValueError, match="publishes 3 pages but holds 2 blocks"):
        either.publish(1, pages(1, 2, 3))


def test_no_room_changes_nothing(either: KVCacheAllocator) -> None:
    cache(either, 0, pages(1, 2))
    opened(either, 1, pages(1, 2, 3, 4))
    before = either.stats()
    assert either.open(2, pages(1, 2, 5, 6, 7, 8)) is None
    assert either.extend(1, 4) is None
    assert either.stats() == before
    either.check()
    with pytest.raises(ValueError, match="owner 2 is not open"):
        either.close(2)


def test_the_caller_may_change_what_it_was_given(either: KVCacheAllocator) -> None:
    opened(either, 1, pages(1)).blocks.clear()
    either.close(1)
    either.check()
    assert either.available == 8


def test_naive_reuses_nothing() -> None:
    kv = make_allocator("naive", 8, PAGE)
    cache(kv, 0, pages(1, 2))
    assert kv.match(pages(1, 2)) == 0
    assert opened(kv, 1, pages(1, 2)).cached_tokens == 0
    assert kv.stats().query_tokens == 18


def test_unknown_kinds_and_empty_pools_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--kv-cache is 'lru'; choose one of naive, radix"):
        make_allocator("lru", 8, 4)
    with pytest.raises(OptionError, match="--kv-blocks is 0"):
        make_allocator("radix", 0, 4)
    with pytest.raises(OptionError, match="--page-size is 0"):
        make_allocator("radix", 8, 0)


def test_a_common_prefix_is_shared_by_100_owners() -> None:
    kv = make_allocator("radix", num_blocks=104, page_size=PAGE)
    prefix = pages(1, 2, 3)[:-1]
    first = opened(kv, 0, np.append(prefix, 100))
    kv.publish(0, prefix)
    for owner in range(1, 100):
        allocation = opened(kv, owner, np.append(prefix, 100 + owner))
        assert allocation.blocks[:3] == first.blocks[:3]
        assert allocation.cached_tokens == 12
    kv.check()
    stats = kv.stats()
    assert (stats.in_use, stats.shared, stats.free) == (103, 3, 1)
    assert (stats.hit_tokens, stats.query_tokens) == (99 * 12, 100 * 13)
    for owner in range(100):
        kv.close(owner)
    assert (kv.stats().cached, kv.stats().shared, kv.stats().free) == (3, 0, 101)


def test_a_fully_cached_prompt_computes_its_last_page(radix: KVCacheAllocator) -> None:
    known = cache(radix, 0, pages(1, 2))
    whole = pages(1, 2)[:-1]
    assert radix.match(whole) == PAGE
    allocation = opened(radix, 1, whole)
    assert allocation.cached_tokens == PAGE
    assert allocation.blocks[0] == known[0]
    assert allocation.blocks[1] not in known


def test_a_prompt_of_one_page_or_less_matches_nothing(radix: KVCacheAllocator) -> None:
    cache(radix, 0, pages(1))
    assert [radix.match(pages(1)[:n]) for n in range(6)] == [0, 0, 0, 0, 0, 4]


def test_salts_share_nothing(radix: KVCacheAllocator) -> None:
    blocks = {salt: cache(radix, 0, pages(1), salt) for salt in ["", "a", "ab"]}
    assert len({block for held in blocks.values() for block in held}) == 3
    for salt, held in blocks.items():
        assert opened(radix, 1, pages(1), salt).blocks[:1] == held
        radix.close(1)
    assert radix.match(pages(1), "b") == 0


def test_a_salt_cannot_be_spelled_in_tokens(radix: KVCacheAllocator) -> None:
    tokens = np.frombuffer(b"saltsaltsaltsalt" * 2 + b"more", np.int32)
    cache(radix, 0, tokens, "salt")
    assert radix.match(tokens) == 0
    assert radix.match(np.frombuffer(b"salt" + tokens.tobytes(), np.int32)) == 0


def test_pages_that_differ_in_one_token_never_alias() -> None:
    kv = make_allocator("radix", num_blocks=400, page_size=PAGE)
    rng = np.random.default_rng(0)
    base = rng.integers(-(2**31), 2**31 - 1, PAGE + 1, dtype=np.int32)
    cache(kv, 0, base)
    for place in range(PAGE):
        for bit in range(32):
            other = base.copy()
            other[place] ^= np.int32(1) << np.int32(bit) if bit < 31 else np.int32(-(2**31))
            assert kv.match(other) == 0
    for number in range(300):
        cache(kv, 0, np.append(rng.permutation(base[:PAGE]) ^ number, 0).astype(np.int32))
    kv.check()


def test_a_key_is_the_tokens_not_their_hash(radix: KVCacheAllocator) -> None:
    """Python hashes -1 and -2 alike, the classical collision of keys made of hashes."""
    assert hash(-1) == hash(-2)
    cache(radix, 0, np.full(5, -1, np.int32))
    assert radix.match(np.full(5, -2, np.int32)) == 0


def test_matching_does_not_count_as_use(radix: KVCacheAllocator) -> None:
    cache(radix, 0, pages(1))
    cache(radix, 0, pages(2))
    before = radix.stats()
    for _ in range(3):
        assert radix.match(pages(1)) == PAGE
    assert radix.stats() == before
    opened(radix, 1, np.arange(100, 100 + 7 * PAGE, dtype=np.int32))
    assert (radix.match(pages(1)), radix.match(pages(2))) == (0, PAGE)


def test_pages_become_visible_as_they_are_published(radix: KVCacheAllocator) -> None:
    tokens = pages(1, 2, 3)
    opened(radix, 0, tokens)
    seen = []
    for count in [3, 4, 7, 12, 13]:
        radix.publish(0, tokens[:count])
        radix.check()
        seen.append(radix.match(tokens))
    assert seen == [0, 4, 4, 12, 12]


def test_an_unpublished_page_is_free_after_close(radix: KVCacheAllocator) -> None:
    opened(radix, 0, pages(1, 2, 3))
    radix.publish(0, pages(1, 2, 3)[:9])
    radix.close(0)
    assert (radix.stats().cached, radix.stats().free) == (2, 6)


def test_the_second_to_publish_a_page_keeps_its_own_and_stops(radix: KVCacheAllocator) -> None:
    first, second = opened(radix, 0, pages(1, 2)), opened(radix, 1, pages(1, 3))
    radix.publish(0, pages(1, 2))
    radix.publish(1, pages(1, 3))
    radix.check()
    assert not set(first.blocks) & set(second.blocks)
    assert radix.match(pages(1, 3)) == PAGE
    radix.close(1)
    assert (radix.stats().in_use, radix.stats().cached) == (3, 0)


def test_an_owner_never_pins_more_blocks_than_it_has(radix: KVCacheAllocator) -> None:
    """Alone in the pool an owner can grow to all of it, also when others published its pages before it did."""
    for owner in [0, 1]:
        opened(radix, owner, pages(1, 2, 3)[:-1])
    for owner in [0, 1]:
        radix.publish(owner, pages(1, 2, 3)[:-1])
    radix.close(0)
    assert radix.extend(1, 5) is not None
    radix.check()


def test_eviction_takes_the_oldest_leaf_first(radix: KVCacheAllocator) -> None:
    cache(radix, 0, pages(1, 2, 3))
    cache(radix, 0, pages(4, 5))
    cache(radix, 0, pages(1, 6))  # page 1 is used again: younger than 4 and 5
    opened(radix, 1, np.array([9], np.int32))
    assert radix.stats().free == 1
    radix.extend(1)
    left = []
    for _ in range(6):
        left.append([radix.match(pages(*path)) // PAGE for path in [(1, 2, 3), (4, 5), (1, 6)]])
        radix.extend(1)
        radix.check()
    assert left == [[3, 2, 2], [2, 2, 2], [1, 2, 2], [1, 1, 2], [1, 0, 2], [1, 0, 1]]
    assert radix.stats().evictions == 6
    assert radix.extend(1) is None


def test_opening_does_not_evict_what_it_matches(radix: KVCacheAllocator) -> None:
    known = cache(radix, 0, pages(1, 2))
    cache(radix, 0, pages(3, 4, 5, 6))
    allocation = opened(radix, 1, pages(1, 2, 7, 8, 9, 10, 11)[:-1])  # 8 - 2 matched - 2 free: evicts 3 of the 4
    assert allocation.blocks[:2] == known
    radix.check()
    assert radix.stats().evictions == 3
    assert radix.match(pages(3, 4, 5, 6)) == PAGE
    radix.close(1)
    cache(radix, 0, pages(1, 2))
    # The match itself leaves too few: the two matched blocks must not be counted as available besides.
    assert radix.open(2, pages(1, 2, 12, 13, 14, 15, 16, 17)) is None
    radix.check()


def test_held_pages_are_not_evicted(radix: KVCacheAllocator) -> None:
    opened(radix, 0, pages(1, 2))
    radix.publish(0, pages(1, 2))
    assert radix.open(1, np.zeros(6 * PAGE, np.int32)) is None
    opened(radix, 1, np.zeros(5 * PAGE, np.int32))
    assert radix.match(pages(1, 2)) == 2 * PAGE


def test_the_eviction_heap_stays_bounded_and_in_order(radix: KVCacheAllocator) -> None:
    order = [3, 1, 5, 2, 4, 6]
    for _ in range(100):
        for value in order:
            cache(radix, 0, pages(value))
            radix.check()
    assert radix.stats().evictions == 0
    opened(radix, 1, np.zeros(2 * PAGE, np.int32))
    for evicted in range(1, 7):
        radix.extend(1)
        assert [radix.match(pages(value)) for value in order] == [0] * evicted + [PAGE] * (6 - evicted)


def test_what_a_failed_owner_published_is_forgotten(radix: KVCacheAllocator) -> None:
    cache(radix, 0, pages(1))
    opened(radix, 1, pages(1, 2, 3))
    radix.publish(1, pages(1, 2, 3))
    radix.forget(1)
    radix.close(1)
    radix.check()
    assert radix.match(pages(1, 2, 3)) == 0  # page 1 was there before, and may be where the fault came from
    assert (radix.stats().cached, radix.stats().free) == (0, 8)


def test_forgotten_pages_stay_with_those_who_hold_them(radix: KVCacheAllocator) -> None:
    opened(radix, 0, pages(1, 2))
    radix.publish(0, pages(1, 2))
    other = opened(radix, 1, pages(1, 2, 3))
    radix.publish(1, pages(1, 2, 3))
    cache(radix, 2, pages(1, 4))
    radix.forget(0)
    radix.close(0)
    radix.check()
    assert radix.match(pages(1, 2, 3)) == radix.match(pages(1, 4)) == 0
    assert (radix.stats().in_use, radix.stats().cached, radix.stats().free) == (4, 0, 4)
    taken = radix.extend(1, 4)
    assert taken is not None
    assert not set(taken) & set(other.blocks)
    radix.publish(1, pages(1, 2, 3, 4, 5))  # below forgotten pages: stays private
    radix.check()
    assert radix.match(pages(1, 2, 3, 4, 5)) == 0
    radix.close(1)
    assert (radix.stats().cached, radix.stats().free) == (0, 8)


def test_a_forgotten_page_can_be_published_anew(radix: KVCacheAllocator) -> None:
    for owner in [0, 1]:
        opened(radix, owner, pages(1))
        radix.publish(owner, pages(1))
    radix.forget(0)
    radix.close(0)
    again = cache(radix, 2, pages(1))
    assert opened(radix, 3, pages(1)).blocks[:1] == again
    radix.close(1)
    radix.check()


def test_costs_do_not_grow_with_the_tree() -> None:
    """A prompt of 131072 tokens takes milliseconds, one more block a microsecond; the bounds leave room for slow CI."""
    tokens = np.random.default_rng(0).integers(0, 128256, 131073, dtype=np.int32)
    prompt_s, extend_s = zip(*(prompt_and_extend_seconds(tokens) for _ in range(5)), strict=True)
    assert min(prompt_s) < 0.1
    assert min(extend_s) < 50e-6


def prompt_and_extend_seconds(tokens: np.ndarray) -> tuple[float, float]:
    """CPU time of this thread, which a busy machine does not lengthen."""
    kv = make_allocator("radix", num_blocks=8192, page_size=64)
    start = time.thread_time()
    opened(kv, 0, tokens)
    for stop in range(0, len(tokens), 2048):
        kv.publish(0, tokens[:stop])
    assert kv.match(tokens) == 131072
    opened(kv, 1, tokens)
    kv.close(0)
    prompt_s = time.thread_time() - start
    start = time.thread_time()
    for _ in range(2000):
        kv.extend(1)
    return prompt_s, (time.thread_time() - start) / 2000
