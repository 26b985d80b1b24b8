"""`python -m tools.check_deploy`: renders docker-compose.yml and deploy/k8s with the real programs, and checks them.

Every command line goes through the parser of the program that it names, every plan through the router's reader, every
flag in it through that of the worker's settings, every variable must be known to who reads it; objects are validated
strictly. Prints what is wrong, one a line, and exits 1 if anything is.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate

from chiasm.settings import SettingsError
from router import ray_plan
from tools.check_deploy.rendered import PROFILES, ROOT, Refused, binary, compose, kubernetes, output, pods
from tools.check_deploy.words import fault, settings_fault, variable_fault

KUBERNETES: Final = "1.33.0"
SECRET: Final = "chiasm"
# Of KubeRay's RayCluster, as far as it is used; the pods in it are validated as pods.
RAY_CLUSTER: Final = {"rayVersion", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD: Final = {"rayStartParams", "template"}
GROUP: Final = {*HEAD, "groupName", "replicas", "minReplicas", "maxReplicas"}


def of_compose(profile: str) -> Iterator[str]:
    """What is wrong with docker-compose.yml in a profile. Raises Refused."""
    project = compose(profile)
    for name, service in project["services"].items():
        for words in _compose_commands(service):
            if found := fault(words):
                yield f"{name}: {found}"
        for variable in service.get("environment") or {}:
            if found := variable_fault(variable):
                yield f"{name}: {found}"
        for port in service.get("ports", []):
            if port.get("host_ip") != "127.0.0.1":
                yield f"{name}: port {port['target']} is published beyond this machine"
        for needed in ("read_only", "user", "cap_drop", "image"):
            if not service.get(needed):
                yield f"{name}: no {needed}"
        if service.get("restart") != "no" and "healthcheck" not in service:
            yield f"{name}: no healthcheck"
    yield from plan_faults((ROOT / f"deploy/k8s/overlays/{profile}/plan.yaml").read_text("utf-8"))


def _compose_commands(service: dict[str, Any]) -> Iterator[list[str]]:
    own = service["image"].split(":")[-1].endswith("-load")
    if service.get("command"):
        yield [*(["chiasm", "load"] if own else []), *service["command"]]
    if health := service.get("healthcheck"):
        yield health["test"][1:]
    yield from (hook["command"] for hook in service.get("pre_stop", []))


def plan_faults(text: str) -> Iterator[str]:
    """What is wrong with a plan, and with the flags of the workers in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            plan = ray_plan.read(path)
        except SettingsError as error:
            yield error.what
            return
    for pool in plan.pools:
        given = {**pool.flags, "arena": "/dev/shm/region", "arena-bytes": "1", "listen": "10.0.0.1:0"}
        words = [word for flag, value in given.items() for word in (f"--{flag}", value) if word]
        if found := settings_fault(f"{pool.role}_service", words):
            yield f"plan: {found}"


def of_kubernetes(overlay: str, *, kuberay: bool) -> Iterator[str]:
    """What is wrong with the objects of an overlay. Raises Refused."""
    objects = kubernetes(overlay, kuberay=kuberay)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for each in objects:
        if each["kind"] == "RayCluster":
            yield from _ray_cluster_faults(each)
        else:
            yield from _invalid(each)
        if each["kind"] == "ConfigMap" and "plan.yaml" in each["data"]:
            yield from plan_faults(each["data"]["plan.yaml"])
    for where, template in pods(objects).items():
        yield from (f"{where}: {found}" for found in _pod_faults(template, names))
    labels = [template["metadata"]["labels"].items() for template in pods(objects).values()]
    for each in objects:
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            selector = each["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            rays = kuberay and any(key.startswith("ray.io/") for key, _ in wanted)  # the operator labels its pods
            if not rays and not any(wanted <= own for own in labels):
                yield f"{each['kind']} {each['metadata']['name']} selects no pod"


def _invalid(of: dict[str, Any]) -> Iterator[str]:
    try:
        kubernetes_validate.validate(of, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, getattr(error, "path", ())))
        yield f"{of['kind']} {of['metadata']['name']}: {where} {error.message}"


