"""`python -m tests.telltale.router`: the router, with a bug in it if one is asked for."""

from __future__ import annotations

from tests.telltale.service import run, taken

if __name__ == "__main__":
    taken()
    run("router")
