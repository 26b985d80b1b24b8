"""Sequences that hold room of a decoder's pools without any request behind them."""

from __future__ import annotations

import asyncio

from decoder_service.model import DecoderModel
from decoder_service.room import Room
from decoder_service.seats import Seat
from decoder_service.sequence import DecodeSequence


async def hold(model: DecoderModel, *, text: int, visual: int = 0) -> Seat[DecodeSequence]:
    """Waits for so much room and holds it, until `DecoderModel.release`."""
    woken = asyncio.Event()
    seat = model.scheduler.seat(model.engine.sequence(), wake=woken.set)
    try:
        model.scheduler.enter(seat, Room(-(-text // model.engine.pages.page_size), visual))
        model.stepping.poke()
        await woken.wait()
    except asyncio.CancelledError:
        await model.release(seat)
        raise
    assert seat.admitted
    return seat
