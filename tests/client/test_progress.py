"""What is new of an answer: each index, sight and end once, whatever streams say again."""

from __future__ import annotations

import pytest

from chiasm.client.progress import Gap, Progress
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client import fake


def progress(n: int = 1) -> Progress:
    return Progress(rpb.GenerateRequest(sampling=pb.SamplingParams(n=n)))


def end(sequence: int, tokens: int) -> rpb.GenerateResponse:
    return rpb.GenerateResponse(finished=pb.Finished(sequence=sequence, attempt=1, tokens=tokens))


def test_what_is_seen_is_told_when_it_changes_also_where_a_decoder_was_lost_before_its_first_token() -> None:
    one = progress()
    told = [fake.visible(1, index=0), fake.visible(1, index=0), fake.visible(2, index=0), fake.visible(2, index=0)]
    assert [one.take(response) for response in told] == [True, False, True, False]


def test_an_answer_has_ended_when_all_its_sequences_have_each_once() -> None:
    one = progress(n=2)
    assert one.take(end(1, 0)) and not one.finished
    assert not one.take(end(1, 0)) and not one.finished
    with pytest.raises(Gap):
        one.take(end(0, 1))
    assert one.take(end(0, 0)) and one.finished
