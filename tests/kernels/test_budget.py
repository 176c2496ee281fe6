"""What a rank's memory is planned for, before any of it is taken."""

from __future__ import annotations

import msgspec
import pytest
import torch

from corellm.comms.settings import Settings
from corellm.errors import OutOfMemoryError
from corellm.models.llama.spec import LlamaSpec
from corellm.worker import budget
from corellm.worker.budget import block_budget, seq_budget, table_bytes
from corellm.worker.slots import SlotTables

CPU = torch.device("cpu")
GIB = 1 << 30
SPEC = LlamaSpec(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=258,
    max_positions=10**12,
    eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    dtype="float32",
)
SETTINGS = Settings(
    model="m",
    model_path="/m",
    name="m",
    tp=1,
    device="cpu",
    dtype="float32",
    max_model_len=4096,
    max_batch_tokens=1024,
    max_seqs=64,
    kv_cache="radix",
    page_size=16,
    kv_blocks=None,
    gpu_memory=0.9,
    load_format="auto",
    seed=0,
    log_level="warning",
    threads=1,
)


def settings(**changes: object) -> Settings:
    return msgspec.structs.replace(SETTINGS, **changes)


@pytest.mark.parametrize("kv_blocks", [None, 100])
def test_tables_that_memory_cannot_hold_name_the_option(monkeypatch: pytest.MonkeyPatch, kv_blocks: int | None) -> None:
    monkeypatch.setattr(budget, "available_memory", lambda: 8 * GIB)
    with pytest.raises(OutOfMemoryError) as refused:
        block_budget(settings(max_model_len=2**31 - 2, kv_blocks=kv_blocks), SPEC, 10**6, CPU)
    assert refused.value.message == (
        "the tables for 64 requests of up to 2147483646 tokens take 808.5 GiB, and 8.0 GiB are free: "
        "lower --max-model-len or --max-seqs"
    )
    assert block_budget(settings(kv_blocks=100), SPEC, 10**6, CPU) == 100


def test_tables_are_counted_as_they_are_made() -> None:
    made = SlotTables(max_seqs=64, max_model_len=4096, num_blocks=8, page_size=16, vocab=258, device=CPU)
    rotary = 2 * 4096 * SPEC.head_dim * 4
    assert table_bytes(SETTINGS, 64, SPEC, torch.float32) - rotary == pytest.approx(made.memory.nbytes, rel=0.01)


def test_blocks_are_a_share_of_memory_and_no_more_than_slots_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory", lambda: 8 * GIB)
    assert block_budget(SETTINGS, SPEC, 10**6, CPU) == 64 * 4096 // 16
    monkeypatch.setattr(budget, "available_memory", lambda: 64 << 20)
    assert 128 <= block_budget(SETTINGS, SPEC, 10**6, CPU) < 64 * 4096 // 16
    monkeypatch.setattr(budget, "available_memory", lambda: 4 << 20)
    with pytest.raises(OutOfMemoryError, match="a useful KV cache"):
        block_budget(SETTINGS, SPEC, 10**6, CPU)


@pytest.mark.parametrize(
    ("gib", "tokens", "seqs"), [(140, 8192, 1024), (80, 8192, 1024), (24, 8192, 384), (8, 8192, 128), (80, 100, 50)]
)
def test_sequences_by_the_size_of_the_gpu(monkeypatch: pytest.MonkeyPatch, gib: int, tokens: int, seqs: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * GIB, gib * GIB))
    gpu = torch.device("cuda", 0)
    assert seq_budget(settings(max_seqs=None, max_batch_tokens=tokens), gpu) == seqs
    assert seq_budget(settings(max_seqs=7), gpu) == 7
