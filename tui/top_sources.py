"""Where a dashboard's picture comes from: a running engine, or a recording. Both fill one state."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Protocol

from corellm.errors import CoreLLMError, RecordingError
from corellm.running_engines import RunningEngine

from . import quantities
from .top_lines import Line, Span, foreign
from .top_live import LiveFeed
from .top_recording import Event, Recorder
from .top_replay import Player
from .top_state import Link, TopState

HELD_MAX = 2048  # messages that wait while the picture is held; of more the oldest are dropped


class Source(Protocol):
    """What the dashboard drives. `player` is None unless there is something to scrub in."""

    state: TopState
    player: Player | None

    async def run(self) -> None:
        """Fill the state until cancelled, or until there is nothing more to read."""
        ...

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def toggle(self) -> None:
        """Hold the picture, or let it go on."""
        ...

    def seek(self, position_s: float) -> None:
        """Go to a moment, where there is something to scrub in."""
        ...

    def want_trees(self, wanted: bool) -> None: ...

    def status(self) -> Line:
        """Where the picture stands, for a corner of the screen."""
        ...


class LiveSource:
    """A running engine; None: the first that runs. A `recorder` is closed by whoever made it."""

    def __init__(self, engine: RunningEngine | None, recorder: Recorder | None = None) -> None:
        self.state = TopState(engine.info if engine is not None else None)
        self.player: Player | None = None
        self._recorder = recorder
        self._recording_ended = ""  # why, if it ended before the dashboard did
        self._held: deque[Event] | None = None
        self._feed = LiveFeed(
            engine,
            on_event=self._on_event,
            on_engine=self._on_engine,
            on_link=self.state.set_link,
            trees=recorder is not None,
        )

    async def run(self) -> None:
        try:
            await self._feed.run()
        except CoreLLMError as error:  # such as a run folder that others may look into
            self.state.set_link(Link(is_live=False, message=error.message))

    def tick(self, seconds: float) -> None:
        """An engine's time passes by itself."""

    def toggle(self) -> None:
        if self._held is None:
            self._held = deque(maxlen=HELD_MAX)
        else:
            held, self._held = self._held, None
            for event in held:
                self.state.add(event)
        self.state.version += 1

    def seek(self, position_s: float) -> None:
        """An engine is always at its present."""

    def want_trees(self, wanted: bool) -> None:
        self._feed.want_trees(wanted or self._recorder is not None)

    def status(self) -> Line:
        if self._held is not None:
            return [Span(f"held, {len(self._held):,} behind", "warn")]
        recording: Line = [Span("● recording  ", "bad")] if self._recorder is not None else []
        if self._recording_ended:
            recording = [foreign(f"{self._recording_ended}  ", "bad")]
        lost: Line = [Span(f"{self.state.lost:,} lost  ", "warn")] if self.state.lost else []
        live = Span("live", "used") if self.state.link.is_live else Span("no signal", "bad")
        return [*recording, *lost, live]

    def _on_engine(self, engine: RunningEngine) -> None:
        self.state.set_info(engine.info)

    def _on_event(self, event: Event) -> None:
        if self._recorder is not None:
            try:
                self._recorder.add(monotonic(), event)
            except RecordingError as error:
                self._recorder, self._recording_ended = None, error.message
        if self._held is None:
            self.state.add(event)
        else:
            self._held.append(event)


class ReplaySource:
    """A recording, played."""

    def __init__(self, player: Player) -> None:
        self.player: Player | None = player
        self.state = player.state
        self._player = player

    async def run(self) -> None:
        """All of it is here already."""

    def tick(self, seconds: float) -> None:
        try:
            self._player.advance(seconds)
        except RecordingError as error:
            self._stop(error)

    def toggle(self) -> None:
        self._player.toggle()
        self.state.version += 1

    def seek(self, position_s: float) -> None:
        try:
            self._player.seek(position_s)
        except RecordingError as error:
            self._stop(error)
        else:
            self.state.set_link(Link(is_live=True))

    def want_trees(self, wanted: bool) -> None:
        """A recording has them, or it has not."""

    def status(self) -> Line:
        player = self._player
        word = "playing" if player.is_playing else "paused"
        return [Span(word, "used" if player.is_playing else "warn"), Span(f" ×{player.speed:g}", "dim")]

    def _stop(self, error: RecordingError) -> None:
        """A damaged event is as far as it plays."""
        self._player.is_playing = False
        self.state.set_link(Link(is_live=False, message=error.message))


def scrub_line(player: Player, columns: int) -> Line:
    """The recording as a bar, with the position in it."""
    now, end = quantities.duration(player.position_s), quantities.duration(player.recording.duration_s)
    cells = max(columns - len(now) - len(end) - 2, 1)
    done = round(cells * player.position_s / player.recording.duration_s) if player.recording.duration_s else cells
    return [Span(f"{now} "), Span("━" * done, "title"), Span("─" * (cells - done) + f" {end}", "dim")]
