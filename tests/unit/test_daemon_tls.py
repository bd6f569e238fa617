"""TCP is served over TLS, with certificates that may change while it is."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.asyncio.client import connect

from forkd import AsyncClient, Client
from forkd.daemon.clients import TCP
from forkd.daemon.settings import Bind, Settings
from forkd.daemon.tls import certificates
from forkd.errors import InvalidRequest, TransportError
from tests.support.audited import audited
from tests.support.certificates import Signed, root

if TYPE_CHECKING:
    from pathlib import Path


DEADLINE_S = 10.0

NONE = "of-nobody"
"""No token of the daemon's."""


@dataclass
class Files:
    """The files of one server, signed by one CA."""

    folder: Path
    ca: Signed
    ca_file: Path
    cert: Path
    key: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key}

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    ca = root()
    ca_file, _ = ca.write(tmp_path, "ca")
    cert, key = ca.sign("server").write(tmp_path, "server")
    return Files(tmp_path, ca, ca_file, cert, key)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORKD_CA_FILE", "FORKD_CLIENT_CERT", "FORKD_CLIENT_KEY"):
        monkeypatch.delenv(name, raising=False)


def read(**given: Any) -> None:  # noqa: ANN401 - settings
    certificates(Settings(bind=Bind("127.0.0.1", 0), **given))


def refused(match: str, **given: Any) -> str:  # noqa: ANN401 - settings
    with pytest.raises(InvalidRequest, match=match) as caught:
        read(**given)
    return str(caught.value.context["field"])


def test_a_certificate_that_does_not_match_its_key_is_refused(files: Files) -> None:
    _, other = files.ca.sign("other").write(files.folder, "other")

    match = rf"FORKD_TLS_KEY {other} does not match .*FORKD_TLS_CERT {files.cert}"
    assert refused(match, tls_cert=files.cert, tls_key=other) == "tls_key"


def test_a_chain_that_does_not_begin_with_the_servers_own_is_refused(files: Files) -> None:
    files.cert.write_bytes(files.ca_file.read_bytes() + files.cert.read_bytes())

    refused("must be the server's own, before those of its CAs", **files.settings)


def test_a_client_ca_that_is_none_is_refused(files: Files) -> None:
    match = rf"FORKD_TLS_CLIENT_CA {files.cert} .*not a CA's \(CN=server\)"
    assert refused(match, **files.settings, tls_client_ca=files.cert) == "tls_client_ca"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_may_read_is_refused_with_the_way_out(files: Files, mode: int) -> None:
    files.key.chmod(mode)

    assert refused(f"chmod 600 {files.key}", **files.settings) == "tls_key"


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: Files) -> None:
    cert, key = files.ca.sign("server").write(files.folder, "hidden", password=b"secret")

    refused("has a password; .*openssl pkey", tls_cert=cert, tls_key=key)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize(("text", "match"), [("rubbish", "PEM"), (None, "does not exist")])
def test_a_file_that_is_missing_or_holds_something_else_is_named_with_its_setting(
    files: Files, name: str, text: str | None, match: str
) -> None:
    path = files.folder / "wrong"
    if text is not None:
        path.touch(0o600)
        path.write_text(text)

    given = {**files.settings, name: path}
    assert refused(rf"FORKD_{name.upper()} {path} .*{match}", **given) == name


@pytest.mark.parametrize(
    ("given", "missing"),
    [("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")],
)
def test_half_of_what_tls_needs_is_refused(files: Files, given: str, missing: str) -> None:
    assert refused("TLS needs both", **{given: files.ca_file}) == missing


def test_certificates_for_no_address_are_refused(files: Files) -> None:
    with pytest.raises(InvalidRequest, match="set FORKD_BIND too"):
        certificates(Settings(**files.settings))


