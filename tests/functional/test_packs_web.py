"""Packs on a real web server: an index with versions, and everything that can be wrong with it."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from blake3 import blake3

from forkd.errors import (
    Conflict,
    Denied,
    ForkdError,
    InvalidRequest,
    NotFound,
    PackError,
    TransportError,
)
from forkd.packs import index as indexes
from forkd.packs import limits
from forkd.packs.remote import PUSH_ATTEMPTS_MAX, Place, Remote, shown, source_of, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.web import Web

DATA = b"a pack, or something like it" * 1000


@pytest.fixture
def remote() -> Iterator[Remote]:
    with Remote() as made:
        yield made


def push(remote: Remote, web: Web, name: str = "numpy", version: str | None = None) -> str:
    published = remote.push(io.BytesIO(DATA), target_of(web.url(), name, version), None)
    assert published is not None
    return published.version


def pull(remote: Remote, web: Web, source: str) -> bytes:
    url, published = remote.find(source_of(source, web.url()))
    with remote.fetch(url, published) as pieces:
        return b"".join(pieces)


def index_of(web: Web) -> Any:  # noqa: ANN401 - JSON
    return json.loads(web.files["/packs/index.json"])


def test_what_was_pushed_is_pulled(web: Web, remote: Remote) -> None:
    assert push(remote, web) == "1"

    assert pull(remote, web, "numpy") == DATA
    assert index_of(web)["packs"]["numpy"][0]["digest"] == blake3(DATA).hexdigest()


def test_versions_are_counted_and_the_newest_is_meant(web: Web, remote: Remote) -> None:
    assert [push(remote, web), push(remote, web), push(remote, web, version="9-rc.1")] == [
        "1",
        "2",
        "9-rc.1",
    ]

    place = source_of("numpy", web.url())
    _, newest = remote.find(place)
    _, second = remote.find(source_of(web.url("/packs/numpy@2"), None))
    assert newest is not None
    assert second is not None
    assert (newest.version, second.version) == ("9-rc.1", "2")


def test_a_version_is_never_replaced(web: Web, remote: Remote) -> None:
    push(remote, web, version="1.0")
    files = dict(web.files)

    with pytest.raises(Conflict, match=r"numpy@1\.0 already"):
        push(remote, web, version="1.0")

    assert web.files == files


def test_what_the_index_does_not_have_is_named_with_what_it_has(web: Web, remote: Remote) -> None:
    push(remote, web)

    with pytest.raises(NotFound, match=r"no numpy@7; of that name it has 1"):
        remote.find(source_of("numpy@7", web.url()))
    with pytest.raises(NotFound, match="no pandas"):
        remote.find(source_of("pandas", web.url()))
    with pytest.raises(NotFound):
        remote.find(source_of(web.url("/elsewhere/numpy"), None))


def test_a_push_begins_anew_if_somebody_was_faster(web: Web, remote: Remote) -> None:
    push(remote, web)
    theirs = indexes.parse(web.files["/packs/index.json"])
    theirs = theirs.with_version("other", theirs.find("numpy"))
    web.others.append(indexes.encode(theirs))

    assert push(remote, web) == "2"

    assert list(index_of(web)["packs"]) == ["numpy", "other"]


def test_a_push_gives_up_in_the_end(web: Web, remote: Remote) -> None:
    push(remote, web)
    index = indexes.parse(web.files["/packs/index.json"])
    for number in range(PUSH_ATTEMPTS_MAX):
        changed = index.with_version(f"other{number}", index.find("numpy"))
        web.others.append(indexes.encode(changed))

    with pytest.raises(Conflict, match="changed by others"):
        push(remote, web)


def test_a_file_is_stored_and_fetched_as_it_is(web: Web, remote: Remote) -> None:
    url = web.url("/bucket/x.forkpack?signature=secret")

    assert remote.push(io.BytesIO(DATA), target_of(url, "numpy", None), None) is None

    with remote.fetch(*remote.find(source_of(url, None))) as pieces:
        assert b"".join(pieces) == DATA
    assert list(web.files) == ["/bucket/x.forkpack?signature=secret"]


def test_a_redirect_is_followed(web: Web, remote: Remote) -> None:
    web.files["/there"] = DATA
    web.redirects["/here.forkpack"] = web.url("/there")

    with remote.fetch(web.url("/here.forkpack"), None) as pieces:
        assert b"".join(pieces) == DATA


def test_redirects_without_end_are_not(web: Web, remote: Remote) -> None:
    web.redirects["/a.forkpack"] = web.url("/a.forkpack")

    with (
        pytest.raises(TransportError, match="redirect"),
        remote.fetch(web.url("/a.forkpack"), None),
    ):
        pass


def test_the_token_is_sent_where_it_is_safe_and_nowhere_else(web: Web) -> None:
    web.token = "let me in"  # noqa: S105 - it guards nothing
    with Remote("let me in") as remote:
        push(remote, web)
        with pytest.raises(InvalidRequest, match="without TLS"):
            remote.index("http://example.org/packs/")
    with Remote() as remote, pytest.raises(Denied, match="403"):
        push(remote, web)


def test_the_token_does_not_follow_a_redirect_to_another_server(web: Web) -> None:
    web.files["/there"] = DATA
    web.redirects["/here.forkpack"] = web.url("/there").replace("127.0.0.1", "localhost")
    with Remote("let me in") as remote, remote.fetch(web.url("/here.forkpack"), None) as pieces:
        assert b"".join(pieces) == DATA

    assert [token for _, path, token in web.seen if path == "/there"] == [None]


def test_a_bucket_is_a_folder_whose_requests_are_signed(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url("/buckets/"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    with Remote("a token for others") as remote:
        remote.push(io.BytesIO(DATA), target_of("s3://mine/team a/", "numpy", None), None)
        url, published = remote.find(source_of("s3://mine/team a/numpy", None))
        with remote.fetch(url, published) as pieces:
            assert b"".join(pieces) == DATA

    assert all(path.startswith("/buckets/mine/team%20a/") for path in web.files)
    for _, _, proof in web.seen:
        assert proof is not None
        assert proof.startswith("AWS4-HMAC-SHA256 Credential=somebody/")
        assert "/eu-north-1/s3/aws4_request,SignedHeaders=host;x-amz-content-sha256" in proof


def test_a_bucket_is_asked_as_anybody_without_a_key(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", web.url("/"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    web.files["/mine/x.forkpack"] = DATA
    with Remote() as remote, remote.fetch("s3://mine/x.forkpack", None) as pieces:
        assert b"".join(pieces) == DATA

    assert web.seen == [("GET", "/mine/x.forkpack", None)]


def test_a_server_that_is_not_there_is_named_without_its_secrets(remote: Remote) -> None:
    url = "http://user:password@127.0.0.1:1/x.forkpack?signature=secret"

    with pytest.raises(TransportError) as failed, remote.fetch(url, None):
        pass

    assert "http://127.0.0.1:1/x.forkpack" in str(failed.value)
    assert "secret" not in str(failed.value)
    assert "password" not in shown(url)


def test_an_answer_that_breaks_off_is_an_error(web: Web, remote: Remote) -> None:
    push(remote, web)
    url, published = remote.find(source_of("numpy", web.url()))
    web.cut = 100

    with pytest.raises(TransportError), remote.fetch(url, published) as pieces:
        list(pieces)


def test_a_file_that_is_not_what_the_index_says_is_refused(web: Web, remote: Remote) -> None:
    push(remote, web)
    path = f"/packs/{index_of(web)['packs']['numpy'][0]['file']}"
    web.files[path] = DATA[:-1] + b"!"

    with pytest.raises(PackError, match="not the one that the index means"):
        pull(remote, web, "numpy")


def test_a_file_one_byte_longer_than_the_index_says_is_not_read_on(
    web: Web, remote: Remote
) -> None:
    push(remote, web)
    path = f"/packs/{index_of(web)['packs']['numpy'][0]['file']}"
    web.files[path] = DATA + b"x"

    with pytest.raises(PackError, match=f"longer than {len(DATA)}"):
        pull(remote, web, "numpy")


def test_a_file_without_an_index_has_a_limit_too(
    web: Web, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/x.forkpack"] = DATA
    for limit in (len(DATA), len(DATA) - 1):
        monkeypatch.setattr(limits, "PACK_FILE_BYTES_MAX", limit)
        with remote.fetch(web.url("/x.forkpack"), None) as pieces:
            if limit == len(DATA):
                assert b"".join(pieces) == DATA
            else:
                with pytest.raises(PackError, match=f"longer than {limit}"):
                    list(pieces)


def entry(**members: object) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["packs"]["numpy"][0].update(members)


@pytest.mark.parametrize(
    "change",
    [
        entry(file="../../etc/passwd"),
        entry(file="/etc/passwd"),
        entry(file="http://elsewhere/x"),
        entry(file="x?y"),
        entry(file=".."),
        entry(version="../1"),
        entry(version=""),
        entry(bytes=0),
        entry(bytes=limits.PACK_FILE_BYTES_MAX + 1),
        entry(digest="x"),
        entry(extra=1),
        lambda said: said["packs"].update({"../x": []}),
        lambda said: said["packs"].update(
            {"numpy": said["packs"]["numpy"] * (limits.INDEX_VERSIONS_MAX + 1)}
        ),
    ],
)
def test_an_index_that_names_what_it_must_not_is_refused(
    change: Callable[[dict[str, Any]], object], web: Web, remote: Remote
) -> None:
    push(remote, web)
    said = index_of(web)
    change(said)
    web.files["/packs/index.json"] = json.dumps(said).encode()

    with pytest.raises(PackError, match="index is refused"):
        remote.index(web.url())


def test_an_index_of_a_later_version_is_refused(web: Web, remote: Remote) -> None:
    push(remote, web)
    web.files["/packs/index.json"] = json.dumps(index_of(web) | {"version": 2}).encode()

    with pytest.raises(PackError, match="index has version 2, and this forkd reads 1"):
        remote.index(web.url())


def test_an_index_one_byte_too_long_is_refused(web: Web, remote: Remote) -> None:
    index = indexes.encode(indexes.Index())
    web.files["/packs/index.json"] = index.ljust(limits.INDEX_BYTES_MAX)
    assert remote.index(web.url())[0] == indexes.Index()

    web.files["/packs/index.json"] = index.ljust(limits.INDEX_BYTES_MAX + 1)
    with pytest.raises(PackError, match="longer than"):
        remote.index(web.url())


def test_one_version_more_than_an_index_may_have_is_refused(web: Web, remote: Remote) -> None:
    push(remote, web)
    index = indexes.parse(web.files["/packs/index.json"])
    first = index.find("numpy")
    full = tuple(
        first.model_copy(update={"version": str(n)}) for n in range(limits.INDEX_VERSIONS_MAX)
    )

    with pytest.raises(Conflict, match=str(limits.INDEX_VERSIONS_MAX)):
        indexes.Index(packs={"numpy": full}).with_version(
            "numpy", first.model_copy(update={"version": "more"})
        )


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("numpy", Place("http://f/", "numpy")),
        ("numpy@1.2", Place("http://f/", "numpy", "1.2")),
        ("https://h/a/numpy", Place("https://h/a/", "numpy")),
        ("https://h/a/numpy@3", Place("https://h/a/", "numpy", "3")),
        ("https://h/a/x.forkpack", Place("https://h/a/x.forkpack")),
        ("https://h/a/x?sig=1", Place("https://h/a/x?sig=1")),
        ("s3://bucket/a/numpy@3", Place("s3://bucket/a/", "numpy", "3")),
    ],
)
def test_what_a_user_writes_means_one_place(source: str, place: Place) -> None:
    assert source_of(source, "http://f") == place


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("numpy", None),
        ("numpy@../x", "http://f/"),
        ("numpy@", "http://f/"),
        ("numpy", "file:///etc/"),
        ("file:///etc/passwd", None),
        ("ftp://h/x.forkpack", None),
        ("https://h/a/", None),
        ("https:///a", None),
        ("https://h/a#b", None),
    ],
)
def test_what_is_no_place_is_refused(source: str, folder: str | None) -> None:
    with pytest.raises(InvalidRequest):
        source_of(source, folder)


@pytest.mark.parametrize("url", ["file:///tmp/", "numpy", "https://", "https://h/x#y"])
def test_what_is_no_target_is_refused(url: str) -> None:
    with pytest.raises(ForkdError):
        target_of(url, "numpy", None)


def test_a_file_has_no_versions() -> None:
    with pytest.raises(InvalidRequest, match="folder"):
        target_of("https://h/x.forkpack", "numpy", "1")
