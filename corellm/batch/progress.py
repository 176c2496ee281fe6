"""How far a batch run is, for whoever displays it."""

from __future__ import annotations

from dataclasses import dataclass

MIN_MEASURED_S = 0.5  # a pace measured over less is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The counts of a run at one moment. Tokens and seconds are of this run alone, not of one it goes on from."""

    total: int | None  # rows of the input; None: not known before its end
    ok: int
    failed: int
    skipped: int  # finished by an earlier run
    skipped_failed: int  # of these, the error rows
    in_flight: int  # rows
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, reused from the cache
    output_tokens: int
    elapsed_s: float
    stopping: bool

    @property
    def done(self) -> int:
        """Rows that have an output line."""
        return self.ok + self.failed + self.skipped

    @property
    def rates(self) -> tuple[float, float] | None:
        """(prompt, output) tokens a second, of finished rows; None before they mean something."""
        if self.elapsed_s < MIN_MEASURED_S:
            return None
        return self.prompt_tokens / self.elapsed_s, self.output_tokens / self.elapsed_s

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last row at the pace so far; None before there is a pace, or where the total is unknown."""
        ran = self.ok + self.failed
        if self.total is None or not ran or self.elapsed_s < MIN_MEASURED_S:
            return None
        return max(0, self.total - self.done) * self.elapsed_s / ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run, or of a check of its input.

    `interrupted`: it was stopped. `failed_with` is the code of the error that ended it. `resumable`: as things stand,
    the same command goes on with it.
    """

    ok: int = 0
    failed: int = 0
    skipped: int = 0  # finished by an earlier run
    skipped_failed: int = 0  # of these, the error rows
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    wall_s: float = 0.0
    output: str = ""  # path, "stdout", or "" where nothing was opened
    interrupted: bool = False
    failed_with: str | None = None
    resumable: bool = False

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class RowEnded:
    """Event: a row has its output line (in a dry run: was checked). `error` says why it failed, else None."""

    line: int
    custom_id: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Stopping:
    """Event: no more rows are admitted; those in flight have `grace_s` seconds."""

    in_flight: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class SharedId:
    """Event: a row that has no `custom_id` is called like another that gives this one."""

    line: int
    custom_id: str


Event = RowEnded | Stopping | SharedId
