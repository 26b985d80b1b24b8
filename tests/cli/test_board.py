"""What people are shown of a log."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from chiasm.cli.board import Board, as_json, ready_line
from chiasm.cli.child import WRITTEN_PAST, Record, record
from chiasm.cli.telling import size


def said(event: str, role: str = "encoder-0", level: str = "info", **facts: object) -> Record:
    made = {"timestamp": "2026-01-02T03:04:05.6Z", "level": level, "logger": "l", "event": event, "role": role}
    return {**made, **facts}


def shown(*records: Record, quiet: bool = False, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=200, soft_wrap=True, highlight=False, markup=False, force_terminal=terminal)
    board = Board(console, quiet=quiet)
    for one in records:
        board.tell(one)
    board.close()
    return file.getvalue()


def test_weights_are_a_line_for_every_tenth_where_there_is_no_terminal() -> None:
    loading = [said("loading", model="m", done=done, total=2000) for done in (*range(0, 2000, 10), 2000, 2000)]
    lines = shown(*loading).splitlines()
    assert len(lines) == 11
    assert lines[4].split() == ["loading", "encoder-0", "40", "%", "800", "B", "of", "2.0", "KiB"]
    assert "100 %" in lines[-1]
    assert shown(*loading, quiet=True) == ""


def test_weights_are_bars_on_a_terminal_and_leave_nothing() -> None:
    half = shown(
        said("loading", model="m", done=1, total=2),
        said("loading", role="decoder-0", model="m", done=2, total=2),
        said("ready", role="serve", target="127.0.0.1:50051", seconds=1.0),
        terminal=True,
    )
    assert "encoder-0" in half
    assert "decoder-0" in half
    assert "ready in 1.0 s" in half


def test_the_life_of_a_role_is_told_in_few_words_and_the_rest_as_it_was_logged() -> None:
    lines = shown(
        said("starting", version="0.1.0", pid=1),
        said("listening", target="t", http="none"),
        said("ready", target="t", http="none", seconds=2.5),
        said("something", level="warning", item="x", count=3),
        said("died", exit=-9, again_in=0.1, level="warning"),
        said("failed", level="error", exception="Traceback …\nValueError"),
        said("not JSON", logger=WRITTEN_PAST),
        said("draining", role="router", seconds=30.0),
        said("ready", role="serve", target="127.0.0.1:50051", seconds=1.0),
        said("loading", model="m", done=1, total=2),
        said("not JSON either", logger=WRITTEN_PAST),
        said("draining", role="decoder-0", seconds=30.0),
        said("draining", role="router", seconds=30.0),
        said("stopped", role="router"),
    ).splitlines()
    assert lines[0].split() == ["encoder-0", "ready", "after", "2500", "ms"]
    assert lines[1:] == [
        "03:04:05 encoder-0 warning something item=x count=3",
        "03:04:05 encoder-0 warning died exit=-9 again_in=0.1",
        "03:04:05 encoder-0 error failed",
        "Traceback …",
        "ValueError",
        'ready in 1.0 s · try: chiasm ask "What happens?" clip.mp4',
        "03:04:05 encoder-0 not JSON either",
        "ending    up to 30 s for requests that are running; Ctrl-C again ends at once",
    ]


def test_a_quiet_board_shows_what_goes_wrong_only() -> None:
    lines = shown(said("something"), said("ready", seconds=1), said("odd", level="error"), quiet=True).splitlines()
    assert lines == ["03:04:05 encoder-0 error odd"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:50051", "chiasm ask "),
        ("0.0.0.0:50051", "chiasm ask "),
        ("127.0.0.1:4000", "chiasm ask --target localhost:4000 "),
        ("[::]:4000", "chiasm ask --target localhost:4000 "),
        ("unix:/run/chiasm.sock", "chiasm ask --target unix:/run/chiasm.sock "),
    ],
)
def test_the_last_line_says_what_to_do_next(target: str, expected: str) -> None:
    assert ready_line(target, 4.24) == f'ready in 4.2 s · try: {expected}"What happens?" clip.mp4'


def test_a_record_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    as_json(record("über\nzwei", level="info", logger="l", role="r", path=object))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert json.loads(err)["event"] == "über\nzwei"


def test_sizes_have_units() -> None:
    assert [size(count) for count in (0, 1023, 1536, 100 << 20, 3 << 30, 5 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "100 MiB", "3.0 GiB", "5.0 TiB")
    ]
