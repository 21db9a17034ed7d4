# The everyday commands; `make help` lists them. They need Python >= 3.11 with pip, and make.

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2# test processes; a file's tests stay in one of them, since they may share an engine

# What `make demo` passes on, where given: make demo MODEL=tiny STEPS=60
DEMO_ARGS := $(if $(MODEL),--model $(MODEL)) $(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) \
	$(if $(WINDOW),--window $(WINDOW)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT)) $(ARGS)

PROTO := dora/rpc/dora.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO)

.DEFAULT_GOAL := help
.PHONY: help setup demo test experiments check lint types imports proto proto-check docs fmt clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv from the lock (once)
	@command -v $(PYTHON) >/dev/null || { echo "set-up failed: no $(PYTHON) found; Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON) locks/install.py

demo: setup ## service, trainer and a live view in one terminal; MODEL=tiny STEPS=60 ...
	@$(BIN)/dora demo $(strip $(DEMO_ARGS))

test: check ## everything that CI runs: lint, types, import rules, stubs, all tests
	@$(BIN)/pytest -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

experiments: setup ## the papers' tables: their tests, then a short form of each; ARGS="tables laminar" for one
	@$(BIN)/pytest experiments
	@$(BIN)/python -m experiments $(or $(ARGS),tables all --short)

check: lint types imports proto-check ## everything of `make test` but the tests

lint: setup ## style and common errors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## static types
	@$(BIN)/mypy

imports: setup ## which module may import which
	@$(BIN)/lint-imports --no-logo

proto: setup ## generate the gRPC stubs from dora.proto
	@$(call PROTOC,.)

proto-check: setup ## are the gRPC stubs those of dora.proto?
	@folder=$$(mktemp -d); trap 'rm -rf '$$folder EXIT; $(call PROTOC,$$folder); \
		for file in dora_pb2.py dora_pb2.pyi dora_pb2_grpc.py; do \
			cmp -s $$folder/dora/rpc/$$file dora/rpc/$$file || { echo "dora/rpc/$$file is not that of $(PROTO); run make proto"; exit 1; }; \
		done

docs: setup ## write docs/reference.md from the code
	@$(BIN)/python -m dora.cli.reference > docs/reference.md.new && mv docs/reference.md.new docs/reference.md

fmt: setup ## format, and repair what can be repaired
	@$(BIN)/ruff check --fix --quiet .; $(BIN)/ruff format .

clean: ## remove caches and output; .venv stays
	@rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find dora experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
