"""References to packs in registries, credentials for these, and how they are shown to them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.errors import Denied, ForkdError, InvalidRequest, PackError, TransportError
from forkd.limits import REGISTRY_NAME_CHARS_MAX
from forkd.packs import cosign, references
from forkd.packs.limits import REGISTRY_REFERENCE_CHARS_MAX
from forkd.packs.registry import Registry
from forkd.registry import limits
from forkd.registry.client import digest_of
from forkd.registry.credentials import Login, login_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PACK = references.parse("registry.example.com/team/numpy:1.0", field="url")
LOGIN = Login("alice", "password", "", "a file")
BASIC = "Basic YWxpY2U6cGFzc3dvcmQ="


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("registry.example.com/team/numpy:1.0", ("registry.example.com", "team/numpy", "1.0")),
        ("oci://localhost/numpy", ("localhost", "numpy", "latest")),
        ("127.0.0.1:5000/a/b/c:x_Y", ("127.0.0.1:5000", "a/b/c", "x_Y")),
        ("[::1]:5000/a:1", ("[::1]:5000", "a", "1")),
        (f"h.example/a@sha256:{'0' * 64}", ("h.example", "a", "latest")),
    ],
)
def test_a_reference_has_parts(text: str, parts: tuple[str, str, str]) -> None:
    found = references.parse(text, field="url")

    assert references.is_reference(text)
    assert (found.registry, found.repository, found.tag) == parts


@pytest.mark.parametrize(
    "text",
    [
        "team/numpy:1",
        "h.example/Team:1",
        "h.example/",
        "h.example",
        "h.example/../x",
        "h.example/a:",
        "h.example/a:b c",
        "h.example/a@sha256:1",
        "user@h.example/a",
        "h.example/a?x",
        "oci://",
        f"h.example/{'a' * REGISTRY_NAME_CHARS_MAX}",
    ],
)
def test_what_is_no_reference_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not a reference to a pack") as refused:
        references.parse(text, field="source")

    assert repr(text[:80]) in str(refused.value)
    assert refused.value.context["field"] == "source"


def test_a_reference_may_be_so_long() -> None:
    name = "a" * (REGISTRY_NAME_CHARS_MAX - len("h.example/"))
    assert references.parse(f"h.example/{name}", field="url").repository == name
    tag = "1" * 128
    assert references.parse(f"h.example/{name}:{tag}", field="url").tag == tag
    with pytest.raises(InvalidRequest):
        references.parse(f"h.example/{name}:{tag}1", field="url")
    long = "/" * (REGISTRY_REFERENCE_CHARS_MAX + 1)
    with pytest.raises(InvalidRequest):
        references.parse(long, field="url")


@pytest.mark.parametrize("text", ["numpy", "numpy@1", "https://h/a/numpy", "s3://b/numpy"])
def test_urls_and_names_are_no_references(text: str) -> None:
    assert not references.is_reference(text)


def auths(**entries: object) -> str:
    return json.dumps({"auths": {key.replace("_", "."): each for key, each in entries.items()}})


def encoded(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_first_file_that_knows_the_registry_is_believed(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    key = "registry_example_com"

    assert login_for(PACK, environment) is None
    docker = written(tmp_path, ".docker/config.json", auths(**{key: encoded("docker:x:y")}))
    assert login_for(PACK, environment) == Login("docker", "x:y", "", str(docker))
    written(tmp_path, ".config/containers/auth.json", auths(other_example=encoded("a:b")))
    assert login_for(PACK, environment) == Login("docker", "x:y", "", str(docker))
    podman = written(tmp_path, "run/containers/auth.json", auths(**{key: encoded("podman:z")}))
    assert login_for(PACK, environment) == Login("podman", "z", "", str(podman))
    named = written(tmp_path, "named.json", auths(**{key: {"identitytoken": "token"}}))
    environment["REGISTRY_AUTH_FILE"] = str(named)
    assert login_for(PACK, environment) == Login("", "", "token", str(named))


@pytest.mark.parametrize(
    "key",
    [
        "registry.example.com",
        "https://registry.example.com/v1/",
        "registry.example.com/team",
        "registry.example.com/team/numpy",
    ],
)
def test_a_key_of_a_file_may_be_narrow_or_a_url(key: str, tmp_path: Path) -> None:
    said = {"auths": {key: encoded("alice:x"), "registry.example.com/other": encoded("bob:y")}}
    path = written(tmp_path, "config.json", json.dumps(said))

    found = login_for(PACK, {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path)})

    assert found == Login("alice", "x", "", str(path))


def helper(folder: Path, script: str) -> None:
    path = written(folder, "bin/docker-credential-test", f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "said", [{"credsStore": "test"}, {"credHelpers": {"registry.example.com": "test"}}]
)
def test_a_credential_helper_is_asked(
    said: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    environment = {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path)}
    path = written(tmp_path, "config.json", json.dumps(said))
    program = "docker-credential-test"

    with pytest.raises(InvalidRequest, match=f"{path} names {program}: cannot run it"):
        login_for(PACK, environment)
    helper(
        tmp_path,
        """read -r server; echo "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$server\\"}" """,
    )
    assert login_for(PACK, environment) == Login("get", PACK.registry, "", program)
    helper(tmp_path, """echo '{"Username": "<token>", "Secret": "x"}'""")
    assert login_for(PACK, environment) == Login("", "", "x", program)
    helper(tmp_path, "echo credentials not found in native keychain; exit 1")
    assert login_for(PACK, environment) is None
    helper(tmp_path, "echo the keychain is locked >&2; exit 1")
    with pytest.raises(InvalidRequest, match=f"{program} failed for .*: the keychain is locked"):
        login_for(PACK, environment)
    helper(tmp_path, "echo '[]'")
    with pytest.raises(InvalidRequest, match=f"{program} answered .* no credentials"):
        login_for(PACK, environment)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}".ljust(limits.AUTH_FILE_BYTES_MAX + 1), "longer than"),
        (auths(registry_example_com={"auth": "?"}), "damaged `auth`"),
        (auths(registry_example_com=encoded("no colon")), "damaged `auth`"),
        ('{"credsStore": "../x"}', "'../x'"),
    ],
)
def test_a_damaged_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, "config.json", text)

    with pytest.raises(InvalidRequest, match=f"{path}.*{said}"):
        login_for(PACK, {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path)})


