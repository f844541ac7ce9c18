#!/usr/bin/env bash
# Two replicas as plain processes, on ports 8001 and 8002: no container, no cluster. Ctrl-C ends both.
#
#   scripts/run_local.sh [options of `greenroom serve`]     e.g. --config greenroom.yaml
#
# Each has a state directory of its own below .greenroom/. Without --config they serve what is in ./models. Replicas that
# share a GPU need a lease store in the configuration (`leases.store`), or each plans with the whole GPU.
set -euo pipefail

export HF_HOME=${HF_HOME:-$PWD/models/hf_home}
first_port=${FIRST_PORT:-8001}
greenroom=${GREENROOM:-$(test -x .venv/bin/greenroom && echo .venv/bin/greenroom || echo greenroom)}
mkdir -p models .greenroom "$HF_HOME/hub"
test $# -gt 0 || set -- --models models

# Groups of their own: Ctrl-C in a terminal would reach them beside our SIGTERM, and a second signal cuts answers off.
set -m
pids=()
stop() {
  trap '' INT TERM
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  wait
}
trap 'stop; exit 0' INT TERM
for number in 1 2; do
  "$greenroom" serve "$@" --port $((first_port + number - 1)) --state-dir ".greenroom/replica-$number" &
  pids+=($!)
done
# One that ends by itself, as with a port that is taken, ends the other: half of it is not what was asked for.
status=0
wait -n || status=$?
stop
exit $((status == 0 ? 1 : status))
