"""Make the README's pictures of `corellm top` from the recorded example.

python docs/screenshots.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from corellm_tui.top_app import TopApp
from corellm_tui.top_recording import Recording, read_recording
from corellm_tui.top_replay import Player
from corellm_tui.top_sources import ReplaySource
from corellm_tui.top_state import TopState

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "preemption.stats"
IMAGES = ROOT / "docs" / "images"
MOMENT_S = 12.0  # requests run, wait and were preempted
# File name: size, and the keys that lead there.
PICTURES = {
    "top.svg": ((110, 34), []),
    "top-explain.svg": ((80, 24), ["e"]),
    "top-tree.svg": ((80, 24), ["t"]),
}


async def picture(recording: Recording, size: tuple[int, int], keys: list[str]) -> str:
    """The dashboard at the moment, as SVG."""
    player = Player(recording, TopState())
    player.is_playing = False
    player.seek(MOMENT_S)
    app = TopApp(ReplaySource(player), token_text=lambda token: "")
    async with app.run_test(size=size) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        app.paint(whatever=True)
        await pilot.pause()
        return app.export_screenshot()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    recording = read_recording(EXAMPLE)
    try:
        for name, (size, keys) in PICTURES.items():
            (IMAGES / name).write_text(asyncio.run(picture(recording, size, keys)), encoding="utf-8")
    finally:
        recording.close()


if __name__ == "__main__":
    main()
