"""How much of a step batch requests may take while interactive ones share the engine with them.

Alone, an interactive request waits for its own step only. Beside a batch it waits for the step that runs, and then for
its own with all that is in it. So that this takes at most about twice as long, from the first interactive request until
`LINGER_S` after the last:

1. No step is planned ahead. A request that comes is in the very next step; and since no fence stands when that step is
   planned, a slot or block that is taken from a batch row for it is free at once.
2. A step that computes an interactive prompt holds nothing of the batch. Of such steps in a row this is every second
   one, so that batch rows go on under any load.
3. Any other step holds as many batch tokens as fit into the time that such a request takes alone: a step of the second
   rule, and `OVERHEAD_S`. Rows decode in turn where that is less than all of them.

An engine with requests of one kind only never comes here.
"""

from __future__ import annotations

import math

from corellm.engine.sequence import Sequence, interactive

LINGER_S = 30.0  # a person reads an answer and asks again
OVERHEAD_S = 0.010  # what a request waits for besides steps: HTTP, text, sockets
RISE = 1.1  # how much longer one prompt may make the steps that the next one waits for


class BatchShare:
    """The share of the batch class in tokens a step, learnt from how long steps take."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._tokens = 1  # known to fit; it grows as fuller steps turn out to be short enough
        self._prompt_s = 0.0  # a step of an interactive prompt, 0 before the first; falls at once and rises slowly
        self._held_back = False

    def is_shared(self, running: list[Sequence], waiting: list[Sequence], now: float) -> bool:
        """Whether the rules above hold. Both lists are sorted by order, so their ends tell which classes are there."""
        ends = [queue[end] for queue in (running, waiting) if queue for end in (0, -1)]
        if not all(sequence.is_batch for sequence in ends):
            self._until = now + LINGER_S
        return now < self._until and any(sequence.is_batch for sequence in ends)

    def next(self, running: list[Sequence], head: Sequence | None) -> int:
        """Batch tokens of the shared step about to be planned; `head` is who enters next."""
        urgent = [*running[: interactive(running)], *([head] if head is not None and not head.is_batch else [])]
        self._held_back = not self._held_back and any(sequence.is_prefilling for sequence in urgent)
        return 0 if self._held_back else self._tokens

    def learn(self, prompt_tokens: int, batch_tokens: int, seconds: float) -> None:
        """Take in how long a step of so many tokens, of interactive prompts and of the batch class, ran."""
        if prompt_tokens and not batch_tokens:
            self._prompt_s = min(seconds, RISE * self._prompt_s) if self._prompt_s else seconds
        elif 0 < batch_tokens <= self._tokens and not prompt_tokens:
            self._tokens = math.ceil(batch_tokens * (self._prompt_s + OVERHEAD_S) / max(seconds, 1e-6))
