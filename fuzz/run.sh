#!/bin/sh
# Runs every harness for a short while:  fuzz/run.sh [seconds for each]
#
# With a nightly compiler and cargo-fuzz, guided by coverage; without them, the
# same harnesses on a stable compiler over a seeded generator.
set -eu
cd "$(dirname "$0")"
seconds=${1:-5}
targets="mmio_block mmio_net mmio_rng vsock layered_disk device_states frame"

if cargo +nightly fuzz --version >/dev/null 2>&1; then
    for target in $targets; do
        cargo +nightly fuzz run --features libfuzzer "$target" -- \
            -max_total_time="$seconds" -max_len=4096 -print_final_stats=1
    done
else
    echo "no nightly compiler or cargo-fuzz: running the seeded inputs instead"
    cargo test --release
fi
