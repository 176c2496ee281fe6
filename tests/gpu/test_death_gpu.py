"""A rank that is killed or stopped during load, on GPUs: everything ends within 10 s, and no GPU memory is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from corellm import EngineNode, SamplingParams
from corellm.errors import EngineDeadError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.processes import pid_of, wait_until_gone
from tests.support.tiny_llama import make_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

RANKS = [tp for tp in (1, 2) if tp <= max(1, torch.cuda.device_count())]
LEFT_BYTES = 64 << 20  # that the driver itself may keep


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "silent")])
def test_a_lost_rank_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, number: signal.Signals, reason: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = tmp_path / "tiny"
    model.mkdir()
    make_tiny_llama(model, heads=8, kv_heads=4, hidden=128, max_positions=4096)
    write_byte_tokenizer(model)
    before = free_bytes()
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    with EngineNode(str(model), device="cuda", dtype="bfloat16", tp=tp, gpu_memory=0.3) as node:
        assert free_bytes()[0] < before[0] - LEFT_BYTES
        lost = threading.Timer(0.3, os.kill, (pid_of(tmp_path / "corellm", "corellm.worker"), number))
        lost.start()
        began = time.monotonic() + 0.3
        with pytest.raises(EngineDeadError, match=reason):
            node.generate([[1, 2, 3]] * 500, params)
        wait_until_gone(tmp_path / "corellm", began + 10 - time.monotonic())
    assert all(now > then - LEFT_BYTES for now, then in zip(free_bytes(), before, strict=True))
