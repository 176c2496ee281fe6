"""Bytes that should be a JSON object: what is said of those that are none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corellm.openai_api.json_object import NotAnObjectError, json_object

HALF = "half of a surrogate pair"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b" \r\n\t", "the body is empty; it must be a JSON object"),
        (b"[1]", "the body holds a list with 1 entry; it must be a JSON object"),
        (b'{"a": "\xff"}', "the body is not UTF-8 at byte 7"),
        (b'{"a": 1', "the body is not JSON: it is cut off"),
        (b'{"a": "\\ud83d\\ude00', "the body is not JSON: it is cut off"),
        (b'{"a": 1e999}', "the body is not JSON: it holds a number out of range"),
        (b'{"a": NaN}', "the body is not JSON: it goes wrong at byte 6"),
        (b'{"prompt": "\\ud800"}', f"the body is not JSON: it holds \\ud800 at byte 12, {HALF}"),
        (b'{"prompt": "a\\uD800b and so on"}', f"the body is not JSON: it holds \\uD800 at byte 13, {HALF}"),
        (b'{"prompt": "\\udc00"}', f"the body is not JSON: it holds \\udc00 at byte 12, {HALF}"),
        (b'{"\\ude00\\ud83d": 1}', f"the body is not JSON: it holds \\ude00 at byte 2, {HALF}"),
        ('{"prompt": "é\\ud83d\\ud83d\\ude00"}'.encode(), f"the body is not JSON: it holds \\ud83d at byte 14, {HALF}"),
        (b'{"a": "\\\\ud800", b}', "the body is not JSON: it goes wrong at byte 17"),  # an escaped backslash, and text
        (b'{a: "\\ud800"}', "the body is not JSON: it goes wrong at byte 1"),  # the first fault
    ],
)
def test_what_is_wrong_is_said_in_one_line(data: bytes, said: str) -> None:
    with pytest.raises(NotAnObjectError) as refused:
        json_object(data, "the body")
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@given(st.text(), st.sampled_from([r"\ud800", r"\uDBFF", r"\udc00", r"\uDFFF"]), st.text())
def test_a_half_pair_is_found_wherever_it_stands(before: str, half: str, after: str) -> None:
    """Python's own writer makes pairs of escapes of what lies beyond 16 bits, and doubles backslashes."""
    start, end = f'{{"a": "{json.dumps(before)[1:-1]}', f'{json.dumps(after)[1:-1]}"}}'
    assert json_object((start + end).encode(), "it") == {"a": before + after}
    with pytest.raises(NotAnObjectError, match=rf"\{half} at byte {len(start)}, half"):
        json_object((start + half + end).encode(), "it")
