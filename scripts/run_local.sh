#!/usr/bin/env bash
# Two replicas as plain processes, on ports 8001 and 8002: no container, no cluster. Ctrl-C ends both.
#
#   scripts/run_local.sh [options of `greenroom replicas`]     e.g. --config greenroom.yaml
#   MODEL_REPO_ID=org/name scripts/run_local.sh                the model under version control: a repository of the hub
#
# Each has a state directory of its own below .greenroom/. Without --config and --models they serve what is in ./models;
# where nothing is named at all, MODEL_REPO_ID is a tiny model made there, beside a second one to update to.
set -euo pipefail

export HF_HOME=${HF_HOME:-$PWD/models/hf_home}
greenroom=${GREENROOM:-$(test -x .venv/bin/greenroom && echo .venv/bin/greenroom || echo greenroom)}
first=${FIRST_PORT:-8001}
mkdir -p models "$HF_HOME/hub"
case " $*" in
  *" --config"* | *" -c"* | *" --models"*) ;;
  *)
    if ! test -n "${MODEL_REPO_ID:-}${GREENROOM_CONFIG:-}" -o -e greenroom.yaml; then
      test -e models/tiny-2.gguf || python3 "$(dirname "$0")/tiny_model.py" models/tiny-1.gguf models/tiny-2.gguf
      # It is small enough for the CPU, and replicas that share GPUs would need a lease store.
      export MODEL_REPO_ID=tiny-1.gguf CUDA_VISIBLE_DEVICES=-1
      cat <<END
Both serve models/tiny-1.gguf, which says its name, or what they were updated to; MODEL_REPO_ID=org/name names another model.
In a second terminal:

for port in $first $((first + 1)); do curl http://127.0.0.1:\$port/status; done
for port in $first $((first + 1)); do curl http://127.0.0.1:\$port/generate -H 'Content-Type: application/json' \\
  -d '{"prompt": "Hello"}'; done
for port in $first $((first + 1)); do curl "http://127.0.0.1:\$port/update-model?wait=true" -H 'Content-Type: application/json' \\
  -d '{"model_repo_id": "tiny-2.gguf"}'; done

END
    fi
    set -- --models models "$@"
    ;;
esac
exec "$greenroom" replicas 2 --first-port "$first" --state-dir .greenroom "$@"
