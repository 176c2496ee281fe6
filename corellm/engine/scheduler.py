"""Which tokens of which sequences the next step computes, and what its result means.

A pure state machine: clock and allocator are passed in, plans go out, results come back; nothing here waits, sends or
imports torch. `schedule` may be called again before the previous step's result is in (one step ahead): a decode row's
input token is on the device already, so a plan names slots, never sampled tokens.

Rules, in order of precedence:

1. Every running sequence decodes first, one token each, the most urgent and oldest first.
2. What is left of the token budget goes to prefills in progress, in the same order, in chunks.
3. Then waiting sequences enter, by priority class and arrival, while slots and blocks last: one block has to be left
   for each running one before them, by class and age, that may need it, or they would soon be preempted for it. The
   head never yields to a smaller one behind it. Those that await a mask are not in the queue yet.
4. A decode that needs a block evicts cached blocks; if there are none, the youngest of the lowest class is preempted:
   its blocks become cached, it waits again and recomputes what was evicted meanwhile. So the oldest always progresses.
5. A constrained sequence samples only while its mask is known, which is once its last token is: it alone falls back
   from one step ahead.
6. Fence: the slot and blocks of a sequence are given back only when the result of the last step that names it is in.
7. Where interactive requests share the engine with batch ones, `batch_share.py` bounds the batch tokens of a step, and
   no step is planned ahead.

A prompt whose log-probabilities are asked for is computed whole, until they are known.

The pages of a prompt are published to the cache when the chunk that computes them is planned. A later row, even one of
the same step, may attend to them: workers run steps in order and write a layer's KV before they attend in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from corellm.comms.codec import i32
from corellm.comms.messages import I32, SlotOpen, StepPlan, StepResult
from corellm.engine.admission import Limits, check_request
from corellm.engine.batch_share import BatchShare
from corellm.engine.kv_cache.allocator import KVCacheAllocator
from corellm.engine.sequence import End, Order, Sequence, State, by_order, interactive
from corellm.engine.steps import Draft, Outcome
from corellm.errors import NumericalError, ProtocolError


@dataclass(slots=True)
class Counters:
    """Sums since the start, and the make-up of the last plan."""

    prompt_tokens: int = 0  # computed, the cached ones not counted
    output_tokens: int = 0
    finished: int = 0  # with "stop" or "length"
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    last_prefill_tokens: int = 0
    last_decode_tokens: int = 0
    last_step_s: float = 0.0
    busy_s: float = 0.0  # of all steps together


class Scheduler:
    """Owns every sequence and the allocator. `in_flight` counts the plans whose results are not in."""

    def __init__(self, limits: Limits, kv: KVCacheAllocator, clock: Callable[[], float]) -> None:
        if limits.max_batch_tokens <= limits.max_seqs:
            raise ValueError(
                f"a step of {limits.max_batch_tokens} tokens has no room to prefill beside {limits.max_seqs}"
            )
        self.limits = limits
        self.kv = kv
        self.counters = Counters()
        self.waiting: list[Sequence] = []  # both lists are sorted by order
        self.running: list[Sequence] = []
        self._clock = clock
        self._share = BatchShare()
        self._last_turn: Order = (0, 0)  # the batch row that decoded last
        self._free_slots = list(range(limits.max_seqs - 1, -1, -1))
        self._closed_slots: list[int] = []  # to be told to the workers with the next plan
        self._in_flight: deque[Draft] = deque()
        self._retiring: deque[Sequence] = deque()  # released or preempted, before their fence
        self._changes = 0  # counts what may let a sequence in that did not fit before
        self._blocked: tuple[int, int] | None = None  # the head of the queue, and the count when it did not fit
        self._next_step = 1
        self._collected = 0

    # ---- requests in and out --------------------------------------------------------------------------------------

    @property
    def max_request_tokens(self) -> int:
        """Prompt + output of the longest request that fits: the last token's KV is never stored."""
        return min(self.limits.max_model_len, self.kv.num_blocks * self.kv.page_size + 1)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `InvalidRequestError`, or `PromptTooLongError` if it can never fit."""
        check_request(sequence, self.limits, self.max_request_tokens)
        self._queue(sequence)

    def release(self, sequence: Sequence, end: End) -> bool:
        """The one way out, for every reason. Idempotent: False if the sequence has ended before."""
        if sequence.state is State.FINISHED:
            return False
        state, sequence.state = sequence.state, State.FINISHED
        sequence.end, sequence.ended_at = end, self._clock()
        counters = self.counters
        counters.finished += end.reason in ("stop", "length")
        counters.aborted += end.reason == "abort"
        counters.failed += end.reason == "error"
        if state is State.WAITING:
            self.waiting.remove(sequence)
        elif state is State.RUNNING:
            self.running.remove(sequence)
            self._retire(sequence)
        return True

    def allow(self, sequence: Sequence, mask: I32) -> None:
        """Which tokens may come after the last known one of a constrained sequence: it may sample again."""
        sequence.mask, sequence.awaits_mask = mask, False

    # ---- the step -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def steps(self) -> int:
        """Steps planned since the start."""
        return self._next_step - 1

    @property
    def preempted(self) -> list[Sequence]:
        """Those that were preempted and have not passed their fence: they hold what they held, and do not wait yet."""
        return [sequence for sequence in self._retiring if sequence.state is State.PREEMPTED]

    def lack(self, head: Sequence) -> Literal["slots", "blocks", "tokens"]:
        """What keeps the head of the queue from entering: a slot, blocks, or a share of the token budget."""
        if not self._free_slots:
            return "slots"
        return "blocks" if self._blocked is not None and self._blocked[0] == head.id else "tokens"

    def schedule(self) -> StepPlan | None:
        """The next step, or None when none can or should be planned before something changes."""
        budget = batch_budget = self.limits.max_batch_tokens
        if self._share.is_shared(self.running, self.waiting, self._clock()):
            if self._in_flight:
                return None
            batch_budget = self._share.next(self.running, self._head())
        draft = Draft(self._next_step, budget, batch_budget)
        self._schedule_decodes(draft)
        decodes = len(draft.slots)
        self._schedule_prefills(draft)
        self._admit(draft)
        if not draft.slots:
            return None
        self._next_step += 1
        self._in_flight.append(draft)
        self.counters.last_decode_tokens = decodes
        self.counters.last_prefill_tokens = self.limits.max_batch_tokens - draft.budget - decodes
        self.counters.prompt_tokens += self.counters.last_prefill_tokens
        closes, self._closed_slots = self._closed_slots, []
        return draft.plan(closes)

    def collect(self, result: StepResult) -> Outcome:
        """Take in the result of the oldest step in flight.

        Raises `ProtocolError` when the result is of another step or of another number of rows.
        """
        if not self._in_flight or self._in_flight[0].step != result.step:
            due = self._in_flight[0].step if self._in_flight else "none"
            raise ProtocolError(f"a worker answered step {result.step}; the step due is {due}")
        in_flight = self._in_flight.popleft()
        step, rows = in_flight.step, in_flight.sampling
        if len(rows) != len(result.tokens):
            raise ProtocolError(f"step {step} has {len(rows)} sampling rows; the worker answered {len(result.tokens)}")
        outcome = Outcome(step, logprobs=result.logprobs)
        for row, found in result.prompt_logprobs:
            outcome.score(in_flight.scoring.get(row), found)
        failed = frozenset(result.failed.tolist())
        now = self._clock()
        for row, (sequence, token) in enumerate(zip(rows, result.tokens.tolist(), strict=True)):
            if row in failed:
                self.kv.forget(sequence.id)  # also of one that has ended: its pages must not stay
            if sequence.state is State.FINISHED:
                continue  # it ended after this row was planned: one wasted row
            if row in failed:
                self.release(sequence, End("error", code=NumericalError.code, message=_NAN))
                outcome.ended.append(sequence)
                continue
            tokens = sequence.tokens
            outcome.sequences.append(sequence)
            outcome.tokens.append(token)
            outcome.indices.append(len(tokens) - sequence.prompt_len)
            outcome.rows.append(row)
            tokens.append(token)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                outcome.started.append(sequence)
            if token in sequence.stop_ids:
                self.release(sequence, End("stop", stop_id=token))
                outcome.ended.append(sequence)
            elif len(tokens) == sequence.limit:
                self.release(sequence, End("length"))
                outcome.ended.append(sequence)
            elif sequence.awaits_mask:
                outcome.constrained.append((sequence, token))
        self._share.learn(in_flight.prompt_tokens, in_flight.batch_tokens, result.seconds)
        self.counters.output_tokens += len(outcome.tokens)
        self.counters.last_step_s = result.seconds
        self.counters.busy_s += result.seconds
        self._collected = step
        while self._retiring and self._retiring[0].last_step <= step:
            self._give_back(self._retiring.popleft())
        return outcome

    # ---- planning -------------------------------------------------------------------------------------------------

    def _head(self) -> Sequence | None:
        """Who is to enter next."""
        return next((sequence for sequence in self.waiting if not sequence.awaits_mask), None)

    def _schedule_decodes(self, draft: Draft) -> None:
        """One token for everybody who can decode, or for as many of the batch class as it has a share, in turn."""
        running, slots = self.running, draft.slots
        if draft.batch_budget >= len(running):
            self._decode(running.copy(), draft)
        else:
            urgent = interactive(running)
            after = bisect_right(running, self._last_turn, lo=urgent, key=by_order)
            turns = running[after:] + running[urgent:after]
            self._decode(running[:urgent], draft)
            most = len(slots) + draft.batch_budget
            while turns and (left := most - len(slots)):  # not every row can decode
                self._decode(turns[:left], draft)
                del turns[:left]
        draft.counts = [1] * len(slots)
        draft.samples = [1] * len(slots)
        draft.budget -= len(slots)
        draft.batch_tokens = len(slots) - interactive(draft.sampling)
        if draft.batch_tokens:
            self._last_turn = draft.sampling[-1].order

    def _decode(self, sequences: list[Sequence], draft: Draft) -> None:
        """Add a row for each of these that can decode. Growing one may preempt another."""
        # The hot loop: every line runs once a row a step.
        step, running = draft.step, State.RUNNING
        slots, sampling = draft.slots, draft.sampling
        for sequence in sequences:
            fed = sequence.scheduled + 1
            if (
                fed != sequence.total
                or fed >= sequence.limit
                or sequence.prefill is not None
                or sequence.awaits_mask
                or sequence.state is not running
            ):
                continue  # all its tokens are sampled or in flight, or it is not free to sample, or not here any more
            if fed > sequence.capacity and not self._grow(sequence, draft):
                continue
            sequence.scheduled = fed
            sequence.total = fed + 1
            sequence.last_step = step
            slots.append(sequence.slot)
            if sequence.mask is None:
                sampling.append(sequence)
            else:
                draft.sample(sequence)

    def _schedule_prefills(self, draft: Draft) -> None:
        for sequence in self.running:
            if draft.budget == 0:
                return
            if sequence.is_prefilling and draft.room(sequence):
                self._feed(sequence, draft)

    def _admit(self, draft: Draft) -> None:
        while (sequence := self._head()) is not None and draft.room(sequence):
            if self._blocked == (sequence.id, self._changes):
                return  # nothing has come back or been published since it last did not fit
            if self._enter(sequence, draft):
                self._feed(sequence, draft)
                continue
            changes = self._changes
            self._make_room(sequence)
            if self._changes == changes:  # else a victim that no step in flight names came back at once: try again
                self._blocked = (sequence.id, changes)
                return

    def _enter(self, sequence: Sequence, draft: Draft) -> bool:
        """Give a waiting sequence a slot and blocks, or nothing and False."""
        if not self._free_slots:
            return False
        tokens, reuse = sequence.known(), sequence.scored == sequence.prompt_len
        spare = self._spare(sequence)
        allocation = self.kv.open(sequence.id, tokens, sequence.cache_salt, reuse=reuse, spare=spare)
        if allocation is None:
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=by_order)
        sequence.state = State.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.scheduled = allocation.cached_tokens
        sequence.capacity = len(allocation.blocks) * self.kv.page_size
        if sequence.admitted_at is None:
            sequence.admitted_at = self._clock()
            sequence.cached_tokens = allocation.cached_tokens
        draft.opens.append(
            SlotOpen(
                slot=sequence.slot,
                tokens=tokens,
                prompt_len=sequence.prompt_len,
                computed=allocation.cached_tokens,
                blocks=i32(allocation.blocks),
                sampling=sequence.sampling,
            )
        )
        return True

    def _spare(self, sequence: Sequence) -> int:
        """Blocks to be left when this one enters: one for each running before it, by class and age, that may grow."""
        if self.kv.available >= -(-sequence.total // self.kv.page_size) + len(self.running):
            return 0  # there are enough for all: no need to count
        before = bisect_left(self.running, sequence.order, key=by_order)
        return sum(other.limit - 1 > other.capacity for other in self.running[:before])

    def _feed(self, sequence: Sequence, draft: Draft) -> None:
        """Plan the next chunk of a sequence's known tokens; the last chunk samples."""
        tokens = sequence.known()
        count = min(draft.room(sequence), sequence.total - sequence.scheduled)
        draft.spend(sequence, count)
        if sequence.scored < sequence.prompt_len and sequence.scheduled < sequence.prompt_len - 1:
            draft.scoring[len(draft.slots)] = sequence
        sequence.scheduled += count
        sequence.last_step = draft.step
        draft.slots.append(sequence.slot)
        draft.counts.append(count)
        self.kv.publish(sequence.id, tokens[: sequence.scheduled])
        self._changes += 1
        if sequence.scheduled < sequence.total:
            draft.samples.append(0)
            return
        draft.samples.append(1)
        draft.sample(sequence)
        sequence.total += 1
        sequence.prefill = None

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """One more block for a decode, by preemption if need be. False: it sits this step out."""
        while (blocks := self.kv.extend(sequence.id)) is None:
            if self._retiring:
                return False  # blocks come back with the next result; preempting more would be too much
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        draft.append_slots.append(sequence.slot)
        draft.append_blocks.extend(blocks)
        sequence.capacity += self.kv.page_size
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """Preempt sequences of a lower class for the head of the queue: one slot, and as many blocks as it can need."""
        blocks = -(-sequence.total // self.kv.page_size) + self._spare(sequence) if self._free_slots else 0
        coming = self.kv.available + sum(s.capacity // self.kv.page_size for s in self._retiring)
        slots = len(self._free_slots) + len(self._retiring)
        while (slots < 1 or coming < blocks) and self.running and self.running[-1].order[0] > sequence.order[0]:
            victim = self.running[-1]
            coming += victim.capacity // self.kv.page_size
            slots += 1
            self._preempt(victim)

    def _queue(self, sequence: Sequence) -> None:
        """To the waiting, with everything known of it to be fed."""
        sequence.state = State.WAITING
        sequence.scheduled = sequence.capacity = 0
        sequence.total = len(sequence.tokens)
        sequence.prefill = sequence.token_array()
        insort(self.waiting, sequence, key=by_order)

    # ---- giving back ----------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.state = State.PREEMPTED
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        if sequence.last_step <= self._collected:
            self._give_back(sequence)
        else:
            insort(self._retiring, sequence, key=lambda s: s.last_step)

    def _give_back(self, sequence: Sequence) -> None:
        """Past the fence: slot and blocks return; a preempted sequence that has not ended waits again."""
        computed = min(sequence.scheduled, len(sequence.tokens))
        self.kv.publish(sequence.id, sequence.token_array(computed))
        self.kv.close(sequence.id)
        self._free_slots.append(sequence.slot)
        self._closed_slots.append(sequence.slot)
        sequence.slot = -1
        self._changes += 1
        if sequence.state is State.PREEMPTED:
            self._queue(sequence)


_NAN = "the model's logits hold NaN or infinity for this request; its KV blocks are discarded"
