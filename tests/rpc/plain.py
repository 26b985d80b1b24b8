"""The plain port as a probe or a scraper asks it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Answer(NamedTuple):
    status: int
    body: str
    kind: str

    @property
    def told(self) -> Mapping[str, object]:
        told = json.loads(self.body)
        assert isinstance(told, dict)
        return told


def fetch(address: str, path: str, *, method: str = "GET", accept: str = "*/*") -> Answer:
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Answer(response.status, response.read().decode(), response.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


def metrics(address: str) -> dict[str, float]:
    """What a process has measured: `name`, or `name:value` of the labels that it has besides the model's name."""
    samples = {}
    for family in text_string_to_metric_families(fetch(address, "/metrics").body):
        for sample in family.samples:
            told_apart = [value for label, value in sample.labels.items() if label != "model_name"]
            samples[":".join([sample.name, *told_apart])] = sample.value
    return samples
