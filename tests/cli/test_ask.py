"""`chiasm ask` as a person runs it, against the shipped model in its three processes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import chiasm
from chiasm.cli.app import app
from chiasm.cli.ask import by_file, only
from chiasm.cli.failure import CommandFailed
from chiasm.cli.telling import Teller
from chiasm.client import Event, FramesVisible, Started, Token
from chiasm.errors import InvalidRequest
from tests.cli.serving import CHIASM, Served, until
from tests.cli.serving import chiasm as run
from tests.rpc.plain import metrics

HELD_OUT = Path(chiasm.__file__).parent / "checkpoints" / "digits" / "held_out"
ANSWERS: dict[str, Any] = json.loads((HELD_OUT / "answers.json").read_text(encoding="utf-8"))
CLIP = ANSWERS["clips"][0]
FILE = str(HELD_OUT / CLIP["file"])
DIGITS = " ".join(map(str, CLIP["digits"]))


def three_lines(done: subprocess.CompletedProcess[str]) -> str:
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"], done.stderr
    assert done.stdout == ""
    return done.stderr


def test_the_answer_alone_goes_to_standard_output(served: Served) -> None:
    done = run("ask", "Read the digits.", FILE, "--target", served.target)
    assert (done.returncode, done.stdout) == (0, f"{DIGITS}\n"), done.stderr
    assert "frames    0.0 1.0 2.0 s visible from token 0 on" in done.stderr
    assert "3 frames" in done.stderr.splitlines()[-1]


def test_json_is_one_object_with_everything_that_a_program_wants(served: Served) -> None:
    done = run("ask", "--json", "Read the digits.", FILE, CHIASM_TARGET=served.target)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["text"], said["frames"], said["finish_reason"]) == (DIGITS, CLIP["seconds"], "stop")
    assert said["usage"]["output_tokens"] == len(said["ids"]) > 0
    assert said["usage"]["media"][0]["frames_used"] == len(CLIP["digits"])
    assert said["model"] == "digits"
    assert said["seconds"] >= said["first_token_seconds"] > 0
    assert len(said["request_id"]) > 0
    assert DIGITS in done.stderr


def test_images_and_videos_are_shown_in_the_order_they_are_named(served: Served) -> None:
    names = ("image_2.png", "image_7.png")
    for order in (names, names[::-1]):
        done = run("ask", "Read the digits.", *(str(HELD_OUT / name) for name in order), "--target", served.target)
        assert done.stdout.split() == [name[6] for name in order], done.stderr


def test_sampling_of_videos_is_said_by_options(served: Served) -> None:
    done = run("ask", "--json", "--max-frames", "2", "Read the digits.", FILE, "--target", served.target)
    assert len(json.loads(done.stdout)["frames"]) == 2
    done = run("ask", "--json", "--max-tokens", "1", "Read the digits.", FILE, "--target", served.target)
    said = json.loads(done.stdout)
    assert (said["finish_reason"], len(said["ids"])) == ("length", 1)
    picture = str(HELD_OUT / "image_2.png")
    done = run("ask", "--fps", "2", "Read the digits.", picture, "--target", served.target)
    assert done.returncode == 2
    assert "--fps 2.0 without a video" in three_lines(done)


def test_a_question_without_media_is_one_too(served: Served) -> None:
    done = run("ask", "--json", "--max-tokens", "2", "Read the digits.", "--target", served.target)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["frames"] == []


def test_a_file_that_is_at_fault_is_named_by_its_path(served: Served, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(Path(FILE).read_bytes()[:2000])
    done = run("ask", "Read the digits.", FILE, str(broken), "--target", served.target)
    assert done.returncode == 2
    assert str(broken) in three_lines(done).splitlines()[1]
    done = run("ask", "Read the digits.", str(tmp_path / "none.mp4"), "--target", served.target)
    assert done.returncode == 2
    assert "none.mp4" in three_lines(done)


def test_an_unknown_model_is_told_with_those_there_are(served: Served) -> None:
    done = run("ask", "--model", "digit", "Read the digits.", FILE, "--target", served.target)
    assert done.returncode == 2
    assert "digits" in three_lines(done)


def test_where_nobody_listens_one_is_told_what_to_start() -> None:
    done = run("ask", "Read the digits.", FILE, "--target", "127.0.0.1:1")
    assert done.returncode == 1
    assert "chiasm serve" in three_lines(done)
    assert "127.0.0.1:1" in done.stderr


def test_ctrl_c_cancels_the_request(served: Served) -> None:
    encoder = served.pid("encoder-0")
    os.kill(encoder, signal.SIGSTOP)  # the answer does not come
    try:
        process = subprocess.Popen(
            [*CHIASM, "ask", "Read the digits.", FILE, "--target", served.target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                until(lambda: waits_in_a_call(served))
                process.send_signal(signal.SIGINT)
                said, told = process.communicate(timeout=40)
            finally:
                process.kill()
    finally:
        os.kill(encoder, signal.SIGCONT)
    assert (process.returncode, said) == (130, "")
    assert told == "interrupted, the request was cancelled\n"
    until(lambda: not waits_in_a_call(served))


def waits_in_a_call(served: Served) -> bool:
    """Whether the router has a request, by what it measures."""
    http = served.until("router", "ready")["http"]
    return metrics(http)["chiasm_num_requests_running"] == 1


# -- what it is made of ------------------------------------------------------------------------------------------------


def test_the_only_model_needs_no_name_and_of_several_one_must_be_named() -> None:
    assert only(["one"]) == "one"
    with pytest.raises(CommandFailed, match="2 models: one, two") as caught:
        only(["one", "two"])
    assert (caught.value.exit_code, caught.value.fix) == (2, "--model one")
    with pytest.raises(CommandFailed, match="no model"):
        only([])


def test_an_error_about_a_medium_names_its_file() -> None:
    media = [Path("a.png"), Path("b.mp4")]
    for item, told in [
        ("messages[0].content[1]", "b.mp4"),
        ("messages[0].content[1].video.fps", "b.mp4"),
        ("messages[0].content[2]", "messages[0].content[2]"),
        (None, None),
    ]:
        assert by_file(InvalidRequest("MEDIA_EMPTY", "empty", item=item), media).item == told


def test_the_answer_is_passed_on_as_it_is_wherever_what_is_seen_changes() -> None:
    answers = io.StringIO()
    teller = Teller(Console(file=io.StringIO()), answers)
    events: list[Event] = [
        Started((), 30),
        Token("a\t[b]", (1,), 0, 2),
        FramesVisible(4, 3.0, 1),
        Token("\n c ", (2,), 1, 4),
    ]
    for event in events:
        teller.tell(event, 0.5)
    teller.end_line()
    assert answers.getvalue() == "a\t[b]\n c \n"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(["ask", "--max-frame", "3", "x"], "--max-frames"), (["serv", "digits"], "serve"), (["helth"], "health")],
)
def test_a_typing_mistake_is_answered_with_the_nearest_name(arguments: list[str], nearest: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert nearest in done.output


def test_the_verbs_come_in_the_order_in_which_one_meets_them() -> None:
    told = CliRunner().invoke(app, ["--help"]).output
    places = [told.index(f"│ {verb} ") for verb in ("demo", "serve", "ask", "health", "doctor")]
    assert places == sorted(places)