def test_a_file_may_be_so_long(tmp_path: Path) -> None:
    written(tmp_path, "config.json", "{}".ljust(limits.AUTH_FILE_BYTES_MAX))

    assert login_for(PACK, {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path)}) is None


def test_a_file_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"REGISTRY_AUTH_FILE names .*/none"):
        login_for(PACK, {"REGISTRY_AUTH_FILE": str(tmp_path / "none")})


def registry(
    answer: Callable[[httpx.Request], httpx.Response],
    login: Login | None = None,
    *,
    plain_http: bool = False,
) -> Registry:
    def streamed(request: httpx.Request) -> httpx.Response:
        said = answer(request)
        stream = httpx.ByteStream(said.content)
        return httpx.Response(said.status_code, headers=said.headers, stream=stream)

    transport = httpx.MockTransport(streamed)
    return Registry(PACK, login, plain_http=plain_http, transport=transport, wait=lambda _: None)


@pytest.mark.parametrize("login", [None, LOGIN, Login("", "", "identity", "a file")])
def test_a_token_is_fetched_with_credentials_and_kept(login: Login | None) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.host == "auth.example.com":
            return httpx.Response(200, json={"access_token": "t0ken"})
        if request.headers.get("Authorization") != "Bearer t0ken":
            challenge = (
                'Bearer realm="https://auth.example.com/token",service="s",'
                'scope="repository:team/numpy:pull,push"'
            )
            return httpx.Response(401, headers={"WWW-Authenticate": challenge})
        return httpx.Response(200, content=b"{}")

    with registry(answer, login) as opened:
        assert opened.manifest("1.0") == (b"{}", digest_of(b"{}"))
        assert opened.manifest("1.0") == (b"{}", digest_of(b"{}"))

    hosts = [request.url.host for request in seen]
    assert hosts == [PACK.host, "auth.example.com", PACK.host, PACK.host]
    asked = seen[1]
    if login is not None and login.identity:
        assert asked.method == "POST"
        assert b"refresh_token=identity" in asked.content
        assert b"grant_type=refresh_token" in asked.content
    else:
        assert dict(asked.url.params) == {
            "service": "s",
            "scope": "repository:team/numpy:pull,push",
        }
        assert asked.headers.get("Authorization") == (BASIC if login else None)


