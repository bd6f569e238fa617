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

REGISTRY_ATTEMPTS_MAX = 5
"""How often a registry that has answered before is asked for one thing."""

REGISTRY_PAUSE_S_MIN = 0.5
"""How long before it is asked again, if it does not say; doubled each time."""

REGISTRY_PAUSE_S_MAX = 60.0
"""Longest time before it is asked again; one that wants a longer one has failed."""

REGISTRY_PROGRESS_BYTES = 1024 * 1024
"""An attempt that brought so much of a layer is not counted."""

LAYERS_AT_ONCE_MAX = 3
"""How many layers of an image are fetched at once: as many as Docker's daemon fetches."""

AUTH_FILE_BYTES_MAX = 1024 * 1024
"""Longest file with credentials of registries."""

CREDENTIAL_HELPER_TIMEOUT_S = 60.0
"""How long a credential helper may take; it may ask the user."""
