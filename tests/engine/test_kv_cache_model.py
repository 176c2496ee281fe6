"""Both KV allocators against a model of plain dicts that recomputes everything from scratch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corellm.engine.kv_cache import KVCacheAllocator, make_allocator

OPERATIONS = 100_000  # on each allocator
OPERATIONS_PER_POOL = 1_000

Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a page


@dataclass(eq=False)
class Page:
    block: int
    released: tuple[int, int] = (0, 0)  # number of the close that let go of it, and its depth counted downwards


@dataclass(eq=False)
class Owner:
    salt: str
    tokens: list[int]
    blocks: list[int]
    pages: list[Page]
    matched: int
    stopped: bool = False


@dataclass
class Model:
    """What the allocator's contract says, with no regard for cost. `pages` is the whole cache, by prefix."""

    num_blocks: int
    page_size: int
    reuses: bool
    pages: dict[Prefix, Page] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    closes: int = 0
    evictions: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0

    def held(self) -> list[int]:
        return [block for owner in self.owners.values() for block in owner.blocks]

    def cached(self) -> set[int]:
        return {page.block for page in self.pages.values()} - set(self.held())

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.held()) - self.cached()

    def found(self, salt: str, tokens: list[int]) -> list[Page]:
        found = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.pages.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def evict(self, kept: list[Page]) -> None:
        """Drop the cached page without a page behind it that was let go of first."""
        held = set(self.held())
        leaves = [
            (page.released, prefix)
            for prefix, page in self.pages.items()
            if page.block not in held and page not in kept and not self.behind(prefix)
        ]
        del self.pages[min(leaves)[1]]
        self.evictions += 1

    def behind(self, prefix: Prefix) -> list[Prefix]:
        salt, tokens = prefix
        return [
            other
            for other in self.pages
            if other[0] == salt and len(other[1]) > len(tokens) and other[1][: len(tokens)] == tokens
        ]

    def take(self, given: list[int] | None, count: int, kept: list[Page], spare: int = 0) -> bool:
        """Whether `given` is a right answer to a request for `count` blocks; evicts what had to go for it."""
        if count + spare > len(self.free()) + len(self.cached() - {page.block for page in kept}):
            assert given is None
            return False
        assert given is not None
        while len(self.free()) < count:
            self.evict(kept)
        assert len(given) == len(set(given)) == count
        assert set(given) <= self.free()
        return True

    def publish(self, name: int, count: int) -> None:
        owner = self.owners[name]
        tokens = owner.tokens[:count]
        if not self.reuses:
            return
        for index in range(len(owner.pages), len(tokens) // self.page_size):
            prefix = (owner.salt, tuple(tokens[: (index + 1) * self.page_size]))
            before = self.pages.get((owner.salt, prefix[1][: -self.page_size]))
            forgotten = index > 0 and before is not owner.pages[-1]
            owner.stopped |= forgotten or prefix in self.pages
            if owner.stopped:
                return
            self.pages[prefix] = Page(owner.blocks[index])
            owner.pages.append(self.pages[prefix])

    def close(self, name: int, keep: bool) -> None:
        owner = self.owners.pop(name)
        self.closes += 1
        for depth, page in enumerate(owner.pages):
            page.released = (self.closes, -depth)
        for page in [] if keep else owner.pages:
            for prefix in [prefix for prefix, known in self.pages.items() if known is page]:
                for gone in [prefix, *self.behind(prefix)]:
                    del self.pages[gone]

    def stats(self) -> dict[str, int]:
        held = self.held()
        return {
            "total": self.num_blocks,
            "free": len(self.free()),
            "in_use": len(set(held)),
            "cached": len(self.cached()),
            "shared": sum(held.count(block) > 1 for block in set(held)),
            "evictions": self.evictions,
            "hit_tokens": self.hit_tokens,
            "query_tokens": self.query_tokens,
        }


class Twins:
    """An allocator and its model, driven together; every answer and every state is compared."""

    def __init__(self, kind: str, num_blocks: int, page_size: int) -> None:
        self.real: KVCacheAllocator = make_allocator(kind, num_blocks, page_size)
        self.model = Model(num_blocks, page_size, reuses=kind == "radix")

    def open(self, name: int, salt: str, tokens: list[int], spare: int = 0) -> None:
        model, page = self.model, self.model.page_size
        if name in model.owners:
            with pytest.raises(ValueError, match=f"owner {name} is open already"):
                self.real.open(name, np.array(tokens, np.int32), salt)
            return
        found = model.found(salt, tokens)
        given = self.real.open(name, np.array(tokens, np.int32), salt, spare=spare)
        fresh = None if given is None else given.blocks[len(found) :]
        if not model.take(fresh, -(-len(tokens) // page) - len(found), found, spare):
            return
        assert given is not None
        assert given.blocks[: len(found)] == [known.block for known in found]
        assert given.cached_tokens == len(found) * page
        model.hit_tokens += len(found) * page
        model.query_tokens += len(tokens)
        model.owners[name] = Owner(salt, list(tokens), given.blocks, found, matched=len(found))

    def extend(self, name: int, count: int) -> None:
        if name not in self.model.owners:
            with pytest.raises(ValueError, match=f"owner {name} is not open"):
                self.real.extend(name, count)
            return
        given = self.real.extend(name, count)
        if self.model.take(given, count, kept=[]) and given is not None:
            self.model.owners[name].blocks += given

    def grow(self, name: int, tokens: list[int]) -> None:
        """More tokens for an owner, as many as its blocks hold."""
        owner = self.model.owners[name]
        room = len(owner.blocks) * self.model.page_size - len(owner.tokens)
        owner.tokens += tokens[:room]

    def publish(self, name: int, count: int) -> None:
        if name not in self.model.owners:
            with pytest.raises(ValueError, match=f"owner {name} is not open"):
                self.real.publish(name, np.zeros(count, np.int32))
            return
        self.real.publish(name, np.array(self.model.owners[name].tokens[:count], np.int64))
        self.model.publish(name, count)

    def close_real(self, name: int, keep: bool) -> None:
        if not keep:
            self.real.forget(name)
        self.real.close(name)

    def close(self, name: int, keep: bool) -> None:
        if name not in self.model.owners:
            with pytest.raises(ValueError, match=f"owner {name} is not open"):
                self.close_real(name, keep)
            return
        self.close_real(name, keep)
        self.model.close(name, keep)

    def compare(self, salt: str, tokens: list[int]) -> None:
        self.real.check()
        stats = self.model.stats()
        assert {name: getattr(self.real.stats(), name) for name in stats} == stats
        assert stats["free"] + stats["in_use"] + stats["cached"] == stats["total"]
        assert self.real.available == stats["free"] + stats["cached"]
        matched = len(self.model.found(salt, tokens)) * self.model.page_size
        assert self.real.match(np.array(tokens, np.int32), salt) == matched


def operate(twins: Twins, rng: random.Random, salts: list[str], alphabet: int, longest: int) -> None:
    """One random operation, some of them wrong on purpose."""
    name, salt = rng.randrange(6), rng.choice(salts)
    tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest))]
    owners = twins.model.owners
    if name not in owners:
        if rng.random() < 0.9:
            twins.open(name, salt, tokens, spare=rng.choice([0, 0, 1, 3]))
        else:
            twins.extend(name, 1)
            twins.publish(name, 1)
            twins.close(name, keep=True)
    elif (choice := rng.random()) < 0.35:
        twins.publish(name, rng.randint(0, len(owners[name].tokens)))
    elif choice < 0.55:
        twins.extend(name, rng.randint(0, 3))
        twins.grow(name, tokens)
    elif choice < 0.6:
        twins.open(name, salt, tokens)
    else:
        twins.close(name, keep=rng.random() < 0.8)


