"""Requests that a worker could not run are refused, by the name of the field that is at fault."""

from __future__ import annotations

from typing import Any

import pytest

from corellm.comms.codec import i32
from corellm.comms.messages import Request, Sampling
from corellm.engine.admission import Limits, check_request
from corellm.engine.sequence import Sequence
from corellm.errors import InvalidRequestError

LIMITS = Limits(max_seqs=4, max_batch_tokens=64, max_model_len=32, vocab=100)


def check(prompt: list[int], **sampling: Any) -> None:
    request = Request(tag=1, prompt=i32(prompt), sampling=Sampling(**({"max_tokens": 1} | sampling)))
    check_request(Sequence(1, b"client", request, 0.0), LIMITS, room=32)


def test_ids_up_to_the_vocabulary_are_let_in() -> None:
    check([0, 99], stop_ids=(0, 99), bias_ids=(0, 99), bias_values=(1.0, -1.0))


@pytest.mark.parametrize("wrong", [100, 99999, -1])
@pytest.mark.parametrize(
    ("field", "named"), [("prompt", "prompt"), ("bias_ids", "logit_bias"), ("stop_ids", "stop_token_ids")]
)
def test_an_id_outside_the_vocabulary_names_its_own_field(field: str, named: str, wrong: int) -> None:
    sampling: dict[str, Any] = {"stop_ids": (1,), "bias_ids": (1, 2), "bias_values": (1.0, 1.0)}
    prompt = [1, wrong] if field == "prompt" else [1, 2]
    if field != "prompt":
        sampling[field] = (1, wrong)
    with pytest.raises(InvalidRequestError) as refused:
        check(prompt, **sampling)
    assert refused.value.param == named
    assert refused.value.message == f"{named} holds token id {wrong}; the model's ids are 0 to 99"


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"bias_ids": (1, 2), "bias_values": (1.0,)}, "logit_bias"),
    ],
)
def test_settings_that_no_worker_takes_are_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{named} is out of range") as refused:
        check([1], **sampling)
    assert refused.value.param == named
