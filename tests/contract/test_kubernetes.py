"""The manifests for Kubernetes fit its published schemas, the image, and what the daemon has."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from forkd.cli.commands import LISTED
from forkd.daemon.settings import Settings
from tests.support.container_image import config
from tests.support.container_kinds import KINDS, USER
from tests.support.docs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = ROOT / "packaging/kubernetes"

VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
"""The oldest version that the page speaks of, and the newest whose schemas are there."""


def resources(name: str) -> list[dict[str, Any]]:
    """Return what a manifest makes."""
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


MANIFESTS = {path.name: resources(path.name) for path in sorted(FOLDER.glob("*.yaml"))}

DAEMON_SET = {each["kind"]: each for each in MANIFESTS["forkd.yaml"]}["DaemonSet"]["spec"]

PODS: dict[str, dict[str, Any]] = {
    "forkd.yaml": DAEMON_SET["template"]["spec"],
    "capabilities-pod.yaml": MANIFESTS["capabilities-pod.yaml"][0]["spec"],
    "smallest-pod.yaml": MANIFESTS["smallest-pod.yaml"][0]["spec"],
}


def container(name: str) -> dict[str, Any]:
    """Return the container of the daemon in a manifest."""
    (only,) = PODS[name]["containers"]
    return dict(only)


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 - what YAML has
    """Give where each object within one is, this one first."""
    if isinstance(value, dict):
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if isinstance(inner, dict | list):
            yield from objects(inner, (*path, key))


OPEN = {"labels", "matchLabels", "nodeSelector", "requests", "limits"}
"""Objects whose fields are for whoever writes them to choose."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_each_resource_fits_its_schema(name: str, version: str) -> None:
    for each in MANIFESTS[name]:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_misspelt_field_anywhere_does_not_fit(name: str) -> None:
    tried = 0
    for each in MANIFESTS[name]:
        for path in objects(each):
            if path and path[-1] in OPEN:
                continue
            wrong = copy.deepcopy(each)
            within: Any = wrong
            for key in path:
                within = within[key]
            within["misspelt"] = {}
            with pytest.raises(kubernetes_validate.ValidationError, match="misspelt"):
                kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
            tried += 1
    assert tried > len(MANIFESTS[name])


def test_the_account_has_no_right_and_no_token() -> None:
    kinds = [each["kind"] for each in MANIFESTS["forkd.yaml"]]
    assert kinds == ["Namespace", "ServiceAccount", "DaemonSet", "NetworkPolicy"]

    account = MANIFESTS["forkd.yaml"][1]

    assert PODS["forkd.yaml"]["serviceAccountName"] == account["metadata"]["name"]
    assert account["automountServiceAccountToken"] is False
    for pod in PODS.values():
        assert pod["automountServiceAccountToken"] is False


def test_the_policy_is_of_the_daemons_pods_and_names_its_port() -> None:
    policy = MANIFESTS["forkd.yaml"][3]["spec"]

    assert policy["podSelector"] == DAEMON_SET["selector"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (only,) = policy["ingress"]
    (port,) = only["ports"]
    named = {each["name"]: each["containerPort"] for each in container("forkd.yaml")["ports"]}
    assert config().ports == (f"{named[port['port']]}/tcp",)


@pytest.mark.parametrize("name", PODS)
def test_every_setting_is_one_of_the_daemon(name: str) -> None:
    known = {f"FORKD_{field.upper()}" for field in Settings.model_fields}

    assert {each["name"] for each in container(name).get("env", [])} <= known


@pytest.mark.parametrize("name", PODS)
def test_volumes_are_mounted_where_the_settings_look(name: str) -> None:
    mounts = {each["mountPath"] for each in container(name)["volumeMounts"]}
    settings: Mapping[str, str] = {
        each["name"]: each["value"] for each in container(name).get("env", [])
    }

    for setting in {"FORKD_TOKEN_FILE", "FORKD_TLS_CERT", "FORKD_TLS_KEY"} & settings.keys():
        assert settings[setting].rpartition("/")[0] in mounts
    defaults = Settings.model_fields
    assert {str(defaults[each].default) for each in ("state_dir", "run_dir")} <= mounts
    assert set(config().volumes) <= mounts


@pytest.mark.parametrize("name", PODS)
def test_the_pod_runs_the_images_program_and_its_probes_are_commands_of_ours(name: str) -> None:
    run = [*container(name).get("command", []), *container(name).get("args", [])]
    assert not run or run[-1].endswith(f"exec {' '.join(config().program)}")
    probes = [value for key, value in container(name).items() if key.endswith("Probe")]
    for probe in probes:
        program, command = probe["exec"]["command"]
        assert (program, command in LISTED) == ("forkd", True)
        assert ("CMD", program, command) == config().healthcheck["test"]
    assert probes


def test_the_smallest_pod_is_the_kind_of_container_that_was_tried() -> None:
    pod, tried = PODS["smallest-pod.yaml"], KINDS["user"].confinement
    context = container("smallest-pod.yaml")["securityContext"]

    assert pod["securityContext"]["runAsUser"] == tried.user == USER
    assert (pod["securityContext"]["seccompProfile"]["type"] == "Unconfined") is not tried.seccomp
    assert context["allowPrivilegeEscalation"] is tried.gains_rights
    assert (context["capabilities"]["drop"] == ["ALL"]) is not bool(tried.capabilities)
    assert "privileged" not in context


def test_the_pod_with_capabilities_is_the_kind_of_container_that_was_tried() -> None:
    pod, tried = container("capabilities-pod.yaml"), KINDS["root, remounted"]
    context = pod["securityContext"]

    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"]["add"]) == tried.confinement.capabilities
    assert (context["seccompProfile"]["type"] == "Unconfined") is not tried.confinement.seccomp
    assert (*pod["command"], *pod["args"]) == tried.program
    assert len(pod["resources"]["limits"]) == len({"memory", *tried.confinement.devices})
    assert "privileged" not in context
