"""`python -m tests.telltale.decoder`: the decoder service over the tell-tale model. Whatever model it is told, it loads
none."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from tests.telltale.model import TellingModel, decoder_engine
from tests.telltale.service import run, taken

if __name__ == "__main__":
    mine = taken()
    serving: Any = importlib.import_module("decoder_service.serving")
    serving.open_model = lambda model: TellingModel()
    serving.DecoderEngine = partial(decoder_engine, pace=mine.pace)
    run("decoder_service")
