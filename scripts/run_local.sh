#!/usr/bin/env bash
# Two replicas as plain processes, on ports 8001 and 8002: no container, no cluster. Ctrl-C ends both.
#
#   scripts/run_local.sh [options of `greenroom replicas`]     e.g. --config greenroom.yaml
#
# Each has a state directory of its own below .greenroom/. Without --config and --models they serve what is in ./models.
set -euo pipefail

export HF_HOME=${HF_HOME:-$PWD/models/hf_home}
greenroom=${GREENROOM:-$(test -x .venv/bin/greenroom && echo .venv/bin/greenroom || echo greenroom)}
mkdir -p models "$HF_HOME/hub"
case " $*" in
  *" --config"* | *" -c"* | *" --models"*) ;;
  *) set -- --models models "$@" ;;
esac
exec "$greenroom" replicas 2 --first-port "${FIRST_PORT:-8001}" --state-dir .greenroom "$@"
