# Every target sets up what it needs; the first run of any of them makes the virtual environment.

PYTHON ?= python3
# With `VENV=` nothing is made nor installed, and PYTHON runs everything: for machines that reach no package index.
VENV ?= .venv
# The torch that is installed first, so that a machine without a GPU does not get the CUDA build with everything else.
# On such a machine the smaller CPU build is TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu".
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
# What installs; PIP="uv pip" takes seconds for what takes pip two minutes, and reads no settings of pip.
PIP ?= $(BIN)/python -m pip
# More arguments for serve, test, demo and bench: make serve ARGS="--model DIR".
ARGS ?=
# The seed that `make sim` replays; without one it plays seeds that nobody has played.
SEED ?=

BIN := $(VENV)/bin
STAMP := $(if $(VENV),$(VENV)/.installed)
RUN := $(if $(VENV),$(BIN)/python,$(PYTHON))
MODEL := core/models/bundled/checkpoint/config.json
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv serve test nightly soak scorecard check docs links sim sim-long mutants demo bench chart image format proto
.PHONY: test-lowest gpu gpu-tests gpu-bench gpu-mixed gpu-peer
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make the virtual environment with everything for use and development

ifneq ($(VENV),)
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "Python 3.11 to 3.13 is needed; name one with PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH_FLAGS) "$(TORCH)"
	$(PIP) install --editable '.[dev]'
	@touch $@
endif

# Comes with the repository; training it again takes a while and is only done where it was removed.
$(MODEL): | $(STAMP)
	$(RUN) -m core.models.bundled.train

serve: $(STAMP) $(MODEL) ## Serve the bundled model on 127.0.0.1:50051, metrics on 127.0.0.1:9464; Ctrl-C drains
	@exec $(RUN) -m service serve $(ARGS)

# What is left to `make nightly` takes long and kills no mutant: tests/nightly.txt. What needs other programs (Helm,
# Node.js, a browser, a gateway, Prometheus) is left to `.ci/run` too. What is named by its path is run.
test: MARKS ?= not soak$(if $(filter tests/%,$(ARGS)),, and not nightly and not tools)
# The rules of the house are part of `make check`.
test: HOUSE = $(if $(filter tests/%,$(ARGS)),,--ignore=tests/tidy)

# First what can share the machine, then what measures it (tests/support/workers.py). Three at a time on two cores: many
# tests wait for servers. One thread of math per process: tests start servers beside themselves, and two cores have to
# do. Compiled files are kept whatever the shell says: without them each server of a test would compile the tree again.
test: $(STAMP) $(MODEL) ## Run the tests that a change must pass
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest --workers 3 -m "$(MARKS)" $(HOUSE) $(ARGS)

# In the order of their lengths; what fails does not keep the rest from running.
nightly: $(STAMP) $(MODEL) ## Run check, all tests, soak, chart, image, mutants, lowest versions, 20,000 seeds; takes hours
	@failed=0; AT_LENGTH=1 REFERENCES=check $(MAKE) --no-print-directory test MARKS='not soak' || failed=1; \
	for each in check docs soak chart image mutants test-lowest; do $(MAKE) --no-print-directory $$each || failed=1; done; \
	$(MAKE) --no-print-directory sim ARGS='--seeds 20000' || failed=1; exit $$failed

# The lowest versions are what uv chooses by pyproject.toml, in an environment of their own; torch comes first, as above.
LOWEST := build/lowest
LOWEST_TORCH ?= torch==2.11.0
# Interprets our kernels: what PyTorch 2.11 makes of them differed from what later ones do (core/decisions/0053).
LOWEST_TRITON ?= triton==3.6.0
LOWEST_TESTS := $(addprefix tests/unit/core/,models attention sampling) tests/proofs/equivalence tests/contract/api \
	tests/unit/service/bench/test_gpu.py

$(LOWEST)/.installed: pyproject.toml
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -c 'import torch' 2>/dev/null \
		|| $(LOWEST)/bin/python -m pip install $(TORCH_FLAGS) "$(LOWEST_TORCH)"
	$(LOWEST)/bin/python -m pip install uv
	VIRTUAL_ENV=$(LOWEST) UV_COMPILE_BYTECODE=1 $(LOWEST)/bin/uv pip install --resolution lowest-direct --editable '.[dev]'
	$(LOWEST)/bin/python -m pip install --no-deps "$(LOWEST_TRITON)"
	@touch $@

test-lowest: MARKS := not soak and not nightly and not tools
test-lowest: $(LOWEST)/.installed ## Run the tests near transformers and gRPC with the lowest versions that are allowed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -m "$(MARKS)" $(LOWEST_TESTS) $(ARGS)

soak: $(STAMP) $(MODEL) ## Run the chaos tests and the simulation at length; takes half an hour
	@mkdir -p build && rm -f build/soak.jsonl
	SCORECARD_FILE=build/soak.jsonl OMP_NUM_THREADS=1 $(RUN) -m pytest -m soak --timeout 1800 $(ARGS)

