"""A decoder that takes every digest for right, for the control run: the judge must find what it answers wrong."""

from __future__ import annotations

import runpy

import chiasm.cache.entry

if __name__ == "__main__":
    chiasm.cache.entry.compare_digest = lambda one, other: True  # type: ignore[attr-defined]
    runpy.run_module("decoder_service", run_name="__main__", alter_sys=True)
