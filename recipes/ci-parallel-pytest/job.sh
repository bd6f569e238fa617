#!/bin/sh
# Run a project's tests spread over forks, as a CI job does:
#
#     recipes/ci-parallel-pytest/job.sh FOLDER [option of pytest]…
#
# WORKERS forks, 4 by default, run tests at the same time.  The snapshot is named after the recipe's
# files, so that the first job after a change makes a new one, and all others find it.
set -eu
recipe=$(cd "$(dirname "$0")" && pwd)
project=$1
shift
tag=ci-$(cd "$recipe" && cat recipe.toml warmup.py check/* | sha256sum | cut -c 1-12)
forkd snapshot show "$tag" >/dev/null 2>&1 || forkd snapshot create "$tag" --recipe "$recipe"
cd "$project"
exec pytest --forkd "$tag" --forkd-workers "${WORKERS:-4}" --junitxml=report.xml "$@"
