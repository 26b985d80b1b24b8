"""Which attention a decoder is told to serve with: the flag, the settings of one process, and what is refused."""

from __future__ import annotations

import pytest

from chiasm.local import LocalService, LocalSettings
from chiasm.settings import SettingsError, load
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
