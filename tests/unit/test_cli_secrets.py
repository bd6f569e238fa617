"""Secrets from outside: over REST, by the SDK, by `forkd secret` and `forkd fork --secret`."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd import Client, limits
from forkd.errors import CapacityError, InvalidRequest, NotFound
from forkd.wire.v2_secrets import SecretSet
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

VALUE = "sk-the-very-value"
HOSTS = ["api.example.com"]


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        yield client


def test_a_secret_is_set_listed_and_removed_and_its_value_told_never(client: Client) -> None:
    made = client.secrets.set("openai", VALUE, [*HOSTS, "*.example.com:8443"], env="OPENAI_API_KEY")

    assert made.placeholder == "forkd-secret-openai"
    assert made.hosts == ["api.example.com:443", "*.example.com:8443"]
    assert (made.header, made.env, made.tenant) == ("Authorization", "OPENAI_API_KEY", "default")
    assert client.secrets.list() == [made]
    assert client.secrets.set("openai", VALUE, HOSTS, header="X-Key").header == "X-Key"
    assert len(client.secrets.list()) == 1
    client.secrets.delete("openai")
    assert client.secrets.list() == []
    with pytest.raises(NotFound):
        client.secrets.delete("openai")


@pytest.mark.parametrize(
    ("value", "hosts", "field"),
    [
        ("short", HOSTS, "value"),
        ("x" * (limits.SECRET_VALUE_BYTES_MAX + 1), HOSTS, "value"),
        (f"{VALUE}\r\nX-Injected: 1", HOSTS, "value"),
        (VALUE, ["no name"], "hosts"),
        (VALUE, [], "hosts"),
        (VALUE, HOSTS * (limits.SECRET_HOSTS_MAX + 1), "hosts"),
    ],
)
def test_what_is_no_secret_is_one_error_that_does_not_repeat_it(
    client: Client, value: str, hosts: list[str], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.secrets.set("some", value, hosts)
    assert caught.value.context["field"] == field
    assert VALUE not in f"{caught.value} {caught.value.context} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "body",
    [
        {"value": {"of": VALUE}, "hosts": HOSTS},
        {"value": VALUE, "hosts": "no list"},
        {"value": VALUE, "hosts": HOSTS, "other": 1},
        {"value": VALUE * 1_000, "hosts": HOSTS},
        {"value": f"{VALUE}\n", "hosts": HOSTS},
        {"value": VALUE, "hosts": HOSTS, "header": "Host"},
    ],
)
def test_a_refusal_over_rest_does_not_repeat_the_value(
    daemon: RunningDaemon, body: dict[str, object]
) -> None:
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"))
    with httpx.Client(transport=transport, base_url="http://forkd") as http:
        answer = http.put("/v2/secrets/some", json=body)
    assert answer.status_code == 400
    assert VALUE not in answer.text


def test_a_request_does_not_show_the_value() -> None:
    assert VALUE not in repr(SecretSet(value=VALUE, hosts=HOSTS))


def test_a_tenant_has_so_many_secrets_and_no_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.service.secrets.SECRETS_PER_TENANT_MAX", 2)
    client.secrets.set("a", VALUE, HOSTS)
    client.secrets.set("b", VALUE, HOSTS)
    with pytest.raises(CapacityError):
        client.secrets.set("c", VALUE, HOSTS)
    client.secrets.set("b", VALUE, HOSTS)  # in its place
    client.secrets.set("c", VALUE, HOSTS, tenant="other")
    assert [each.name for each in client.secrets.list()] == ["a", "b", "c"]


def test_a_fork_names_secrets_that_its_tenant_has(client: Client) -> None:
    with pytest.raises(NotFound, match="no secret 'openai'"):
        client.fork("warm", network="internet", secrets=["openai"])
    client.secrets.set("openai", VALUE, HOSTS)
    (made,) = client.fork("warm", network="internet", secrets=["openai"])
    assert made.info.secrets == ["openai"]
    assert made.branch(1)[0].info.secrets == ["openai"]
    with pytest.raises(InvalidRequest) as caught:
        client.fork("warm", secrets=["openai"])
    assert caught.value.context["field"] == "secrets"


@pytest.mark.usefixtures("client")
def test_the_commands(forkd: Callable[..., Ended], tmp_path: Path) -> None:
    def run(*args: str, given: bytes = b"") -> Ended:
        return forkd(*args, stdin=given)

    made = run("secret", "set", "openai", "--host", HOSTS[0], "--env", "KEY", given=VALUE.encode())
    assert made.out == "forkd-secret-openai\n"
    (tmp_path / "value").write_text(f"{VALUE}\n")
    again = forkd(
        "secret", "set", "git", "--host", HOSTS[0], "--file", str(tmp_path / "value"), "--json"
    )
    assert again.document["placeholder"] == "forkd-secret-git"
    assert "api.example.com:443" in forkd("secret", "ls").out
    listed = forkd("secret", "ls", "--json")
    assert [each["name"] for each in listed.document] == ["git", "openai"]
    assert VALUE not in listed.out + made.out + again.out
    forked = forkd("fork", "warm", "--network", "internet", "--secret", "git", "--json")
    assert forked.document[0]["secrets"] == ["git"]
    assert forkd("secret", "rm", "git", "openai", "--json").document == {
        "removed": ["git", "openai"]
    }


@pytest.mark.parametrize("again", [VALUE, "sk-another-value"])
def test_a_terminal_asks_twice_and_shows_nothing(
    forkd: Callable[..., Ended], daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    ours, theirs = os.openpty()
    shown = bytearray()

    def type_when_asked() -> None:
        for text, answer in ((b"Value: ", VALUE), (b"Value again: ", again)):
            while not shown.endswith(text):
                shown.extend(os.read(ours, 1))
            os.write(ours, f"{answer}\n".encode())

    typist = threading.Thread(target=type_when_asked)
    typist.start()
    opened = os.open

    def terminal_of_this_process(path: str, *flags: int, **more: int) -> int:
        return os.dup(theirs) if path == "/dev/tty" else opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", terminal_of_this_process)
    with os.fdopen(os.dup(theirs), "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ended = forkd("secret", "set", "openai", "--host", HOSTS[0], keep_stdin=True)
    typist.join()
    os.write(theirs, b"\0")
    while not shown.endswith(b"\0"):
        shown.extend(os.read(ours, 1))
    os.close(ours)
    os.close(theirs)

    differ = "the two values differ; nothing was changed" in ended.err
    assert (ended.code, differ) == ((0, False) if again == VALUE else (2, True))
    assert shown.split() == [b"Value:", b"Value", b"again:", b"\0"]
    assert len(daemon.service.vault.all()) == (again == VALUE)
