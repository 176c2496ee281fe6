"""Print a batch's questions with their answers: `python examples/show.py IN.jsonl OUT.jsonl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def question(row: dict[str, Any]) -> str:
    body = row.get("body", row)
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def answer(row: dict[str, Any]) -> str:
    if row["error"] is not None or row["response"]["status_code"] != 200:
        return f"(failed: {json.dumps(row['error'] or row['response']['body'])})"
    choice = row["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_bytes().splitlines()]
    answers = {row["custom_id"]: row for row in map(json.loads, Path(sys.argv[2]).read_bytes().splitlines())}
    for number, row in enumerate(rows, start=1):
        print(f"\n> {question(row)}\n{answer(answers[row.get('custom_id', f'row-{number}')]).strip()}")


if __name__ == "__main__":
    main()
