"""The verbs and their options. What a verb does lives in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chiasm import __version__
from chiasm.cli import demo as demo_verb
from chiasm.cli.failure import told

MODEL_HELP = "The folder of a checkpoint, the name of one that comes with chiasm, or a hub name (owner/name)."

app = typer.Typer(
    help="Chiasm: disaggregated serving for vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the command `chiasm`. Exits 0, 1 (failed, or a wrong answer), 2 (asked for what cannot be) or
    130 (interrupted)."""
    app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"chiasm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Argument(help="An image or a video. Default: a held-out clip that comes with the model.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about it.")] = None,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "digits",
    json: Annotated[
        bool, typer.Option("--json", help="Prints one JSON object last; what is for people goes to standard error.")
    ] = False,
) -> None:
    """Asks a model about one clip, twice: encoded, and from the cache. Everything runs in this process."""
    console = Console(stderr=json, highlight=False, soft_wrap=True, emoji=False, markup=False)
    with told():
        right = demo_verb.run(console, file=file, question=question, model=model, as_json=json)
    raise typer.Exit(1 if right is False else 0)
