"""Small random Llamas in transformers, their weights for an executor, and a scheduler simple enough to be a truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from corellm.comms.codec import i32
from corellm.comms.messages import AllocateKV, Sampling, SlotOpen, StepPlan, StepResult
from corellm.layers.parallel import Collectives
from corellm.models.llama.spec import LlamaSpec, weight_table
from corellm.worker.collectives import SingleRank
from corellm.worker.executor import Executor
from corellm.worker.kv_memory import kv_bytes

torch.set_num_threads(1)  # these models are too small to share out, and cores that spin slow the machine down

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(*, tied: bool = False, vocab: int = 131, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random model of 3 layers whose greedy outputs vary: weights large enough for distinct logits."""
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": LLAMA3_ROPE,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = LlamaConfig(**(settings | changes))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return model


def spec_of(model: LlamaForCausalLM) -> LlamaSpec:
    return LlamaSpec.from_config(model.config.to_dict())


def weights_of(model: LlamaForCausalLM, tp: int = 1, rank: int = 0) -> dict[str, torch.Tensor]:
    """The weights of one rank as the table lays them out."""
    state, weights = model.state_dict(), {}
    for entry in weight_table(spec_of(model), 4, tp, rank).entries:
        weights[entry.name] = torch.zeros(entry.shape)
        for shard in entry.shards:
            part = state[shard.tensor].narrow(shard.dim, shard.start, shard.stop - shard.start)
            weights[entry.name].narrow(shard.dim, shard.at, part.shape[shard.dim]).copy_(part)
    return weights


def greedy_truth(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def make_executor(
    model: LlamaForCausalLM,
    *,
    num_blocks: int = 64,
    page_size: int = 4,
    max_seqs: int = 8,
    max_model_len: int = 160,
    group: Collectives | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Executor:
    """An allocated executor whose KV memory is all NaN: whatever reads what was not written shows."""
    group = group or SingleRank()
    spec = spec_of(model)
    elements = kv_bytes(spec, group.size, num_blocks, page_size, dtype) // dtype.itemsize
    executor = Executor(
        spec,
        {name: weight.to(device, dtype) for name, weight in weights_of(model, group.size, group.rank).items()},
        torch.full((elements,), torch.nan, dtype=dtype, device=device).view(torch.uint8),
        page_size=page_size,
        device=device,
        dtype=dtype,
        group=group,
    )
    executor.allocate(
        AllocateKV(num_blocks=num_blocks, max_batch_tokens=256, max_seqs=max_seqs, max_model_len=max_model_len)
    )
    return executor


def greedy(max_tokens: int = 1000, **changes: object) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **changes)


@dataclass
class Running:
    """A sequence as the driver sees it; it never looks at the outputs to plan the next step."""

    slot: int
    prompt: list[int]
    computed: int
    known: int
    blocks: int
    outputs: list[int] = field(default_factory=list)


class Driver:
    """Plans steps for an executor like an engine one step ahead: a row is planned without knowing its token."""

    def __init__(self, executor: Executor, *, page_size: int = 4, num_blocks: int = 64, seed: int = 0) -> None:
        self.executor, self.page_size = executor, page_size
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(num_blocks).tolist()
        self.held: dict[int, list[int]] = {}
        self.running: dict[int, Running] = {}
        self.opens: list[SlotOpen] = []
        self.closes: list[int] = []
        self.step = 0

    def open(self, slot: int, tokens: list[int], sampling: Sampling, prompt_len: int | None = None) -> Running:
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.page_size))]
        self.held[slot] = blocks
        self.opens.append(
            SlotOpen(
                slot=slot,
                tokens=_from_wire(tokens),
                prompt_len=len(tokens) if prompt_len is None else prompt_len,
                computed=0,
                blocks=_from_wire(blocks),
                sampling=sampling,
            )
        )
        self.running[slot] = Running(slot, tokens, 0, len(tokens), len(blocks))
        return self.running[slot]

    def close(self, slot: int) -> None:
        self.closes.append(slot)
        del self.running[slot]
        self.free[:0] = self.held.pop(slot)

    def run(self, rows: list[tuple[int, int]], score: Sequence[int] = ()) -> StepResult | None:
        """Feed (slot, tokens) rows. A row that reaches the end of what is known samples; rows `score` are scored."""
        appends: list[tuple[int, int]] = []
        samples = []
        for slot, count in rows:
            sequence = self.running[slot]
            sequence.computed += count
            samples.append(sequence.computed == sequence.known)
            sequence.known += samples[-1]
            while len(self.held[slot]) * self.page_size < sequence.computed:
                self.held[slot].append(self.free.pop())
                appends.append((slot, self.held[slot][-1]))
        self.step += 1
        plan = StepPlan(
            step=self.step,
            closes=_from_wire(self.closes),
            opens=self.opens,
            append_slots=_from_wire([slot for slot, _ in appends]),
            append_blocks=_from_wire([block for _, block in appends]),
            row_slots=_from_wire([slot for slot, _ in rows]),
            row_tokens=_from_wire([count for _, count in rows]),
            row_samples=_from_wire(samples),
            score_rows=_from_wire(score),
        )
        self.opens, self.closes = [], []
        launched = self.executor.execute(plan)
        result = None if self.executor.rank else launched.result()
        sampling = [slot for (slot, _), sampled in zip(rows, samples, strict=True) if sampled]
        if result is not None:
            for slot, token in zip(sampling, result.tokens.tolist(), strict=True):
                self.running[slot].outputs.append(token)
        return result

    def generate(self, slot: int, count: int) -> list[int]:
        """Prefill what is open in `slot` whole, then decode, alone, until `count` tokens are out."""
        sequence = self.running[slot]
        while len(sequence.outputs) < count:
            self.run([(slot, sequence.known - sequence.computed)])
        return sequence.outputs


def _from_wire(values: Sequence[int]) -> np.ndarray:
    """Read-only, as decoded messages are."""
    array = i32(values)
    array.flags.writeable = False
    return array
