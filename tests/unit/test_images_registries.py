"""What a registry's refusal is called, in words that a user can act on."""

from __future__ import annotations

from forkd.errors import BuildError
from forkd.images.registries import explained

SAID = (
    'skopeo failed: time="2026-11-27T15:16:00Z" level=fatal msg="Error parsing image name '
    '\\"docker://hub.example/tool:1\\": Get \\"https://hub.example/v2/\\": dial tcp: lookup '
    'hub.example: no such host"'
)


def test_a_registry_that_is_not_reached_is_named_with_what_to_check() -> None:
    error = str(explained("//hub.example/tool:1", BuildError(SAID)))

    assert error.startswith("cannot reach hub.example for hub.example/tool:1: ")
    assert 'Get "https://hub.example/v2/"' in error
    assert error.endswith("; check the daemon's network, and FORKD_BUILD_NETWORK")
    assert "\\" not in error
