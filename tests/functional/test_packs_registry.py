"""Packs in Debian's docker-registry: what is sent, what is refused, and what is left of it."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import NotFound, PackError, TransportError
from forkd.model.ids import Tag
from forkd.model.snapshot import SnapshotStatus
from forkd.packs import artifacts, cosign, limits, references
from forkd.packs.manifest import BLOCK_BYTES
from forkd.packs.reader import read
from forkd.packs.registry import MANIFEST_TYPE, Registry
from forkd.packs.writer import Source, write
from forkd.registry.client import digest_of
from tests.functional.test_packs_service import a_host
from tests.support import registry as registries
from tests.support.fake_service import a_snapshot
from tests.support.packs import ANYBODY, a_chain, a_link, pages, signed, write_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

pytestmark = [pytest.mark.needs("docker-registry"), pytest.mark.timeout(120)]

NAME = "team/numpy:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[registries.Registry, Path]]:
    """A registry whose files a test may change."""
    (folder := tmp_path / "own").mkdir()
    with registries.running(folder) as running:
        yield running, folder / "stored/docker/registry/v2"


@pytest.fixture(autouse=True)
def _own_keys_and_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORKD_KEYS", str(tmp_path / "keyring"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.chdir(tmp_path)


def opened(reference: references.Reference) -> Registry:
    return Registry(reference, None, plain_http=False)


def at(server: registries.Registry, name: str = NAME) -> references.Reference:
    return references.parse(f"{server.host}/{name}", field="url")


def push(reference: references.Reference, pack: bytes) -> artifacts.Pushed:
    with opened(reference) as registry:
        *_, pushed = artifacts.push(registry, reference, io.BytesIO(pack))
    assert isinstance(pushed, artifacts.Pushed)
    return pushed


def pull(reference: references.Reference) -> bytes:
    with opened(reference) as registry:
        return b"".join(artifacts.fetch(registry, reference, None))


def noise(seed: int, blocks: int) -> list[bytes]:
    source = random.Random(seed)  # noqa: S311 - what does not compress
    return [source.randbytes(BLOCK_BYTES) for _ in range(blocks)]


def grown(source: Source, folder: Path, seed: int, blocks: int) -> Source:
    """Return a chain of one link more, with pages that are like no others."""
    tag = f"t{len(source.links)}"
    link = a_link(folder / tag, tag, source.links[-1].tag if source.links else None)
    body = pages(*noise(seed, blocks))
    memory = write_stored(folder / tag / "memory", "memory", body)
    files = tuple(memory if file.name == "memory" else file for file in link.files)
    link = link.model_copy(update={"files": files})
    return Source((*source.links, link), (*source.folders, folder / tag), source.rootfs)


def packed(source: Source) -> bytes:
    return b"".join(write(source))


def test_what_was_pushed_is_pulled(server: registries.Registry, tmp_path: Path) -> None:
    pack = signed(packed(a_chain(tmp_path / "in", 3)))
    reference = at(server, "team/same:1")

    pushed = push(reference, pack)

    assert pull(reference) == pack
    assert pull(at(server, f"team/same@{pushed.digest}")) == pack
    assert pushed.sent_layers == pushed.layers
    assert pushed.bytes == len(pack) - 8  # what ends a pack is not stored


def test_a_second_snapshot_over_the_same_base_costs_its_delta(
    server: registries.Registry, tmp_path: Path
) -> None:
    rootfs = tmp_path / "rootfs.ext4"
    rootfs.write_bytes(b"".join(noise(1, 200)))
    base = grown(Source((), (), rootfs), tmp_path / "in", 2, 3000)
    deltas = [grown(base, tmp_path / f"delta{seed}", seed, 100) for seed in (3, 4)]
    base_bytes = len(packed(base))
    with registries.counted(server) as (host, counter):
        name = f"{host}/team/delta"
        push(references.parse(f"{name}:base", field="url"), packed(base))
        assert counter.sent > base_bytes
        for number, source in enumerate(deltas):
            pack = packed(source)
            before = counter.sent

            pushed = push(references.parse(f"{name}:{number}", field="url"), pack)

            delta_bytes = len(pack) - base_bytes
            assert delta_bytes < counter.sent - before <= 1.1 * delta_bytes
            assert pushed.sent_bytes <= 1.1 * delta_bytes

        before = counter.sent
        again = push(references.parse(f"{name}:again", field="url"), packed(base))
    assert (again.sent_layers, again.layers > 1) == (0, True)


def test_a_layer_has_so_many_chunks_and_no_more(
    server: registries.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHUNK_BYTES_MAX", 64 * 1024)
    chain = grown(Source((), (), a_chain(tmp_path / "a").rootfs), tmp_path / "in", 5, 500)
    pack = packed(chain)
    reference = at(server, "team/large:1")

    pushed = push(reference, pack)

    memory_layers = -(-500 * BLOCK_BYTES // (limits.LAYER_CHUNKS_MAX * 64 * 1024))
    assert pushed.layers == 3 + memory_layers  # image, state and the disk's layer have one each
    assert pull(reference) == pack


def blobs(stored: Path) -> list[Path]:
    return sorted(stored.glob("blobs/sha256/*/*/data"), key=lambda path: path.stat().st_size)


def test_a_layer_that_was_changed_is_refused(
    own: tuple[registries.Registry, Path], tmp_path: Path
) -> None:
    server, stored = own
    push(at(server), packed(a_chain(tmp_path / "in")))
    for path in blobs(stored):
        raw = path.read_bytes()
        if not raw.startswith((b"FKDPACK", b"{")):
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))

    with pytest.raises(PackError, match=r"numpy:1 was changed: sha256:.* has another digest") as no:
        pull(at(server))
    assert no.value.context["reason"] == "digest"


def test_a_manifest_that_was_changed_is_refused(
    own: tuple[registries.Registry, Path], tmp_path: Path
) -> None:
    server, stored = own
    pushed = push(at(server), packed(a_chain(tmp_path / "in")))
    path = stored / f"blobs/sha256/{pushed.digest[7:9]}/{pushed.digest[7:]}/data"
    raw = path.read_bytes()
    assert raw.count(b'image.title":"t0"') == 1
    path.write_bytes(raw.replace(b'image.title":"t0"', b'image.title":"t1"'))

    with pytest.raises(PackError, match=r"the manifest of .*numpy@sha256:.* was changed"):
        pull(at(server, f"team/numpy@{pushed.digest}"))


def test_a_layer_that_is_lost_is_named(
    own: tuple[registries.Registry, Path], tmp_path: Path
) -> None:
    server, stored = own
    push(at(server), packed(a_chain(tmp_path / "in")))
    for path in blobs(stored):
        if not path.read_bytes().startswith((b"FKDPACK", b"{")):
            path.unlink()

    with pytest.raises(PackError, match=r"has lost a part of .*numpy:1: sha256:") as lost:
        pull(at(server))
    assert lost.value.context["reason"] == "lost"


def test_what_is_not_there_is_named(server: registries.Registry) -> None:
    with pytest.raises(NotFound, match=r"no pack 127.*/team/none:7: .* no such repository or tag"):
        pull(at(server, "team/none:7"))


def test_what_is_no_pack_is_refused(server: registries.Registry) -> None:
    reference = at(server, "team/other:1")
    with opened(reference) as registry:
        registry.put_blob(b"{}")
        part = {"mediaType": "application/json", "digest": digest_of(b"{}"), "size": 2}
        said = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": part}
        registry.put_manifest("1", json.dumps(said | {"layers": []}).encode())

        with pytest.raises(PackError, match="team/other:1 is no pack"):
            artifacts.fetch(registry, reference, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.update(size=limits.LAYER_BYTES_MAX + 1),
        lambda part: part.update(size=-1),
        lambda part: part.update(size="1"),
        lambda part: part.update(digest="sha256:../../x"),
        lambda part: part.update(mediaType="application/octet-stream"),
    ],
)
def test_a_manifest_that_says_what_it_must_not_is_refused(
    change: Callable[[dict[str, Any]], object],
    server: registries.Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = at(server, "team/said:1")
    push(reference, packed(a_chain(tmp_path / "in")))
    with opened(reference) as registry:
        raw, _ = registry.manifest("1")
        said = json.loads(raw)
        change(said["layers"][0])
        answered = (json.dumps(said).encode(), "sha256:0")
        monkeypatch.setattr(registry, "manifest", lambda _: answered)

        with pytest.raises(PackError, match=r"manifest of .*said:1 is refused"):
            artifacts.fetch(registry, reference, None)


def test_a_registry_that_is_down_is_named() -> None:
    reference = references.parse("127.0.0.1:1/team/numpy:1", field="source")

    with pytest.raises(TransportError, match=r"cannot reach 127\.0\.0\.1:1 for 127.*numpy:1: "):
        pull(reference)


def test_credentials_are_those_of_docker(
    forkd: Forkd, daemon: RunningDaemon, tmp_path: Path
) -> None:
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")
    (folder := tmp_path / "private").mkdir()
    with registries.running(folder, private=True) as server:
        name = f"{server.host}/{NAME}"
        config = tmp_path / "docker/config.json"
        config.parent.mkdir()

        nobody = forkd("push", "numpy", name, "--unsigned")
        auth = base64.b64encode(b"puller:wrong").decode()
        config.write_text(json.dumps({"auths": {server.host: {"auth": auth}}}))
        wrong = forkd("push", "numpy", name, "--unsigned")
        auth = base64.b64encode(f"{registries.USER}:{registries.PASSWORD}".encode()).decode()
        config.write_text(json.dumps({"auths": {server.host: {"auth": auth}}}))
        right = forkd("push", "numpy", name, "--unsigned", "--json")

    assert f"{server.host} refuses {name}: it needs credentials" in nobody.err
    assert f"the credentials of 'puller' in {config} do not suffice" in wrong.err
    assert "wrong" not in wrong.err
    assert right.document["reference"] == name
    assert (nobody.code, wrong.code, right.code) == (5, 5, 0)


def test_a_pack_is_pushed_pulled_and_refused_by_commands(
    forkd: Forkd, daemon: RunningDaemon, server: registries.Registry
) -> None:
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")
    forkd("key", "new")
    name = f"{server.host}/team/cli:1"

    pushed = forkd("push", "numpy", name, "--json").document
    again = forkd("push", "numpy", f"oci://{name}", "--json").document
    taken = forkd("pull", name, "--as", "copy", "--json").document
    shown = forkd("push", "numpy", name)

    assert pushed["sent_layers"] == pushed["layers"] > again["sent_layers"] == 0
    assert taken["snapshot"]["tag"] == "copy"
    assert taken["signed_by"] == pushed["signed_by"]
    assert Tag("copy") in daemon.service.stored
    assert f"{name}: " in shown.err
    assert "were sent" in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["push", "numpy", "numpy/UPPER:1"], "'numpy/UPPER:1'"),
        (["push", "numpy", "127.0.0.1:5/Upper:1"], "'127.0.0.1:5/Upper:1'"),
        (["push", "numpy", "127.0.0.1:5/x:1", "--version", "2"], "NAME:TAG"),
        (["push", "numpy", f"127.0.0.1:5/x@sha256:{'0' * 64}", "--unsigned"], "NAME:TAG"),
        (["push", "numpy", "https://h/x/", "--cosign-key", "x"], "--cosign-key"),
        (["push", "numpy", "127.0.0.1:5/x:1", "--unsigned", "--cosign-key", "none"], "read none"),
        (["pull", "127.0.0.1:5/x:1@sha256:0"], "'127.0.0.1:5/x:1@sha256:0'"),
        (["pull", "https://h/x", "--plain-http"], "--plain-http"),
        (["pull", "127.0.0.1:5/x:1", "--cosign-key", "none"], "read none"),
    ],
)
def test_what_is_no_reference_is_refused(
    words: list[str], said: str, forkd: Forkd, daemon: RunningDaemon
) -> None:
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")
    forkd("key", "new")

    ended = forkd(*words)

    assert ended.code == 2
    assert said in ended.err


def test_a_pull_that_is_refused_leaves_nothing(
    forkd: Forkd, daemon: RunningDaemon, own: tuple[registries.Registry, Path]
) -> None:
    server, stored = own
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")
    forkd("key", "new")
    name = f"{server.host}/{NAME}"
    assert forkd("push", "numpy", name).code == 0
    for path in blobs(stored)[-1:]:
        path.write_bytes(path.read_bytes()[:-1] + b"!")

    ended = forkd("pull", name, "--as", "copy")

    assert ended.code == 1
    assert f"a part of {name} was changed" in ended.err
    assert Tag("copy") not in daemon.service.stored


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a key as people who use cosign do, with openssl."""
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    for words in (
        ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(secret)],
        ["pkey", "-in", str(secret), "-pubout", "-out", str(public)],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True)  # noqa: S603, S607 - our own arguments
    return secret, public


