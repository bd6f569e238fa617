"""The manifest for Kubernetes fits its published schemas, and names what the daemon has."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from forkd.cli.commands import LISTED
from forkd.daemon.settings import Settings
from tests.support.docs import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST = ROOT / "packaging/kubernetes/forkd.yaml"

VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
"""The oldest version that the page speaks of, and the newest whose schemas are there."""


def resources() -> list[dict[str, Any]]:
    """Return what the manifest makes."""
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def container() -> dict[str, Any]:
    """Return the container of the daemon."""
    (daemon_set,) = (each for each in resources() if each["kind"] == "DaemonSet")
    (only,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_resource_fits_its_schema_and_a_misspelt_field_does_not(version: str) -> None:
    found = resources()
    assert [each["kind"] for each in found] == ["Namespace", "DaemonSet", "NetworkPolicy"]
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)

    wrong = copy.deepcopy(found[1])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_every_setting_is_one_of_the_daemon() -> None:
    known = {f"FORKD_{name.upper()}" for name in Settings.model_fields}

    assert {each["name"] for each in container()["env"]} <= known


def test_volumes_are_mounted_where_the_settings_look() -> None:
    mounts = {each["mountPath"] for each in container()["volumeMounts"]}
    settings: Mapping[str, str] = {each["name"]: each["value"] for each in container()["env"]}

    for name in ("FORKD_TOKEN_FILE", "FORKD_TLS_CERT", "FORKD_TLS_KEY"):
        assert settings[name].rpartition("/")[0] in mounts
    defaults = Settings.model_fields
    assert {str(defaults[name].default) for name in ("state_dir", "run_dir")} <= mounts


def test_probes_are_commands_of_ours() -> None:
    for probe in ("readinessProbe", "livenessProbe"):
        program, command = container()[probe]["exec"]["command"]
        assert (program, command in LISTED) == ("forkd", True)
