"""A worker without a model: it obeys plans as a real one does and checks every bit of KV that a row would attend to.

The KV of a token depends on all tokens before it, so here it is a chained hash of them, begun by the salt. A block that
is shared, reused, evicted or recomputed wrongly therefore holds a value that the attending sequence does not expect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from corellm.comms.codec import f32, i32
from corellm.comms.messages import I32, PromptLogprobs, Sampling, SlotOpen, StepPlan, StepResult

VOCAB = 8
FAILED = -2


def chain(value: int, token: int) -> int:
    return hash((value, token))


def start(sampling: Sampling) -> int:
    """Requests of one salt carry one seed here, since plans do not name salts."""
    return hash((sampling.seed, -5))


def is_constrained(sampling: Sampling) -> bool:
    """Constrained requests carry a `min_p` here, since plans do not say which they are."""
    return sampling.min_p > 0


def grammar(value: int) -> I32:
    """The mask that follows the history `value`: some tokens, never none."""
    return i32([(value >> 11) % (2**VOCAB - 1) + 1])


def sampled(value: int, output: int, sampling: Sampling) -> int:
    """The token that follows the history `value`, a pure function; FAILED where `top_k` says that logits are NaN."""
    if output == sampling.top_k - 1:
        return FAILED
    if not is_constrained(sampling):
        return (value >> 7) % VOCAB
    mask = int(grammar(value)[0])
    allowed = [token for token in range(VOCAB) if mask >> token & 1]
    return allowed[(value >> 7) % len(allowed)]


def score(value: int) -> int:
    """The log-probability of the last token of the history `value`, and its rank: integers, to be exact in float32."""
    return -(value % 1009)


def unlimited_run(prompt: list[int], sampling: Sampling) -> tuple[list[int], str]:
    """What a request yields alone with all the memory in the world: its outputs and how it ends."""
    value = start(sampling)
    outputs: list[int] = []
    for token in prompt:
        value = chain(value, token)
    while True:
        token = sampled(value, len(outputs), sampling)
        if token == FAILED:
            return outputs, "error"
        outputs.append(token)
        if token in sampling.stop_ids:
            return outputs, "stop"
        if len(outputs) == sampling.max_tokens:
            return outputs, "length"
        value = chain(value, token)


@dataclass
class Slot:
    tokens: list[int]
    prompt_len: int
    blocks: list[int]
    cached: int  # tokens whose KV was there when it opened
    fed: int  # tokens whose KV is written
    sampling: Sampling
    kv: list[int] = field(default_factory=list)  # what the KV of each fed token must be
    opened_with: int = field(init=False)  # tokens known when it opened: to be prefilled

    def __post_init__(self) -> None:
        self.opened_with = len(self.tokens)

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def can_decode(self) -> bool:
        return not self.prefills and self.fed == len(self.tokens) - 1 and self.outputs < self.sampling.max_tokens

    @property
    def prefills(self) -> bool:
        return self.fed < self.opened_with


@dataclass
class Named:
    """What a step in flight names: neither may be handed out anew before its result is in."""

    slots: set[int]
    blocks: set[int]


class SimulatedWorker:
    def __init__(self, num_blocks: int, page_size: int, max_seqs: int, max_batch_tokens: int) -> None:
        self.page_size = page_size
        self.max_seqs = max_seqs
        self.max_batch_tokens = max_batch_tokens
        self.memory = [[0] * page_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.in_flight: dict[int, Named] = {}
        self.distrusted: set[int] = set()  # blocks that a failed request has written, until they are written anew

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one step. Whoever delivers the result calls `deliver`."""
        self._apply_deltas(plan)
        rows = list(zip(plan.row_slots.tolist(), plan.row_tokens.tolist(), plan.row_samples.tolist(), strict=True))
        assert rows, "an empty step"
        assert len({slot for slot, _, _ in rows}) == len(rows), "a slot has two rows"
        assert sum(count for _, count, _ in rows) <= self.max_batch_tokens, "over the token budget"
        for number, count, _ in rows:
            self._write(self.slots[number], count)
        for opened in plan.opens:
            known = opened.blocks[: opened.computed // self.page_size].tolist()
            assert not self.distrusted.intersection(known), "a prefix that a failed request computed"
        tokens: list[int] = []
        masks = dict(zip(plan.mask_rows.tolist(), plan.masks.tolist(), strict=True))
        for number, _, samples in rows:
            slot = self.slots[number]
            self._attend(slot)
            assert samples == (slot.fed == len(slot.tokens)), "a row samples if and only if it feeds the last token"
            if samples:
                right = int(grammar(slot.kv[-1])[0]) if is_constrained(slot.sampling) else None
                assert masks.pop(len(tokens), None) == right, "a mask is missing, or of another place or sequence"
                tokens.append(sampled(slot.kv[-1], slot.outputs, slot.sampling))
                slot.tokens.append(max(tokens[-1], 0))
        assert not masks, "a mask for a row that does not sample"
        named = [self.slots[number] for number, _, _ in rows]
        self.in_flight[plan.step] = Named(
            {number for number, _, _ in rows}, {block for slot in named for block in slot.blocks}
        )
        failed = [row for row, token in enumerate(tokens) if token == FAILED]
        return StepResult(
            step=plan.step,
            tokens=i32([max(token, 0) for token in tokens]),
            failed=i32(failed),
            seconds=0,
            prompt_logprobs=[(row, self._scores(*rows[row][:2])) for row in plan.score_rows.tolist()],
        )

    def _scores(self, number: int, count: int) -> PromptLogprobs:
        """Of the prompt tokens after each of the `count` that were fed last."""
        slot = self.slots[number]
        assert slot.sampling.prompt_logprobs is not None, "nobody asked for these scores"
        first, last = slot.fed - count + 1, min(slot.fed, slot.prompt_len - 1)
        assert first <= last, "a row without prompt tokens to score"
        value, scores = start(slot.sampling), []
        for position, token in enumerate(slot.tokens[: last + 1]):
            value = chain(value, token)
            if position >= first:
                scores.append(score(value))
        return PromptLogprobs(
            first=first, logprobs=f32(scores), ranks=i32(scores), k=2,
            top_ids=i32([token for token in scores for _ in range(2)]),
            top_logprobs=f32([token for token in scores for _ in range(2)]),
        )  # fmt: skip

    def deliver(self, result: StepResult) -> StepResult:
        del self.in_flight[result.step]
        return result

    def distrust(self, number: int) -> None:
        """The request in this slot has failed: nobody may begin with KV that it computed."""
        slot = self.slots[number]
        self.distrusted.update(slot.blocks[slot.cached // self.page_size :])

    def _apply_deltas(self, plan: StepPlan) -> None:
        for number in plan.closes.tolist():
            del self.slots[number]
        for opened in plan.opens:
            self._open(opened)
        for number, block in zip(plan.append_slots.tolist(), plan.append_blocks.tolist(), strict=True):
            self._check_fence(block)
            self.slots[number].blocks.append(block)

    def _open(self, opened: SlotOpen) -> None:
        assert 0 <= opened.slot < self.max_seqs, "no such slot"
        assert opened.slot not in self.slots, "the slot is taken"
        assert not any(opened.slot in named.slots for named in self.in_flight.values()), "slot reused before its fence"
        tokens, computed = opened.tokens.tolist(), opened.computed
        assert computed % self.page_size == 0
        assert computed < len(tokens), "nothing is left to compute"
        slot = Slot(tokens, opened.prompt_len, opened.blocks.tolist(), computed, computed, opened.sampling)
        for block in slot.blocks[computed // self.page_size :]:
            self._check_fence(block)
        self._extend_kv(slot)
        self.slots[opened.slot] = slot

    def _check_fence(self, block: int) -> None:
        assert not any(block in named.blocks for named in self.in_flight.values()), "block reused before its fence"

    def _write(self, slot: Slot, count: int) -> None:
        assert count > 0, "an empty row"
        first, slot.fed = slot.fed, slot.fed + count
        assert slot.fed <= len(slot.tokens), "a row feeds tokens that are not known"
        assert slot.fed <= len(slot.blocks) * self.page_size, "a row writes behind its last block"
        self._extend_kv(slot)
        for position in range(first, slot.fed):
            if position % self.page_size == 0:
                self.distrusted.discard(slot.blocks[position // self.page_size])
            self.memory[slot.blocks[position // self.page_size]][position % self.page_size] = slot.kv[position]

    def _attend(self, slot: Slot) -> None:
        """All rows of a step have written by now, as in a layer of a real model."""
        seen: list[int] = []
        for block in slot.blocks:
            seen += self.memory[block]
        assert seen[: slot.fed] == slot.kv, "a row attends to KV of other tokens"

    @staticmethod
    def _extend_kv(slot: Slot) -> None:
        value = slot.kv[-1] if slot.kv else start(slot.sampling)
        for token in slot.tokens[len(slot.kv) : slot.fed]:
            value = chain(value, token)
            slot.kv.append(value)
