"""The scheduler in thousands of small worlds, each a seed: arrivals, aborts, failures, late results, too few blocks.

After every event all that DESIGN promises of scheduling and of the KV cache is checked, from outside where possible:
against the worker's own state, the sequences' public fields, and an unlimited run of each request alone.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from corellm.comms.codec import i32
from corellm.comms.messages import PromptLogprobs, Request, Sampling, StepPlan, StepResult
from corellm.engine.admission import Limits
from corellm.engine.batch_share import LINGER_S
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import End, Sequence, State
from corellm.errors import InvalidRequestError, PromptTooLongError
from corellm.sampling_params import JsonConstraint
from tests.support.simulated_worker import (
    VOCAB,
    SimulatedWorker,
    Slot,
    chain,
    grammar,
    is_constrained,
    score,
    start,
    unlimited_run,
)

SEEDS = 6000
CHUNKS = 12
STOP = VOCAB - 1
MUST_HAPPEN = (
    "preemptions",
    "evictions",
    "hit_tokens",
    "shared",
    "refused",
    "stop",
    "length",
    "error",
    "aborted while waiting",
    "aborted while running",
    "constrained and preempted",
    "masks that others did not wait for",
    "scored and preempted",
    "shared",
    "held back",
    "waited its turn",
    "left room",
    "shared no more",
)
MOST_EVENTS = 3000  # a world that needs more is stuck


class World:
    """One scheduler, one simulated worker, a clock that only this class moves, and every check."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.page = rng.choice([1, 2, 3, 4])
        blocks, seqs = rng.randint(4, 14), rng.randint(1, 5)
        budget = rng.choice([seqs + 1, rng.randint(seqs + 1, seqs + 8), 64])
        self.kv = make_allocator(rng.choice(["naive", "radix", "radix"]), blocks, self.page)
        self.limits = Limits(
            max_seqs=seqs, max_batch_tokens=budget, max_model_len=rng.choice([16, 64, 64]), vocab=VOCAB
        )
        self.scheduler = Scheduler(self.limits, self.kv, lambda: self.now)
        self.worker = SimulatedWorker(blocks, self.page, seqs, budget)
        self.depth = rng.choice([1, 2, 2, 3])
        self.results: list[StepResult] = []
        self.documents = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
        self.sequences: list[Sequence] = []
        self.received: dict[int, list[int]] = {}
        self.scores: dict[int, list[float]] = {}
        self.verdicts: list[Sequence] = []  # constrained ones whose next mask is being worked out
        self.ends: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.priorities = rng.choice([(0,), (1,), (0, 1), (0, 1)])
        self.pace = rng.choice([0.1, 1.0, 20.0])  # seconds an event
        self.shared_until = -LINGER_S
        self.held_back = False  # the last shared step, for the sake of an interactive prompt
        self.last_row: dict[int, int] = {}  # the last step that computed a token of each sequence
        self.passed_over: dict[int, int] = {}  # since which step, of batch rows that could have decoded in every turn

    def run(self) -> Counter[str]:
        """Requests come for a while, then everything must come to its end."""
        rng = self.rng
        arrivals = rng.randint(3, 14)
        for _ in range(MOST_EVENTS):
            self.now += self.pace
            choice = rng.random()
            if choice < 0.01 and self.sequences:
                self.abort(rng.choice(self.sequences))
            elif choice < 0.25 and arrivals:
                arrivals -= 1
                self.submit(self.random_request())
            elif choice < 0.6 and len(self.results) < self.depth:
                self.schedule()
            elif choice < 0.75 and self.verdicts:
                self.allow(self.verdicts.pop(rng.randrange(len(self.verdicts))))
            elif self.results:
                self.collect()
            elif self.verdicts:
                self.allow(self.verdicts.pop())
            elif not arrivals and len(self.ends) == len(self.sequences):
                break
            self.check()
        assert len(self.ends) == len(self.sequences), "some requests have no terminal event"
        self.check_nothing_is_left()
        stats = self.kv.stats()
        self.counts += Counter(evictions=stats.evictions, hit_tokens=stats.hit_tokens)
        self.counts["preemptions"] += self.scheduler.counters.preemptions
        return self.counts

    def random_request(self) -> Request:
        rng = self.rng
        shared = rng.choice(self.documents)[: rng.randint(0, 10)]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 1, 2, 5]))]
        if rng.random() < 0.02:
            prompt.append(VOCAB)
        salt = rng.choice([0, 0, 0, 1])
        sampling = Sampling(
            max_tokens=rng.randint(1, 10),
            seed=salt,
            stop_ids=(STOP,) if rng.random() < 0.4 else (),
            top_k=rng.randint(1, 6) if rng.random() < 0.1 else 0,
            min_p=0.5 if rng.random() < 0.3 else 0.0,
            prompt_logprobs=rng.choice([0, 2]) if rng.random() < 0.2 else None,
        )
        constraint = JsonConstraint("{}") if is_constrained(sampling) else None
        priority, tag = rng.choice(self.priorities), len(self.sequences)
        return Request(
            tag=tag, prompt=i32(prompt), sampling=sampling, priority=priority, cache_salt="tenant" if salt else "",
            constraint=constraint,
        )  # fmt: skip

    def submit(self, request: Request) -> None:
        sequence = Sequence(len(self.sequences) + 1, b"client", request, self.now)
        prompt, total = request.prompt.tolist(), len(request.prompt) + request.sampling.max_tokens
        room = min(self.limits.max_model_len, self.kv.num_blocks * self.page + 1)
        if not prompt or max(prompt) >= VOCAB or total > room:
            kind = PromptTooLongError if prompt and max(prompt) < VOCAB else InvalidRequestError
            with pytest.raises(kind):
                self.scheduler.add(sequence)
            self.counts["refused"] += 1
            return
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.received[sequence.id] = []
        self.scores[sequence.id] = []
        if sequence.constraint is not None:
            self.verdicts.append(sequence)

    def allow(self, sequence: Sequence) -> None:
        """The grammar has caught up with the sequence, which may have ended or been preempted meanwhile."""
        value = start(sequence.sampling)
        for token in sequence.tokens:
            value = chain(value, token)
        if sequence.state is not State.FINISHED:
            self.scheduler.allow(sequence, grammar(value))

    def abort(self, sequence: Sequence) -> None:
        state = sequence.state
        released = self.scheduler.release(sequence, End("abort"))
        assert released == (sequence.id not in self.ends), "a request ends once, and an abort of an open one ends it"
        assert not self.scheduler.release(sequence, End("abort"))
        if released:
            self.ends[sequence.id] = "abort"
            self.counts[f"aborted while {state.value}"] += 1

    def schedule(self) -> None:
        running, slots = self.scheduler.running.copy(), self.slots_by_sequence()
        retiring, queue = self.retiring(), self.queue()
        first, free = queue[0].order[0] if queue else None, {s.id for s in running if not s.awaits_mask}
        owners, shared = {s.slot: s for s in running}, self.is_shared()
        if shared and not self.results:
            prompt_is_due = first == 0 or any(s.order[0] == 0 and slots[s.id].prefills for s in running)
            self.held_back = prompt_is_due and not self.held_back
            self.counts["held back"] += self.held_back
        plan = self.scheduler.schedule()
        if plan is None:
            pending = self.scheduler.running or self.scheduler.waiting
            assert self.results or self.verdicts or not pending, (
                "nothing is in flight and nothing is planned for what is open"
            )
            return
        left = self.check_order(plan, running, slots, free, shared=shared)
        owners.update((s.slot, s) for s in self.scheduler.running)
        if shared:
            batch = [s for s in running if slots[s.id].can_decode and s.id in free and s.order[0] == 1]
            waits = [s for s in batch if s not in left and not self.needs_block(slots[s.id])]
            self.check_share(plan, owners, batch, waits)
        for slot in plan.row_slots.tolist():
            self.last_row[owners[slot].id] = plan.step
            self.passed_over.pop(owners[slot].id, None)
        grows = any(slot.can_decode and key in free and self.needs_block(slot) for key, slot in slots.items())
        self.counts["masks that others did not wait for"] += bool(self.verdicts)
        self.counts["constrained and preempted"] += sum(s.constraint is not None for s in left)
        self.counts["scored and preempted"] += sum(s.scored < s.prompt_len for s in left)
        if retiring or not grows:
            assert all(first is not None and first < s.order[0] for s in left), "a preemption that nothing asked for"
        self.results.append(replace(self.worker.run(plan), seconds=self.rng.choice([0.001, 0.02, 0.05])))
        self.check_room_to_grow({opening.slot for opening in plan.opens})

    def collect(self) -> None:
        slots = {sequence: sequence.slot for sequence in self.sequences}
        outcome = self.scheduler.collect(self.worker.deliver(self.results.pop(0)))
        for sequence, token, index in zip(outcome.sequences, outcome.tokens, outcome.indices, strict=True):
            assert sequence.id not in self.ends, "a token after the end"
            assert index == len(self.received[sequence.id]), "tokens are numbered without gap or repetition"
            self.received[sequence.id].append(token)
        followed = [(s, s.tokens[-1]) for s in outcome.sequences if s.constraint is not None and s not in outcome.ended]
        assert outcome.constrained == followed
        self.verdicts += [sequence for sequence, _ in followed]
        for sequence, found in outcome.prompt_logprobs:
            self.take_scores(sequence, found)
        for sequence in outcome.ended:
            assert sequence.id not in self.ends, "a second end"
            assert sequence.end is not None
            self.ends[sequence.id] = sequence.end.reason
            self.counts[sequence.end.reason] += 1
            if sequence.end.reason == "error":
                self.worker.distrust(slots[sequence])

    def take_scores(self, sequence: Sequence, found: PromptLogprobs) -> None:
        scores = self.scores[sequence.id]
        assert sequence.id not in self.ends or self.ends[sequence.id] != "abort", "scores after the end"
        assert found.first == 1 + len(scores), "scores come in order of position, none twice"
        scores += found.logprobs.tolist()
        again = [value for value in found.logprobs.tolist() for _ in range(found.k)]
        assert found.ranks.tolist() == found.logprobs.tolist()
        assert found.top_ids.tolist() == found.top_logprobs.tolist() == again

    def queue(self) -> list[Sequence]:
        """Those that wait to enter; who awaits a mask does not stand in line yet."""
        return [sequence for sequence in self.scheduler.waiting if not sequence.awaits_mask]

    def slots_by_sequence(self) -> dict[int, Slot]:
        return {s.id: self.worker.slots[s.slot] for s in self.scheduler.running}

    def needs_block(self, slot: Slot) -> bool:
        return slot.fed == len(slot.blocks) * self.page

    def retiring(self) -> bool:
        """Blocks are on their way back, behind a fence."""
        return any(s.slot >= 0 and s.state is not State.RUNNING for s in self.sequences)

    def is_shared(self) -> bool:
        """Interactive requests are beside batch ones, or were some seconds ago."""
        classes = {s.order[0] for s in self.scheduler.running + self.scheduler.waiting}
        if 0 in classes:
            self.shared_until = self.now + LINGER_S
        shared = 1 in classes and self.now < self.shared_until
        self.counts["shared"] += shared
        self.counts["shared no more"] += 0 < self.shared_until <= self.now
        return shared

    def check_share(
        self, plan: StepPlan, owners: dict[int, Sequence], batch: list[Sequence], free: list[Sequence]
    ) -> None:
        """What batch rows that can decode get of a shared step; nothing but the share keeps the `free` ones from it."""
        assert not self.results, "a shared step is planned ahead"
        rows = {owners[slot].id for slot in plan.row_slots.tolist()}
        if self.held_back:
            assert all(owners[slot].order[0] == 0 for slot in plan.row_slots.tolist()), "batch rows beside a prompt"
            return
        passed_over = [s.id for s in free if s.id not in rows]
        self.passed_over = {key: self.passed_over.get(key, plan.step) for key in passed_over}
        chosen = [self.last_row[s.id] for s in batch if s.id in rows]
        if passed_over:
            assert chosen, "the batch gets nothing, and not for the sake of a prompt"
            assert max(chosen) < min(self.passed_over.values()), "a row has two turns while another waits for its own"
            self.counts["waited its turn"] += 1

    def check_order(
        self, plan: StepPlan, before: list[Sequence], slots: dict[int, Slot], free: set[int], *, shared: bool
    ) -> list[Sequence]:
        """Who got a row and who was passed over; returns who had to leave.

        `before`, `slots` and `free` (to sample) are as they were before the plan. In a shared step batch rows may be
        passed over.
        """
        rows = dict(zip(plan.row_slots.tolist(), plan.row_tokens.tolist(), strict=True))
        opened = {opening.slot for opening in plan.opens}
        stayed = [s for s in before if s.state is State.RUNNING and s.slot not in opened]
        left = [s for s in before if s not in stayed]  # some may have entered again at once
        assert all(s.order < gone.order for s in stayed for gone in left), "an older or more urgent one was preempted"
        entered = [s for s in self.scheduler.running if s.slot in opened]
        assert all(s.order < w.order for s in entered for w in self.queue()), "the queue was jumped"

        number = {s.slot: s for s in self.scheduler.running}
        decoding = [s for s in stayed if slots[s.id].can_decode and s.id in free]
        prefilling = [s for s in stayed if slots[s.id].prefills]
        spent = sum(rows.values())
        for sequence in decoding:
            needs_block = self.needs_block(slots[sequence.id])
            full = spent == self.limits.max_batch_tokens and set(rows.values()) == {1}
            yields = shared and sequence.order[0] == 1
            assert sequence.slot in rows or needs_block or full or yields, "a decode was passed over"
        for sequence in prefilling:
            yields = shared and sequence.order[0] == 1
            full = spent == self.limits.max_batch_tokens
            assert sequence.slot in rows or full or yields, "budget is left for this prefill"
        order = [number[slot] for slot in rows if slot in number]
        groups = [0 if s in decoding else 1 if s in stayed else 2 for s in order]
        assert groups == sorted(groups), "decodes go first, then prefills in progress, then new sequences"
        for group in range(3):
            orders = [s.order for s, its in zip(order, groups, strict=True) if its == group]
            if shared and group == 0:  # batch rows take turns, as `check_share` verifies
                orders = [(key, 0 if key else number) for key, number in orders]
            assert orders == sorted(orders), "more urgent and older ones go first"
        if not self.results and not shared:
            self.check_progress(rows, [s for s in before if s.id in free], decoding)
        if spent < self.limits.max_batch_tokens and not left:
            self.check_classes()
        return left

    def check_room_to_grow(self, opened: set[int]) -> None:
        """Whoever enters leaves a block for each older or more urgent one that may come to need it."""
        running, slots = self.scheduler.running, self.slots_by_sequence()
        for last in [s for s in running if s.slot in opened][-1:]:
            before = [s for s in running if s.order < last.order]
            growing = [s for s in before if s.limit - 1 > len(slots[s.id].blocks) * self.page]
            assert self.kv.available >= len(growing), "who enters takes what the others will need"
            self.counts["left room"] += bool(growing)

    def check_progress(self, rows: dict[int, int], before: list[Sequence], decoding: list[Sequence]) -> None:
        """With nothing in flight, no fence is left to wait for: the oldest must advance now, or a more urgent one."""
        if not before:
            return
        oldest = before[0]
        crowded = oldest not in decoding and len(decoding) >= self.limits.max_batch_tokens
        overtaken = any(s.order < oldest.order and s.slot in rows for s in self.scheduler.running)
        assert oldest.slot in rows or crowded or overtaken, "the oldest does not progress"

    def check_classes(self) -> None:
        """Interactive requests do not wait for batch ones, unless what they need is on its way behind a fence."""
        waiting, running = self.queue(), self.scheduler.running
        if waiting and running and not self.retiring():
            assert waiting[0].order[0] >= running[-1].order[0], "a batch request keeps an interactive one waiting"

    def check(self) -> None:
        self.kv.check()
        stats = self.kv.stats()
        assert stats.free + stats.in_use + stats.cached == stats.total == self.kv.num_blocks
        self.counts["shared"] += stats.shared
        assert len(self.scheduler.running) <= self.limits.max_seqs
        assert self.scheduler.in_flight == len(self.results)
        for sequence in self.sequences:
            assert (sequence.state is State.FINISHED) == (sequence.id in self.ends)

    def check_nothing_is_left(self) -> None:
        for sequence in self.sequences:
            self.check_against_unlimited_run(sequence)
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.kv.stats().in_use == 0
        tokens = sum(len(outputs) for outputs in self.received.values())
        counters = self.scheduler.counters
        assert counters.output_tokens == tokens
        assert counters.finished + counters.aborted + counters.failed == len(self.sequences)
        self.check_all_slots_are_free()

    def check_against_unlimited_run(self, sequence: Sequence) -> None:
        prompt, outputs = sequence.tokens[: sequence.prompt_len], self.received[sequence.id]
        expected, reason = unlimited_run(prompt, sequence.sampling)
        if self.ends[sequence.id] == "abort":
            assert outputs == expected[: len(outputs)]
        else:
            assert (outputs, self.ends[sequence.id]) == (expected, reason)
        self.check_scores(sequence, prompt, whole=bool(outputs))
        times = [sequence.arrived_at, sequence.admitted_at, sequence.first_token_at, sequence.ended_at]
        known = [time for time in times if time is not None]
        assert known == sorted(known)

    def check_scores(self, sequence: Sequence, prompt: list[int], *, whole: bool) -> None:
        value, scores = start(sequence.sampling), []
        for token in prompt:
            value = chain(value, token)
            scores.append(score(value))
        expected = scores[1:] if sequence.sampling.prompt_logprobs is not None else []
        found = self.scores[sequence.id]
        assert found == (expected if whole else expected[: len(found)])

    def check_all_slots_are_free(self) -> None:
        wave = min(self.limits.max_seqs, self.limits.max_batch_tokens, self.kv.num_blocks)
        for tag in range(wave):
            request = Request(tag=tag, prompt=i32([0]), sampling=Sampling(max_tokens=1))
            self.scheduler.add(Sequence(1000 + tag, b"client", request, self.now))
        plan = self.scheduler.schedule()
        assert plan is not None
        assert len(plan.opens) == wave
        outcome = self.scheduler.collect(self.worker.deliver(self.worker.run(plan)))
        assert len(outcome.ended) == wave


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_is_kept_in_every_world(chunk: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(chunk, SEEDS, CHUNKS):
        try:
            totals += World(seed).run()
        except Exception as error:
            error.add_note(f"in the world of seed {seed}")
            raise
    for event in MUST_HAPPEN:
        assert totals[event] > 0, f"no world saw {event}"
