"""Requests to buckets are signed as the examples of the protocol's authors are."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

import httpx
import pytest

from forkd.packs.s3 import Bucket, Signer, authorization

EXAMPLE = Bucket.from_environment(
    {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    }
)
HOST = "examplebucket.s3.amazonaws.com"
EMPTY = sha256(b"").hexdigest()


@pytest.mark.parametrize(
    ("target", "more", "signature"),
    [
        (
            ("/test.txt", ""),
            {"range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            ("/", "lifecycle="),
            {},
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            ("/", "max-keys=2&prefix=J"),
            {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_published_examples_get_their_published_signatures(
    target: tuple[str, str], more: dict[str, str], signature: str
) -> None:
    headers = {"host": HOST, "x-amz-content-sha256": EMPTY, "x-amz-date": "20130524T000000Z"}

    proof = authorization(EXAMPLE, "GET", target, headers | more)

    assert proof.endswith(f"Signature={signature}")


def test_a_token_for_some_hours_is_sent_and_signed() -> None:
    bucket = Bucket(None, "us-east-1", "id", "secret", "session")
    signer = Signer(bucket, lambda: datetime(2026, 1, 2, tzinfo=UTC))

    (request,) = signer.auth_flow(httpx.Request("GET", "https://b.example.org:444/a%20b"))

    assert request.headers["x-amz-security-token"] == "session"
    assert request.headers["x-amz-date"] == "20260102T000000Z"
    assert "x-amz-security-token" in request.headers["Authorization"]


def test_a_bucket_is_a_host_at_amazon_and_a_folder_elsewhere() -> None:
    elsewhere = Bucket("https://store.example.org/", "r", "", "", "")

    there = EXAMPLE.address("s3://mine/a b/x")
    assert there == "https://mine.s3.us-east-1.amazonaws.com/a%20b/x"
    assert elsewhere.address("s3://mine/x") == "https://store.example.org/mine/x"
    assert elsewhere.auth() is None
