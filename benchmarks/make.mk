# Included by the Makefile. BENCH passes options on, as in `make bench BENCH="--rounds 3 --only plain_vs_genai"`.
.PHONY: bench peers

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH)

# The environment of the OpenVINO GenAI peer. torch (only the export needs it) comes first and alone: point pip at an
# index of its CPU builds beforehand (PIP_EXTRA_INDEX_URL), else gigabytes of CUDA come with it.
peers: .venv-peers/ready

.venv-peers/ready: benchmarks/peers/constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install "torch==2.13.0"
	.venv-peers/bin/python -m pip install --no-deps -r benchmarks/peers/constraints.txt
	touch $@