# Every test that takes the fixture `scorecard` runs, and no other; the table says which of them failed.
scorecard: $(STAMP) $(MODEL) ## Measure the reliability scorecard again and write tests/SCORECARD.md
	@mkdir -p build && rm -f build/scorecard.jsonl
	-AT_LENGTH=1 SCORECARD_FILE=build/scorecard.jsonl OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "not soak" $(ARGS)
	$(RUN) -m tests.support.scorecard build/scorecard.jsonl build/soak.jsonl

check: $(STAMP) ## Lint, format, types and house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/tidy

# Warnings are errors: a page that is not listed, a link or an anchor that leads nowhere. Other servers are not asked.
docs: $(STAMP) ## Build the documents as a site, build/docs/index.html, with strict links
	$(RUN) -m sphinx -q -W --keep-going -n -b html -c docs . build/docs

links: $(STAMP) ## Look at the documents' links to other servers; needs a network
	$(RUN) -m sphinx -q -n -b linkcheck -c docs . build/links

sim: $(STAMP) ## Simulate the scheduler under 2000 fresh seeds, or replay one: make sim SEED=7
	@$(RUN) -m tests.proofs.sim $(if $(SEED),--seed $(SEED) --trace) $(ARGS)

sim-long: $(STAMP) ## Simulate a million seeds on all cores; takes hours
	@$(RUN) -m tests.proofs.sim --seeds 1000000 --jobs 0 $(ARGS)

mutants: $(STAMP) ## Break the code line by line and see that the named tests notice
	OMP_NUM_THREADS=1 $(RUN) -m tests.proofs.mutants $(ARGS)

demo: $(STAMP) $(MODEL) ## Start a server, stream three completions at once, show the pools, drain
	@$(RUN) -m service.cli.demo $(ARGS)

bench: $(STAMP) ## Measure how much of the time the device waits, with overlap on and off
	@$(RUN) -m service bench overlap $(ARGS)

chart: $(STAMP) $(MODEL) ## Check the Helm chart and the Dockerfile over every Kubernetes version
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "soak or not soak" tests/packaging/helm tests/contract/api/test_health_port.py $(ARGS)

# Behind mirrors: IMAGE_FLAGS="--build-arg REGISTRY=… --build-arg TORCH_INDEX=…"; the Dockerfile has them all. The tests
# run the CPU variant, as the chart renders it, under podman; one that is skipped and not known for it fails the run.
VARIANT ?= cpu
IMAGE_FLAGS ?=
image: $(STAMP) $(MODEL) ## Build the image, tell its size and layers, and run the rendered worker in it
	$(RUN) -m helm.image --variant $(VARIANT) $(IMAGE_FLAGS)
ifeq ($(VARIANT),cpu)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "soak or not soak" --built-image --listed-skips tests/packaging/image $(ARGS)
endif

# For a machine with a CUDA device and a CUDA build of PyTorch; elsewhere the tests skip and the benchmarks say why they
# stop. Such a machine may be lent by the minute and reach no package index: `make gpu PYTHON=python3 VENV=` installs
# nothing. Each part ends in time, and one that is killed leaves the outcomes and figures that it had in build/gpu-*.
gpu: ## Run the GPU tests, measure an 8B-shaped model, then transformers beside it
	@failed=0; $(MAKE) --no-print-directory gpu-tests ARGS= || failed=1; \
	for part in gpu-bench gpu-mixed gpu-peer; do $(MAKE) --no-print-directory $$part || failed=1; done; exit $$failed

GPU_SECONDS ?= 470
GPU_PART := PYTHONUNBUFFERED=1 timeout --foreground --signal INT --kill-after 5 $(GPU_SECONDS) $(RUN) -m
GPU_TESTS := tests/gpu $(addprefix tests/unit/core/,relay/test_fused_relay.py sampling/test_gpu.py sampling/test_triton_sampling.py attention \
	models/test_fused.py models/lora/test_row_deltas.py)

gpu-tests: SHELL := bash
gpu-tests: .SHELLFLAGS := -o pipefail -c
gpu-tests: $(STAMP) $(MODEL) ## Run the GPU tests; their outcomes go to build/gpu-tests.log too
	@mkdir -p build
	$(GPU_PART) pytest -v --no-decoder $(GPU_TESTS) $(ARGS) 2>&1 | tee build/gpu-tests.log

gpu-bench: $(STAMP) $(MODEL) ## Measure an 8B-shaped model with random weights into build/gpu-bench.json
	@mkdir -p build
	$(GPU_PART) service bench gpu --part own --out build/gpu-bench.json $(ARGS)

gpu-mixed: $(STAMP) $(MODEL) ## Measure its steps with prompts, captured and launched, into build/gpu-mixed.json
	@mkdir -p build
	$(GPU_PART) service bench gpu --part mixed --out build/gpu-mixed.json $(ARGS)

gpu-peer: $(STAMP) $(MODEL) ## Measure transformers beside it, on the same weights, into build/gpu-peer.json
	@mkdir -p build
	$(GPU_PART) service bench gpu --part peer --out build/gpu-peer.json $(ARGS)

format: $(STAMP) ## Format the code, and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## Generate the gRPC code again after a change in protos/
	$(RUN) -m service.pb.generate
