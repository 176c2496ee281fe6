"""Compare a screen with a picture of it that someone has looked at."""

from __future__ import annotations

import os
from pathlib import Path

from corellm_tui.top_app import TopApp

FOLDER = Path(__file__).parents[1] / "tui" / "snapshots"
UPDATE = "CORELLM_UPDATE_SNAPSHOTS"


def assert_looks_as_before(app: TopApp, name: str) -> None:
    """The screen as SVG is the stored one, byte for byte. With CORELLM_UPDATE_SNAPSHOTS=1 it is stored instead."""
    shown = app.export_screenshot()
    path = FOLDER / f"{name}.svg"
    if os.environ.get(UPDATE):
        path.write_text(shown, encoding="utf-8")
    assert path.exists(), f"there is no {path.name}; run with {UPDATE}=1 and look at what it stores"
    if path.read_text(encoding="utf-8") != shown:
        other = path.with_suffix(".new.svg")
        other.write_text(shown, encoding="utf-8")
        message = (
            f"the screen is not {path.name} any more; look at {other.name}, and run with {UPDATE}=1 if it is right"
        )
        raise AssertionError(message)