def test_a_cosign_signature_is_made_and_asked_for(
    forkd: Forkd, daemon: RunningDaemon, server: registries.Registry, tmp_path: Path
) -> None:
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")
    forkd("key", "new")
    (secret, public), (other, stranger) = key_pair(tmp_path, "mine"), key_pair(tmp_path, "other")
    name = f"{server.host}/team/cosigned:1"
    assert forkd("push", "numpy", name).code == 0
    unsigned = forkd("pull", name, "--as", "copy", "--cosign-key", str(public))

    pushed = [forkd("push", "numpy", name, "--cosign-key", str(secret), "--json") for _ in range(2)]
    taken = forkd("pull", name, "--as", "copy", "--cosign-key", str(public))
    refused = forkd("pull", name, "--as", "other", "--cosign-key", str(stranger))
    assert forkd("push", "numpy", name, "--cosign-key", str(other)).code == 0
    both = [
        forkd("pull", name, "--as", f"b{number}", "--cosign-key", str(each)).code
        for number, each in enumerate((public, stranger))
    ]

    assert f"{name} has no cosign signature" in unsigned.err
    assert f"{name} has no cosign signature by that key" in refused.err
    assert (unsigned.code, taken.code, refused.code, both) == (1, 0, 1, [0, 0])
    assert Tag("other") not in daemon.service.stored
    digest = pushed[0].document["digest"]
    with opened(at(server, "team/cosigned:1")) as registry:
        raw, _ = registry.manifest(cosign.tag_of(digest))
        layers = json.loads(raw)["layers"]
        payload = registry.blob(layers[0]["digest"], layers[0]["size"])
    assert len(layers) == 2  # one for each key, however often it signed
    (tmp_path / "signature").write_bytes(
        base64.b64decode(layers[0]["annotations"][cosign.ANNOTATION])
    )
    words = ["-sha256", "-verify", str(public), "-signature", "signature"]
    subprocess.run(["openssl", "dgst", *words], input=payload, check=True, capture_output=True)  # noqa: S603, S607 - our own arguments
    assert json.loads(payload)["critical"]["image"]["docker-manifest-digest"] == digest


