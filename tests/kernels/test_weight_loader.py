"""Weights in the slab equal the tensors that transformers wrote, for any split, dtype, piece size and short reads."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from corellm.checkpoint import Checkpoint, open_checkpoint
from corellm.comms.messages import Progress
from corellm.errors import CheckpointError, OutOfMemoryError
from corellm.models.llama.spec import weight_table
from corellm.worker import weight_loader
from corellm.worker.collectives import SingleRank
from corellm.worker.slab import Slab
from corellm.worker.weight_loader import dummy_weights, load_weights
from tests.support.tiny_llama import make_tiny_llama

CPU = torch.device("cpu")


class Turns:
    """Ranks that load one after the other, rank 0 first: what it broadcast, the others receive in the same order."""

    def __init__(self, rank: int, size: int, sent: list[torch.Tensor]) -> None:
        self.rank, self.size = rank, size
        self._sent, self._received = sent, iter(list(sent))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank:
            return x.copy_(next(self._received))
        self._sent.append(x.clone())
        return x


def load_ranks(
    checkpoint: Checkpoint, dtype: torch.dtype, tp: int, device: torch.device = CPU
) -> list[dict[str, torch.Tensor]]:
    sent: list[torch.Tensor] = []
    return [load(checkpoint, dtype, Turns(rank, tp, sent), device) for rank in range(tp)]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, group: Turns | SingleRank | None = None, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    group = group or SingleRank()
    table = weight_table(checkpoint.spec, dtype.itemsize, group.size, group.rank)
    slab = Slab(table.nbytes, device)
    slab.data.fill_(0x7F)  # what is not written shows
    return load_weights(checkpoint, table, slab, dtype, group, lambda progress: None, threads=3)


def expected(state: dict[str, torch.Tensor], tp: int, rank: int, layers: int) -> dict[str, torch.Tensor]:
    """The same rank's weights, cut from the whole tensors by torch."""

    def rows(name: str) -> torch.Tensor:
        whole = state[f"{name}.weight"]
        return torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % tp)).chunk(tp)[rank]

    def columns(name: str) -> torch.Tensor:
        return state[f"{name}.weight"].chunk(tp, dim=1)[rank]

    weights = {"embed": rows("model.embed_tokens"), "head": rows("lm_head"), "norm": state["model.norm.weight"]}
    for i in range(layers):
        source, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        weights |= {
            f"layers.{i}.input_norm": state[f"{source}.input_layernorm.weight"],
            f"layers.{i}.post_norm": state[f"{source}.post_attention_layernorm.weight"],
            f"layers.{i}.qkv": torch.cat([rows(f"{attention}.{part}_proj") for part in "qkv"]),
            f"layers.{i}.o": columns(f"{attention}.o_proj"),
            f"layers.{i}.gate_up": torch.cat([rows(f"{source}.mlp.gate_proj"), rows(f"{source}.mlp.up_proj")]),
            f"layers.{i}.down": columns(f"{source}.mlp.down_proj"),
        }
    return weights


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == truth.keys()
    for name, weight in truth.items():
        assert found[name].dtype is dtype
        torch.testing.assert_close(found[name].cpu(), weight.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("piece_bytes", [64, 1000, 2**24])
def test_ranks_hold_their_parts_of_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(weight_loader, "PIECE_BYTES", piece_bytes)
    state = make_tiny_llama(tmp_path, heads=8, kv_heads=4, vocab=131, eos_token_id=130, shard_size="60KB").state_dict()
    checkpoint = open_checkpoint(tmp_path, "auto")
    assert len({ref.file for ref in checkpoint.tensors.values()}) > 1
    for rank, weights in enumerate(load_ranks(checkpoint, torch.float32, tp)):
        assert_same(weights, expected(state, tp, rank, layers=2), torch.float32)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_converted_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(weight_loader, "PIECE_BYTES", 4096)
    state = make_tiny_llama(tmp_path, dtype=stored).state_dict()
    weights = load_ranks(open_checkpoint(tmp_path, "auto"), wanted, 2)[1]
    assert_same(weights, expected(state, 2, 1, layers=2), wanted)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tied=True)
    weights = load(open_checkpoint(tmp_path, "auto"), torch.float32)
    assert weights["head"] is weights["embed"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_together_read_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    make_tiny_llama(tmp_path, heads=8, kv_heads=8)
    checkpoint = open_checkpoint(tmp_path, "auto")
    file = tmp_path / "model.safetensors"
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    load_ranks(checkpoint, torch.float32, tp)
    times = np.zeros(file.stat().st_size, dtype=int)
    for offset, count in reads:
        times[offset : offset + count] += 1
    for name, ref in checkpoint.tensors.items():
        assert set(times[ref.start : ref.stop]) == {1}, name


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_tiny_llama(tmp_path, layers=1).state_dict()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1001]], offset))
    weights = load(open_checkpoint(tmp_path, "auto"), torch.float32)
    assert_same(weights, expected(state, 1, 0, layers=1), torch.float32)


