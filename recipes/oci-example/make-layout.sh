#!/bin/sh
# Make a small OCI image in ./layout, without Docker: Debian's essential packages in one layer.
# Needs mmdebstrap and umoci, and root or a range of user ids in /etc/subuid.
set -eu
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf layout

mmdebstrap --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$scratch/layer.tar"
umoci init --layout "$scratch/layout"
umoci new --image "$scratch/layout:example"
umoci raw add-layer --image "$scratch/layout:example" "$scratch/layer.tar"
umoci config --image "$scratch/layout:example" --architecture amd64 --os linux \
    --config.env GREETING="hello from the image" --config.workingdir /srv --config.user nobody
mv "$scratch/layout" layout
