"""The committed stubs are those of the proto files, and load where the package says they do."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "chiasm" / "rpc" / "v1"


def plain(file: FileDescriptorProto) -> FileDescriptorProto:
    """`file` without what compilers may write or leave out: JSON names that follow from the names."""
    found = FileDescriptorProto.FromString(file.SerializeToString())
    stack = list(found.message_type)
    while stack:
        message = stack.pop()
        stack.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return found


def test_the_stubs_describe_the_proto_files(tmp_path: Path) -> None:
    image = tmp_path / "wire.binpb"
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run(
        [buf, "build", "--as-file-descriptor-set", "--exclude-source-info", "-o", image],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = [
        file for file in FileDescriptorSet.FromString(image.read_bytes()).file if file.name.startswith("chiasm/")
    ]
    assert len(written) == 4
    for file in written:
        module = importlib.import_module(file.name.removesuffix(".proto").replace("/", ".") + "_pb2")
        generated = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(generated)
        assert plain(generated) == plain(file), f"{file.name}: run make proto"


def test_every_stub_has_its_types_beside_it() -> None:
    sources = sorted(STUBS.glob("*_pb2*.py"))
    assert len(sources) == 8
    assert all(source.with_suffix(".pyi").exists() for source in sources)


def test_the_stubs_ask_for_no_newer_runtime_than_the_package_does() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = (re.match(r"(protobuf|grpcio)>=([\d.]+)", line) for line in lines)
    declared = {bound[1]: tuple(map(int, bound[2].split("."))) for bound in bounds if bound}
    protobuf = {
        tuple(map(int, found))
        for source in STUBS.glob("*_pb2.py")
        for found in re.findall(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", source.read_text())
    }
    grpc = {
        tuple(map(int, found.split(".")))
        for source in STUBS.glob("*_pb2_grpc.py")
        for found in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", source.read_text())
    }
    assert protobuf == {declared["protobuf"]}
    assert grpc == {declared["grpcio"]}
