"""One request inside the engine: what is known of it and where it stands.

    WAITING --admit--> RUNNING --preempt--> PREEMPTED --fence--> WAITING
       |                  |                     |
       +------------------+---------------------+----release----> FINISHED

A sequence holds a slot and blocks from its admission until its fence: the result of the last step that names it.

Token counts, all from the first token of the prompt:

    0 ......... scheduled ....... len(tokens) ....... total ....... limit
      KV written  |  to be fed next  |  sampled, but still on the device  |  where it must end
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from corellm.comms.codec import i32
from corellm.comms.messages import I32, Request, Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

Order = tuple[int, int]


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class End(NamedTuple):
    """Why a sequence finished. `stop_id` is the token that ended it; `code`, `message` and `param` are an error's."""

    reason: str  # stop, length, abort, error
    stop_id: int | None = None
    code: str = ""
    message: str = ""
    param: str = ""


class Sequence:
    """State of one request. The scheduler alone changes it, but for `grammar`, which belongs to `Constraints`."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "awaits_mask",
        "cache_salt",
        "cached_tokens",
        "capacity",
        "client",
        "constraint",
        "end",
        "ended_at",
        "first_token_at",
        "grammar",
        "id",
        "last_step",
        "limit",
        "mask",
        "order",
        "preemptions",
        "prefill",
        "prompt_len",
        "sampling",
        "scheduled",
        "scored",
        "slot",
        "state",
        "stop_ids",
        "tag",
        "tokens",
        "total",
    )

    def __init__(self, id: int, client: bytes, request: Request, now: float) -> None:
        self.id = id
        self.client = client
        self.tag = request.tag
        self.sampling: Sampling = request.sampling
        self.cache_salt = request.cache_salt
        self.constraint = request.constraint
        self.stop_ids = frozenset(request.sampling.stop_ids)
        self.order: Order = (request.priority, id)  # priority class, then arrival: ids only grow
        self.prompt_len = len(request.prompt)
        self.tokens = array("i", request.prompt.tobytes())  # those known: int32, as messages carry them
        self.limit = self.prompt_len + request.sampling.max_tokens

        self.state = State.WAITING
        self.slot = -1
        self.total = self.prompt_len
        self.scheduled = 0
        self.capacity = 0  # tokens that its blocks can hold
        self.last_step = -1  # the last step that names it
        self.prefill: I32 | None = None  # its known tokens, until all of them are fed

        # Of a constrained sequence: which tokens may come next. It samples only while this is known.
        self.mask: I32 | None = None
        self.awaits_mask = request.constraint is not None
        self.grammar: LLMatcher | None = None  # has taken in the tokens so far
        # Leading prompt tokens whose log-probability is known, or was not asked for. The first never has one.
        self.scored = self.prompt_len if request.sampling.prompt_logprobs is None else 1

        self.cached_tokens = 0
        self.preemptions = 0
        self.arrived_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.end: End | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_batch(self) -> bool:
        """Of a class that yields to people who wait for an answer."""
        return self.order[0] > 0

    @property
    def is_prefilling(self) -> bool:
        return self.prefill is not None

    def known(self) -> I32:
        """The tokens to be fed. Raises `ValueError` once all of them are."""
        if self.prefill is None:
            raise ValueError(f"sequence {self.id} is not prefilling")
        return self.prefill

    def token_array(self, stop: int | None = None) -> I32:
        """The known tokens, up to `stop`."""
        return i32(self.tokens[:stop])  # a copy: an array that is viewed cannot grow


def by_order(sequence: Sequence) -> Order:
    """Sort key: the most urgent and then the oldest first."""
    return sequence.order


def interactive(ordered: list[Sequence]) -> int:
    """How many of these are interactive; they come first in the order of `by_order`."""
    return bisect_right(ordered, False, key=lambda sequence: sequence.is_batch)
