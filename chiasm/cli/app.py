"""The verbs and their options.

What a verb does lives in a module of its own, which is loaded when the verb is used: a probe that asks for health every
few seconds does not wait for the rest.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from chiasm import __version__
from chiasm.cli import options
from chiasm.cli.failure import told
from chiasm.cli.probe import Service

RAY_HERE = "local"
"""The address of a Ray that `serve` starts and ends itself."""

MODEL_HELP = "The folder of a checkpoint, the name of one that comes with chiasm (digits), or a hub name (owner/name)."


class DType(StrEnum):
    """In what a model computes, as torch names it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class EntryForm(StrEnum):
    """What an entry of the cache holds."""

    AUTO = "auto"
    CROSS_KV = "cross_kv"
    STATES = "states"
    CROSS_KV_INT8 = "cross_kv_int8"
    CROSS_KV_FP8 = "cross_kv_fp8"


app = typer.Typer(
    help="Chiasm: disaggregated serving for vision-language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cache = typer.Typer(help="Looks into the cache of this machine, or empties it.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def main() -> None:
    """The entry point of the command `chiasm`. Exits 0, 1 (failed, or a wrong answer), 2 (asked for what cannot be) or
    130 (interrupted)."""
    app(_completed(sys.argv[1:]))


def _completed(arguments: list[str]) -> list[str]:
    """With what `--ray` means where no address follows it: an option's value may not be left out otherwise."""
    completed = []
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        completed.append(word)
        if word == "--ray" and following.startswith("-"):
            completed.append(RAY_HERE)
    return completed


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
        Path | None,
        typer.Argument(metavar="FILE", help="An image or a video. Default: a held-out clip that comes with the model."),
    ] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about it.")] = None,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "digits",
    json: options.Json = False,
) -> None:
    """Shows a model answering a question about a clip.

    It is served, asked twice (the second answer comes from the cache), and ended.
    """
    from chiasm.cli import demo as verb
    from chiasm.cli.telling import console

    with told():
        right = verb.run(console(stderr=json), file=file, question=question, model=model, as_json=json)
    raise typer.Exit(1 if right is False else 0)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    listen: Annotated[
        str, typer.Option(help="Where the router listens; port 0 takes a free one.", metavar="HOST:PORT")
    ] = "127.0.0.1:50051",
    http: Annotated[
        str | None, typer.Option(help="Serves /metrics, /healthz and /readyz here.", metavar="HOST:PORT")
    ] = None,
    device: Annotated[str, typer.Option(envvar="CHIASM_DEVICE", help="cpu, cuda, cuda:1 …")] = "cpu",
    dtype: Annotated[
        DType | None,
        typer.Option(envvar="CHIASM_DTYPE", help="Default: float32 on a CPU, else the checkpoint's own."),
    ] = None,
    form: Annotated[
        EntryForm | None,
        typer.Option(
            envvar="CHIASM_FORMS",
            help="What the cache holds of a frame. Default: keys and values or states, as is measured to be quicker.",
        ),
    ] = None,
    condition_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Keeps so many of the decoder's layers: states after them are served, answers are not.",
        ),
    ] = None,
    arena_bytes: Annotated[
        int | None,
        typer.Option(
            parser=options.size,
            metavar="SIZE",
            envvar="CHIASM_ARENA_BYTES",
            help="Shared memory for the cache, for example 4GiB. Default: 1 GiB, or half of what is free.",
        ),
    ] = None,
    cache_tenant_bytes: Annotated[
        int | None,
        typer.Option(
            parser=options.size,
            metavar="SIZE",
            envvar="CHIASM_CACHE_TENANT_BYTES",
            help="Of the cache, what one tenant may take. Default: all of it.",
        ),
    ] = None,
    cache_ttl: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            envvar="CHIASM_CACHE_TTL",
            help="After which what nobody has used is not served from the cache. Default: until it makes room.",
        ),
    ] = None,
    encoders: Annotated[int, typer.Option(min=1, help="How many encoder processes.")] = 1,
    decoders: Annotated[int, typer.Option(min=1, help="How many decoder processes.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]",
            help="Has Ray place the workers: the cluster at this address, or one of its own without it.",
        ),
    ] = None,
    max_encoders: Annotated[
        int | None, typer.Option(min=1, help="With --ray, up to how many encoders there are when calls wait.")
    ] = None,
    max_decoders: Annotated[
        int | None, typer.Option(min=1, help="With --ray, up to how many decoders there are when calls wait.")
    ] = None,
    workers_secret_file: Annotated[
        Path | None,
        typer.Option(help="With --ray and an address: 64 hex digits in a file of 0600, at this path on every node."),
    ] = None,
    redis: options.Redis = None,
    redis_password_file: options.RedisPasswordFile = None,
    redis_ca_file: options.RedisCaFile = None,
    redis_cert_file: options.RedisCertFile = None,
    redis_key_file: options.RedisKeyFile = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allows addresses that other machines reach, without keys or TLS.")
    ] = False,
    json_log: Annotated[
        bool, typer.Option("--json-log", help="Logs lines of JSON to standard error, and nothing else.")
    ] = False,
) -> None:
    """Serves a model until Ctrl-C.

    An encoder, a decoder and a router run as processes; one that dies is started again.
    """
    from chiasm.cli import serve as verb
    from chiasm.cli.over_ray import over_ray
    from chiasm.cli.subject import model_folder
    from chiasm.cli.system import Options
    from chiasm.cli.telling import console
    from chiasm.models.finding import name_of

    with told(verb.log_failure if json_log else None):
        folder = model_folder(model)
        shared = {
            "--redis": redis,
            "--redis-password-file": redis_password_file and redis_password_file.absolute(),
            "--redis-ca-file": redis_ca_file and redis_ca_file.absolute(),
            "--redis-cert-file": redis_cert_file and redis_cert_file.absolute(),
            "--redis-key-file": redis_key_file and redis_key_file.absolute(),
        }
        asked = Options(
            folder=folder.absolute(),
            name=name_of(model, folder),
            listen=listen,
            http=http,
            device=device,
            dtype=dtype.value if dtype else None,
            form=form.value if form else None,
            condition_layers=condition_layers,
            arena_bytes=arena_bytes,
            cache_tenant_bytes=cache_tenant_bytes,
            cache_ttl=cache_ttl,
            encoders=encoders,
            decoders=decoders,
            insecure=insecure,
            ray=over_ray(ray, encoders, decoders, max_encoders, max_decoders, workers_secret_file),
            redis={flag: str(value) for flag, value in shared.items() if value is not None},
        )
        verb.run(asked, console(), json_log=json_log)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    media: Annotated[
        list[Path] | None, typer.Argument(metavar="MEDIA", help="Images and videos, in the order they are shown.")
    ] = None,
    target: options.Target = options.TARGET,
    model: Annotated[str | None, typer.Option(help="Which model. Default: the only one that is served.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames to take of each second of a video.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Frames to take of a video, at most.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Bounds the answer.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that the answer may take. Default: 600.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Asks a served model about images and videos.

    The answer is printed as it comes. Ctrl-C cancels the request.
    """
    from chiasm.cli import ask as verb
    from chiasm.cli.telling import console

    asked = verb.Question(
        text=question,
        media=media or [],
        model=model,
        fps=fps,
        max_frames=max_frames,
        max_tokens=max_tokens,
        timeout=timeout,
    )
    with told():
        said = verb.run(target, asked, console(stderr=True), None if json else sys.stdout)
    if json:
        verb.print_json(said)


class LoadScenario(StrEnum):
    """What a load asks."""

    IMAGE = "image"
    IMAGES = "images"
    QUESTIONS = "questions"
    GROWING = "growing"
    TEXT = "text"


class LoadArrivals(StrEnum):
    """How requests of a rate follow each other."""

    POISSON = "poisson"
    CONSTANT = "constant"


@app.command()
def load(
    target: options.Target = options.TARGET,
    scenario: Annotated[
        LoadScenario,
        typer.Option(
            help="One image, several images, one video and many questions, a clip that grows, or no media at all."
        ),
    ] = LoadScenario.IMAGE,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.001, help="Requests a second, whether or not others are answered; several are run in turn."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Callers who ask again when they are answered; several are run in turn."),
    ] = None,
    arrivals: Annotated[LoadArrivals, typer.Option(help="Of requests that come by a rate.")] = LoadArrivals.POISSON,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds in which requests are sent. Default: 10.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many are sent, instead of a duration.")] = None,
    slo: Annotated[
        str,
        typer.Option(
            metavar="NAME=NUMBER,…",
            help="Limits on the 99th percentile of ttft_ms, tpot_ms, itl_ms, e2el_ms, and on the share refused.",
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Writes the numbers here.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Writes a report here: one page.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and questions.")] = 0,
    model: Annotated[str | None, typer.Option(help="Which model. Default: the only one that is served.")] = None,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="Whether answers must be right. Default: those of the model digits."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Makes each picture one that no cache has seen with this seed.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Bounds an answer.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds of one request.")] = 60.0,
    processes: Annotated[int, typer.Option(min=1, help="How many processes send.")] = 1,
) -> None:
    """Puts a load on a router, and says what became of it.

    Exit code 1 where a limit was missed, a request failed, or an answer was wrong. Needs the extra `load`.
    """
    from chiasm.cli import load as verb
    from chiasm.cli.telling import console

    with told():
        held = verb.start(
            verb.planned(
                target=target,
                scenario=scenario.value,
                rates=rate or (),
                callers=concurrency or (),
                arrivals=arrivals.value,
                duration=duration,
                requests=requests,
                seed=seed,
                model=model,
                check=check,
                fresh=fresh,
                max_tokens=max_tokens,
                timeout=timeout,
                processes=processes,
            ),
            slo,
            verb.Outputs(json=json, html=html),
            console(stderr=True),
        )
    raise typer.Exit(0 if held else 1)


@app.command()
def health(
    target: options.Target = options.TARGET,
    service: Annotated[
        Service, typer.Option(help="Whether calls are welcome, or whether the process works at all.")
    ] = Service.READINESS,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that the answer may take.")] = 5.0,
) -> None:
    """Says whether a server is ready: exit code 0 or 1.

    The target is a gRPC address, or http://HOST:PORT of --http.
    """
    from chiasm.cli import health as verb

    well, answer = verb.check(target, service, timeout)
    typer.echo(f"{'ok' if well else 'not ok'}: {service.value} of {target}: {answer}")
    raise typer.Exit(0 if well else 1)


@cache.command("stats")
def cache_stats(
    arena: options.Arena = None,
    redis: options.Redis = None,
    redis_password_file: options.RedisPasswordFile = None,
    redis_ca_file: options.RedisCaFile = None,
    redis_cert_file: options.RedisCertFile = None,
    redis_key_file: options.RedisKeyFile = None,
    redis_namespace: options.RedisNamespace = None,
    json: options.OneJson = False,
) -> None:
    """Shows what each tier of the cache holds, and how often what was looked for was there."""
    from chiasm.cli import cache as verb

    with told():
        shared = verb.shared_store(
            redis, redis_password_file, redis_ca_file, redis_cert_file, redis_key_file, redis_namespace
        )
        verb.stats(arena, shared, as_json=json)


@cache.command("flush")
def cache_flush(
    arena: options.Arena = None,
    redis: options.Redis = None,
    redis_password_file: options.RedisPasswordFile = None,
    redis_ca_file: options.RedisCaFile = None,
    redis_cert_file: options.RedisCertFile = None,
    redis_key_file: options.RedisKeyFile = None,
    redis_namespace: options.RedisNamespace = None,
    json: options.OneJson = False,
) -> None:
    """Forgets every entry that nobody is about to read, and all that nodes share.

    Requests go on; what they need is encoded again. Nothing is overwritten: bytes stay in memory until others take
    their place.
    """
    from chiasm.cli import cache as verb

    with told():
        shared = verb.shared_store(
            redis, redis_password_file, redis_ca_file, redis_cert_file, redis_key_file, redis_namespace
        )
        verb.flush(arena, shared, as_json=json)


@app.command()
def doctor(
    json: options.OneJson = False,
) -> None:
    """Checks this machine, and says how to mend it.

    Nothing is changed and nothing leaves the machine. Exit code: 0, 1 for warnings, 2 for failures.
    """
    from chiasm.cli import doctor as verb

    raise typer.Exit(verb.run(as_json=json))
