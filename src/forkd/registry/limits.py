"""How much is read of a registry, and of what proves who asks it."""

from __future__ import annotations

REGISTRY_ANSWER_BYTES_MAX = 1024 * 1024
"""Longest answer of a registry that is no manifest and no layer: an error, or a token."""

REGISTRY_MANIFEST_BYTES_MAX = 4 * 1024 * 1024
"""Longest manifest: as much as registries take."""

REDIRECTS_MAX = 5
"""How often a registry may send us elsewhere for one layer."""

REGISTRY_TIMEOUT_S = 60.0
"""Time without a byte after which a registry is taken for gone."""

AUTH_FILE_BYTES_MAX = 1024 * 1024
"""Longest file with credentials of registries."""

CREDENTIAL_HELPER_TIMEOUT_S = 60.0
"""How long a credential helper may take; it may ask the user."""
