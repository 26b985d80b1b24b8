"""Whole processes with a store that nodes share: right answers with it, without it, and when it comes back."""

from __future__ import annotations

from pathlib import Path

from chiasm.client import Client
from chiasm.models.finding import SHIPPED
from tests.processes import trio
from tests.redis_server import redis_server

HELD_OUT = SHIPPED / "digits" / "held_out"
