#!/bin/sh
# Writes the lists of hashed wheels that the images install: docker/lock.sh WHEELS
# WHEELS is a folder, or the URL of an index, that has PyTorch's CPU build for CPython 3.11. Needs uv, which
# `python tests/operations/tools.py` puts into .operations/venv/bin.
set -eu
cd "$(dirname "$0")/.."

lock() {  # LIST PYTHON ARGUMENT...
    list=docker/requirements-$1.txt python=$2
    shift 2
    UV_CUSTOM_COMPILE_COMMAND="docker/lock.sh WHEELS" uv pip compile --quiet --upgrade --generate-hashes \
        --only-binary :all: --emit-build-options --constraints constraints.txt --python-version "$python" \
        --python-platform x86_64-manylinux_2_28 --no-emit-index-url --no-emit-find-links --no-annotate --output-file "$list" "$@"
}

printf 'setuptools>=77\ncyclonedx-bom>=7.5,<8\n' | lock build 3.11 -
lock frontend 3.11 --extra fetch --extra otel --extra sglang pyproject.toml
lock worker-cpu 3.11 --extra fetch --extra otel --extra sglang --extra worker --find-links "$1" pyproject.toml
lock worker-cuda 3.12 --extra fetch --extra otel --extra sglang --extra worker pyproject.toml  # 3.12 needs one package more than 3.11: good for both
