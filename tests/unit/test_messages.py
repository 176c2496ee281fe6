"""Messages over the wire: equal after a round trip, refused when damaged, and described by their first line."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from corellm.comms import messages
from corellm.comms.codec import Decoder, encode, f32, i32, i64
from corellm.errors import ProtocolError
from corellm.sampling_params import JsonConstraint

UNIONS: dict[str, tuple[Any, str | tuple[str, ...]]] = {
    "ClientMessage": (messages.ClientMessage, "Front end to engine"),
    "EngineMessage": (messages.EngineMessage, "Engine to"),
    "WorkerCommand": (messages.WorkerCommand, "Engine to"),
    "WorkerReport": (messages.WorkerReport, ("Worker to engine", "Engine to front end, worker to engine")),
}

INFO = messages.EngineInfo(
    name="a",
    model="demo",
    model_path="/m",
    dtype="float32",
    device="cpu",
    tp=1,
    kv_cache="radix",
    page_size=16,
    kv_blocks=10,
    max_model_len=1000,
    max_batch_tokens=512,
    max_seqs=4,
    vocab=100,
    seed=0,
    load_format="auto",
    max_request_tokens=161,
    startup_s=1.0,
)


def plain(value: Any) -> Any:
    """Messages as dicts and lists, so that `==` compares arrays too."""
    if isinstance(value, np.ndarray):
        return (type(value).__name__, value.dtype.str, value.tolist())
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", UNIONS)
def test_the_first_line_says_who_talks_to_whom(name: str) -> None:
    union, says = UNIONS[name]
    for message in get_args(union):
        assert (message.__doc__ or "").startswith(says), message


@given(
    prompt=arrays.arrays(np.int32, st.integers(0, 50)),
    bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
    stop_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    salt=st.text(max_size=10),
)
@settings(max_examples=50, deadline=None)
def test_submit_round_trip(prompt: Any, bias: dict[int, float], stop_ids: list[int], salt: str) -> None:
    sampling = messages.Sampling(
        max_tokens=5, stop_ids=tuple(stop_ids), bias_ids=tuple(bias), bias_values=tuple(bias.values())
    )
    sent = messages.Submit(
        requests=[
            messages.Request(
                tag=2**40, prompt=i32(prompt), sampling=sampling, cache_salt=salt, constraint=JsonConstraint(salt, "; ")
            )
        ]
    )
    received: Any = Decoder[Any](messages.ClientMessage).decode(encode(sent))
    assert plain(received) == plain(sent)


def test_events_and_results_round_trip() -> None:
    finish = messages.Finish(tag=1, reason="stop", stop_id=2, prompt_tokens=3, output_tokens=4, total_s=0.5)
    top = messages.Logprobs(row=0, logprob=-0.25, top_ids=i32([7, 8]), top_logprobs=f32([-0.25, -1.5]))
    events = messages.StepEvents(
        step=9, tags=i64([2**40]), tokens=i32([5]), indices=i32([0]), finished=[finish], logprobs=[top]
    )
    ready = messages.Ready(info=INFO)
    for sent in (events, ready):
        assert plain(Decoder[Any](messages.EngineMessage).decode(encode(sent))) == plain(sent)

    masked = messages.StepPlan(
        step=1, closes=i32([]), opens=[], append_slots=i32([]), append_blocks=i32([]), row_slots=i32([3]),
        row_tokens=i32([1]), row_samples=i32([1]), mask_rows=i32([0]), masks=i32([-1, 5]), score_rows=i32([0]),
    )  # fmt: skip
    assert plain(Decoder[Any](messages.WorkerCommand).decode(encode(masked))) == plain(masked)

    scores = messages.PromptLogprobs(
        first=1, logprobs=f32([-0.5]), ranks=i32([2]), k=1, top_ids=i32([7]), top_logprobs=f32([-0.25])
    )
    result = messages.StepResult(
        step=3,
        tokens=i32([1, -1]),
        failed=i32([]),
        seconds=0.01,
        logprobs=messages.TopLogprobs(rows=i32([1]), sampled=f32([-1]), k=0, ids=i32([]), values=f32([])),
        prompt_logprobs=[(0, scores)],
    )
    assert plain(Decoder[Any](messages.WorkerReport).decode(encode(result))) == plain(result)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "Abort"}),
        msgspec.msgpack.encode({"type": "Abort", "tags": b"\0" * 7}),  # not whole int64
        msgspec.msgpack.encode({"type": "Abort", "tags": [1, 2]}),
        msgspec.msgpack.encode({"type": "Hello", "version": "1", "front_end": "x"}),
        msgspec.msgpack.encode({"type": "WorkerReady", "rank": 0}),  # of another union
        encode(messages.Ping())[:-1],
    ],
)
def test_a_damaged_or_foreign_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        Decoder[Any](messages.ClientMessage).decode(frame)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "tags", [np.arange(3), i32([1]).astype("<i8"), i64([1, 2]).reshape(1, 2), i64([1]).astype("<i4")]
)
def test_only_wrapped_vectors_can_be_sent(tags: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(messages.Abort(tags=tags))
