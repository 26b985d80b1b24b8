"""The recorded MOSS-VL results, through halves and store, for every way in which a checkpoint may be stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chiasm.cache.form import Form
from chiasm.models.checkpoint import split
from chiasm.models.registry import Model
from tests.checkpoints_tiny import split_qkv, write
from tests.oracles.moss_vl import CHECKPOINT, DATA
from tests.oracles.moss_vl.__main__ import main
from tests.oracles.moss_vl.compare import compare
from tests.oracles.moss_vl.report import Report

WEIGHTS = "model.safetensors"


def recorded_config() -> dict[str, object]:
    read: dict[str, object] = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    return read


@pytest.fixture
def oracle(tmp_path: Path) -> Path:
    """A copy of the recorded folder, to be changed."""
    return Path(shutil.copytree(DATA, tmp_path / "oracle"))


def change(folder: Path, file: str, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrites one file of tensors of an oracle folder."""
    save_file(how(load_file(folder / file)), folder / file)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_the_command_agrees_with_the_reference_and_prints_one_object_last() -> None:
    folders = ["--checkpoint", str(CHECKPOINT), "--oracle", str(DATA)]
    command = [sys.executable, "-m", "tests.oracles.moss_vl", *folders, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["ok"] is True
    expected = {name for name in load_file(DATA / "expected.safetensors") if ".hf." not in name}
    assert expected <= set(answer["worst"]), "every expected tensor is compared"
    assert answer["not_known"] == []
    assert all(".hf." in name for name in answer["not_followed"])


def test_without_json_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "mixed.prefill_logits" in out
    assert "rotated in every step" in out
    assert out.strip().splitlines()[-1].startswith("ok: ")


def agrees(encoder: Path, decoder: Path, form: Form = Form.CROSS_KV) -> Report:
    report = compare(encoder, decoder, DATA, form=form)
    assert report.ok, report.as_table()
    return report


def test_states_that_the_decoder_projects_agree_as_keys_and_values_do() -> None:
    agrees(CHECKPOINT, CHECKPOINT, Form.STATES)


@pytest.mark.parametrize(("form", "logits"), [(Form.CROSS_KV_INT8, 0.005), (Form.CROSS_KV_FP8, 0.025)])
def test_forms_of_eight_bits_move_the_logits_a_little_and_nothing_before_the_entries(form: Form, logits: float) -> None:
    report = compare(CHECKPOINT, CHECKPOINT, DATA, form=form)
    assert not report.ok and not report.faults, "the comparison sees it"
    for name, finding in report.failed.items():
        assert not {"states", "merged", "patch_embed", "text_only"} & set(name.split(".")), name
        if "logits" in name:
            assert finding.error <= logits, name
    assert "mixed.prefill_logits" in report.failed


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_fused_or_split_in_one_file_or_several(tmp_path: Path, fused: bool, shards: int) -> None:
    tensors = load_file(CHECKPOINT / WEIGHTS)
    stored = tensors if fused else split_qkv(tensors)
    folder = write(tmp_path / "checkpoint", recorded_config(), made=stored, shards=shards)
    agrees(folder, folder)


def test_rotary_keys_where_transformers_5_keeps_them(tmp_path: Path) -> None:
    config = recorded_config()
    text = config["text_config"]
    assert isinstance(text, dict)
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    folder = write(tmp_path / "checkpoint", config, made=load_file(CHECKPOINT / WEIGHTS))
    agrees(folder, folder)


def test_each_half_from_a_folder_of_its_own_weights(tmp_path: Path) -> None:
    model = Model(CHECKPOINT)
    folders = {}
    for half in ("encoder", "decoder"):
        folders[half] = tmp_path / half
        split(model.checkpoint, model.weights.names(half), folders[half])
    encoder, decoder = (set(load_file(folders[half] / WEIGHTS)) for half in ("encoder", "decoder"))
    assert encoder.isdisjoint(decoder)
    assert encoder | decoder == set(load_file(CHECKPOINT / WEIGHTS))
    assert not any("visual" in name for name in decoder)
    allowed = ("cross_attn.k_proj", "cross_attn.v_proj", "cross_attn.k_norm")
    assert all(
        any(part in name for part in allowed) for name in encoder if "language_model" in name or "lm_head" in name
    )
    assert Model(folders["encoder"]).checkpoint.fingerprint == Model(folders["decoder"]).checkpoint.fingerprint
    assert Model(folders["encoder"]).checkpoint.fingerprint == model.checkpoint.fingerprint
    agrees(folders["encoder"], folders["decoder"])


# -- other folders of the format ---------------------------------------------------------------------------------------


def test_cases_and_streams_of_other_names(oracle: Path) -> None:
    names = {"mixed.": "case_7.", "realtime.": "live.b.", "image_first.": "x."}

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            next((name.replace(a, b, 1) for a, b in names.items() if name.startswith(a)), name): tensor
            for name, tensor in tensors.items()
        }

    change(oracle, "inputs.safetensors", renamed)
    change(oracle, "expected.safetensors", renamed)
    (oracle / "oracle.json").unlink()
    report = agrees_with(oracle)
    assert "case_7.greedy.rotated.logits" in report.findings
    assert "live.b.rotated.logits" in report.findings
    assert "x.bf16.prefill_logits" in report.findings
    assert not report.not_known


