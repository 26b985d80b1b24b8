"""Quantising and reading back on a CUDA device: the same numbers as on the CPU, and no further off than is stated."""

from __future__ import annotations

import pytest
import torch

from chiasm.cache.form import Form
from chiasm.cache.quantised import SCHEMES, dequantise, quantise
from chiasm.local import LocalSettings
from tests import digits
from tests.asking import ask, question, running, video

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_alike_on_both_devices(form: Form, dtype: torch.dtype) -> None:
    shape = (12, 2, 8, 145, 128)
    entry = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    entry[0, 0, 0, :, 0] = 0
    entry[0, 0, 0, :, 1] *= 2.0**-130
    here, there = quantise(entry, form), quantise(entry.cuda(), form)
    assert there.is_cuda
    # A quotient may fall to the other side of a half: then the numbers are neighbours, which the bound allows.
    assert (here != there.cpu()).float().mean() < 1e-4
    read = dequantise(there, form, shape, torch.float32).cpu()
    allowed = SCHEMES[form].max_error * entry.double().abs().amax(3, keepdim=True).clamp(min=2.0**-110)
    assert bool(((read.double() - entry.double()).abs() <= allowed).all())
    assert torch.equal(dequantise(here.cuda(), form, shape, dtype).cpu(), dequantise(here, form, shape, dtype))


@pytest.mark.parametrize("form", Form)
async def test_the_shipped_clips_are_read_in_every_form(form: Form) -> None:
    async with running(settings=LocalSettings(device="cuda", form=form)) as service:
        for clip in digits.shipped_clips():
            answer = await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
            assert answer.text == clip.answer
