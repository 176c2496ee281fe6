"""The line below an answer."""

from __future__ import annotations

from typing import Any

import pytest

from corellm.chat.backend import AnswerEnd
from corellm_tui.chat_footer import footer


def end(**changes: Any) -> AnswerEnd:
    values: dict[str, Any] = {
        "finish_reason": "stop",
        "prompt_tokens": 1812,
        "cached_tokens": 1800,
        "output_tokens": 41,
        "first_token_s": 0.25,
        "total_s": 4.25,
    }
    return AnswerEnd(**{**values, **changes})


@pytest.mark.parametrize(
    ("given", "context", "line"),
    [
        (end(), 8192, "TTFT 250 ms · 10.0 tok/s · in 1,812 (1,800 cached) · out 41 · context 1,853 of 8,192"),
        (
            end(first_token_s=2.0, total_s=2.0, output_tokens=1),
            10,
            "TTFT 2.0 s · in 1,812 (1,800 cached) · out 1 · context 1,813 of 10",
        ),
        (end(cached_tokens=None), None, "TTFT 250 ms · 10.0 tok/s · in 1,812 · out 41 · context 1,853"),
        (end(prompt_tokens=None, output_tokens=None), 8192, "TTFT 250 ms"),
        (
            end(finish_reason="length", output_tokens=0),
            None,
            "TTFT 250 ms · in 1,812 (1,800 cached) · out 0 · context 1,812 · cut off at the token limit",
        ),
        (
            end(finish_reason="length", prompt_tokens=200, output_tokens=56),
            256,
            "TTFT 250 ms · 13.8 tok/s · in 200 (1,800 cached) · out 56 · context 256 of 256"
            " · cut off at the end of the context",
        ),
        (
            end(finish_reason="length", prompt_tokens=200, output_tokens=55),
            256,
            "TTFT 250 ms · 13.5 tok/s · in 200 (1,800 cached) · out 55 · context 255 of 256"
            " · cut off at the token limit",
        ),
        (
            end(prompt_tokens=200, output_tokens=56),
            256,
            "TTFT 250 ms · 13.8 tok/s · in 200 (1,800 cached) · out 56 · context 256 of 256",
        ),
    ],
)
def test_what_is_known_is_shown(given: AnswerEnd, context: int | None, line: str) -> None:
    assert footer(given, context) == line
