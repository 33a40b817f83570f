# Two commands do everything: `make demo` and `make test`. Both make .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two test processes on two cores: one thread each, and threads that wait must not spin.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.PHONY: demo test lint types tests install clean

demo: $(READY)
	@$(BIN)/slipstream demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal

install: $(READY)

# torch comes first and alone, pinned, so that no looser range can bring a CUDA build along.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info

include benchmarks/make.mk
