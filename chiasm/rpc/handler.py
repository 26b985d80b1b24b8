"""A method's handler as gRPC has it: what answers in it, and the same handler with something else in its place."""

from __future__ import annotations

from typing import Any

import grpc


def behavior_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
    """The function that answers."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def with_behavior(handler: grpc.RpcMethodHandler[Any, Any], behavior: Any) -> Any:
    """The same handler, where `behavior` answers."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        behavior,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
