"""How far a batch run is, for whoever displays it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The counts of a run at one moment. Tokens and seconds are of this run alone, not of one it goes on from."""

    total: int | None  # rows of the input; None: not known before its end
    ok: int
    failed: int
    skipped: int  # finished by an earlier run
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
    def prompt_rate(self) -> float:
        """Prompt tokens a second, of finished rows."""
        return self.prompt_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens a second, of finished rows."""
        return self.output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last row at the pace so far; None before there is a pace, or where the total is unknown."""
        ran = self.ok + self.failed
        if self.total is None or not ran:
            return None
        return max(0, self.total - self.done) * self.elapsed_s / ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run. `interrupted`: it was stopped, and the same command goes on with it."""

    ok: int
    failed: int
    skipped: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wall_s: float
    output: str  # path, "stdout", or "" for a dry run
    interrupted: bool = False

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self.prompt_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class RowsChecked:
    """Event: `--strict` has checked so many rows."""

    rows: int


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


Event = RowsChecked | RowEnded | Stopping
