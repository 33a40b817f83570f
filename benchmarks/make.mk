# Included by the Makefile. BENCH passes options on, as in `make bench BENCH="--rounds 3 --only plain_vs_genai"`.
PEERS := .venv-peers

.PHONY: bench peers

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH)

# The environment of the OpenVINO GenAI peer. torch (only the export needs it) comes first and alone: have pip prefer
# CPU builds of it, by its configuration, else gigabytes of CUDA come along.
peers: $(PEERS)/.ready

$(PEERS)/.ready: benchmarks/peers/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet torch==2.13.0
	$(PEERS)/bin/pip install --quiet --no-deps --requirement benchmarks/peers/constraints.txt
	@touch $@
