# `make demo` shows the whole path on a real base; `make test` passes the tests. Both set up what is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
STAMP := $(VENV)/.installed

.PHONY: demo test lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train heads on SmolLM2-135M, decode with them, compare with transformers (4 minutes)"
	@echo "make test   run the tests (12 to 20 minutes on two cores)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove the virtual environment"

demo: $(STAMP)
	$(BIN)/python -m train.demo

# One thread per worker: two workers that both start a thread per core slow each other down several times over.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n auto --maxprocesses 4

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without a GPU the CPU build of torch is enough, and gigabytes smaller. It is looked for where pip is configured to look,
# then by uv, which knows PyTorch's own index; if neither finds it, PyPI's build serves as well.
$(STAMP): pyproject.toml Makefile
	@echo "setting up $(VENV): about 2 GB of packages, which takes some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || \
	if command -v nvidia-smi >/dev/null 2>&1; then \
		$(BIN)/pip install --quiet "torch==$(TORCH)"; \
	else \
		$(BIN)/pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null || \
		{ $(BIN)/pip install --quiet uv && \
		  $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu "torch==$(TORCH)"; } || \
		$(BIN)/pip install --quiet "torch==$(TORCH)"; \
	fi
	@$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