def test_a_signature_of_another_artifact_does_not_count(
    server: registries.Registry, tmp_path: Path
) -> None:
    secret, public = key_pair(tmp_path, "mine")
    reference = at(server, "team/swapped:1")
    first = push(reference, packed(a_chain(tmp_path / "a", 1)))
    with opened(reference) as registry:
        artifacts.sign(registry, reference, first.digest, cosign.read_secret(secret))
        signatures, _ = registry.manifest(cosign.tag_of(first.digest))
    second = push(reference, packed(a_chain(tmp_path / "b", 2)))
    with opened(reference) as registry:
        registry.put_manifest(cosign.tag_of(second.digest), signatures)

        with pytest.raises(PackError, match="no cosign signature by that key"):
            artifacts.fetch(registry, reference, cosign.read_public(public))


@pytest.mark.asyncio
async def test_a_chain_that_was_pulled_is_ready_in_another_store(
    server: registries.Registry, tmp_path: Path
) -> None:
    reference = at(server, "team/chain:1")
    with a_host(tmp_path / "here") as here, a_host(tmp_path / "there") as there:
        here.add(["base", "middle", "head"])
        push(reference, await here.pack("head"))

        links = await there.unpack(pull(reference), "head")

        assert links == [("base", False), ("middle", False), ("head", False)]
        assert there.contents("head") == here.contents("head")
        assert there.catalog.get(Tag("head")).status is SnapshotStatus.READY


def test_a_pulled_pack_is_read(server: registries.Registry, tmp_path: Path) -> None:
    reference = at(server, "team/read:1")
    push(reference, packed(a_chain(tmp_path / "in", 2)))
    (out := tmp_path / "out").mkdir()

    head = read(io.BytesIO(pull(reference)), out, ANYBODY)

    assert [link.tag for link in head.manifest.links] == ["t0", "t1"]
    assert (out / "1/memory").read_bytes() == (tmp_path / "in/t1/memory").read_bytes()