def agrees_with(oracle: Path) -> Report:
    report = compare(CHECKPOINT, CHECKPOINT, oracle)
    assert report.ok, report.as_table()
    return report


def test_what_is_not_expected_is_not_compared(oracle: Path) -> None:
    change(oracle, "expected.safetensors", lambda t: {"image_first.prefill_logits": t["image_first.prefill_logits"]})
    (oracle / "oracle.json").write_text("{}", encoding="utf-8")
    report = agrees_with(oracle)
    assert "image_first.prefill_logits" in report.findings
    assert {name.split(".")[0] for name in report.findings} == {"media", "image_first"}


def test_a_blank_image_beside_a_prompt_without_media_changes_nothing(oracle: Path) -> None:
    blank = {
        "text_only.pixel_values": torch.zeros(64, 768),
        "text_only.grid_thw": torch.tensor([[1, 8, 8]]),
    }
    change(oracle, "inputs.safetensors", lambda t: t | blank)
    assert "text_only.prefill_logits" in agrees_with(oracle).findings


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "by"),
    [
        ("mixed.prefill_logits", 3e-4),
        ("mixed.layer4.k_pre_rope", 1e-3),
        ("mixed.text_position_ids", 1),
        ("image_first.row_visible", 1),
        ("realtime.rotated.ids", 1),
        ("realtime.rotated.logits", 3e-4),
        ("media.image0.resized_u8", 1),
        ("mixed.bf16.prefill_logits", 0.3),
    ],
)
def test_one_changed_tensor_fails_the_command(
    oracle: Path, tensor: str, by: float, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        before = tensors[tensor]
        return tensors | {tensor: (before + by).to(before.dtype) if before.dtype != torch.bool else ~before}

    change(oracle, "expected.safetensors", changed)
    assert main(["--oracle", str(oracle), "--json"]) == 1
    answer = printed(capsys)
    assert answer["ok"] is False
    assert list(answer["failed"]) == [tensor]  # type: ignore[call-overload]


def test_a_folder_that_expects_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("inputs", "expected"):
        save_file({"nothing": torch.zeros(1)}, tmp_path / f"{file}.safetensors")
    assert main(["--oracle", str(tmp_path), "--json"]) == 1
    assert printed(capsys)["ok"] is False


def test_a_checkpoint_or_a_folder_that_cannot_be_read_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(CHECKPOINT / WEIGHTS)
    del tensors["lm_head.weight"]
    folder = write(tmp_path / "checkpoint", recorded_config(), made=tensors)
    assert main(["--checkpoint", str(folder), "--json"]) == 1
    answer = printed(capsys)
    assert answer["ok"] is False
    assert "lm_head.weight" in str(answer["faults"])
    assert main(["--oracle", str(tmp_path / "nowhere"), "--json"]) == 1
    assert printed(capsys)["ok"] is False


def test_frames_without_placeholders_are_a_fault_and_the_other_cases_are_still_compared(oracle: Path) -> None:
    def shortened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"mixed.input_ids": tensors["mixed.input_ids"][:40].clone()}

    change(oracle, "inputs.safetensors", shortened)
    report = compare(CHECKPOINT, CHECKPOINT, oracle)
    assert not report.ok
    assert any("placeholders" in fault for fault in report.faults)
    assert report.findings["image_first.prefill_logits"].good
