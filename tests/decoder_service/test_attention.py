"""Which attention a decoder is told to serve with, and whether in graphs: flags, settings of one process, refusals."""

from __future__ import annotations

import pytest

from chiasm.local import LocalService, LocalSettings
from chiasm.settings import SettingsError, load
from decoder_service.computing import captured_rows
from decoder_service.settings import DecoderSettings

NEEDED = ["--model", "digits", "--arena", "/dev/null", "--workers-secret-file", "/dev/null"]


def test_a_decoder_is_told_by_a_flag() -> None:
    assert load(DecoderSettings, NEEDED, program="decoder").attention == "auto"
    assert load(DecoderSettings, [*NEEDED, "--attention", "torch"], program="decoder").attention == "torch"
    with pytest.raises(SettingsError, match="attention is 'flash'"):
        load(DecoderSettings, [*NEEDED, "--attention", "flash"], program="decoder")


async def test_flashinfer_on_a_cpu_is_refused_before_anything_is_served() -> None:
    with pytest.raises(SettingsError, match="the device is cpu"):
        await LocalService.start("digits", LocalSettings(attention="flashinfer"))


def test_graphs_are_where_they_can_be_unless_a_flag_says_otherwise() -> None:
    for flags, asked in (([], None), (["--cuda-graphs"], True), (["--no-cuda-graphs"], False)):
        assert load(DecoderSettings, [*NEEDED, *flags], program="decoder").cuda_graphs is asked
    assert [captured_rows(asked, 64, "flashinfer") for asked in (None, True, False)] == [64, 64, 0]
    assert [captured_rows(asked, 64, "torch") for asked in (None, False)] == [0, 0]


def test_graphs_that_are_asked_for_where_they_cannot_be_are_refused_before_anything_is_served() -> None:
    with pytest.raises(SettingsError, match="torch's attend here") as refused:
        captured_rows(True, 64, "torch")
    assert refused.value.where == "--cuda-graphs"
