"""What the dashboard makes of messages: rates, percentiles, losses; sentences; recordings and their replay."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from corellm.comms.stats_messages import WATCH_VERSION
from corellm.errors import RecordingError
from corellm_tui import top_replay
from corellm_tui.top_explain import explain
from corellm_tui.top_lines import plain
from corellm_tui.top_recording import Event, Recorder, read_recording
from corellm_tui.top_replay import Player
from corellm_tui.top_sources import LiveSource, ReplaySource
from corellm_tui.top_state import TopState, percentile
from tests.support.top_material import INFO, histogram, request, snapshot


def state_after(*sequences: int) -> TopState:
    state = TopState(INFO)
    for sequence in sequences:
        state.add(snapshot(sequence))
    return state


@pytest.mark.parametrize("sequences", [range(1, 41), (1, 2, 20, 40)])
def test_rates_are_right_even_where_snapshots_were_lost(sequences: range) -> None:
    state = state_after(*sequences)
    rates = state.rates()
    assert (rates.prompt, rates.output, rates.steps, rates.hit) == pytest.approx((200, 400, 4, 0.25))
    assert state.lost == 40 - len(sequences)


def test_one_snapshot_makes_no_rate() -> None:
    assert state_after(5).rates().output == 0
    assert TopState().rates().output == 0


def test_the_hit_rate_is_that_of_all_prompts_while_none_comes() -> None:
    state = state_after(5)
    assert state.rates().hit == 0.25
    same = snapshot(6).stats.kv
    for sequence in (6, 30):
        stats = msgspec.structs.replace(snapshot(sequence).stats, kv=same)
        state.add(snapshot(sequence, stats=stats))
    assert state.rates().hit == 0.25


def test_another_engine_or_an_earlier_time_begins_anew() -> None:
    state = state_after(10, 11)
    state.add(snapshot(12, pid=8))
    assert (len(state.points), len(state.steps), state.lost) == (1, 1, 0)
    state.add(snapshot(3, pid=8))
    assert len(state.points) == 1


def test_percentiles_are_within_a_bucket_of_the_true_ones() -> None:
    counts = histogram(ms10=50, ms100=49, ms5000=1).counts
    for share, seconds in ((0.5, 0.01), (0.9, 0.1), (0.99, 0.1), (1.0, 5.0)):
        assert percentile(counts, share) == pytest.approx(seconds, rel=0.1)
    assert percentile([0] * len(counts), 0.5) is None


def test_latencies_are_those_of_the_last_minute_and_of_all_time_where_it_saw_none() -> None:
    state = TopState(INFO)
    slow, both = histogram(ms900=5), histogram(ms900=5, ms20=10)
    state.add(snapshot(1, ttft=slow))
    assert state.time_to_first_token(0.5) == [pytest.approx(0.9, rel=0.1)]
    state.add(snapshot(2, ttft=both))
    assert state.time_to_first_token(0.99) == [pytest.approx(0.02, rel=0.1)]


def test_the_explanation_names_the_head_what_it_lacks_and_the_option() -> None:
    state = TopState(INFO)
    head = request(7, state="waiting", wait="blocks", prompt_tokens=900, output_tokens=0)
    others = [request(8, state="waiting", wait="turn"), request(9, state="waiting", wait="mask")]
    state.add(snapshot(1, requests=[head, *others]))
    told = dict(explain(state))
    assert "Request 7 is at the head and lacks KV blocks" in told["The queue"]
    assert "for the running ones to grow; a larger --kv-blocks" in told["The queue"]
    assert "It has 1 behind it" in told["The queue"]
    assert "mask of tokens that its format allows next: 1." in told["The queue"]
    assert "Step 1 decoded one token for each of 3 sequences and prefilled 4 prompt tokens" in told["The last step"]
    assert " 1 preemption because" in told["The KV cache"]
    assert "25% of all prompt tokens were found in the cache" in told["The KV cache"]


def recorded(path: Path, *sequences: int) -> Path:
    recorder = Recorder(path, INFO)
    for sequence in sequences:
        recorder.add(100 + sequence / 4, snapshot(sequence))
    recorder.close()
    return path


def test_a_recording_plays_what_was_recorded_at_its_times(tmp_path: Path) -> None:
    recording = read_recording(recorded(tmp_path / "a.stats", *range(1, 21)))
    assert recording.engine == msgspec.structs.replace(INFO, model_path="")
    assert recording.times == pytest.approx([n / 4 for n in range(20)])
    assert list(recording.between(-1, 99)) == [snapshot(n) for n in range(1, 21)]
    assert list(recording.between(0.25, 0.75)) == [snapshot(3), snapshot(4)]
    recording.close()


def test_playing_seeking_and_playing_again_lead_to_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_replay, "HINDSIGHT_S", 5.0)
    recording = read_recording(recorded(tmp_path / "a.stats", *range(1, 41)))
    played = Player(recording, TopState())
    for _ in range(20):
        played.advance(0.25)
    sought = Player(recording, TopState())
    sought.seek(9.0)
    sought.seek(5.0)
    assert played.state.snapshot == sought.state.snapshot == snapshot(21)
    assert played.state.rates() == sought.state.rates()
    assert list(played.state.steps) == list(sought.state.steps)
    sought.seek(0.0)
    sought.seek(8.0)
    assert sought.state.lost == 0
    played.faster()
    played.advance(100)
    assert (played.position_s, played.is_playing) == (recording.duration_s, False)
    played.toggle()
    assert (played.position_s, played.is_playing, played.state.snapshot) == (0.0, True, snapshot(1))
    recording.close()


def test_a_recording_cut_anywhere_plays_up_to_the_cut(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole.stats", *range(1, 41)).read_bytes()
    cut = tmp_path / "cut.stats"
    counts = []
    for size in range(len(whole) // 2, len(whole), 101):
        cut.write_bytes(whole[:size])
        recording = read_recording(cut)
        counts.append(len(recording.times))
        assert list(recording.between(-1, 99)) == [snapshot(n) for n in range(1, len(recording.times) + 1)]
        recording.close()
    assert counts == sorted(counts)
    assert 1 <= counts[0] < 40


def gzipped(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"corellm_stats": 9}\n[0, {}]\n', f"version 9 of the stats protocol; this program plays {WATCH_VERSION}"),
        ("hello\n", "is no recording"),
        (f'{{"corellm_stats": {WATCH_VERSION}}}\n', "holds no event"),
        (f'{{"corellm_stats": {WATCH_VERSION}}}\n["a", 3]\n', "is no recording"),
        (f'{{"corellm_stats": {WATCH_VERSION}}}\n[0, {"[" * 100_000}\n', "is no recording"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecordingError, match=said):
        read_recording(gzipped(tmp_path / "a.stats", text))


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("not gzip")
    with pytest.raises(RecordingError, match="plain is no recording"):
        read_recording(plain)
    with pytest.raises(RecordingError, match="cannot read the recording"):
        read_recording(tmp_path / "missing")
    with pytest.raises(RecordingError, match="cannot write the recording"):
        Recorder(tmp_path / "no" / "folder", INFO)
    with pytest.raises(RecordingError, match=r"plain exists; --record writes a new file"):
        Recorder(plain, INFO)
    assert plain.read_text() == "not gzip"


def damaged(path: Path, event: str) -> Path:
    """A recording of a snapshot at 0 s and this event at 1 s."""
    good = msgspec.json.encode((0.0, snapshot(1))).decode()
    return gzipped(path, f'{{"corellm_stats": {WATCH_VERSION}}}\n{good}\n[1, {event}]\n')


def test_a_damaged_event_is_told_by_its_number(tmp_path: Path) -> None:
    recording = read_recording(damaged(tmp_path / "a.stats", '{"type": "Snapshot"}'))
    with pytest.raises(RecordingError, match="event 2 of the recording is damaged"):
        list(recording.between(-1, 9))
    recording.close()


@pytest.mark.parametrize("go", [lambda source: source.seek(1.0), lambda source: source.tick(1.0)])
def test_a_replay_stops_at_a_damaged_event_and_can_be_sought_back(
    tmp_path: Path, go: Callable[[ReplaySource], None]
) -> None:
    recording = read_recording(damaged(tmp_path / "a.stats", '{"type": "Snapshot"}'))
    source = ReplaySource(Player(recording, TopState()))
    go(source)
    assert "event 2 of the recording is damaged" in source.state.link.message
    assert "paused" in plain(source.status())
    source.seek(0.5)
    assert source.state.link.is_live
    assert source.state.snapshot == snapshot(1)
    recording.close()


class FullDisk(Recorder):
    def add(self, now: float, event: Event) -> None:
        raise RecordingError("the recording run.stats stopped: No space left on device")


def test_a_recording_that_ends_early_is_told_while_the_dashboard_goes_on(tmp_path: Path) -> None:
    recorder = FullDisk(tmp_path / "run.stats", INFO)
    source = LiveSource(None, recorder)
    assert "● recording" in plain(source.status())
    source._on_event(snapshot(1))
    source._on_event(snapshot(2))
    recorder.close()
    assert "● recording" not in plain(source.status())
    assert "the recording run.stats stopped: No space left on device" in plain(source.status())
    assert source.state.snapshot == snapshot(2)
