"""Settings from flags, environment and file, against the real sources: what wins, and what a person is told."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from chiasm.settings import (
    RoleSettings,
    SettingsError,
    Targets,
    WorkerSettings,
    is_private,
    load,
    read_password,
    read_secret,
)

PROGRAM = "python -m encoder_service"
WORKER = ["--model", "digits", "--arena", "/dev/shm/none", "--workers-secret-file", "secret"]


class FrontSettings(RoleSettings):
    """What a front can be told."""

    encoders: Targets = Field(description="where the encoders are")
    api_key: SecretStr | None = Field(default=None, max_length=4, description="a secret by value")
    max_waiting: int = Field(default=8, ge=1, description="a number")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHIASM_MAX_WAITING", "CHIASM_ENCODERS", "CHIASM_LISTEN", "CHIASM_MODEL"):
        monkeypatch.delenv(name, raising=False)


def refused(kind: type[RoleSettings], *argv: str) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(kind, argv, program=PROGRAM)
    return caught.value


def test_flags_are_the_fields_with_dashes_and_values_have_their_types() -> None:
    settings = load(
        WorkerSettings,
        [*WORKER, "--arena-bytes", "64MiB", "--supervised", "--dtype=bfloat16", "--drain-seconds", "2.5"],
        program=PROGRAM,
    )
    assert settings.workers_secret_file == Path("secret")
    assert (settings.arena_bytes, settings.supervised, settings.dtype) == (64 << 20, True, "bfloat16")
    assert (settings.drain_seconds, settings.listen, settings.http) == (2.5, "127.0.0.1:0", "none")


def test_flags_win_over_the_environment_which_wins_over_the_file_which_wins_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "front.yaml"
    file.write_text("max-waiting: 1\nencoders: a:1,b:2\nlog_format: json\n")
    argv = ["--config", str(file)]
    read = load(FrontSettings, argv, program=PROGRAM)
    assert (read.max_waiting, read.encoders, read.log_format) == (1, ("a:1", "b:2"), "json")
    monkeypatch.setenv("CHIASM_MAX_WAITING", "2")
    monkeypatch.setenv("CHIASM_ENCODERS", "c:3")
    read = load(FrontSettings, argv, program=PROGRAM)
    assert (read.max_waiting, read.encoders) == (2, ("c:3",))
    read = load(FrontSettings, [*argv, "--max-waiting", "3"], program=PROGRAM)
    assert (read.max_waiting, read.encoders, read.supervised) == (3, ("c:3",), False)


def test_settings_that_a_program_makes_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIASM_MAX_WAITING", "2")
    assert FrontSettings(encoders=("a:1",)).max_waiting == 8


def test_lists_are_parted_by_commas_and_each_part_is_checked() -> None:
    argv = ["--encoders", "dns:///encoders:50052, unix:/run/e ,[::1]:7"]
    assert load(FrontSettings, argv, program=PROGRAM).encoders == ("dns:///encoders:50052", "unix:/run/e", "[::1]:7")
    for bad in ("a", "a:0", "a:70000", ":1", "dns:///a", "unix:", "a:1,,b:2"):
        assert refused(FrontSettings, "--encoders", bad).what.startswith("encoders is"), bad


def test_an_unknown_flag_is_answered_with_the_nearest() -> None:
    error = refused(WorkerSettings, "--modle", "digits")
    assert (error.what, error.where, error.fix) == ("--modle is not a setting", PROGRAM, "did you mean --model?")
    assert refused(WorkerSettings, "--model=digits", "--arena-byte=3").fix == "did you mean --arena-bytes?"
    assert refused(WorkerSettings, *WORKER, "--zzz").fix == f"{PROGRAM} --help lists every setting"
    assert refused(WorkerSettings, *WORKER, "digits").what == "'digits' is given without a flag"
    assert "expected one argument" in refused(WorkerSettings, "--model").what


def test_an_unknown_name_in_the_file_is_answered_with_the_nearest_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "front.yaml"
    file.write_text("max_wating: 3\n")
    error = refused(FrontSettings, "--config", str(file))
    assert (error.what, error.where) == ("max_wating is not a setting", str(file))
    assert error.fix == "did you mean max_waiting?"


@pytest.mark.parametrize(
    ("text", "what"),
    [("a: [1", "the settings file is not YAML"), ("- 1\n", "holds no names"), ("max_waiting: many\n", "is 'many'")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "front.yaml"
    file.write_text(text)
    error = refused(FrontSettings, "--encoders", "a:1", "--config", str(file))
    assert what in error.what
    assert error.where.startswith(str(file))
    assert "No such file" in refused(FrontSettings, "--config", str(tmp_path / "none")).what


def test_everything_that_is_wrong_is_told_at_once_with_where_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIASM_MAX_WAITING", "0")
    error = refused(FrontSettings, "--listen", "5000", "--http", "x")
    assert error.where == f"--listen, --http, {PROGRAM}, CHIASM_MAX_WAITING"
    for part in ("listen is '5000': must be HOST:PORT", "http is 'x'", "--encoders is missing", "max_waiting is '0'"):
        assert part in error.what


def test_a_secret_is_neither_printed_nor_told_in_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(FrontSettings, "--encoders", "a:1", "--api-key", "hunter2")
    assert "api_key is" in error.what
    assert "hunter2" not in error.what
    with pytest.raises(SystemExit):
        load(FrontSettings, ["--encoders", "a:1", "--api-key", "hunt", "--print-config"], program=PROGRAM)
    assert "hunt" not in capsys.readouterr().out


def test_every_value_is_shown_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "front.yaml"
    file.write_text("drain_seconds: 3\n")
    monkeypatch.setenv("CHIASM_MAX_WAITING", "2")
    with pytest.raises(SystemExit) as ended:
        load(FrontSettings, ["--encoders", "a:1", "--config", str(file), "--print-config"], program=PROGRAM)
    assert ended.value.code == 0
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert shown["--max-waiting"] == ["2", "environment"]
    assert shown["--drain-seconds"] == ["3.0", str(file)]
    assert shown["--encoders"][-1] == "flag"
    assert shown["--http"] == ["none", "default"]


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(FrontSettings, ["--help"], program=PROGRAM)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--encoders", "--listen", "--http", "--log-format", "--supervised", "--config", "--print-config"):
        assert flag in text
    assert "What a front can be told" in text


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "front.example:1"])
def test_an_address_that_others_reach_must_be_meant(listen: str) -> None:
    assert not is_private(listen)
    error = refused(FrontSettings, "--encoders", "a:1", "--listen", listen)
    assert listen in error.what
    assert "--insecure" in error.what
    argv = ["--encoders", "a:1", "--listen", listen, "--insecure"]
    assert load(FrontSettings, argv, program=PROGRAM).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:1", "[::1]:1", "unix:/run/s"])
def test_an_address_of_this_machine_needs_nothing_more(listen: str) -> None:
    assert load(FrontSettings, ["--encoders", "a:1", "--listen", listen], program=PROGRAM).listen == listen


def test_a_secret_file_is_its_owners_alone_and_holds_64_hex_digits(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0a" * 32 + "\n")
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        with pytest.raises(SettingsError, match=f"mode {mode:04o}") as caught:
            read_secret(file)
        assert caught.value.fix == f"chmod 600 {file}"
    file.chmod(0o600)
    assert read_secret(file) == b"\x0a" * 32
    for bad in ("", "0a" * 31, "0a" * 33, "zz" * 32, "passphrase"):
        file.write_text(bad)
        with pytest.raises(SettingsError, match="64 hex digits") as caught:
            read_secret(file)
        assert not bad or bad not in caught.value.what
    with pytest.raises(SettingsError, match="No such file"):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://host:6379",
        "rediss://user@host:6380/0",
        "redis://[::1]:1/",
        "unix:///run/redis",
        "unix://u@/r",
    ],
)
def test_a_shared_store_is_named_by_a_url(url: str) -> None:
    assert load(WorkerSettings, [*WORKER, "--redis", url], program=PROGRAM).redis == url


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host", "redis://:hunter2@host:1", "rediss://u:hunt@er2@host:1", "unix://u:hunter2@/r",
        "host:6379", "http://host", "redis://", "redis://host/1", "redis://host?db=2", "redis://host:port", "unix://",
        "unix://host/path", "redis://host#a",
    ],
)  # fmt: skip
def test_what_is_no_such_url_or_holds_a_password_is_refused_and_the_password_not_repeated(url: str) -> None:
    error = refused(WorkerSettings, *WORKER, "--redis", url)
    assert error.where == "--redis"
    assert "hunt" not in error.what


@pytest.mark.parametrize(
    "said",
    [
        ("--redis-password-file", "f"),
        ("--redis", "redis://host", "--redis-ca-file", "f"),
        ("--redis", "rediss://host", "--redis-cert-file", "f"),
        ("--redis-key-file", "f"),
        ("--redis", "redis://host", "--redis-namespace", "a*"),
        ("--redis", "redis://host", "--redis-policy", "never"),
    ],
)
def test_what_does_not_go_together_in_a_shared_store_is_refused(said: tuple[str, ...]) -> None:
    assert "redis" in refused(WorkerSettings, *WORKER, *said).what


def test_a_password_is_a_file_of_its_owner_and_whatever_else_is_refused_without_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(0o600)
    with pytest.raises(SettingsError, match="empty"):
        read_password(file)
    file.write_text("hunter2 with spaces\n", encoding="utf-8")
    assert read_password(file) == "hunter2 with spaces"
    file.write_text(" spaces at both ends \r\n", encoding="utf-8")
    assert read_password(file) == " spaces at both ends "
    for unfit, said in ((b"x" * 5000, "4096 bytes"), (b"hunter2\xff", "UTF-8")):
        file.write_bytes(unfit)
        with pytest.raises(SettingsError, match=said):
            read_password(file)
    file.chmod(0o640)
    with pytest.raises(SettingsError, match="0640") as caught:
        read_password(file)
    assert "hunter2" not in caught.value.what
    with pytest.raises(SettingsError):
        read_password(tmp_path / "none")


def test_the_error_can_be_copied() -> None:
    error = SettingsError("what", "where", "fix")
    again = copy.copy(error)
    assert (again.what, again.where, again.fix, str(again)) == ("what", "where", "fix", "what")