def test_an_expired_certificate_is_a_warning(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = files.ca.sign("old", days=-1).write(files.folder, "old")
    with caplog.at_level(logging.WARNING):
        read(tls_cert=cert, tls_key=key)

    (record,) = caplog.records
    assert "expired" in record.getMessage()
    assert record.__dict__["setting"] == "FORKD_TLS_CERT"


async def test_the_sdk_is_answered_over_https_by_a_daemon_whose_ca_it_was_given(
    tmp_path: Path, files: Files
) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        assert daemon.url.startswith("https://127.0.0.1:")
        ca_file = str(files.ca_file)
        async with AsyncClient(daemon.url, token=daemon.secret, ca_file=ca_file) as client:
            assert await client.sandboxes.list() == []


async def test_both_flavours_of_the_sdk_take_everything_from_the_environment_websockets_too(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = files.ca.sign("client").write(tmp_path, "client")
    given = {**files.settings, "tls_client_ca": files.ca_file}
    async with audited(tmp_path, **given) as daemon:
        monkeypatch.setenv("FORKD_URL", daemon.url)
        monkeypatch.setenv("FORKD_TOKEN", daemon.secret)
        monkeypatch.setenv("FORKD_CA_FILE", str(files.ca_file))
        monkeypatch.setenv("FORKD_CLIENT_CERT", str(cert))
        monkeypatch.setenv("FORKD_CLIENT_KEY", str(key))
        async with AsyncClient() as client:
            await client.snapshots.create("new", recipe="/recipes/good")
            (sandbox,) = await client.fork("new")
            async with sandbox.exec_stream(["echo", "well"]) as stream:
                assert b"".join([each.data async for each in stream]) == b"well\n"

        assert await asyncio.to_thread(said_by_echo, sandbox.id) == b"well\n"


def said_by_echo(sandbox: str) -> bytes:
    with Client() as client, client.sandboxes.get(sandbox).exec_stream(["echo", "well"]) as stream:
        return b"".join(each.data for each in stream)


def handshake(url: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    parts = httpx.URL(url)
    plain = socket.create_connection((parts.host, parts.port or 0), DEADLINE_S)
    try:
        return context.wrap_socket(plain, server_hostname=parts.host)
    except BaseException:
        plain.close()
        raise


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_from_1_2_on_are_spoken(
    tmp_path: Path, files: Files, version: ssl.TLSVersion
) -> None:
    context = files.trusting
    context.minimum_version = context.maximum_version = version
    async with (
        audited(tmp_path, **files.settings) as daemon,
        httpx.AsyncClient(verify=context) as http,
    ):
        assert (await http.get(f"{daemon.url}/healthz")).status_code == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_older_versions_are_refused(
    tmp_path: Path, files: Files, version: ssl.TLSVersion
) -> None:
    context = files.trusting
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    async with audited(tmp_path, **files.settings) as daemon:
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            await asyncio.to_thread(handshake, daemon.url, context)


async def test_a_chain_of_cas_is_sent_with_the_certificate(tmp_path: Path, files: Files) -> None:
    between = files.ca.sign("between", is_ca=True)
    cert, key = between.sign("server").write(tmp_path, "chained")
    async with (
        audited(tmp_path, tls_cert=cert, tls_key=key) as daemon,
        httpx.AsyncClient(verify=files.trusting) as http,
    ):
        assert (await http.get(f"{daemon.url}/healthz")).status_code == 200


async def test_a_daemon_of_another_ca_is_not_trusted_and_the_way_out_is_told(
    tmp_path: Path, files: Files
) -> None:
    stranger, _ = root("stranger").write(tmp_path, "stranger")
    async with audited(tmp_path, **files.settings) as daemon:
        for ca_file in (None, str(stranger)):
            async with AsyncClient(daemon.url, token=NONE, ca_file=ca_file) as client:
                with pytest.raises(TransportError, match=r"not trusted.*FORKD_CA_FILE"):
                    await client.version()


async def test_a_client_without_a_certificate_is_told_and_written_down(
    tmp_path: Path, files: Files
) -> None:
    given = {**files.settings, "tls_client_ca": files.ca_file}
    own = root("stranger").sign("client").write(tmp_path, "client")
    async with audited(tmp_path, **given) as daemon:
        ca_file = str(files.ca_file)
        async with AsyncClient(daemon.url, token=NONE, ca_file=ca_file) as client:
            with pytest.raises(TransportError, match="set FORKD_CLIENT_CERT"):
                await client.version()
        cert, key = map(str, own)
        async with AsyncClient(
            daemon.url,
            token=NONE,
            ca_file=ca_file,
            client_cert=cert,
            client_key=key,
        ) as client:
            with pytest.raises(TransportError, match="does not trust the certificate"):
                await client.version()

        lines = await daemon.lines(2)
        assert {(each["action"], each["result"], each["error"]) for each in lines} == {
            ("tls_handshake", "denied", "denied")
        }
        assert all(each["remote"].startswith("127.0.0.1:") for each in lines)


def peer_name(connection: ssl.SSLSocket | ssl.SSLObject) -> str:
    certificate = connection.getpeercert()
    assert certificate is not None
    subject: Any = certificate["subject"]
    return str(subject[0][0][1])


async def test_a_reload_gives_new_connections_the_new_certificate_and_drops_none(
    tmp_path: Path, files: Files
) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        parts = httpx.URL(daemon.url)
        reader, writer = await asyncio.open_connection(parts.host, parts.port, ssl=files.trusting)
        files.ca.sign("renewed").write(tmp_path, "server")
        daemon.reloads.run()

        with await asyncio.to_thread(handshake, daemon.url, files.trusting) as following:
            assert peer_name(following) == "renewed"
        assert peer_name(writer.get_extra_info("ssl_object")) == "server"
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_reload_of_unusable_files_keeps_the_old_ones_and_says_so(
    tmp_path: Path, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        files.cert.write_text("half a file")
        daemon.reloads.run()

        with await asyncio.to_thread(handshake, daemon.url, files.trusting) as following:
            assert peer_name(following) == "server"
        failed, done = await daemon.lines(2)
        assert (failed["action"], failed["result"], failed["error"], failed["objects"]) == (
            "reload", "failed", "invalid_request", ["tls"],
        )  # fmt: skip
        assert "tls" not in done["objects"]
    assert any("FORKD_TLS_CERT" in str(each.__dict__.get("error")) for each in caplog.records)


async def test_plain_http_to_a_tls_port_is_told_so(tmp_path: Path, files: Files) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        plain = daemon.url.replace("https:", "http:")
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{plain}/healthz")
        assert (answer.status_code, answer.json()["code"]) == (400, "request")
        assert "https://" in answer.json()["error"]
        async with AsyncClient(plain, token=NONE) as client:
            with pytest.raises(Exception, match="speaks TLS"):
                await client.version()


async def test_tls_to_a_plain_port_is_told_so_by_the_sdk(tmp_path: Path, files: Files) -> None:
    async with audited(tmp_path) as daemon:
        url = daemon.url.replace("http:", "https:")
        async with AsyncClient(url, token=NONE, ca_file=str(files.ca_file)) as client:
            with pytest.raises(TransportError, match=f"speaks no TLS; its URL is {daemon.url}"):
                await client.version()


async def test_who_says_nothing_is_cut_off_and_keeps_nobody_from_being_served(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = replace(TCP, first_header_timeout_s=3_600.0)
    monkeypatch.setattr("tests.support.audited.TCP", patient)
    async with audited(tmp_path, **files.settings) as daemon:
        parts = httpx.URL(daemon.url)
        silent = [await asyncio.open_connection(parts.host, parts.port) for _ in range(20)]
        async with httpx.AsyncClient(verify=files.trusting) as http:
            assert (await http.get(f"{daemon.url}/healthz")).status_code == 200
    # The daemon has ended without waiting for them.
    for reader, writer in silent:
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_refused_request_can_be_read_to_its_end(
    tmp_path: Path, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        parts = httpx.URL(daemon.url)
        reader, writer = await asyncio.open_connection(parts.host, parts.port, ssl=files.trusting)
        writer.write(b"this is no HTTP\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400")
        assert b"this is no HTTP/1.1" in said
        writer.close()
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_websocket_is_refused_without_a_token(tmp_path: Path, files: Files) -> None:
    async with audited(tmp_path, **files.settings) as daemon:
        url = f"wss{daemon.url.removeprefix('https')}/v2/sandboxes/a/exec/stream"
        with pytest.raises(Exception, match="401"):
            await connect(url, ssl=files.trusting)


@pytest.mark.parametrize("name", ["ca_file", "client_cert"])
def test_a_file_of_a_client_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "rubbish").write_text("rubbish")

    given: dict[str, Any] = {name: str(tmp_path / "rubbish")}
    with pytest.raises(InvalidRequest, match=f"{name} .*rubbish.*PEM") as caught:
        Client("https://localhost", **given)
    assert caught.value.context["field"] == name
