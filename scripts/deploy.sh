#!/usr/bin/env bash
# Deploys an overlay to the cluster that kubectl is set up for, and waits until its replicas are ready.
#
#   scripts/deploy.sh [one-gpu | replicas | trainer | monitoring]       replicas when not given
#   IMAGE=registry.example.org/greenroom:0.1.0 scripts/deploy.sh
set -euo pipefail
cd "$(dirname "$0")/.."

overlay=deploy/kubernetes/overlays/${1:-replicas}
namespace=greenroom
test -d "$overlay" || { echo "deploy.sh: there is no $overlay" >&2; exit 2; }

new_key() { echo "gr-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"; }

kubectl apply -f deploy/kubernetes/base/namespace.yaml
if ! kubectl --namespace "$namespace" get secret greenroom-keys >/dev/null 2>&1; then
  # By a pipe: command lines are public.
  printf 'GREENROOM_%s_KEY=%s\n' ADMIN "$(new_key)" CLIENT "$(new_key)" METRICS "$(new_key)" |
    kubectl --namespace "$namespace" create secret generic greenroom-keys --from-env-file=/dev/stdin
fi
kubectl kustomize "$overlay" | sed "${IMAGE:+s|image: greenroom:.*|image: $IMAGE|}" | kubectl apply -f -
kubectl --namespace "$namespace" rollout status deployment/inference --timeout "${TIMEOUT:-10m}"