def probe(model: Model, rng: random.Random, alphabet: int) -> tuple[str, list[int]]:
    """Something to look up: half of the time what the model still knows, else anything."""
    if model.pages and rng.random() < 0.5:
        salt, tokens = rng.choice(list(model.pages))
        return salt, [*tokens, 0]
    return rng.choice(["", "a", "b"]), [rng.randrange(alphabet) for _ in range(rng.randint(0, 4 * model.page_size))]


@pytest.mark.parametrize("kind", ["naive", "radix"])
def test_random_operations_agree_with_the_model(kind: str) -> None:
    rng = random.Random(20261130)
    seen = dict.fromkeys(["evictions", "hit_tokens"], 0)
    shared = 0
    for _ in range(OPERATIONS // OPERATIONS_PER_POOL):
        page = rng.choice([1, 1, 2, 3])
        blocks, alphabet, salts = rng.randint(1, 16), rng.randint(1, 3), ["", "a", "b"][: rng.randint(1, 3)]
        twins = Twins(kind, blocks, page)
        for _ in range(OPERATIONS_PER_POOL):
            operate(twins, rng, salts, alphabet, longest=min(8, blocks) * page)
            twins.compare(*probe(twins.model, rng, alphabet))
            shared += twins.real.stats().shared
        seen["evictions"] += twins.model.evictions
        seen["hit_tokens"] += twins.model.hit_tokens
    if kind == "radix":
        assert min(*seen.values(), shared) > 1000
    else:
        assert max(*seen.values(), shared) == 0


class RadixMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest sequence of operations on which allocator and model part."""

    names = st.integers(0, 3)
    salts = st.sampled_from(["", "a"])
    tokens = st.lists(st.integers(0, 1), max_size=9)

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins("radix", num_blocks=6, page_size=2)
        self.probe = ("", [0])

    @rule(name=names, salt=salts, tokens=tokens, spare=st.integers(0, 2))
    def open(self, name: int, salt: str, tokens: list[int], spare: int) -> None:
        self.probe = (salt, tokens)
        self.twins.open(name, salt, tokens, spare)

    @rule(name=names, count=st.integers(0, 3), tokens=tokens)
    def extend(self, name: int, count: int, tokens: list[int]) -> None:
        self.twins.extend(name, count)
        if name in self.twins.model.owners:
            self.twins.grow(name, tokens)

    @rule(name=names, count=st.integers(0, 9))
    def publish(self, name: int, count: int) -> None:
        owner = self.twins.model.owners.get(name)
        if owner is not None:
            self.probe = (owner.salt, owner.tokens.copy())
        self.twins.publish(name, count)

    @rule(name=names, keep=st.booleans())
    def close(self, name: int, keep: bool) -> None:
        self.twins.close(name, keep)

    @invariant()
    def agree(self) -> None:
        self.twins.compare(*self.probe)


class NaiveMachine(RadixMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins("naive", num_blocks=6, page_size=2)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
RadixMachine.TestCase.settings = SETTINGS
NaiveMachine.TestCase.settings = SETTINGS
TestRadixMachine = RadixMachine.TestCase
TestNaiveMachine = NaiveMachine.TestCase
