"""Images come from a registry by tag or digest, without TLS only where that is allowed."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from forkd import programs
from forkd.errors import BuildError, NotFound
from forkd.images.builder import build_rootfs
from forkd.images.direct import recipe_of
from forkd.images.layout import Cache
from forkd.images.registries import Registries
from forkd.images.resolving import resolve
from forkd.images.steps import Build
from forkd.limits import BUILD_UIDS_DEFAULT
from forkd.model.reference import ImageReference, parse_reference
from forkd.service import build_network
from forkd.service.build_network import BuildNetwork
from forkd.service.cells import Cells
from forkd.service.jail import UidRange
from tests.support import certificates
from tests.support import registry as registries
from tests.support.ext4 import read
from tests.support.hostile_package import cells
from tests.support.oci import regular, write_layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.images.apart import Cells as BuildCells
    from tests.support.registry import Registry

pytestmark = [pytest.mark.needs("docker-registry"), pytest.mark.timeout(120)]

WHERE: list[BuildCells | None] = [None]
"""Where registries are asked, and layers unpacked."""


@pytest.fixture(
    autouse=True,
    params=["here", pytest.param("cell", marks=pytest.mark.needs("root", "binaries"))],
)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [None if request.param == "here" else cells()]
    monkeypatch.setattr(sys.modules[__name__], "WHERE", given)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as running:
        yield running


def image(folder: Path, text: bytes) -> Path:
    return write_layout(folder / text.decode(), [[regular("hello", text)]], {"Env": ["A=1"]})


def build(tmp_path: Path, reference: str, registries: Registries | None = None) -> bytes:
    """Build what a reference means now; return what is in its file."""
    steps = Build(registries=registries or Registries())
    named = parse_reference(reference)
    if named.digest is None:
        named = named.pinned(resolve(str(named), steps, WHERE[0]))
    made = build_rootfs(recipe_of(named), Cache.open(tmp_path / "cache"), steps, WHERE[0])
    assert made.config.env == {"A": "1"}
    return read(made.path, "/hello")


def test_an_image_is_pulled_by_its_tag_and_by_its_digest(
    tmp_path: Path, registry: Registry
) -> None:
    reference = registry.push(image(tmp_path, b"one"), "team/app:1.0")
    digest = resolve(reference, Build(), WHERE[0])
    registry.push(image(tmp_path, b"two"), "team/app:1.0")

    assert build(tmp_path, reference) == b"two"
    assert build(tmp_path, f"{registry.host}/team/app@{digest}") == b"one"


def test_an_image_is_pulled_whole_though_connections_break(
    tmp_path: Path, registry: Registry
) -> None:
    source = random.Random(7)  # noqa: S311 - what does not compress
    layers = [[regular(name, source.randbytes(1 << 20))] for name in ("a", "b", "c", "d")]
    layers.append([regular("hello", b"whole")])
    layout = write_layout(tmp_path / "large", layers, {"Env": ["A=1"]})
    registry.push(layout, "team/large:1.0")

    with registries.counted(registry) as (host, counter):
        counter.cuts, counter.cut_at = 6, 400_000
        assert build(tmp_path, f"{host}/team/large:1.0") == b"whole"

        assert counter.cuts == 0


@pytest.mark.parametrize("name", ["team/app:none", "nobody/nothing:1.0"])
def test_a_missing_tag_or_repository_is_not_found(
    tmp_path: Path, registry: Registry, name: str
) -> None:
    registry.push(image(tmp_path, b"one"), "team/app:1.0")

    with pytest.raises(NotFound, match=f"no image {registry.host}/{name}: .* no such repository"):
        build(tmp_path, f"{registry.host}/{name}")

    assert list((tmp_path / "cache").glob("images/*")) == []


def test_a_digest_that_the_registry_lacks_is_not_found_and_leaves_nothing(
    tmp_path: Path, registry: Registry
) -> None:
    registry.push(image(tmp_path, b"one"), "team/app:1.0")

    with pytest.raises(NotFound, match="no such repository or tag"):
        build(tmp_path, f"{registry.host}/team/app@sha256:{'0' * 64}")

    assert list((tmp_path / "cache" / "images").iterdir()) == []


def test_plain_http_is_refused_unless_the_operator_allows_it(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = registry.push(image(tmp_path, b"one"), "team/app:1.0")
    monkeypatch.setattr(ImageReference, "is_loopback", False)

    with pytest.raises(BuildError, match=r"speaks plain HTTP.*FORKD_REGISTRIES_INSECURE"):
        build(tmp_path, reference)

    assert build(tmp_path, reference, Registries(frozenset({registry.host}))) == b"one"


def test_a_certificate_is_believed_if_this_host_or_the_operator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageReference, "is_loopback", False)
    authority = certificates.root()
    tmp_path.chmod(0o755)
    (tmp_path / "authority.pem").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "registry").mkdir()
    tls = authority.sign("registry").write(tmp_path, "registry")
    with registries.running(tmp_path / "registry", tls=tls) as registry:
        reference = registry.push(image(tmp_path, b"one"), "team/app:1.0")

        with pytest.raises(BuildError, match=r"certificate.* FORKD_REGISTRIES_INSECURE"):
            build(tmp_path / "none", reference)

        insecure = Registries(frozenset({registry.host}))
        assert build(tmp_path / "insecure", reference, insecure) == b"one"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        assert build(tmp_path / "believed", reference) == b"one"


def test_a_registry_that_wants_credentials_gets_those_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    with registries.running(tmp_path / "registry", private=True) as registry:
        reference = registry.push(image(tmp_path, b"one"), "team/app:1.0")
        auth = base64.b64encode(f"{registries.USER}:{registries.PASSWORD}".encode()).decode()
        file = tmp_path / "auth.json"
        file.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        file.chmod(0o600)

        with pytest.raises(BuildError, match=r"refuses .*team/app.*FORKD_REGISTRY_AUTH_FILE"):
            build(tmp_path, reference)

        assert build(tmp_path, reference, Registries(auth_file=file)) == b"one"


def test_a_registry_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    """Port 9 of this machine is closed, so the answer comes at once and without a network."""
    with pytest.raises(BuildError, match=r"cannot reach 127\.0\.0\.1:9 for .*:9/x:latest"):
        build(tmp_path, "127.0.0.1:9/x")


@pytest.mark.needs("root", "binaries", "nft")
def test_a_registry_that_builds_may_not_reach_is_not_asked(
    tmp_path: Path, registry: Registry
) -> None:
    reference = registry.push(image(tmp_path, b"one"), "team/app:1.0")
    vmm, uids = programs.find(programs.VMM), UidRange.parse(BUILD_UIDS_DEFAULT)

    def ask(rules: str) -> str:
        reach = BuildNetwork.of(build_network.parse(rules))
        return resolve(reference, Build(), Cells(vmm, uids, None, None, reach).build)

    with pytest.raises(BuildError, match=r"cannot reach 127\.0\.0\.1.*FORKD_BUILD_NETWORK"):
        ask("internet")

    assert ask("internet host").startswith("sha256:")