def test_a_file_that_shrank_or_fails_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_llama(tmp_path)
    checkpoint = open_checkpoint(tmp_path, "auto")
    file = tmp_path / "model.safetensors"
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].stop)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: ends inside tensor {last}"):
        load(checkpoint, torch.float32)

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"tensor \S+ cannot be read: Input/output error"):
            load(checkpoint, torch.float32)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be opened"):
        load(checkpoint, torch.float32)


def test_progress_counts_every_byte_in_the_callers_thread(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path, "auto")
    table = weight_table(checkpoint.spec, 4)
    seen: list[Progress] = []
    callers = set()

    def report(progress: Progress) -> None:
        seen.append(progress)
        callers.add(threading.current_thread())

    load_weights(checkpoint, table, Slab(table.nbytes, CPU), torch.float32, SingleRank(), report)
    nbytes = sum(ref.stop - ref.start for ref in checkpoint.tensors.values())
    assert (seen[-1].stage, seen[-1].done, seen[-1].total, seen[-1].unit) == ("read weights", nbytes, nbytes, "B")
    assert callers == {threading.current_thread()}


def dummy(folder: Path, *, seed: int = 0, tp: int = 1, rank: int = 0) -> dict[str, torch.Tensor]:
    table = weight_table(open_checkpoint(folder, "dummy").spec, 4, tp, rank)
    slab = Slab(table.nbytes, CPU)
    slab.data.fill_(0x7F)
    return dummy_weights(table, slab, torch.float32, seed, rank)


def test_dummy_weights_are_seeded_distinct_and_well_scaled(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, heads=4, kv_heads=4, vocab=259)
    first, again, other = dummy(tmp_path), dummy(tmp_path), dummy(tmp_path, seed=1)
    digests = Counter(weight.numpy().tobytes() for weight in first.values())
    assert set(digests.values()) == {1}
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])
        fan_in = 96 if "down" in name else 64
        mean, std = (1.0, 0.02) if "norm" in name else (0.0, fan_in**-0.5)
        assert weight.mean().item() == pytest.approx(mean, abs=0.02)
        assert weight.std().item() == pytest.approx(std, rel=0.3)
    left, right = dummy(tmp_path, tp=2, rank=0), dummy(tmp_path, tp=2, rank=1)
    for name, weight in left.items():
        assert torch.equal(weight, right[name]) == ("norm" in name), name
    assert not right["embed"][-1].any()
    assert not right["head"][-1].any()
    assert right["embed"][-2].all()


def test_slab_views_share_its_memory() -> None:
    slab = Slab(4096, CPU)
    assert slab.data.data_ptr() % 4096 == 0
    assert not slab.data.any()
    slab.view(8, (2, 3), torch.float32).fill_(1.0)
    assert slab.view(0, (9,), torch.float32).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0]
    for offset, shape in ((4092, (2,)), (-4, (1,)), (2, (1,))):
        with pytest.raises(ValueError, match="not within a slab of 4096 bytes"):
            slab.view(offset, shape, torch.float32)


def test_a_slab_larger_than_memory_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1048576\.00 GiB"):
        Slab(2**50, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_weights_reach_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype) -> None:
    monkeypatch.setattr(weight_loader, "PIECE_BYTES", 1000)
    state = make_tiny_llama(tmp_path, dtype=torch.bfloat16).state_dict()
    weights = load_ranks(open_checkpoint(tmp_path, "auto"), wanted, 2, torch.device("cuda", 0))[1]
    assert_same(weights, expected(state, 2, 1, layers=2), wanted)
