"""Images of registries are copied as layouts, and refusals are in words that a user can act on."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.errors import BuildError, NotFound
from forkd.images import manifests, pulling
from forkd.images.pulling import explained
from forkd.images.registries import Access, Registries
from forkd.images.stored import LAYOUT, Source, open_stored
from forkd.model.reference import parse_reference
from forkd.registry import client
from forkd.registry.client import digest_of
from forkd.registry.limits import (
    LAYERS_AT_ONCE_MAX,
    REGISTRY_MANIFEST_BYTES_MAX,
    REGISTRY_PAUSE_S_MAX,
)
from forkd.registry.session import Fault, Kind, Trust
from tests.support import oci
from tests.support.oci import regular, write_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IMAGE = parse_reference("hub.example/tool:1")
OPEN = Access(insecure=False, auth_file=None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.MISSING, "WORDS"),
        (Kind.REFUSED, r"hub.example refuses hub.example/tool:1: .* FORKD_REGISTRY_AUTH_FILE"),
        (Kind.NO_TLS, r"hub.example speaks plain HTTP.* FORKD_REGISTRIES_INSECURE"),
        (Kind.UNREACHABLE, "WORDS; check the daemon's network, and FORKD_BUILD_NETWORK"),
        (Kind.TLS, "WORDS; .*certificate.* FORKD_REGISTRIES_INSECURE"),
        (Kind.LOST, "cannot fetch hub.example/tool:1: WORDS"),
        (Kind.CHANGED, "cannot fetch hub.example/tool:1: WORDS"),
        (Kind.TOO_LONG, "cannot fetch hub.example/tool:1: WORDS"),
        (Kind.FAILED, "cannot fetch hub.example/tool:1: WORDS"),
    ],
)
def test_what_goes_wrong_is_said_with_what_to_check(kind: Kind, said: str) -> None:
    error = explained(IMAGE, Fault(kind, "WORDS"))

    assert isinstance(error, NotFound if kind is Kind.MISSING else BuildError)
    assert error.context == {"image": "hub.example/tool:1"}
    with pytest.raises(type(error), match=f"^{said}"):
        raise error


def test_registries_of_this_host_and_those_of_the_operator_need_no_tls() -> None:
    said = Registries(frozenset({"hub.example:5000"}))

    assert said.is_insecure("//127.0.0.1:5000/a")
    assert said.is_insecure("hub.example:5000/a:1")
    assert not said.is_insecure("hub.example/a:1")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path / "layout", [[regular("a", b"1")], [regular("b", b"2")]])


class Serving:
    """A registry that has one image, the answers of which a test may change."""

    def __init__(self, layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        index = json.loads((layout / "index.json").read_text())
        self.digest = index["manifests"][0]["digest"]
        self.answers: dict[str, bytes] = {
            f"sha256:{each.name}": each.read_bytes() for each in (layout / "blobs/sha256").iterdir()
        }
        self.answers["1"] = self.answers[self.digest]
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self.instead: dict[str, httpx.Response] = {}
        monkeypatch.setattr(pulling, "Registry", self._registry)

    def _registry(self, *args: object, **more: object) -> client.Registry:
        make: Callable[..., client.Registry] = client.Registry
        return make(*args, **more, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        self.asked.append(name)
        self.before(name)
        if name in self.instead:
            return self.instead[name]
        data = self.answers.get(name)
        stream = httpx.ByteStream(data or b"")
        return httpx.Response(404 if data is None else 200, stream=stream)

    def add(self, document: object) -> str:
        """Have a document; return its digest."""
        raw = json.dumps(document).encode()
        self.answers[digest_of(raw)] = raw
        return digest_of(raw)


@pytest.fixture
def serving(layout: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    return Serving(layout, monkeypatch)


def fetch(to: Path, bytes_max: int = 1 << 20) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    pulling.fetch(str(IMAGE), OPEN, to, bytes_max=bytes_max, tell=tell)
    return told


def test_an_image_is_copied_as_a_layout(serving: Serving, layout: Path, tmp_path: Path) -> None:
    assert pulling.digest_now(str(IMAGE), OPEN) == serving.digest

    told = fetch(tmp_path / "copy")

    ours = open_stored(Source(LAYOUT, tmp_path / "copy"), tmp_path / "none", bytes_max=1)
    theirs = open_stored(Source(LAYOUT, layout), tmp_path / "none", bytes_max=1)
    assert ours.config == theirs.config
    assert [each.path.read_bytes() for each in ours.layers] == [
        each.path.read_bytes() for each in theirs.layers
    ]
    assert told[-1][0] == told[-1][1] == sum(each.size for each in ours.layers)


def test_an_index_leads_to_the_image_for_this_platform(serving: Serving, tmp_path: Path) -> None:
    described = {"mediaType": manifests.MANIFEST, "size": 1}
    platforms = [
        (f"sha256:{'0' * 64}", {"os": "linux", "architecture": "arm64"}),
        (serving.digest, {"os": "linux", "architecture": "amd64"}),
    ]
    listed = [{**described, "digest": digest, "platform": each} for digest, each in platforms]
    digest = serving.add({"schemaVersion": 2, "manifests": listed})
    serving.answers["1"] = serving.answers[digest]

    assert pulling.digest_now(str(IMAGE), OPEN) == digest
    fetch(tmp_path / "copy")

    assert open_stored(Source(LAYOUT, tmp_path / "copy"), tmp_path / "none", bytes_max=1)


def test_an_image_for_another_machine_is_refused_before_its_layers_are_asked_for(
    serving: Serving, layout: Path, tmp_path: Path
) -> None:
    manifest = oci.manifest_of(layout)
    config = serving.add({"os": "linux", "architecture": "arm64"})
    manifest["config"]["digest"], manifest["config"]["size"] = config, len(serving.answers[config])
    serving.answers["1"] = json.dumps(manifest).encode()

    with pytest.raises(BuildError, match="for linux on arm64, not linux on amd64"):
        fetch(tmp_path / "copy")

    assert serving.asked == ["1", config]


def test_a_layer_that_was_changed_or_lost_is_named(
    serving: Serving, layout: Path, tmp_path: Path
) -> None:
    digest = oci.manifest_of(layout)["layers"][1]["digest"]

    serving.answers[digest] = serving.answers[digest][:-1] + b"?"
    with pytest.raises(BuildError, match=f"a part of hub.example/tool:1 was changed: {digest}"):
        fetch(tmp_path / "changed")
    del serving.answers[digest]
    with pytest.raises(BuildError, match=f"lost a part of hub.example/tool:1: {digest}"):
        fetch(tmp_path / "lost")


def test_layers_are_fetched_some_at_once_and_none_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = write_layout(
        tmp_path / "many",
        [
            *[[regular(f"f{at}", b"x")] for at in range(2 * LAYERS_AT_ONCE_MAX)],
            [regular("f0", b"x")],
        ],
    )
    serving = Serving(many, monkeypatch)
    layers = {each["digest"] for each in oci.manifest_of(many)["layers"]}
    together = threading.Barrier(LAYERS_AT_ONCE_MAX)
    begun: list[str] = []

    def wait(name: str) -> None:
        begun.append(name)
        together.wait(timeout=30)  # each of the layers waits for as many as may be fetched at once

    serving.before = lambda name: wait(name) if name in layers else None
    told = fetch(tmp_path / "copy")

    assert sorted(begun) == sorted(layers)
    assert told == sorted(told)
    assert {f"sha256:{each.name}" for each in (tmp_path / "copy/blobs/sha256").iterdir()} >= layers


@pytest.mark.timeout(REGISTRY_PAUSE_S_MAX / 2)
def test_what_cannot_be_had_ends_what_waits_for_its_registry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = write_layout(tmp_path / "many", [[regular(f"f{at}", b"x")] for at in range(9)])
    serving = Serving(many, monkeypatch)
    lost, *others = (each["digest"] for each in oci.manifest_of(many)["layers"])
    del serving.answers[lost]
    busy = {"Retry-After": str(int(REGISTRY_PAUSE_S_MAX))}
    serving.instead = {name: httpx.Response(503, headers=busy) for name in others}

    with pytest.raises(BuildError, match=f"lost a part of hub.example/tool:1: {lost}"):
        fetch(tmp_path / "copy")

    assert len(set(serving.asked) & set(others)) < len(others)


def test_layers_may_be_so_long_as_they_say_before_any_is_asked_for(
    serving: Serving, layout: Path, tmp_path: Path
) -> None:
    manifest = oci.manifest_of(layout)
    most = manifests.stored_bytes_max(1)
    manifest["layers"][0]["size"] = most + 1 - manifest["layers"][1]["size"]
    serving.answers["1"] = json.dumps(manifest).encode()

    with pytest.raises(BuildError, match="layers hold more than 1 bytes"):
        fetch(tmp_path / "copy", bytes_max=1)

    assert serving.asked == ["1"]


def test_a_manifest_may_be_so_long(serving: Serving) -> None:
    serving.answers["1"] = b"{}".ljust(REGISTRY_MANIFEST_BYTES_MAX)
    assert pulling.digest_now(str(IMAGE), OPEN) == digest_of(serving.answers["1"])
    serving.answers["1"] += b" "
    with pytest.raises(BuildError, match=f"more than {REGISTRY_MANIFEST_BYTES_MAX} bytes"):
        pulling.digest_now(str(IMAGE), OPEN)


def test_a_damaged_file_of_credentials_is_named(tmp_path: Path) -> None:
    (tmp_path / "auth.json").write_text("{")

    with pytest.raises(BuildError, match=r"FORKD_REGISTRY_AUTH_FILE: .*auth\.json is no JSON"):
        pulling.digest_now(str(IMAGE), Access(insecure=False, auth_file=tmp_path / "auth.json"))


def test_a_proxy_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://proxy.example")

    with pytest.raises(
        BuildError, match=r"cannot reach hub\.example: a proxy .* is unusable: .*ftp"
    ):
        pulling.digest_now(str(IMAGE), OPEN)


def test_authorities_that_cannot_be_read_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("none.pem", "no.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        with pytest.raises(
            BuildError, match=r"cannot reach hub\.example: SSL_CERT_FILE .* unusable"
        ):
            pulling.digest_now(str(IMAGE), OPEN)


@pytest.mark.parametrize("speaks_tls", [True, False])
def test_an_insecure_registry_is_asked_over_tls_if_it_speaks_that(*, speaks_tls: bool) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.scheme)
        if request.url.scheme == "https" and not speaks_tls:
            raise httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

    with client.Registry(
        IMAGE,
        "image",
        manifests.ACCEPTED,
        None,
        trust=Trust.ANY,
        explain=lambda fault: explained(IMAGE, fault),
        transport=httpx.MockTransport(answer),
    ) as registry:
        registry.manifest("1")

    assert asked == ["https", "https" if speaks_tls else "http"]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1016)", Kind.NO_TLS),
        ("[SSL] record layer failure (_ssl.c:1010)", Kind.NO_TLS),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", Kind.TLS),
        ("[Errno 111] Connection refused", Kind.UNREACHABLE),
    ],
)
def test_a_registry_that_does_not_answer_is_told_from_one_without_tls(
    reason: str, kind: Kind
) -> None:
    faults: list[Fault] = []

    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(reason)

    def explain(fault: Fault) -> Exception:
        faults.append(fault)
        return BuildError(fault.text)

    with (
        client.Registry(
            IMAGE,
            "image",
            manifests.ACCEPTED,
            None,
            trust=Trust.TLS,
            explain=explain,
            transport=httpx.MockTransport(answer),
        ) as registry,
        pytest.raises(BuildError),
    ):
        registry.manifest("1")

    assert (faults[0].kind, faults[0].reason) == (kind, reason)
