"""The pure parts of the egress proxy: who is asked for, what is put in, what is taken out."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import UTC, datetime

import pytest
from cryptography import x509

from forkd.errors import HostError, InvalidRequest
from forkd.model.caller import Tenant
from forkd.model.secret import Bound, Secret, SecretValue, parse_hosts
from forkd.network.authority import Authority
from forkd.network.heads import BodyMask, is_searchable, mask
from forkd.network.hello import HELLO_BYTES_MAX, UNFINISHED, server_name
from forkd.network.upstream import Stream, Upstreams, Via

VALUE = "abcabcabd-value"


def bound(value: str = VALUE, name: str = "token") -> Bound:
    secret = Secret(
        name, Tenant("t"), parse_hosts(["a.example.com"]), "Authorization", None, datetime.now(UTC)
    )
    return Bound(secret, SecretValue(value))


def client_hello(name: str | None) -> bytes:
    """Return what a real client says first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize(
    ("name", "found"),
    [("api.example.com", "api.example.com"), ("API.example.com", "api.example.com"), (None, None)],
)
def test_the_name_is_read_and_every_shorter_part_is_unfinished(
    name: str | None, found: str | None
) -> None:
    hello = client_hello(name)
    assert server_name(hello) == found
    assert server_name(hello + b"more") == found
    assert {server_name(hello[:length]) for length in range(1, len(hello))} == {UNFINISHED}


def test_a_hello_may_come_in_many_records() -> None:
    hello = client_hello("api.example.com")
    head, message = hello[:3], hello[5:]
    pieces = [message[start : start + 7] for start in range(0, len(message), 7)]
    cut = b"".join(head + len(each).to_bytes(2) + each for each in pieces)
    assert server_name(cut) == "api.example.com"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # another message of the handshake
        b"\x17\x03\x03\x00\x04aaaa",  # data
        b"\x16\x02",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01x",  # cut within
        b"\x16" + b"\x03" * (HELLO_BYTES_MAX - 1),  # longer than one may be
    ],
)
def test_what_is_no_hello_names_nobody(data: bytes) -> None:
    assert server_name(data) is None


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        (f"{'a' * 63}.example.com", True),
        (f"{'a' * 64}.example.com", False),
        ("a\0.example.com", False),
        ("-a.example.com", False),
        ("a..example.com", False),
    ],
)
def test_a_name_that_is_none_is_not_taken_for_one(name: str, taken: bool) -> None:  # noqa: FBT001 - a table
    placed = ("bbb." * 64)[: len(name) - 1] + "b"  # which Python takes for a name
    hello = client_hello(placed).replace(placed.encode(), name.encode())
    assert server_name(hello) == (name if taken else None)


async def test_a_name_that_python_cannot_encode_is_one_error_of_ours() -> None:
    ours, theirs = socket.socketpair()
    stream = Stream(*await asyncio.open_connection(sock=ours))
    try:
        with pytest.raises(HostError, match="no TLS with"):
            await Upstreams().secure(stream, f"{'a' * 64}.example.com")
    finally:
        stream.abort()
        theirs.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
@pytest.mark.parametrize(
    "body",
    [
        f"{VALUE}",
        f"abc{VALUE}abcabc",
        f"abcabcabcabd-value{VALUE[:-1]}",
        f"{VALUE}{VALUE} {VALUE[:5]}",
        "nothing",
        "",
    ],
)
def test_values_are_taken_out_of_a_body_however_it_is_cut(body: str, size: int) -> None:
    made = BodyMask([bound(), bound("another-value", "other")])
    data = body.encode()
    pieces = [made.feed(data[start : start + size]) for start in range(0, len(data), size)]
    masked = b"".join((*pieces, made.end()))
    assert masked == data.replace(VALUE.encode(), b"forkd-secret-token"[: len(VALUE)])


def test_what_cannot_be_the_beginning_of_a_value_is_not_held_back() -> None:
    made = BodyMask([bound()])
    assert made.feed(b"data: 1\n\nab") == b"data: 1\n\n"
    assert made.feed(b"x") == b"abx"


def test_headers_of_answers_are_masked() -> None:
    alternative = (b"Alt-Svc", b'h3=":443"')
    (masked,) = mask([(b"X-Echo", f"<{VALUE}>".encode()), alternative], [bound()])
    assert masked == (b"X-Echo", b"<forkd-secret-token>")


@pytest.mark.parametrize(
    ("headers", "searchable"),
    [
        ([], True),
        ([(b"Content-Encoding", b"identity")], True),
        ([(b"content-encoding", b" GZIP")], False),
    ],
)
def test_compressed_bodies_are_not_searched(
    headers: list[tuple[bytes, bytes]],
    searchable: bool,  # noqa: FBT001 - a table
) -> None:
    assert is_searchable(headers) is searchable


def test_a_ca_follows_from_the_hosts_key_and_its_tree() -> None:
    def key(host_key: bytes, root: str) -> object:
        pem = Authority(host_key, root).certificate()
        return x509.load_pem_x509_certificate(pem).public_key()

    one, other = bytes(32), bytes(31) + b"\1"
    assert key(one, "sb-a") == key(one, "sb-a")
    assert len({str(key(h, r).public_numbers()) for h in (one, other) for r in "ab"}) == 4  # type: ignore[attr-defined]  # a public key


def test_a_leaf_is_signed_by_its_ca_and_for_its_name_only() -> None:
    authority = Authority(bytes(32), "sb-a")
    ca = x509.load_pem_x509_certificate(authority.certificate())
    leaf = x509.load_pem_x509_certificate(authority.leaf("a.example.com").certificate)
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.example.com"]
    constraints = leaf.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://proxy.example.com:3128", Via("proxy.example.com", 3128)),
        ("proxy.example.com:3128/", Via("proxy.example.com", 3128)),
        ("http://192.0.2.1", Via("192.0.2.1", 80)),
        ("http://u%40x:p%3A@192.0.2.1:8080", Via("192.0.2.1", 8080, "u@x:p:")),
        ("http://[2001:db8::1]:8080", Via("2001:db8::1", 8080)),
    ],
)
def test_the_url_of_a_proxy_is_read(url: str, expected: Via) -> None:
    assert Via.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    ["https://a:1", "socks5://a:1", "http://", "http://a:x", "http://a/path", "http://a:99999"],
)
def test_what_is_no_url_of_a_proxy_is_refused_and_its_password_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest, match="http://host:port"):
        Via.parse(url)


@pytest.mark.parametrize(
    ("no_proxy", "name", "address", "expected"),
    [
        ("", "a.example.com", "192.0.2.1", False),
        ("*", None, "192.0.2.1", True),
        ("example.com", "a.example.com", "192.0.2.1", True),
        (".example.com", "example.com", "192.0.2.1", True),
        ("ample.com", "example.com", "192.0.2.1", False),
        ("x, 192.0.2.0/24", None, "192.0.2.1", True),
        ("192.0.2.2", None, "192.0.2.1", False),
        ("[2001:db8::1]", None, "2001:db8::1", True),
        ("example.com", None, "192.0.2.1", False),
    ],
)
def test_what_no_proxy_says_is_reached_straight(
    no_proxy: str,
    name: str | None,
    address: str,
    expected: bool,  # noqa: FBT001 - a table
) -> None:
    assert Via.parse("http://p:1", no_proxy).bypasses(name, address) is expected
