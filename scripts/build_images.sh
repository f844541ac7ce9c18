#!/usr/bin/env bash
# Builds the image. The gateway and the trainer are one image: it runs whichever command it is given.
#
#   scripts/build_images.sh [options of docker build]
#   IMAGE=registry.example.org/greenroom:0.1.0 EXTRAS=llamacpp,hub,transformers scripts/build_images.sh --push
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
tool=$(command -v docker || command -v podman) || { echo "build_images.sh: neither docker nor podman is here" >&2; exit 1; }
exec "$tool" build --tag "${IMAGE:-greenroom:$version}" ${EXTRAS:+--build-arg "EXTRAS=$EXTRAS"} "$@" .
