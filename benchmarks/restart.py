"""What it takes until a system serves again whose only decoder, or encoder, was killed, against that process's start.

`chiasm serve digits`, one of each. Cold: from a process's first line of the log to its `ready`. Restart: from SIGKILL
to the `ready` of the one that the supervisor starts in its place. Back: a stream that the SDK reads is at its sixteenth
token when its decoder is killed, and the time to its next token is taken, which the new process draws. Medians; `ratio`
is back over the decoder's cold start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from datetime import datetime

from chiasm import Client, SamplingParams, Token, Video
from chiasm.models.finding import SHIPPED
from tests.cli.serving import Served

CLIP = SHIPPED / "digits" / "held_out" / "clip_8.mp4"
BEFORE = 16
TOKENS = 64


def stamped(record: dict[str, object]) -> float:
    return datetime.fromisoformat(str(record["timestamp"])).timestamp()


def cold(served: Served, role: str, life: int) -> float:
    """Seconds from the start of a process to its `ready`."""
    return stamped(served.until(role, "ready", life)) - stamped(served.until(role, "starting", life))


def restarted(served: Served, role: str, life: int) -> float:
    """Seconds from SIGKILL to the `ready` of the next life."""
    began = time.time()
    os.kill(served.pid(role), signal.SIGKILL)
    return stamped(served.until(role, "ready", life + 1)) - began


def back(served: Served, client: Client) -> float:
    """Seconds from SIGKILL of the decoder to the next token of a stream that it drew."""
    killed = 0.0
    asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with client.stream("digits", ["Read the digits.", Video(CLIP)], sampling=asked) as stream:
        for event in stream:
            if isinstance(event, Token) and killed:
                return time.perf_counter() - killed
            if len(stream.ids) >= BEFORE:
                os.kill(served.pid("decoder-0"), signal.SIGKILL)
                killed = time.perf_counter()
    raise AssertionError("the answer ended before its decoder was killed")


def measure(rounds: int) -> dict[str, float | int]:
    served = Served("digits", "--listen", "127.0.0.1:0")
    try:
        lives = {"encoder-0": 1, "decoder-0": 1}
        taken: dict[str, list[float]] = {name: [] for name in ("cold", "back", *lives)}
        with Client(served.target) as client:
            client.wait_ready(timeout=60)
            for _ in range(rounds):
                for role in lives:
                    taken[role].append(restarted(served, role, lives[role]))
                    lives[role] += 1
                    if role == "decoder-0":
                        taken["cold"].append(cold(served, role, lives[role]))
                client.wait_ready(timeout=60)
                time.sleep(2)  # until the router knows them both
                taken["back"].append(back(served, client))
                lives["decoder-0"] += 1
                served.until("decoder-0", "ready", lives["decoder-0"])
    finally:
        served.stop()
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "ratio": round(middle["back"] / middle["cold"], 3),
        "cold_s": round(middle["cold"], 2),
        "back_s": round(middle["back"], 2),
        "encoder_restart_s": round(middle["encoder-0"], 2),
        "decoder_restart_s": round(middle["decoder-0"], 2),
        "rounds": rounds,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args(arguments)
    measured = measure(options.rounds)
    if not options.json:
        print(f"back after {measured['back_s']} s, {measured['ratio']} of a cold start ({measured['cold_s']} s)")
    print(json.dumps(measured))
