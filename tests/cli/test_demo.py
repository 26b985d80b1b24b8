"""`chiasm demo` as a person runs it: in a process of its own, on what comes with it and on files of one's own."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import chiasm
from chiasm.cli.demo import as_object, show
from chiasm.cli.failure import CommandFailed, code, lines
from chiasm.cli.subject import READ, Subject, choose, kind_of, model_folder
from chiasm.cli.telling import Teller, listed
from chiasm.cli.weights import parameters
from chiasm.client import AsyncClient, Event, FramesVisible, Started, TimelineFrame, Token
from chiasm.errors import (
    CheckpointError,
    ChiasmError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
)
from tests.client.fake import TEXT, FakeTransport
from tests.media.make import save, scene

HELD_OUT = Path(chiasm.__file__).parent / "checkpoints" / "digits" / "held_out"
ANSWERS: dict[str, Any] = json.loads((HELD_OUT / "answers.json").read_text(encoding="utf-8"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from chiasm.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_demo_reads_the_held_out_clip_rightly_and_twice() -> None:
    done = run("demo", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    longest = max(ANSWERS["clips"], key=lambda clip: len(clip["digits"]))
    assert result["answer"] == result["answer_second"] == result["expected"] == " ".join(map(str, longest["digits"]))
    assert result["right"] is True
    assert result["frames"] == longest["seconds"]
    assert set(result["visible"]) == {len(longest["digits"])}
    assert (result["encoded_units_first"], result["encoded_units_second"]) == (len(longest["digits"]), 0)
    assert result["seconds_first"] >= result["first_token_seconds_first"] > 0
    assert "visible from token 0" in done.stderr
    assert "right" in done.stderr


def test_a_file_of_ones_own_is_asked_about_with_a_question_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "no suffix"
    path.write_bytes(save(scene(64, 64)))
    done = run("demo", str(path), "--question", "What is this?", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["expected"], result["right"], result["frames"]) == (None, None, [None])
    assert (result["question"], result["file"]) == ("What is this?", str(path))
    assert (result["encoded_units_first"], result["encoded_units_second"]) == (1, 0)
    assert "1 image visible" in done.stderr


@pytest.mark.parametrize("what", ["missing", "text", "folder"])
def test_a_file_that_cannot_be_asked_about_is_told_in_three_lines(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "text":
        path.write_text("not a picture")
    if what == "folder":
        path.mkdir()
    done = run("demo", str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()
    assert [line.split()[0] for line in told] == ["error:", "where", "fix"]
    assert str(path) in told[1]


def test_the_version_and_the_help() -> None:
    assert run("--version").stdout == f"chiasm {chiasm.__version__}\n"
    told = run("demo", "--help")
    assert told.returncode == 0
    assert "held-out clip" in told.stdout


def test_an_unknown_model_is_told() -> None:
    done = run("demo", "--model", "nobody")
    assert (done.returncode, done.stderr.splitlines()[1]) == (2, "  where  nobody")


@pytest.mark.parametrize("stage", ["chiasm", "loading"])
def test_ctrl_c_ends_it_and_all_it_started_without_a_traceback(stage: str) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", "from chiasm.cli import main; main()", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a terminal does: Ctrl-C goes to the processes it started as well
    )
    with started:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith(stage):
                break
        os.killpg(started.pid, signal.SIGINT)
        _, told = started.communicate(timeout=60)
    assert started.returncode == 130, told
    assert told.splitlines()[0] == "interrupted, the request was cancelled"
    assert "Traceback" not in told
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)


# -- what it is made of ------------------------------------------------------------------------------------------------


def test_what_is_right_is_known_for_what_comes_with_the_model() -> None:
    clip, image = ANSWERS["clips"][0], ANSWERS["images"][0]
    subject = choose(HELD_OUT / clip["file"], None, "digits")
    assert (subject.question, subject.expected) == (READ, " ".join(map(str, clip["digits"])))
    at = choose(HELD_OUT / clip["file"], "Which digit is at 1.0 seconds?", "digits")
    assert at.expected == str(clip["digits"][1])
    assert choose(HELD_OUT / clip["file"], "Which digit is at 9.0 seconds?", "digits").expected is None
    assert choose(HELD_OUT / clip["file"], "What colour is it?", "digits").expected is None
    picture = choose(HELD_OUT / image["file"], None, "digits")
    assert (picture.kind, picture.expected) == ("image", str(image["digit"]))


def test_an_equal_name_elsewhere_is_not_held_out(tmp_path: Path) -> None:
    copy = tmp_path / ANSWERS["clips"][0]["file"]
    copy.write_bytes(save(scene()))
    subject = choose(copy, None, "digits")
    assert (subject.expected, subject.held_out) == (None, False)


def test_bytes_decide_what_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(save(scene()))
    assert kind_of(path) == "image"
    path.write_bytes(save(scene(), "GIF"))
    assert kind_of(path) == "video"
    assert kind_of(HELD_OUT / ANSWERS["clips"][0]["file"]) == "video"


def test_a_checkpoint_without_clips_needs_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest) as caught:
        choose(None, None, str(tmp_path))
    assert caught.value.reason == "FIELD_MISSING"
    with pytest.raises(CheckpointError):
        choose(None, None, "nobody")


def test_parameters_are_counted_in_the_weights() -> None:
    from safetensors import safe_open

    folder = model_folder("digits")
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    counted = 0
    for shape in shapes:
        size = 1
        for axis in shape:
            size *= axis
        counted += size
    assert parameters(folder) == counted


def placed(count: int) -> tuple[TimelineFrame, ...]:
    return tuple(TimelineFrame(0, i, i, float(i), (1, 4, 4), 5, i) for i in range(count))


def test_an_answer_is_told_with_what_was_seen_at_each_token() -> None:
    file = io.StringIO()
    teller = Teller(Console(file=file, width=200, highlight=False, soft_wrap=True))
    events: list[Event] = [
        Started(placed(4), 30),
        FramesVisible(2, 1.0, 0),
        Token("3", (1,), 0, 2),
        FramesVisible(4, 3.0, 1),
        Token(" 7", (2,), 1, 4),
    ]
    for event in events:
        teller.tell(event, 0.5)
    told = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert told == [
        "frames 0.0 1.0 s visible from token 0 on after 500 ms",
        "answer 3",
        "frames 0.0 1.0 2.0 3.0 s visible from token 1 on after 500 ms",
        "answer 7",
    ]


@pytest.mark.parametrize(("expected", "right"), [(TEXT, True), ("1 2", False), (None, None)])
async def test_right_wrong_and_unknown_are_told_apart(expected: str | None, right: bool | None) -> None:
    file = io.StringIO()
    subject = Subject(HELD_OUT / "clip_3.mp4", "video", READ, expected, held_out=True)
    async with AsyncClient(transport=FakeTransport().opener) as client:
        shown = await show(client, "fake", subject, Console(file=file, width=200, highlight=False, soft_wrap=True))
    assert shown.right is right
    assert as_object(shown, "fake")["right"] is right
    told = [line.strip() for line in file.getvalue().splitlines()]
    assert {True: "right", False: "wrong, right is 1 2", None: "nobody told what is right"}[right] in told
    assert (shown.first.encoded, shown.second.encoded) == (1, 1)
    assert "again     2 of 3 units from the cache, 1 encoded" in file.getvalue()


def test_many_frames_are_told_by_their_ends() -> None:
    assert listed(placed(30)) == "0.0 1.0 2.0 … 29.0 s"
    assert listed(()) == "0 images"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(2, "No such file or directory", "x.mp4"), 2),
        (InvalidRequest("MEDIA_EMPTY", "The medium has no bytes.", item="x.mp4", request_id="r1"), 2),
        (CheckpointError("x", ["a is missing", "b is unused"]), 2),
        (Overloaded("QUEUE_FULL", "the queue is full", retry_after=1.5), 1),
        (ServerError("INTERNAL", "lost"), 1),
        (DeadlineExceeded("too slow", stage="encode"), 1),
        (ChiasmError("something"), 1),
    ],
)
def test_every_failure_is_three_lines_and_an_exit_code(error: ChiasmError | OSError, expected: int) -> None:
    what, where, fix = lines(error)
    assert what.startswith("error: ")
    assert where.startswith("  where  ")
    assert len(where) > 9
    assert fix.startswith("  fix    ")
    assert "\n" not in what + where + fix
    assert code(error) == expected


def test_a_failure_names_place_reason_and_request() -> None:
    error = InvalidRequest("MEDIA_EMPTY", "The medium has no bytes.", item="x.mp4", request_id="r1")
    assert lines(error)[1] == "  where  x.mp4 · MEDIA_EMPTY · request r1"
    assert lines(Overloaded("QUEUE_FULL", "full", retry_after=1.5))[2] == "  fix    try again in 1.5 s"
    long = InvalidRequest("CONTEXT_LENGTH_EXCEEDED", "too long", facts={"fits_with": "max_frames=38"})
    assert lines(long)[2] == "  fix    ask with --max-frames 38"


def test_a_failure_of_a_command_can_be_copied() -> None:
    failed = copy.copy(CommandFailed("what", "where", "fix", code=2, before=["a"]))
    assert (lines(failed), failed.exit_code, failed.before) == (
        ("error: what", "  where  where", "  fix    fix"),
        2,
        ("a",),
    )


def test_a_hub_name_is_fetched_and_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "0123abcd"
    shutil.copytree(model_folder("digits"), snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **_: str(snapshot))
    assert model_folder("owner/name") == snapshot
    assert choose(None, None, "owner/name").path.parent == snapshot / "held_out"


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        model_folder(str(tmp_path))