def _ray_cluster_faults(cluster: dict[str, Any]) -> Iterator[str]:
    spec = cluster["spec"]
    groups = spec["workerGroupSpecs"]
    for said, known in [(spec, RAY_CLUSTER), (spec["headGroupSpec"], HEAD), *((group, GROUP) for group in groups)]:
        if unknown := said.keys() - known:
            yield f"RayCluster: {', '.join(sorted(unknown))} not known"
    for group in (spec["headGroupSpec"], *groups):
        flags = [
            f"--{flag}" if value == "true" else f"--{flag}={value.strip(chr(39))}"
            for flag, value in group["rayStartParams"].items()
        ]
        if found := fault(["ray", "start", *flags]):
            yield f"RayCluster: {found}"


def _pod_faults(template: dict[str, Any], names: set[tuple[str, str]]) -> Iterator[str]:
    spec = template["spec"]
    yield from _invalid(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of", **template["metadata"]}, "spec": spec}
    )
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for volume in spec.get("volumes", []):
        if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in names:
            yield f"no ConfigMap {volume['configMap']['name']}"
        if "secret" in volume and volume["secret"]["secretName"] != SECRET:
            yield f"no Secret {volume['secret']['secretName']}"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and ("PersistentVolumeClaim", claim) not in names:
            yield f"no PersistentVolumeClaim {claim}"
    if spec["securityContext"].get("runAsNonRoot") is not True:
        yield "may run as root"
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']} may write to its image"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{container['name']} mounts {mount['name']}, which is not there"
        for words in _pod_commands(container):
            if found := fault(words):
                yield f"{container['name']}: {found}"
        for variable in container.get("env", []):
            if found := variable_fault(variable["name"]):
                yield f"{container['name']}: {found}"
        yield from _grace_faults(container, spec.get("terminationGracePeriodSeconds", 30))


def _pod_commands(container: dict[str, Any]) -> Iterator[list[str]]:
    if container.get("command") or container.get("args"):
        yield [*container.get("command", []), *container.get("args", [])]
    probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")]
    hooks = container.get("lifecycle", {}).values()
    yield from (each["exec"]["command"] for each in (*probes, *hooks) if "exec" in each)


def _grace_faults(container: dict[str, Any], grace: int) -> Iterator[str]:
    """The pod must be let live for longer than its hook and its drain take together."""
    said = container.get("args", [])
    drains = [int(found[1]) for word in said if (found := re.fullmatch(r"--drain-seconds=(\d+)", word))]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    waits = [int(word) for word in hook[-1:]]
    rays = [int(each["value"]) for each in container.get("env", []) if each["name"].endswith("DRAIN_TIMEOUT_S")]
    needed = sum((*drains, *waits, *rays))
    if grace <= needed:
        yield f"{container['name']}: {grace} s to end, and it may need {needed}"


def of_images() -> Iterator[str]:
    """What hadolint finds. Raises Refused for whatever it is."""
    output(binary("hadolint"), "deploy/Dockerfile")
    yield from ()


def main() -> int:
    checks: dict[str, Callable[[], Iterator[str]]] = {"deploy/Dockerfile": of_images}
    for profile in PROFILES:
        checks[f"docker-compose.yml, profile {profile}"] = lambda profile=profile: of_compose(profile)  # type: ignore[misc]
        for kuberay in (False, True):
            name = f"deploy/k8s/overlays/{profile}{' with kuberay' if kuberay else ''}"
            checks[name] = lambda profile=profile, kuberay=kuberay: of_kubernetes(profile, kuberay=kuberay)  # type: ignore[misc]
    faults = 0
    for name, check in checks.items():
        try:
            for found in check():
                faults += 1
                print(f"{name}: {found}", file=sys.stderr)
        except Refused as error:
            faults += 1
            print(f"{name}: {error}", file=sys.stderr)
    print(f"{len(checks)} checks of what deploys, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
