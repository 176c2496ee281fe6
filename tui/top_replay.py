"""Play a recording into a state: at any speed, from any moment."""

from __future__ import annotations

from .top_recording import HINDSIGHT_S, Recording
from .top_state import Link, TopState

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Player:
    """A position in a recording. Whoever has the clock calls `advance`."""

    def __init__(self, recording: Recording, state: TopState) -> None:
        self.recording = recording
        self.position_s = 0.0
        self.speed = 1.0
        self.is_playing = True
        self.state = state
        if recording.engine is not None:
            state.set_info(recording.engine)
        state.set_link(Link(is_live=True))
        self.seek(0.0)

    @property
    def at_end(self) -> bool:
        return self.position_s >= self.recording.duration_s

    def advance(self, seconds: float) -> None:
        """Let time pass; at the end it stands still. Raises `RecordingError` at a damaged event."""
        if not self.is_playing:
            return
        until = min(self.position_s + seconds * self.speed, self.recording.duration_s)
        for event in self.recording.between(self.position_s, until):
            self.state.add(event)
        self.position_s = until
        self.is_playing = not self.at_end

    def toggle(self) -> None:
        """Play or pause; at the end, from the start again."""
        if self.at_end and not self.is_playing:
            self.seek(0.0)
        self.is_playing = not self.is_playing

    def seek(self, position_s: float) -> None:
        """Go to a moment: the state is then what a dashboard would have that had joined some time before."""
        self.position_s = min(max(position_s, 0.0), self.recording.duration_s)
        self.state.clear()
        after = self.position_s - HINDSIGHT_S
        for event in self.recording.between(after if after > 0 else -1.0, self.position_s):
            self.state.add(event)

    def faster(self) -> None:
        self.speed = next((speed for speed in SPEEDS if speed > self.speed), SPEEDS[-1])

    def slower(self) -> None:
        self.speed = next((speed for speed in reversed(SPEEDS) if speed < self.speed), SPEEDS[0])
