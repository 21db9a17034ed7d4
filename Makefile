# The everyday commands; `make help` lists them. They need Python >= 3.11 with pip, and make.

PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE # a run of the tests starts hundreds of processes, each of which would compile all of DORA
JOBS ?= 4# test processes, of which some wait
TEST_V2 = PYTHONPATH=.:.cuda-build/triton TRITON_INTERPRET=1 DORA_TEST_RUNNER=v2 $(BIN)/pytest -n 0 -m "not gpu"
V2_TESTS := tests/contract/test_engine.py tests/contract/test_v2_runner.py tests/contract/test_drafts.py \
	tests/contract/test_engine_forks.py::test_a_block_that_others_have_stays_theirs
# Other projects' clients, each in an environment of its own (locks/install.py): those of `make test`, and all.
TEST_CLIENTS := openenv tinker
CLIENTS := $(TEST_CLIENTS) skyrl trl verifiers verl
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder --durations=60

# What `make demo` passes on, where given: make demo MODEL=tiny STEPS=60. AGENT=1 alone takes the model tiny.
DEMO_ARGS := $(if $(or $(MODEL),$(AGENT)),--model $(or $(MODEL),tiny)) $(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) \
	$(if $(WINDOW),--window $(WINDOW)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT)) $(if $(AGENT),--agent) $(ARGS)

PROTO := dora/rpc/dora.proto
SAMPLE_PROTO := dora/agents/front/protocols/tinker/sample.proto# messages alone
STUBS := $(addprefix dora/rpc/dora_,pb2.py pb2.pyi pb2_grpc.py) $(addprefix dora/agents/front/protocols/tinker/sample_,pb2.py pb2.pyi)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO) \
	&& $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) $(SAMPLE_PROTO)

.DEFAULT_GOAL := help
.PHONY: help setup demo fetched triton prometheus slurm ray kubernetes chromium clients clients-if-had test test-all test-megatron test-v2 check-cuda experiments convergence stress chaos check lint types imports proto proto-check docs fmt clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv from the lock (once); DEVICE=cuda: from that for GPUs
	@command -v $(PYTHON) >/dev/null || { echo "set-up failed: no $(PYTHON) found; Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON) locks/install.py $(DEVICE)

demo: setup ## service, trainer and a live view in one terminal; MODEL=tiny STEPS=60 AGENT=1 ...
	@$(BIN)/dora demo $(strip $(DEMO_ARGS))

test: check fetched ## lint, types, import rules, stubs, and the tests that CI runs
	@$(PYTEST) -m "not gpu and not full" $(ARGS)

test-all: check prometheus slurm ray chromium clients ## every test, with those marked "full" and all of Megatron's: what a release needs (about an hour)
	@$(BIN)/python -m tests.cuda_build.fetch .cuda-build triton
	@$(PYTHON) locks/install.py megatron
	@.venv-megatron/bin/python -m pytest tests/megatron --all
	@$(PYTEST) -m "not gpu" $(ARGS)
	@$(TEST_V2) $(V2_TESTS)

test-megatron: setup ## the Megatron trainer's tests, on a CPU, in .venv-megatron; ARGS=--all for every layout, 20 steps each
	@$(PYTHON) locks/install.py megatron
	@.venv-megatron/bin/python -m pytest tests/megatron $(ARGS)

# What tests need beside .venv, one after the other: apt and pip each lock what they keep.
fetched: setup
	@for name in triton prometheus slurm ray clients-if-had; do $(MAKE) --no-print-directory $$name || exit 1; done

# Where they cannot be had, the tests of rules and dashboards are skipped with the reason.
prometheus: setup
	@$(BIN)/python -m tests.prometheus.fetch .prometheus-build || true

# Where they cannot be had, the tests of `dora cluster` on Slurm, or in pods of Kubernetes, are skipped with the reason.
slurm: setup
	@$(BIN)/python -m tests.clusters.fetch || true

kubernetes: setup ## Kubernetes' API server, from Debian's sources, for tests of `dora cluster` (15 minutes, once)
	@$(BIN)/python -m tests.clusters.build_api

# Where it cannot be had, the tests of `dora cluster` on Ray are skipped with the reason.
ray: setup
	@$(PYTHON) locks/install.py ray || true

clients: setup ## the environments of other projects' clients, which their tests run: .venv-NAME (100 to 500 MB each)
	@for name in $(CLIENTS); do $(PYTHON) locks/install.py $$name || exit 1; done

# Where they cannot be had, the tests with these clients are skipped with the reason.
clients-if-had: setup
	@$(MAKE) --no-print-directory clients CLIENTS="$(TEST_CLIENTS)" || true

# Where it cannot be had, the tests of the operator's page are skipped with the reason.
chromium: setup
	@$(BIN)/python -m tests.browser.fetch .chromium-build || true

test-v2: setup ## the engine's contract suite on vLLM's runner for GPUs, on a CPU by Triton's interpreter (about 10 minutes)
	@$(BIN)/python -m tests.cuda_build.fetch .cuda-build triton
	@$(TEST_V2) $(or $(ARGS),$(V2_TESTS))

# Where it cannot be had, the short test of the runner for GPUs is skipped with the reason.
triton: setup
	@$(BIN)/python -m tests.cuda_build.fetch .cuda-build triton || true

check-cuda: setup ## DORA against vLLM's CUDA build, without a GPU: imports, signatures, configuration, KV layouts (500 MB, once)
	@$(BIN)/python -m tests.cuda_build.fetch .cuda-build
	@PYTHONPATH=.:.cuda-build/vllm:.cuda-build/triton DORA_CUDA_BUILD=1 $(BIN)/pytest -n 0 $(or $(ARGS),tests/cuda_build)

experiments: setup ## the papers' tables: their tests, then a short form of each; ARGS="tables laminar" for one
	@$(BIN)/pytest experiments
	@$(BIN)/python -m experiments $(or $(ARGS),tables all --short)

convergence: setup ## learning curves by window and the map of staleness, into docs/convergence.md (hours, goes on where it was); ARGS="--minutes 20"
	@$(BIN)/python -m experiments.convergence --page docs/convergence.md $(ARGS)

stress: setup ## mixtures of experts under KV pressure, moves and kills, every logprob checked; ARGS="--trajectories 200"
	@$(BIN)/python -m tests.stress $(ARGS)

chaos: setup ## kills and faults at every moment of a handoff and a commit, every logprob checked; ARGS="--kills 20 --engine vllm"
	@$(BIN)/python -m tests.chaos $(ARGS)

check: lint types imports proto-check ## everything of `make test` but the tests

lint: setup ## style and common errors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## static types
	@$(BIN)/mypy

imports: setup ## which module may import which
	@$(BIN)/lint-imports --no-logo

proto: setup ## generate the stubs from dora.proto and sample.proto
	@$(call PROTOC,.)

proto-check: setup ## are the stubs those of dora.proto and sample.proto?
	@folder=$$(mktemp -d); trap 'rm -rf '$$folder EXIT; $(call PROTOC,$$folder); \
		for file in $(STUBS); do \
			cmp -s $$folder/$$file $$file || { echo "$$file is not that of its .proto; run make proto"; exit 1; }; \
		done

docs: setup ## write docs/reference/ from the code
	@$(BIN)/python -m dora.ops.cli.reference docs/reference

fmt: setup ## format, and repair what can be repaired
	@$(BIN)/ruff check --fix --quiet .; $(BIN)/ruff format .

clean: ## remove caches and output; .venv stays
	@rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find dora experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
