"""Rules of the wire, checked on its descriptors: the house's own, beside those that buf checks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

MODULES = ("common", "encoder", "decoder", "router")
FILES: list[FileDescriptor] = [importlib.import_module(f"chiasm.rpc.v1.{name}_pb2").DESCRIPTOR for name in MODULES]
# Lengths of time that are no position in a medium.
LENGTHS = {
    "Probe.duration",
    "Probe.eligible_duration",
    "Visible.publish_lag",
    "LiveOptions.window",
    "Load.oldest_wait",
    "EncodeOpen.lease",
    "DecodeAdmitted.expected_wait",
    "UploadHeader.ttl",
}


def messages() -> Iterator[Descriptor]:
    for file in FILES:
        stack: list[Any] = list(file.message_types_by_name.values())
        while stack:
            message = stack.pop()
            yield message
            stack.extend(message.nested_types)


def fields() -> Iterator[tuple[str, FieldDescriptor]]:
    for message in messages():
        for field in message.fields:
            yield f"{message.name}.{field.name}", field


def type_name(field: FieldDescriptor) -> str:
    return field.message_type.full_name if field.message_type else ""


def test_a_time_inside_a_medium_is_a_duration_named_offset() -> None:
    for name, field in fields():
        is_duration = type_name(field) == "google.protobuf.Duration"
        is_named = field.name.endswith(("_offset", "_offsets"))
        if name == "TensorPart.byte_offset" or name.endswith(".byte_offset"):
            continue
        assert not is_named or is_duration, f"{name} is named like a time inside a medium"
        if is_duration and not is_named:
            assert name in LENGTHS or name.startswith("StageTimes."), f"{name} is a position or a length?"


def test_a_moment_of_the_wall_clock_is_named_time() -> None:
    stamps = [(name, field) for name, field in fields() if type_name(field) == "google.protobuf.Timestamp"]
    assert stamps
    for name, field in stamps:
        assert field.name.endswith("_time"), name


def test_no_number_pretends_to_be_a_time() -> None:
    for name, field in fields():
        assert not field.name.endswith(("_ms", "_us", "_ns", "_seconds", "pts", "_timestamp")), name


def test_the_zero_of_every_enum_is_unspecified() -> None:
    enums = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    assert len(enums) >= 8
    for enum in enums:
        assert enum.values[0].number == 0
        assert enum.values[0].name.endswith("_UNSPECIFIED"), enum.name


def test_every_sampling_number_tells_unset_from_zero() -> None:
    sampling = next(message for message in messages() if message.name == "SamplingParams")
    for field in sampling.fields:
        assert field.is_repeated or field.has_presence, field.name
    for name in ("MediaSampling", "MediaBudget", "LiveOptions"):
        for field in next(message for message in messages() if message.name == name).fields:
            assert field.is_repeated or field.has_presence, f"{name}.{field.name}"


def test_no_open_ended_field_lets_an_unknown_option_pass() -> None:
    for name, field in fields():
        assert type_name(field) not in {"google.protobuf.Struct", "google.protobuf.Any", "google.protobuf.Value"}, name
        assert not (field.message_type and field.message_type.GetOptions().map_entry), name


def test_each_rpc_has_messages_of_its_own() -> None:
    used = [
        message.full_name
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
        for message in (method.input_type, method.output_type)
    ]
    assert len(used) == len(set(used)) == 2 * 11


@pytest.mark.parametrize(
    ("service", "methods"),
    [
        (
            "Router",
            {
                "Generate": (False, True),
                "Upload": (True, False),
                "Estimate": (False, False),
                "Condition": (False, True),
                "Embed": (False, True),
                "Session": (True, True),
                "ListModels": (False, False),
            },
        ),
        ("Encoder", {"Encode": (True, True), "Info": (False, False)}),
        ("Decoder", {"Decode": (True, True), "Info": (False, False)}),
    ],
)
def test_the_services_are_whole(service: str, methods: dict[str, tuple[bool, bool]]) -> None:
    found = next(file.services_by_name[service] for file in FILES if service in file.services_by_name)
    assert found.full_name == f"chiasm.rpc.v1.{service}"
    assert {m.name: (m.client_streaming, m.server_streaming) for m in found.methods} == methods


@pytest.mark.parametrize(
    ("message", "members"),
    [
        ("EncodeRequest", {"open", "chunk", "siblings", "go", "credit"}),
        ("EncodeResponse", {"probed", "sized", "ready", "end", "failed"}),
        ("DecodeRequest", {"open", "sized", "ready", "append", "drop", "close"}),
        (
            "DecodeResponse",
            {
                "admitted",
                "laid",
                "started",
                "tokens",
                "visible",
                "states",
                "finished",
                "silence",
                "missing",
                "attached",
            },
        ),
        ("GenerateResponse", {"started", "tokens", "visible", "finished", "resume_point"}),
        ("UploadRequest", {"header", "chunk"}),
    ],
)
def test_a_stream_says_one_thing_at_a_time(message: str, members: set[str]) -> None:
    found = next(candidate for candidate in messages() if candidate.name == message)
    assert {field.name for field in found.oneofs[0].fields} == members
