"""What a pack may be, by name.  A pack comes from anywhere, so each of these is enforced."""

from __future__ import annotations

PACK_MANIFEST_BYTES_MAX = 1024 * 1024
"""Longest manifest of a pack: 65 links of some kilobytes each, many times."""

PACK_LINKS_MAX = 65
"""Most links in a pack: a base and the 64 deltas that a chain may have."""

PACK_BYTES_MAX = 1 << 40
"""Most bytes that the files of a pack may unpack to, holes included: 1 TiB."""

PACK_FILE_BYTES_MAX = 1 << 40
"""Longest pack that is downloaded."""

CHUNK_BYTES_MAX = 4 * 1024 * 1024
"""Most bytes that one compressed chunk holds; what a reader of packs needs in memory."""

CHUNK_STORED_BYTES_MAX = CHUNK_BYTES_MAX + CHUNK_BYTES_MAX // 128
"""Longest compressed chunk: zstd adds less than this to what it cannot compress."""

FEATURES_MAX = 1024
"""Most CPU features that a link may name; Linux knows some four hundred."""

NAME_CHARS_MAX = 128
"""Longest name in a manifest: of a recipe, a kernel, an image, a runtime, a feature."""

DEDUP_BLOCKS_MAX = 4 * 1024 * 1024
"""Most blocks that a packer remembers, 16 GiB of them; later ones that recur are stored again."""

TRUSTED_KEYS_MAX = 64
"""Most keys in a trust list; each travels with a request to unpack."""

INDEX_BYTES_MAX = 4 * 1024 * 1024
"""Longest index of packs that is read."""

INDEX_VERSIONS_MAX = 1000
"""Most versions of one name in an index."""

LAYER_CHUNKS_MAX = 8
"""Most chunks in one layer of an artifact: 32 MiB, which a client holds in memory."""

LAYER_BYTES_MAX = LAYER_CHUNKS_MAX * (CHUNK_STORED_BYTES_MAX + 8)
"""Longest layer of an artifact that is fetched."""

SIGNATURES_MAX = 64
"""Most cosign signatures of one artifact that are looked at or kept."""

SIGNATURE_BYTES_MAX = 64 * 1024
"""Longest payload of a cosign signature."""

PEM_BYTES_MAX = 64 * 1024
"""Longest file with a cosign key."""

REGISTRY_REFERENCE_CHARS_MAX = 512
"""Longest reference to a pack in a registry."""
