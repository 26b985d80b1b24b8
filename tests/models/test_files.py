"""A checkpoint's files may hold anything: whatever is wrong in them is told as the checkpoint's fault, and shortly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import Checkpoint
from chiasm.models.moss_vl.config import read_config
from chiasm.models.reading import Reader, read_json
from chiasm.models.registry import SHIPPED, Model, find, open_model
from tests.checkpoints_tiny import TEXT, VISION, config, write

BEYOND: list[object] = [10**400, 2**31, -(10**4000)]
NO_NUMBERS: list[object] = [float("nan"), float("inf"), -1, -1.0, 0, 0.0, 10**400, True, "1e-6", [1e-6], {}]


def problems(data: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_config(data, "tiny")
    assert all(len(problem) < 400 for problem in caught.value.problems)
    return caught.value.problems


# -- JSON --------------------------------------------------------------------------------------------------------------

NO_JSON = {
    "empty": b"",
    "cut": b'{"a": ',
    "no UTF-8": b'{"a": "\xff"}',
    "integer of 5000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "a list": b"[]",
    "a number": b"NaN",
}


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_a_file_that_is_no_object_is_told(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|holds no object)"):
        Checkpoint(tmp_path)


def test_a_folder_in_a_files_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:8])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_is_finite_and_above_zero(key: str, value: object) -> None:
    (problem,) = problems(config(text={key: value}))
    assert problem.startswith(f"text_config.{key} is ")


@pytest.mark.parametrize("value", BEYOND, ids=["above", "just above", "below"])
@pytest.mark.parametrize(
    ("section", "key"),
    [(name, key) for name, keys in (("text", TEXT), ("vision", VISION)) for key in keys if type(keys[key]) is int],
)
def test_an_integer_is_within_reason(section: str, key: str, value: object) -> None:
    found = problems(config(**{section: {key: value}}))
    assert any(f"{section}_config.{key} " in problem for problem in found)


@pytest.mark.parametrize("value", BEYOND, ids=["above", "just above", "below"])
def test_integers_of_a_list_are_within_reason(value: object) -> None:
    found = problems(config(text={"cross_attention_layers": [1, value]}, vision={"deepstack_visual_indexes": [value]}))
    assert sum("must be a list of integers" in problem for problem in found) == 2


def test_more_layers_than_any_model_has_are_refused_before_they_are_listed() -> None:
    found = problems(config(text={"num_hidden_layers": 2**31 - 1}, vision={"depth": 2**31 - 1}))
    assert sum("must be at most 4096" in problem for problem in found) == 2


def test_what_is_shown_of_a_value_is_short() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    reader = Reader({"a": deep, "b": "x" * 10**6, "c": list(range(10**5))})
    reader.integer("a")
    reader.integer("b")
    reader.refuse_unless("c", 1, why="of the test")
    assert len(reader.problems) == 3 and all(len(problem) < 200 for problem in reader.problems)
    while deep:
        deep = deep[0]


# -- the checkpoint's own keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__all__", "int8", "nn", "Tensor", "torch.float32", "", None, 3, ["float32"], {}])
def test_a_type_that_weights_are_not_stored_in_is_told(name: object, tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(config(dtype=name)), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"dtype is .*must be one of bfloat16, float16, float32"):
        _ = Checkpoint(folder).dtype


def test_a_type_is_read_under_either_key(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    for keys in ({"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}):
        (folder / "config.json").write_text(json.dumps(config(**keys)), encoding="utf-8")
        assert Checkpoint(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("named", [None, "Moss", [], [3], [["a"]], [{}], ["a", "b"], {"a": 1}])
def test_an_architecture_is_one_name(named: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": named}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="architectures is"):
        Model(tmp_path)


@pytest.mark.parametrize("place", [3, 1.5, None, True, ["model-00001-of-00002.safetensors"], {"a": "b"}])
def test_an_index_names_a_file_for_every_tensor(place: object, tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    wrong = ["lm_head.weight", "model.separator_token"]
    index["weight_map"] |= dict.fromkeys(wrong, place)
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        _ = Checkpoint(folder).tensors
    assert caught.value.problems == tuple(f"{path.name} names no file for {name}" for name in wrong)


@pytest.mark.parametrize(
    "place", ["", ".", "..", "/", "../x", "a/b", "nul\0", "\ud800", "x" * 5000, "gone.safetensors"]
)
def test_a_name_that_is_no_file_of_the_folder_is_told(place: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", shards=2)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": place}}), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        _ = Checkpoint(folder).tensors
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("promised", [None, 3, [], "model.safetensors"])
def test_an_index_without_a_map_is_told(promised: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": promised}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        _ = Checkpoint(tmp_path).tensors


def test_processor_settings_are_found_in_the_file_of_every_release_the_newest_first(tmp_path: Path) -> None:
    """transformers 4 wrote a file for each kind, transformers 5 writes both into one."""
    old, new = {"fps": 1}, {"fps": 2}
    write(tmp_path / "tiny")
    checkpoint = Checkpoint(tmp_path / "tiny")
    assert checkpoint.processor_files == {}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (checkpoint.directory / name).write_text(json.dumps(old), encoding="utf-8")
    whole = checkpoint.directory / "processor_config.json"
    whole.write_text(json.dumps({"processor_class": "AnyProcessor", "video_processor": new}), encoding="utf-8")
    assert checkpoint.processor_files == {"preprocessor_config.json": old, "video_preprocessor_config.json": new}
    whole.write_text(json.dumps({"image_processor": [1]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"image_processor in processor_config\.json is \[1\], no object"):
        assert checkpoint.processor_files


def test_a_template_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="no single template"):
        _ = Checkpoint(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        _ = Checkpoint(tmp_path).chat_template


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "..", "a\0b", "x" * 5000, "owner/name", "\ud800"])
def test_a_name_that_is_no_checkpoint_is_told(name: str) -> None:
    with pytest.raises(CheckpointError):
        Model(find(name))


@pytest.mark.parametrize("name", ["owner/name", "Owner-1/name.v2_x"])
@pytest.mark.parametrize(
    "network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}], ids=["off", "cut"]
)
def test_a_hub_name_without_a_network_is_told(name: str, network: dict[str, str], tmp_path: Path) -> None:
    """In a process of its own, because the hub's client reads its settings once. The time limit is the test run's."""
    code = (
        "import sys\n"
        "from chiasm.errors import CheckpointError\n"
        "from chiasm.models.registry import find\n"
        "try:\n"
        "    find(sys.argv[1], download=True)\n"
        "except CheckpointError as error:\n"
        "    sys.exit('told: ' + str(error))\n"
    )
    away = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**away, **network, "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        f"told: {name}: is no folder here, and the hub"
    )


@pytest.mark.parametrize("name", ["/a/b", "a/b/c", "no such/name!", "../name", "./name", "a/", "/a", "a/b\n"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _never)
    with pytest.raises(CheckpointError, match="is neither a folder nor a checkpoint that comes with the package"):
        find(name, download=True)


def test_a_path_that_is_a_file_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _never)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    with pytest.raises(CheckpointError, match="is neither a folder"):
        find("a/b", download=True)


def _never(*args: object, **kwargs: object) -> str:
    raise AssertionError("the hub was asked")


def test_a_model_is_called_by_its_folder_or_its_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "0123abcd"
    shutil.copytree(SHIPPED / "digits", snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **_: str(snapshot))
    assert open_model("owner/name").name == "owner/name"
    assert open_model("digits").name == "digits"
    monkeypatch.chdir(snapshot)
    assert [open_model(given).name for given in (".", f"{snapshot}/", "../0123abcd")] == ["0123abcd"] * 3
    assert Model(snapshot, "another").name == "another"


# -- what text it makes ------------------------------------------------------------------------------------------------


def test_weights_tokenizer_and_template_each_change_the_fingerprint_of_what_text_is_made(tmp_path: Path) -> None:
    def made(name: str, tokenizer: str = "{}", template: str = "x", *, seed: int = 0) -> bytes:
        folder = write(tmp_path / name, seed=seed)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Checkpoint(folder).text_fingerprint

    first = made("first")
    assert len(first) == 32 and made("same") == first
    others = [
        made("weights", seed=1),
        made("tokenizer", "{ }"),
        made("template", template="y"),
        made("moved", "", "{}x"),
    ]
    assert len({first, *others}) == 5
