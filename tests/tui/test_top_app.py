"""The dashboard, driven by keys and mouse over a recorded run: every screen, every key, three sizes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.binding import Binding
from textual.pilot import Pilot

from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch
from corellm.config import EngineOptions
from corellm.running_engines import RunningEngine
from corellm_tui.top_app import TopApp
from corellm_tui.top_lines import plain, width
from corellm_tui.top_recording import Recording, read_recording
from corellm_tui.top_replay import Player
from corellm_tui.top_screens import EnginePicker, Sheet
from corellm_tui.top_sources import LiveSource, ReplaySource
from corellm_tui.top_state import TopState
from corellm_tui.top_table import BY_LETTER, COLUMNS
from corellm_tui.top_widgets import Lines, RequestTable
from tests.support.screens import assert_looks_as_before
from tests.support.top_material import INFO, request, snapshot

EXAMPLE = Path(__file__).parents[2] / "examples" / "preemption.stats"
BUSY_S = 9.0  # a moment of the example at which requests run, wait and were preempted
SIZES = [(80, 24), (120, 40), (50, 15)]


@pytest.fixture
def example() -> Iterator[Recording]:
    with contextlib.closing(read_recording(EXAMPLE)) as recording:
        yield recording


def replaying(recording: Recording, at_s: float = BUSY_S) -> TopApp:
    player = Player(recording, TopState())
    player.is_playing = False
    player.seek(at_s)
    return TopApp(ReplaySource(player), token_text=lambda token: f"<{token}>")


@contextlib.asynccontextmanager
async def running(app: TopApp, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[None]]:
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(app, pilot)
        yield pilot


async def settle(app: TopApp, pilot: Pilot[None]) -> None:
    await pilot.pause()
    app.paint(whatever=True)
    await pilot.pause()


def played(recording: Recording, size: tuple[int, int], *keys: str) -> Callable[[str], None]:
    """Press the keys, then compare with the picture of the given name."""

    def compare(name: str) -> None:
        async def work() -> None:
            app = replaying(recording)
            async with running(app, size) as pilot:
                for key in keys:
                    await pilot.press(key)
                await settle(app, pilot)
                assert_looks_as_before(app, name)

        asyncio.run(work())

    return compare


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_dashboard_looks_as_before(example: Recording, size: tuple[int, int]) -> None:
    played(example, size)(f"top-{size[0]}x{size[1]}")


@pytest.mark.parametrize(
    ("name", "keys"),
    [("help", "question_mark"), ("explain", "e"), ("tree", "t"), ("request", "enter")],
)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_sheet_looks_as_before(example: Recording, size: tuple[int, int], name: str, keys: str) -> None:
    played(example, size, keys)(f"{name}-{size[0]}x{size[1]}")


@pytest.mark.parametrize(("name", "key"), [("requests", "1"), ("kv", "2"), ("steps", "3"), ("rates", "4")])
def test_one_panel_alone_looks_as_before(example: Recording, name: str, key: str) -> None:
    played(example, (80, 24), key)(f"{name}-80x24")


def test_a_recorded_run_plays_through_every_key(example: Recording) -> None:
    """Each key meets two moments of the run, and leads back to the dashboard by Escape."""

    async def work() -> None:
        app = replaying(example, 0.0)
        bound = {binding.key for binding in Binding.make_bindings(TopApp.BINDINGS)}
        keys = [
            *sorted(bound - {"q", "ctrl+c", "ctrl+z", "slash"}),
            *BY_LETTER,
            "up",
            "down",
            "pagedown",
            "pageup",
            "end",
            "home",
        ]
        async with running(app) as pilot:
            player = app.source.player
            assert player is not None
            for moment, key in enumerate(keys * 2):
                player.seek(example.duration_s * moment / (2 * len(keys)))
                app.paint()
                await pilot.press(key)
                if len(app.screen_stack) > 1:
                    await pilot.press("down", "pagedown", "escape")
                assert len(app.screen_stack) == 1, key
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(work())


def over(work: Callable[[TopApp, Pilot[None]], Awaitable[None]], app: TopApp, size: tuple[int, int] = (80, 24)) -> None:
    async def drive() -> None:
        async with running(app, size) as pilot:
            await work(app, pilot)

    asyncio.run(drive())


def shown_ids(app: TopApp) -> list[int]:
    return [row.id for row in app.query_one(RequestTable)._rows]


def live_app(*numbers: int) -> TopApp:
    source = LiveSource(None)
    source.run = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    source.state.set_info(INFO)
    source.state.add(snapshot(1, requests=[request(number) for number in numbers]))
    return TopApp(source, token_text=lambda token: "")


def test_the_filter_narrows_as_one_types_and_escape_clears_it() -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"waiting")
        assert shown_ids(app) == [3, 7]
        await pilot.press("enter", "down")
        assert shown_ids(app) == [3, 7]
        await pilot.press("escape")
        assert sorted(shown_ids(app)) == list(range(1, 9))

    over(work, live_app(*range(1, 9)))


def test_shift_letters_s_r_and_the_column_names_sort() -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("I")
        assert shown_ids(app) == list(range(1, 9))
        await pilot.press("I")
        assert shown_ids(app) == list(range(8, 0, -1))
        await pilot.press("r")
        assert shown_ids(app) == list(range(1, 9))
        await pilot.press("s")
        assert app.query_one(RequestTable).view.sort == COLUMNS[1].name
        await pilot.click(RequestTable, offset=(3, 1))
        assert app.query_one(RequestTable).view.sort == "id"

    over(work, live_app(*range(1, 9)))


def test_the_cursor_stays_on_its_request_and_enter_or_a_click_opens_it() -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("I", "down", "down")  # on 3
        app.source.state.add(snapshot(2, requests=[request(number) for number in (3, 4, 5)]))
        app.paint()
        await pilot.press("enter")
        assert isinstance(app.screen, Sheet)
        assert app.screen._title == "Request 3"
        await pilot.press("escape")
        await pilot.click(RequestTable, offset=(3, 3))
        await pilot.click(RequestTable, offset=(3, 3))
        assert isinstance(app.screen, Sheet)
        assert app.screen._title == "Request 4"

    over(work, live_app(1, 2, 3, 4, 5))


def test_space_holds_the_picture_and_what_came_meanwhile_is_there_afterwards() -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        source = app.source
        assert isinstance(source, LiveSource)
        await pilot.press("space")
        source._on_event(snapshot(2))
        source._on_event(snapshot(3))
        assert source.state.snapshot == snapshot(1, requests=[request(1)])
        await pilot.press("space")
        assert source.state.snapshot == snapshot(3)
        assert (source.state.lost, len(source.state.points)) == (0, 3)

    over(work, live_app(1))


def test_a_click_on_the_scrub_line_goes_there_and_arrows_go_by_seconds(example: Recording) -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        player = app.source.player
        assert player is not None
        await pilot.click("#scrub", offset=(79, 0))
        assert player.position_s == example.duration_s
        await pilot.press("left", "left", "right", "shift+left")
        assert player.position_s == 0
        await pilot.press("full_stop", "full_stop", "comma", "plus")
        assert (player.position_s, player.speed) == (0.25, 2.0)

    over(work, replaying(example))


def test_resizing_changes_the_layout_in_place(example: Recording) -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        for size, gauges, pair in (((50, 15), True, False), ((80, 24), False, True), ((120, 40), False, True)):
            await pilot.resize_terminal(*size)
            await settle(app, pilot)
            assert (app.query_one("#gauges").display, app.query_one("#pair").display) == (gauges, pair)
            for lines in app.query(Lines):
                assert all(strip.cell_length == lines.size.width for strip in lines._strips if lines.size.area)

    over(work, replaying(example), (120, 40))


def test_themes_change_the_colours_and_the_palette_offers_the_commands(example: Recording) -> None:
    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        before = app.export_screenshot()
        app.theme = "textual-light"
        await pilot.pause(0.2)
        for lines in app.query(Lines):
            assert lines._palette is None or lines._palette[0] == "textual-light"
        assert app.export_screenshot() != before
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Explain", "Radix tree", "Filter", "Hold", "Sort by id", "Theme"} <= titles

    over(work, replaying(example))


@pytest.mark.parametrize(("columns", "shown"), [(80, "/ filter"), (50, "? help"), (36, "? help"), (24, "held")])
def test_the_footer_has_as_many_hints_as_fit_beside_what_the_source_says(columns: int, shown: str) -> None:
    app = live_app(1)
    app.source.toggle()
    (line,) = app._footer(columns, 1)
    assert width(line) == columns
    assert shown in plain(line)
    assert "held, 0 behind" in plain(line)


@pytest.mark.parametrize("before", ["", "e", "slash"])
def test_ctrl_c_leaves_from_everywhere(example: Recording, before: str) -> None:
    async def drive() -> None:
        app = replaying(example)
        async with running(app) as pilot:
            await pilot.press(*([before] if before else []), "ctrl+c")
        assert app.return_code == 130

    asyncio.run(drive())


def test_without_colours_the_parts_of_bars_still_differ(monkeypatch: pytest.MonkeyPatch, example: Recording) -> None:
    def bars(app: TopApp) -> str:
        return "".join(strip.text for strip in app.query_one("#steps", Lines)._strips[:-2])

    async def signs() -> str:
        app = replaying(example)
        async with running(app):
            return bars(app)

    assert "▒" not in asyncio.run(signs())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "▒ prefill" in asyncio.run(signs())


def test_of_several_engines_one_is_chosen_by_arrows_number_or_not_at_all(tmp_path: Path) -> None:
    engines = [RunningEngine(RunFolder(tmp_path / name), INFO, Launch(EngineOptions(), "")) for name in "ab"]

    async def work(app: TopApp, pilot: Pilot[None]) -> None:
        assert isinstance(app.screen, EnginePicker)
        await pilot.press("down", "enter")
        assert isinstance(app.source, LiveSource)
        assert app.source.state.info == INFO

    over(work, TopApp(LiveSource(None), token_text=lambda token: "", engines=engines))
    over(lambda app, pilot: pilot.press("2"), TopApp(LiveSource(None), token_text=lambda token: "", engines=engines))
