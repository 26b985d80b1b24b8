"""The router brings the forms of entries together: it asks for what a decoder takes, also of one that takes another's
place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chiasm.cache.form import Form
from chiasm.cache.wire import form_code
from chiasm.errors import Unavailable
from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.fleet import DecoderWorker, Served
from tests import digits
from tests.asking import forget, question, running, video
from tests.router.scripted import MeddledFleet, answer

CLIP = digits.shipped_clips()[-1]
REQUEST = question("Read the digits.", video(CLIP.path.read_bytes()))


class Changing(MeddledFleet):
    """Its decoder takes one form at first, and another when it is asked for again."""

    def __init__(self, service: LocalService, *forms: Form | tuple[Form, ...], forgets: bool = False) -> None:
        super().__init__(service, decoder=self._breaks)
        self._service = service
        self._forms = [form if isinstance(form, tuple) else (form,) for form in forms]
        self._forgets = forgets

    @staticmethod
    def _breaks(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if number == 1 and response.WhichOneof("message") == "started":
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return True

    async def decoder(self, model: Served, *, keys: Sequence[bytes] = ()) -> DecoderWorker:
        given = await super().decoder(model, keys=keys)
        self._service.decoder.flush()  # another one holds nothing
        if self._forgets:
            await self._service.store.flush()
        self._service.decoder.forms = forms = self._forms.pop(0)
        given.forms = {model.name: [form_code(form) for form in forms]}
        return given


@pytest.mark.parametrize("form", Form)
async def test_an_encoder_is_asked_for_the_form_that_the_decoder_prefers(form: Form) -> None:
    async with running(settings=LocalSettings(form=form)) as service:
        fleet = MeddledFleet(service)
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert fleet.encoders is not None
        assert [opened.form for opened in fleet.encoders.opened] == [form_code(form)]


async def test_what_was_announced_in_a_form_that_the_next_decoder_does_not_take_is_made_again_in_one_it_takes() -> None:
    async with running() as service:
        fleet = Changing(service, Form.CROSS_KV, Form.CROSS_KV_INT8)
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert fleet.encoders is not None
        wanted = [opened.form for opened in fleet.encoders.opened]
        assert wanted[0] == form_code(Form.CROSS_KV) and set(wanted[1:]) == {form_code(Form.CROSS_KV_INT8)}
        assert service.encoder.counts.encoded_units == 2 * len(CLIP.digits)
        await forget(service)


async def test_units_that_are_gone_are_made_again_in_their_form_for_whoever_takes_it() -> None:
    async with running() as service:
        fleet = Changing(service, Form.CROSS_KV, (Form.CROSS_KV_INT8, Form.CROSS_KV), forgets=True)
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert fleet.encoders is not None
        forms = [opened.form for opened in fleet.encoders.opened]
        assert len(forms) > 1 and set(forms) == {form_code(Form.CROSS_KV)}


async def test_keys_of_a_known_medium_are_those_of_one_form_and_say_nothing_to_a_decoder_of_another() -> None:
    async with running(settings=replace(LocalSettings(), form=Form.CROSS_KV)) as service:
        assert (await answer(MeddledFleet(service), REQUEST)).text == CLIP.answer  # from now on it is known
        fleet = Changing(service, Form.CROSS_KV, Form.CROSS_KV_INT8)
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert fleet.encoders is not None
        assert {opened.form for opened in fleet.encoders.opened[1:]} == {form_code(Form.CROSS_KV_INT8)}
        await forget(service)


async def test_what_was_announced_serves_the_next_decoder_that_takes_its_form() -> None:
    async with running() as service:
        fleet = Changing(service, Form.CROSS_KV, Form.CROSS_KV)
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert service.encoder.counts.encoded_units == len(CLIP.digits)
        await forget(service)


async def test_a_decoder_that_prefers_what_no_encoder_makes_is_served_in_the_next_form_it_takes() -> None:
    async with running(settings=replace(LocalSettings(), form=Form.STATES)) as service:
        assert service.decoder.forms == (Form.STATES, Form.CROSS_KV)
        service.encoder.forms = (Form.CROSS_KV_FP8, Form.CROSS_KV)
        fleet = MeddledFleet(service)
        for worker, forms in ((fleet.inner._encoder, service.encoder.forms),):  # type: ignore[attr-defined]
            worker.forms = {service.name: [form_code(form) for form in forms]}
        assert (await answer(fleet, REQUEST)).text == CLIP.answer
        assert fleet.encoders is not None
        assert [opened.form for opened in fleet.encoders.opened] == [form_code(Form.CROSS_KV)]
