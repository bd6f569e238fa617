"""Settings are read, checked against each other, and refused by name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pytest
import typer

from forkd.daemon.commands import host_settings
from forkd.daemon.main import app
from forkd.daemon.settings import (
    Bind,
    Settings,
    default,
    flag,
    meaning,
    misspelt,
    read,
    variable,
)
from forkd.errors import InvalidRequest
from forkd.network.upstream import Via
from forkd.service.jail import UidRange


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(variable(name), raising=False)


def test_nothing_set_serves_one_socket() -> None:
    settings = read({})

    assert settings.socket == Path("/run/forkd/forkd.sock")
    assert (settings.socket_mode, settings.bind) == (0o660, None)


EVERYTHING = {
    "socket": ("", None),
    "socket_mode": ("600", 0o600),
    "socket_group": ("5", 5),
    "bind": ("[::1]:8889", Bind("::1", 8889)),
    "hosts": ("forkd.example, [FD00::1]", ("forkd.example", "fd00::1")),
    "token_file": ("/token", Path("/token")),
    "state_dir": ("/s", Path("/s")),
    "run_dir": ("/r", Path("/r")),
    "cache_dir": ("/c", Path("/c")),
    "disk_dir": ("/d", Path("/d")),
    "sandbox_ttl_s": ("600", 600.0),
    "disk_limit_mib": ("512", 512),
    "disk_reserve_mib": ("0", 0),
    "memory_reserve_mib": ("512", 512),
    "memory_overcommit": ("8.5", 8.5),
    "memory_pressure_max": ("0", 0.0),
    "io_pressure_max": ("30", 30.0),
    "cpu_pressure_max": ("99.5", 99.5),
    "cgroups": ("off", "off"),
    "jail": ("off", "off"),
    "core_scheduling": ("off", "off"),
    "uid_range": ("70000:70000", UidRange(70_000, 70_000)),
    "build_uid_range": ("190000:262144", UidRange(190_000, 262_144)),
    "build_network": ("any", None),
    "image_cache_mib": ("0", 0),
    "registries_insecure": (
        "10.0.0.1:5000, Registry.example.com,[::1]:5",
        ("10.0.0.1:5000", "registry.example.com", "[::1]:5"),
    ),
    "registry_auth_file": ("/auth", Path("/auth")),
    "recipe_dirs": ("/r:/e/r", (Path("/r"), Path("/e/r"))),
    "vmm": ("/v", Path("/v")),
    "agent": ("/a", Path("/a")),
    "zygotes": ("65", 65),
    "tree_live": ("7", 7),
    "tree_depth": ("3", 3),
    "tree_private_mib": ("64", 64),
    "dns": ("192.0.2.1, 192.0.2.2:5353", (("192.0.2.1", 53), ("192.0.2.2", 5353))),
    "egress_proxy": ("http://u:p@proxy.example:3128", Via("proxy.example", 3128, "u:p")),
    "egress_ca": ("/c", Path("/c")),
    "network_slots": ("0", 0),
    "pack_keys": ("/k", Path("/k")),
    "pack_unsigned": ("allow", "allow"),
    "otlp_endpoint": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
    "tls_cert": ("/c", Path("/c")),
    "tls_key": ("/y", Path("/y")),
    "tls_client_ca": ("/a", Path("/a")),
    "audit_log": ("/l", Path("/l")),
    "audit_full": ("refuse", "refuse"),
}
"""Each setting, as it is written and as it is read."""


def test_everything_can_be_set_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in EVERYTHING.items():
        monkeypatch.setenv(variable(name), text)

    assert read({}).model_dump() == as_read()


def test_everything_can_be_set_by_flags_which_go_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORKD_TREE_LIVE", "8")
    monkeypatch.setenv("FORKD_SOCKET_MODE", "what is not looked at is not refused")

    assert read({name: text for name, (text, _) in EVERYTHING.items()}).model_dump() == as_read()


def as_read() -> dict[str, object]:
    assert set(EVERYTHING) == set(Settings.model_fields)
    return {name: value for name, (_, value) in EVERYTHING.items()} | {
        "bind": {"host": "::1", "port": 8889},
        "uid_range": {"first": 70_000, "count": 70_000},
        "build_uid_range": {"first": 190_000, "count": 262_144},
        "egress_proxy": asdict(Via("proxy.example", 3128, "u:p")),
    }


WRONG = [
    ("socket", "/" + "x" * 107, "107 bytes"),
    ("socket_mode", "rw", "octal"),
    ("socket_mode", "1000", "octal"),
    ("socket_group", "no-such-group", "groupadd --system forkd"),
    ("socket_group", "4294967295", "a group of this host"),
    ("bind", "8889", "host:port"),
    ("uid_range", "70000", "FIRST:COUNT"),
    ("uid_range", "0:65536", "above 0"),
    ("build_uid_range", "90000", "FIRST:COUNT"),
    ("build_network", "internet *.example.com", "names in full"),
    ("jail", "maybe", "on"),
    ("core_scheduling", "on", "sandbox"),
    ("bind", "127.0.0.1:65536", "host:port"),
    ("hosts", "forkd.example:8889", "without ports"),
    ("hosts", "https://forkd.example", "without ports"),
    ("state_dir", "", "folder"),
    ("zygotes", "64", "greater than or equal to 65"),
    ("tree_live", "0", "greater than or equal to 1"),
    ("tree_depth", "-1", "greater than or equal to 1"),
    ("tree_private_mib", "1.5", "integer"),
    ("io_pressure_max", "100.1", "less than or equal to 100"),
    ("cpu_pressure_max", "-0.1", "greater than or equal to 0"),
    ("pack_unsigned", "yes", "'allow' or 'refuse'"),
    ("dns", "dns.example", "must be IPv4 addresses"),
    ("dns", "192.0.2.1:x", "must be IPv4 addresses"),
    ("egress_proxy", "socks5://proxy.example", "must be http://host:port"),
    ("egress_proxy", "http://user:word@proxy.example:x", "must be http://host:port"),
    ("network_slots", "-1", "greater than or equal to 0"),
    ("network_slots", "1025", "less than or equal to 1024"),
    ("otlp_endpoint", "127.0.0.1:4318", "must be http://host:port"),
    ("otlp_endpoint", "https://user:word@host", "must be http://host:port"),
    ("audit_full", "stop", "'continue' or 'refuse'"),
]


@pytest.mark.parametrize(("name", "text", "problem"), WRONG)
def test_a_value_that_makes_no_sense_is_refused_with_its_variable_and_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, problem: str
) -> None:
    monkeypatch.setenv(variable(name), text)

    with pytest.raises(InvalidRequest) as caught:
        read({})

    assert caught.value.context["field"] == variable(name)
    for part in (variable(name), problem, default(name)):
        assert part in str(caught.value)


@pytest.mark.parametrize(("name", "text", "problem"), WRONG)
def test_a_flag_that_makes_no_sense_is_refused_by_its_name(
    name: str, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        read({name: text})

    assert caught.value.context["field"] == flag(name)


def test_a_password_in_a_value_that_makes_no_sense_is_not_repeated() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"egress_proxy": "https://user:hush@proxy.example"})
    assert "https://...@proxy.example" in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://one.example:1"}, Via("one.example", 1)),
        ({"https_proxy": "one.example:1", "http_proxy": "x:2"}, Via("one.example", 1)),
        (
            {"HTTP_PROXY": "two.example:2", "NO_PROXY": "a,b"},
            Via("two.example", 2, None, ("a", "b")),
        ),
        ({"HTTPS_PROXY": "one.example:1", "FORKD_EGRESS_PROXY": ""}, None),
        ({"HTTPS_PROXY": "socks5://one.example:1"}, None),
        (
            {"FORKD_EGRESS_PROXY": "own.example:3", "HTTPS_PROXY": "x:1", "no_proxy": "c"},
            Via("own.example", 3, None, ("c",)),
        ),
    ],
)
def test_sandboxes_go_by_the_daemons_own_proxy_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Via | None
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "FORKD_EGRESS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = read({"vmm": "/vmm", "agent": "/agent"})
    assert host_settings(settings).egress_proxy == expected


def test_a_daemon_must_listen_somewhere() -> None:
    with pytest.raises(InvalidRequest, match="socket, or bind"):
        read({"socket": ""})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FORKD_SOKET", ["FORKD_SOCKET"]),
        ("FORKD_STATEDIR", ["FORKD_STATE_DIR"]),
        ("FORKD_CACHE", ["FORKD_CACHE_DIR"]),
        ("FORKD_TREE_LIVES", ["FORKD_TREE_LIVE"]),
        ("FORKD_BIND", []),
        ("FORKD_KEYS", []),
        ("FORKD_TOKEN", []),
        ("FORKD_HOME", []),
        ("FORKD_FOR_SOMETHING_ELSE", []),
        ("SOCKET", []),
    ],
)
def test_a_variable_that_may_be_misspelt_is_told_with_what_may_be_meant(
    name: str, meant: list[str]
) -> None:
    assert [each for _, each in misspelt({name: ""})] == meant


def test_every_flag_has_a_help_and_names_its_default_and_its_variable() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]  # it is a group
    options = {each.name: each for each in command.params}

    for name in Settings.model_fields:
        assert options[name].opts == [flag(name)]
        assert options[name].help == meaning(name) != ""
        assert variable(name) in options[name].show_default
        assert default(name) in options[name].show_default


def test_the_audit_log_is_in_the_state_folder_unless_it_is_named_or_unwanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read({"state_dir": "/s"}).audit_path == Path("/s/audit.log")
    assert read({"state_dir": "/s", "audit_log": "/l/a"}).audit_path == Path("/l/a")

    monkeypatch.setenv("FORKD_AUDIT_LOG", "")
    assert read({}).audit_path is None


@pytest.mark.parametrize(("jail", "filtered"), [(None, True), ("off", False)])
def test_only_without_a_jail_by_choice_are_system_calls_not_filtered(
    jail: Literal["off"] | None, *, filtered: bool
) -> None:
    settings = Settings(jail=jail, vmm=Path("/vmm"), agent=Path("/agent"))

    assert host_settings(settings).filtered is filtered


@pytest.mark.parametrize(("chosen", "own"), [("sandbox", True), ("off", False)])
def test_machines_have_cores_to_themselves_unless_the_operator_says_otherwise(
    chosen: Literal["sandbox", "off"], *, own: bool
) -> None:
    settings = Settings(core_scheduling=chosen, vmm=Path("/vmm"), agent=Path("/agent"))

    assert host_settings(settings).own_cores is own
    assert Settings().core_scheduling == "sandbox"


@pytest.mark.parametrize("jail", [None, "on", "off"])
@pytest.mark.parametrize("root", [True, False])
def test_who_is_root_has_users_for_machines_and_who_is_not_a_jail_without(
    monkeypatch: pytest.MonkeyPatch, jail: Literal["on", "off"] | None, *, root: bool
) -> None:
    monkeypatch.setattr("forkd.host.proc.is_root", lambda: root)
    settings = Settings(jail=jail, vmm=Path("/vmm"), agent=Path("/agent"))

    found = host_settings(settings)

    assert found.jailed is (jail != "off")
    assert (found.uids is not None) is (root and jail != "off")
    assert found.rootless_jail is (not root and jail != "off")
    assert (found.build_uids is None) is (found.uids is None)
