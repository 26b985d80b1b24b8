"""Signals to a command that has things to undo, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from chiasm.cli.interrupts import run

async def work(interrupts):
    hurried = asyncio.Event()
    interrupts.hurry = lambda: loop.call_soon_threadsafe(hurried.set)
    loop = asyncio.get_running_loop()
    try:
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        print("undoing", flush=True)
        if sys.argv[1] == "slow":
            await hurried.wait()
        print("undone", flush=True)

try:
    run(work)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("kind", "signals"), [("fast", 1), ("slow", 2)])
def test_the_first_signal_cancels_and_the_second_hurries(number: signal.Signals, kind: str, signals: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(number)
        assert process.stdout.readline() == "undoing\n"
        if signals == 2:
            process.send_signal(number)
        assert process.stdout.read() == "undone\ninterrupted\n"
    assert process.returncode == 0


def test_a_signal_that_was_to_be_ignored_is_ignored() -> None:
    begun = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = subprocess.Popen([sys.executable, "-c", begun + PROGRAM, "fast"], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "undoing\nundone\ninterrupted\n"


def test_a_signal_before_the_work_began_is_not_lost() -> None:
    early = """
import os

def begin(interrupts):
    os.kill(os.getpid(), 2)
    return work(interrupts)

try:
    run(begin)
"""
    program = PROGRAM.replace("\ntry:\n    run(work)\n", early)
    done = subprocess.run([sys.executable, "-c", program, "fast"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
