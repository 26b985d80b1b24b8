"""A client of its own process that asks and reads for ever: `python -m tests.faults.leaving_client TARGET`, with the
serialized request on its standard input. It is there to be killed."""

from __future__ import annotations

import sys

import grpc

from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc

if __name__ == "__main__":
    request = rpb.GenerateRequest.FromString(sys.stdin.buffer.read())
    with grpc.insecure_channel(sys.argv[1]) as channel:
        for _ in router_pb2_grpc.RouterStub(channel).Generate(request):
            pass
    sys.stdin.close()
