"""`python -m tests.telltale.encoder`: the encoder service over the tell-tale model. Whatever model it is told, it loads
none."""

from __future__ import annotations

import importlib
from typing import Any

from tests.telltale.model import TellingEngine, TellingModel
from tests.telltale.service import run, taken

if __name__ == "__main__":
    taken()
    serving: Any = importlib.import_module("encoder_service.serving")
    serving.open_model = lambda model: TellingModel()
    serving.EncoderEngine = TellingEngine
    run("encoder_service")