def test_credentials_go_to_the_registry_alone() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        proof = request.headers.get("Authorization")
        seen.append((f"{request.method} {request.url.host}", proof))
        if request.url.host == PACK.host and proof is None:
            return httpx.Response(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        if request.method == "HEAD":
            return httpx.Response(404)
        if request.method == "POST":
            return httpx.Response(202, headers={"Location": "https://elsewhere.example/up?a=b"})
        if request.method == "GET" and request.url.host == PACK.host:
            return httpx.Response(307, headers={"Location": "https://elsewhere.example/blob"})
        return httpx.Response(200 if request.method == "GET" else 201, content=b"data")

    with registry(answer, LOGIN) as opened:
        assert opened.put_blob(b"data")
        assert opened.blob(digest_of(b"data"), 4) == b"data"

    assert {proof for where, proof in seen if "elsewhere" in where} == {None}
    assert [where for where, _ in seen if "elsewhere" in where] == [
        "PUT elsewhere.example",
        "GET elsewhere.example",
    ]


@pytest.mark.parametrize("realm", ["http://auth.example.com/", "ftp://x", ""])
def test_a_token_server_without_tls_gets_no_credentials(realm: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PACK.host
        return httpx.Response(401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})

    with registry(answer, LOGIN) as opened, pytest.raises(Denied, match="token server without TLS"):
        opened.manifest("1.0")


def test_layers_are_not_sent_without_tls_to_who_asks_for_that() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.scheme == "https"
        headers = {"Location": "http://registry.example.com/up"}
        return httpx.Response(404 if request.method == "HEAD" else 202, headers=headers)

    with registry(answer) as opened, pytest.raises(TransportError, match="without TLS"):
        opened.put_blob(b"data")


def test_plain_http_is_asked_for_by_the_user() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=request.url.scheme.encode())

    with registry(answer, plain_http=True) as opened:
        assert opened.manifest("1.0")[0] == b"http"
    with registry(answer) as opened:
        assert opened.manifest("1.0")[0] == b"https"


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (401, b"", Denied, "refuses .*numpy:1.0: the credentials of 'alice' in a file"),
        (403, b"", Denied, "refuses"),
        (500, b"x", TransportError, "registry.example.com answered 500 for .*numpy:1.0$"),
        (429, b'{"errors": [{"message": "slow down"}]}', TransportError, "429 .*: slow down"),
        (404, b"", PackError, "has lost a part of"),
        (200, b"other", PackError, "was changed"),
        (200, b"data+", PackError, "was changed"),
    ],
)
def test_what_a_registry_answers_instead_is_said(
    status: int, body: bytes, kind: type[ForkdError], said: str
) -> None:
    with (
        registry(lambda _: httpx.Response(status, content=body), LOGIN) as opened,
        pytest.raises(kind, match=said),
    ):
        opened.blob(digest_of(b"data"), 4)


def test_an_answer_is_read_so_far_and_no_further() -> None:
    size = limits.REGISTRY_ANSWER_BYTES_MAX
    data = bytes(size)
    with registry(lambda _: httpx.Response(200, content=data)) as opened:
        assert opened.blob(digest_of(data), size) == data
    with (
        registry(lambda _: httpx.Response(200, content=bytes(size + 1))) as opened,
        pytest.raises(PackError, match=f"more than {size} bytes"),
    ):
        opened.blob(digest_of(data), size)


def test_a_manifest_with_another_digest_is_refused() -> None:
    with (
        registry(lambda _: httpx.Response(200, content=b"{} ")) as opened,
        pytest.raises(PackError, match=r"the manifest of .* was changed"),
    ):
        opened.manifest(digest_of(b"{}"))


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----",
        "not a key",
        "",
    ],
)
def test_a_file_without_a_key_is_named(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, "key.pem", text)

    for read in (cosign.read_secret, cosign.read_public):
        with pytest.raises(InvalidRequest, match=str(path)):
            read(path)
