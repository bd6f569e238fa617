#!/bin/sh
# Make a small OCI image in ./layout, without Docker: Debian's essential packages in one layer.
# Needs mmdebstrap and python3, and root or a range of user ids in /etc/subuid.
set -eu
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf layout

mmdebstrap --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$scratch/layer.tar"
python3 - "$scratch" <<'EOF'
import hashlib, json, pathlib, sys

scratch = pathlib.Path(sys.argv[1])
layout = scratch / "layout"
blobs = layout / "blobs" / "sha256"
blobs.mkdir(parents=True)


def blob(kind, data):
    """Store a part of the image; return what describes it."""
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    media_type = f"application/vnd.oci.image.{kind}"
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


layer = blob("layer.v1.tar", (scratch / "layer.tar").read_bytes())
config = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Env": ["GREETING=hello from the image"], "WorkingDir": "/srv", "User": "nobody"},
    "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
}
config = blob("config.v1+json", json.dumps(config).encode())
manifest = {"schemaVersion": 2, "config": config, "layers": [layer]}
manifest = blob("manifest.v1+json", json.dumps(manifest).encode())
manifest["annotations"] = {"org.opencontainers.image.ref.name": "example"}
index = {"schemaVersion": 2, "manifests": [manifest]}
(layout / "index.json").write_text(json.dumps(index))
(layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
EOF
mv "$scratch/layout" layout
