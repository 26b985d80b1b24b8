"""Generates `chiasm/rpc/v1` from `proto/`: messages, typed stubs, services.

The generator lives in an environment of its own, `.venv-proto`. Its release is chosen for what its output runs under:
code from grpcio-tools 1.81.1 loads under protobuf 6.33 and 7, code from 1.85 refuses every program that holds
protobuf 6.

    python -m tools.make_proto [--out DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = "chiasm/rpc/v1"
ENVIRONMENT = ROOT / ".venv-proto"
GENERATOR = (
    "grpcio-tools==1.81.1",
    "mypy-protobuf==5.1.0",
    "grpcio==1.85.3",
    "protobuf==6.33.6",
    "types-protobuf==7.35.1.20260906",
)
# A servicer that serves a part of its service is a whole class: what it leaves out answers UNIMPLEMENTED.
OUTPUTS = {
    "python_out": "",
    "grpc_python_out": "",
    "mypy_out": "quiet:",
    "mypy_grpc_out": "quiet,generate_concrete_servicer_stubs:",
}


def generator() -> Path:
    """The Python of the tool environment, made on first use and again when `GENERATOR` changes."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    wanted = "\n".join(GENERATOR)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *GENERATOR], check=True)
        stamp.write_text(wanted)
    return python


def sources() -> list[str]:
    """Every proto file of the wire, relative to `proto/`, sorted."""
    return sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))


def generate(out: Path) -> list[Path]:
    """Writes the generated package below `out` and returns its files.

    Args:
        out: folder that becomes the root of the import path; `chiasm/rpc/v1/` is made inside it.

    Raises:
        subprocess.CalledProcessError: a proto file does not compile; protoc's own message is on stderr.
    """
    python = generator()
    out.mkdir(parents=True, exist_ok=True)
    plugins = [f"--plugin={name}={python.parent / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    targets = [f"--{name}={options}{out}" for name, options in OUTPUTS.items()]
    subprocess.run(
        [python, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}", *plugins, *targets, *sources()], check=True
    )
    folder = out / PACKAGE
    (folder / "__init__.py").write_text('"""Generated from `proto/chiasm/rpc/v1` by `make proto`. Do not edit."""\n')
    return sorted(path for path in folder.iterdir() if path.suffix in {".py", ".pyi"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT, help="root of the import path (default: the repository)")
    out: Path = parser.parse_args().out
    if out.resolve() == ROOT:
        for stale in (ROOT / PACKAGE).glob("*.py*"):
            stale.unlink()
    for path in generate(out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
