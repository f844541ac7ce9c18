# The gateway as an image: `scripts/build_images.sh`, or `docker build -t greenroom .`
#
# It runs as an ordinary user on a read-only root file system, and writes to /var/lib/greenroom, /models and /tmp alone.
# The gateway is process 1: it ends its engines and reaps what they leave, so no other init is needed.
# How to run it: docs/deploying.md.
ARG PYTHON=3.12
ARG DEBIAN=bookworm

# --- builds: has a C compiler, and is thrown away -------------------------------------------------------------------
FROM python:${PYTHON}-${DEBIAN} AS build
# Which engines and stores: the names of extras in pyproject.toml. `transformers` adds torch, some gigabytes.
ARG EXTRAS=llamacpp,hub,redis,governance
# 1 compiles the hot path to machine code, which takes minutes.
ARG COMPILE=1
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN python -m venv --without-pip /opt/greenroom
RUN GREENROOM_COMPILE=${COMPILE} python -m pip --python /opt/greenroom/bin/python install --no-cache-dir ".[${EXTRAS}]"

# --- runs: no compiler, no headers, no sources ----------------------------------------------------------------------
FROM python:${PYTHON}-slim-${DEBIAN}
# OpenMP, which llama.cpp computes with.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
# Number of the user, so that Kubernetes can see that it is not root, and that volumes can be given to it.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/greenroom --shell /usr/sbin/nologin greenroom \
 && install --directory --owner=greenroom --group=greenroom --mode=0750 /var/lib/greenroom /models
COPY --from=build /opt/greenroom /opt/greenroom
# HOST, PORT and METRICS_PORT are read by the gateway itself (`greenroom check --env`). An address beyond loopback needs
# API keys in the configuration, or `--insecure`.
ENV PATH=/opt/greenroom/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/greenroom \
    HOST=0.0.0.0 \
    PORT=8080 \
    METRICS_PORT=9090 \
    MODEL_BASE_PATH=/models \
    LOG_FORMAT=json \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /var/lib/greenroom
USER 10001:10001
EXPOSE 8080 9090
VOLUME ["/var/lib/greenroom"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-I", "-c", "import http.client, os, sys; gateway = http.client.HTTPConnection('127.0.0.1', int(os.environ['PORT']), timeout=4); gateway.request('GET', '/healthz'); sys.exit(gateway.getresponse().status != 200)"]
ENTRYPOINT ["greenroom"]
CMD ["serve", "--state-dir", "/var/lib/greenroom/state"]
