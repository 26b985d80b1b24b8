"""The check of what deploys finds what is wrong: a flag, a variable, a plan, an object, a grace that is too short."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tools.check_deploy.__main__ import of_kubernetes, plan_faults
from tools.check_deploy.rendered import PROFILES, ROOT, compose, kubernetes, pods
from tools.check_deploy.words import fault, variable_fault

WORKER = "python -m encoder_service --model digits --arena /a --workers-secret-file k --listen"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ([*WORKER.split(), "127.0.0.1:0"], True),
        ([*WORKER.split(), "0.0.0.0:50061"], False),  # without --insecure
        ([*WORKER.split(), "127.0.0.1:0", "--max-unit=3"], False),
        (["ray-node", '--resources={"encoder": 1}'], True),
        (["ray-node", "--resource={}"], False),
        (["ray-head"], True),
        (["ray-head", "--stop"], False),
        (["beside-ray-node", *WORKER.split(), "127.0.0.1:0"], True),
        (["beside-ray-node", *WORKER.split(), "127.0.0.1:0", "--keep"], False),
        (["drain-ray-node", "80"], True),
        (["drain-ray-node", "--seconds"], False),
        (["chiasm", "health", "--target", "http://127.0.0.1:9090"], True),
        (["chiasm", "health", "--taget", "http://127.0.0.1:9090"], False),
        (["chiasm", "load", "--rate=4", "--scenario=questions"], True),
        (["chiasm", "load", "--scenario=riddles"], False),
        (["ray", "health-check", "--address", "ray-head:6379"], True),
        (["redis-server", "--save", "", "--appendonly", "no"], True),
        (["redis-server", "--save=", "--appendonly", "no"], False),
        (["curl", "localhost"], False),
    ],
)
def test_a_command_line_is_right_where_its_program_takes_it(words: list[str], right: bool) -> None:
    assert (fault(words) is None) == right


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("CHIASM_TARGET", True),
        ("CHIASM_MAX_UNITS", True),
        ("CHIASM_MAX_UNIT", False),
        ("RAY_AUTH_MODE", True),
        ("RAY_AUTH_TOKEN_PATH", True),
        ("RAY_gcs_rpc_server_reconnect_timeout_s", True),
        ("RAY_gcs_rpc_reconnect_seconds", False),
        ("SECRET", False),
    ],
)
def test_a_variable_is_right_where_somebody_reads_it(name: str, right: bool) -> None:
    assert (variable_fault(name) is None) == right


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("said", "instead"),
    [("drain-seconds", "drain-second"), ("fleet: chiasm", "fleets: chiasm"), ('insecure: ""', 'max-units: "3"')],
)
def test_a_plan_with_a_wrong_name_in_it_is_told(profile: str, said: str, instead: str) -> None:
    plan = (ROOT / f"deploy/k8s/overlays/{profile}/plan.yaml").read_text("utf-8")
    assert not list(plan_faults(plan))
    assert list(plan_faults(plan.replace(said, instead)))


def _changed(monkeypatch: pytest.MonkeyPatch, change: str) -> list[str]:
    """The faults of the CPU's overlay with something in it said wrongly."""
    objects = copy.deepcopy(kubernetes("cpu", kuberay=False))
    router = next(each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Deployment", "router"))
    spec: dict[str, Any] = router["spec"]["template"]["spec"]
    container = spec["containers"][0]
    if change == "misspelt":
        container["livenessProbe"]["failureTreshold"] = 3
    elif change == "grace":
        spec["terminationGracePeriodSeconds"] = 70
    elif change == "root":
        spec["securityContext"]["runAsNonRoot"] = False
    elif change == "plan":
        spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "plan"]
    elif change == "label":
        router["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] = "another"
    monkeypatch.setattr("tools.check_deploy.__main__.kubernetes", lambda *_, **__: objects)
    return list(of_kubernetes("cpu", kuberay=False))


def test_what_is_wrong_with_an_object_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _changed(monkeypatch, "nothing")
    for change in ("misspelt", "grace", "root", "plan", "label"):
        assert _changed(monkeypatch, change), change


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_and_kubernetes_run_the_same_command_lines(profile: str) -> None:
    templates = pods(kubernetes(profile, kuberay=False)).values()
    pods_run = {tuple(each["args"]) for template in templates for each in template["spec"]["containers"]}
    services = compose(profile)["services"]
    for name in ("ray-head", f"encoder-{profile}", f"decoder-{profile}", f"router-{profile}"):
        assert tuple(services[name]["command"]) in pods_run, name
