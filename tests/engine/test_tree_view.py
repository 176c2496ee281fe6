"""The picture of the radix tree, against what the test itself knows of who has which tokens."""

from __future__ import annotations

import random

import numpy as np

from corellm.comms.stats_messages import SEGMENTS_MAX, TreeSegment
from corellm.engine.kv_cache import NaiveCacheAllocator, RadixCacheAllocator

PAGE = 4


def opened(kv: RadixCacheAllocator, owner: int, tokens: list[int], salt: str = "") -> None:
    array = np.array(tokens)
    assert kv.open(owner, array, salt) is not None
    kv.publish(owner, array)


def held_by(segments: list[TreeSegment], owner: int) -> int:
    """Pages from the root down to where the owner's shared pages end."""
    by_id = {segment.id: segment for segment in segments}
    (at,) = [segment for segment in segments if owner in segment.ends]
    pages = 0
    while at is not None:
        pages += at.pages
        at = by_id.get(at.parent)
    return pages


def test_a_prefix_of_two_is_one_segment_with_a_branch_for_each() -> None:
    kv = RadixCacheAllocator(32, PAGE)
    opened(kv, 1, [*range(8), 20, 21, 22, 23])
    opened(kv, 2, [*range(8), 20, 21, 30, 31, 5])
    view = kv.tree()
    shared, *branches = view.segments
    assert (shared.parent, shared.pages, shared.holders, shared.ends) == (0, 2, 2, [])
    assert sorted((b.parent, b.pages, b.holders, *b.ends, b.common, b.token) for b in branches) == [
        (shared.id, 1, 1, 1, 2, 22),
        (shared.id, 1, 1, 2, 2, 30),
    ]
    assert (view.pages, view.complete) == (4, True)


def test_what_was_let_go_stays_as_held_by_no_one() -> None:
    kv = RadixCacheAllocator(32, PAGE)
    opened(kv, 1, list(range(12)))
    kv.close(1)
    (segment,) = kv.tree().segments
    assert (segment.pages, segment.holders, segment.ends, segment.token) == (3, 0, [], -1)


def test_prompts_that_differ_by_their_salt_alone_have_no_differing_token() -> None:
    kv = RadixCacheAllocator(32, PAGE)
    opened(kv, 1, list(range(4)), "a")
    opened(kv, 2, list(range(4)), "b")
    assert {(segment.common, segment.token) for segment in kv.tree().segments} == {(PAGE, -1)}


def test_holders_and_pages_are_those_of_the_owners_in_many_random_trees() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        kv = RadixCacheAllocator(400, PAGE)
        prompts = {owner: [chance.randrange(2) for _ in range(chance.randrange(1, 30))] for owner in range(1, 25)}
        for owner, tokens in prompts.items():
            opened(kv, owner, tokens)
        for owner in chance.sample(sorted(prompts), 8):
            kv.close(owner)
            del prompts[owner]
        kv.check()
        view = kv.tree()
        assert view.complete
        assert view.pages == sum(segment.pages for segment in view.segments)
        ends = [owner for segment in view.segments for owner in segment.ends]
        assert len(ends) == len(set(ends))
        for owner in ends:
            assert held_by(view.segments, owner) <= len(prompts[owner]) // PAGE
        # Those that hold a segment are the ends of all that is at or below it.
        below = {segment.id: len(segment.ends) for segment in view.segments}
        for segment in reversed(view.segments):
            if segment.parent:
                below[segment.parent] += below[segment.id]
        assert {segment.id: segment.holders for segment in view.segments} == below


def test_a_large_tree_is_cut_and_says_so() -> None:
    kv = RadixCacheAllocator(4000, PAGE)
    for owner in range(1, 1500):
        opened(kv, owner, [owner] * PAGE)
    kv.close(7)
    view = kv.tree()
    assert len(view.segments) == SEGMENTS_MAX
    assert not view.complete
    assert 7 not in {end for segment in view.segments for end in segment.ends}


def test_the_plain_allocator_has_no_tree() -> None:
    assert NaiveCacheAllocator(4, PAGE).tree().segments == []
