"""Every form of entry through the whole system, with digits as the judge: right answers, each form an entry of its own,
none taken for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chiasm.cache.entry import Contract
from chiasm.cache.form import Form
from chiasm.cache.region import Region
from chiasm.cache.wire import form_code
from chiasm.client import AsyncClient, Video
from chiasm.errors import Unavailable
from chiasm.local import LocalService, LocalSettings
from chiasm.models.finding import SHIPPED
from tests import digits
from tests.asking import ask, image, question, running, video
from tests.e2e.test_digits import ask_all, drawn, share_right
from tests.processes import Trio, trio

CLIPS = 24


def clips() -> tuple[list[bytes], list[list[int]]]:
    rng = np.random.default_rng(30)
    made, expected = [], []
    for i in range(CLIPS):
        frames, shown = drawn(rng, 1 + i % 8)
        made.append(digits.clip(frames))
        expected.append(shown)
    return made, expected


async def kept(service: LocalService) -> list[Contract]:
    """What the entries in the store say they are."""
    found = []
    for key in service.store.held():
        sealed = await service.store.get(key)
        assert sealed is not None
        contract = Contract.unpack(sealed.header)
        if contract is not None:  # beside entries there is what is remembered of media
            assert contract.key == key
            found.append(contract)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", Form)
async def test_digits_are_read_in_every_form(form: Form) -> None:
    made, expected = clips()
    async with running(settings=LocalSettings(form=form)) as service:
        answers = await ask_all(service, [question("Read the digits.", video(clip)) for clip in made])
        contracts = await kept(service)
    assert share_right(answers, expected) >= 0.97
    assert {contract.form for contract in contracts} == {form}
    assert len(contracts) == sum(map(len, expected))


async def test_states_and_keys_and_values_give_the_same_answers_token_by_token() -> None:
    requests = [question("Read the digits.", video(clip.path.read_bytes())) for clip in digits.shipped_clips()]
    requests += [question(image(path.read_bytes()), "Read the digits.") for path, _ in digits.shipped_images()]
    ids = []
    for form in (Form.CROSS_KV, Form.STATES):
        async with running(settings=LocalSettings(form=form)) as service:
            ids.append([(await ask(service, request)).ids for request in requests])
    assert ids[0] == ids[1]


async def test_forms_of_one_picture_are_entries_of_their_own_and_each_is_shared_by_who_asks_for_it() -> None:
    """A fleet whose decoders ask for different forms, over one store; then once more, with everything there."""
    clip = digits.shipped_clips()[-1]
    units = len(clip.digits)
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running(settings=LocalSettings(form=Form.STATES)) as service:
        worker = service.router.fleet._decoder  # type: ignore[attr-defined]
        for again in (False, True):
            for count, form in enumerate(Form, start=1):
                service.decoder.forms = (form,)
                worker.forms = {service.name: [form_code(form)]}
                answer = await ask(service, request)
                assert answer.text == clip.answer
                assert answer.encoded == (0 if again else units), form
                assert service.encoder.counts.encoded_units == units * (len(Form) if again else count)
        contracts = await kept(service)
    assert sorted(contract.form for contract in contracts) == sorted([*Form] * units)
    sizes = {contract.form: contract.payload_bytes for contract in contracts}
    assert sizes[Form.STATES] < sizes[Form.CROSS_KV] and sizes[Form.CROSS_KV_INT8] < sizes[Form.CROSS_KV]


async def test_what_one_form_has_attached_does_not_stand_for_another() -> None:
    """Keys and values of 8 bits stay those of 8 bits, though the pool holds the exact ones of the same picture."""
    clip = digits.shipped_clips()[0]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    attached = []
    async with running(settings=LocalSettings(form=Form.CROSS_KV_INT8)) as service:
        worker = service.router.fleet._decoder  # type: ignore[attr-defined]
        for form in (Form.CROSS_KV, Form.CROSS_KV_INT8):
            service.decoder.forms = (form,)
            worker.forms = {service.name: [form_code(form)]}
            before = service.decoder.engine.holdings.kept.visual
            assert (await ask(service, request)).text == clip.answer
            attached.append(service.decoder.engine.holdings.kept.visual - before)
    assert attached[0] == attached[1] > 0


async def test_a_form_that_the_encoder_does_not_make_is_not_asked_for() -> None:
    clip = digits.shipped_clips()[0]
    settings = replace(LocalSettings(), form=Form.CROSS_KV_FP8)
    async with running(settings=settings) as service:
        assert service.decoder.forms == (Form.CROSS_KV_FP8, Form.CROSS_KV)
        service.encoder.forms = (Form.CROSS_KV,)
        service.router.fleet._encoder.forms = {service.name: [form_code(Form.CROSS_KV)]}  # type: ignore[attr-defined]
        assert (await ask(service, question("Read the digits.", video(clip.path.read_bytes())))).text == clip.answer
        assert {contract.form for contract in await kept(service)} == {Form.CROSS_KV}


# -- as processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["states", "cross_kv_int8"])
async def test_a_decoder_of_its_own_process_gets_the_form_that_it_was_told_to_ask_for(
    form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clip = digits.shipped_clips()[-1]
    with trio(tmp_path_factory.mktemp("forms"), decoder=["--forms", form]) as served:
        async with AsyncClient(served.target) as client:
            await client.wait_ready()
            for cached in (0, len(clip.digits)):
                answer = await client.generate("digits", ["Read the digits.", Video(clip.path)])
                assert answer.text == clip.answer
                assert answer.usage.media[0].units_cached == cached
        told = served.decoder.event("form")
        assert told is not None and (told["form"], told["why"]) == (form, "settings")


async def test_processes_without_a_common_form_serve_nothing_and_the_router_says_why(tmp_path: Path) -> None:
    options: dict[str, Sequence[str]] = {
        "encoder": ["--offer-forms", "cross_kv_int8"],
        "decoder": ["--forms", "cross_kv"],
        "router": ["--patience", "0.5"],
    }
    with ExitStack() as stack:
        region = Region.create(tmp_path / "arena", 8 << 20)
        stack.callback(region.close)
        apart = Trio(tmp_path, SHIPPED / "digits", (region, region), options, encoders=1)
        for role in apart.roles:
            stack.callback(role.end)
            role.start()
        told = await asyncio.to_thread(apart.router.wait_for, "no common form")
        assert told["encoder"] == ["ENTRY_FORM_CROSS_KV_INT8"] and told["decoder"] == ["ENTRY_FORM_CROSS_KV"]
        async with AsyncClient(apart.target, max_retries=0) as client:
            with pytest.raises(Unavailable):
                await client.generate("digits", ["Say something."], max_tokens=1)
