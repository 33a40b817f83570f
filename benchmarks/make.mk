# Included by the Makefile. BENCH, DRAFTERS, SIDE_BY_SIDE, BACKEND, SERVE, GGUF, REAL, HUGGINGFACE and ARCHITECTURES pass options on, as in
# `make bench BENCH="--rounds 3"`.
GENAI := .venv-peers
LLAMACPP := .venv-peer-llamacpp
IK := .venv-peer-ik
VLLM := .venv-vllm
ORTGENAI := .venv-ortgenai
LLAMA_SERVER := .venv-llama-server
LLAMA_SERVER_VERSION := 0.3.36

FOREIGN := runs/foreign-draft

.PHONY: gguf bench-forced never-slower gpu-check test-cuda architectures support foreign-draft bench bench-drafters bench-serve bench-gguf bench-real smollm2-head smollm2-heads bench-huggingface side-by-side peers peer-genai peer-llamacpp ik-llamacpp vllm bench-vllm

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH)

# Needs an NVIDIA GPU: about four minutes.
gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu $(GPU)

# The kernels of the cuda backend by Triton's interpreter, on a CPU; Triton takes 1 GB.
test-cuda: $(READY)
	$(BIN)/pip install --quiet triton==3.9.0
	$(TEST_ENV) $(BIN)/pytest tests/backends/cuda

bench-drafters: $(READY)
	$(BIN)/python -m benchmarks.drafters $(DRAFTERS)

bench-serve: $(READY)
	$(BIN)/python -m benchmarks.serve $(SERVE)

bench-vllm: $(READY) $(VLLM)/.ready
	$(BIN)/python -m benchmarks.serve --vllm $(BENCH_VLLM)

# Q4_K_M files and llama.cpp need `make gguf`.
bench-gguf: $(READY) $(IK)/.ready
	$(BIN)/python -m benchmarks.gguf $(GGUF)

# Not a measurement: which causal models of transformers run, as tiny random ones. Writes the table in docs/support.md.
architectures: $(READY)
	$(BIN)/python -m benchmarks.architectures $(ARCHITECTURES)

# Not a measurement: what the code declares, above that table.
support: $(READY)
	$(BIN)/python -m benchmarks.architectures.support

# SmolLM2 as people use it: make bench-real REAL="--data FOLDER", a folder with spec_bench/question.jsonl and humaneval/.
bench-real: $(READY) $(IK)/.ready $(GENAI)/.ready $(VENV)/.smollm2
	$(BIN)/python -m benchmarks.gguf.families $(REAL)

bench-huggingface: $(READY)
	$(BIN)/python -m benchmarks.huggingface $(HUGGINGFACE)

# A draft model with a tokenizer of its own, for `python -m benchmarks.foreign --trained runs/foreign-draft/model`. The embedded
# draft model is trained on with it, on the Python source of .venv and one thread; a run that was stopped goes on.
foreign-draft: $(READY)
	$(BIN)/python -m recipes.embedded.train --out $(FOREIGN) --role draft --pre-tokenizer gpt2 --lr 2e-3 --threads 1 \
		--start slipstream/zoo/models/draft --budget-tokens 6000000 --step-tokens 4096 --decay-share 0.6 --resume
	$(BIN)/python -m recipes.embedded.export $(FOREIGN) $(FOREIGN)/model

# The draft heads for SmolLM2, on a GPU of 80 GB (`--slots` and `--micro-rows` for less): 4 minutes on two cores for the requests, 2 on the GPU
# for its own text, 5 of training for each head.
SMOLLM2_HEADS := runs/smollm2
SMOLLM2_FILE = $(shell $(BIN)/python -c "from slipstream.zoo import smollm2_file; print(smollm2_file())")
TRAIN_SMOLLM2 = --target smollm2 --device cuda --executor torch --data $(SMOLLM2_HEADS)/texts.bin --answers-only --rows 32 \
	--heldout-share 0.01 --eval-steps 300 --budget-minutes 5
smollm2-heads: $(READY) $(VENV)/.smollm2
	mkdir -p $(SMOLLM2_HEADS)
	$(BIN)/python -m recipes.smollm2.requests $(SMOLLM2_HEADS)/requests.npz
	$(BIN)/python -m recipes.smollm2.write_texts $(SMOLLM2_HEADS)/requests.npz $(SMOLLM2_HEADS)/texts.bin --target $(SMOLLM2_FILE)
	$(BIN)/slipstream train eagle3 --steps 4 --out $(SMOLLM2_HEADS)/eagle3 $(TRAIN_SMOLLM2)
	$(BIN)/slipstream train eagle3 --parallel --layers 2 --steps 6 --out $(SMOLLM2_HEADS)/peagle $(TRAIN_SMOLLM2)
	$(BIN)/slipstream train dflash --block 8 --layers 3 --anchors 48 --out $(SMOLLM2_HEADS)/dflash $(TRAIN_SMOLLM2)
	$(BIN)/python -m recipes.smollm2.write_texts $(SMOLLM2_HEADS)/requests.npz $(SMOLLM2_HEADS)/more.bin --target $(SMOLLM2_FILE) --seed 1
	$(BIN)/slipstream train eagle3 --steps 4 --start $(SMOLLM2_HEADS)/eagle3/final --out $(SMOLLM2_HEADS)/eagle3-longer \
		$(TRAIN_SMOLLM2) --data $(SMOLLM2_HEADS)/more.bin
	$(BIN)/slipstream convert $(SMOLLM2_HEADS)/eagle3-longer/final --to int8 --target smollm2 --out $(SMOLLM2_HEADS)/int8

# An EAGLE-3 head for SmolLM2 without a GPU: 40 minutes for its own text, 25 for hidden states, 42 of training, on two cores. A run that was
# stopped goes on, in its third part with --resume.
SMOLLM2_HEAD := runs/smollm2-eagle3
smollm2-head: $(READY) $(VENV)/.smollm2
	$(BIN)/slipstream train eagle3 --target smollm2 --self 690000 --steps 3 --budget-minutes 42 --cache-hidden \
		--out $(SMOLLM2_HEAD) $(SMOLLM2)
	$(BIN)/slipstream convert $(SMOLLM2_HEAD)/final --to int8 --target smollm2 --out $(SMOLLM2_HEAD)/int8

side-by-side: $(READY)
	$(BIN)/python -m benchmarks.peers $(SIDE_BY_SIDE)

# Each peer has an environment of its own, pinned whole. Where torch is needed it comes first and alone: have pip prefer
# CPU builds of it, by its configuration, else gigabytes of CUDA come along.
peers: peer-genai peer-llamacpp vllm
peer-genai: $(GENAI)/.ready
peer-llamacpp: $(LLAMACPP)/.ready
# ik_llama.cpp, compiled for this processor: twelve minutes on two cores. Its wheel has AVX2 only.
ik-llamacpp: $(IK)/.ready
# A CPU build of vLLM, a third party's wheel (docs/vllm.md), for `slipstream serve --engine vllm` and for comparisons.
vllm: $(VLLM)/.ready

$(GENAI)/.ready: benchmarks/peers/constraints.txt
	$(PYTHON) -m venv $(GENAI)
	$(GENAI)/bin/pip install --quiet $(TORCH)
	$(GENAI)/bin/pip install --quiet --no-deps --requirement $<
	@touch $@

$(IK)/.ready:
	$(PYTHON) -m venv $(IK)
	$(IK)/bin/pip download --quiet --no-deps --no-binary :all: --dest $(IK)/archive ik-llama-cpp-python==0.1.5
	mkdir -p $(IK)/src
	tar -xzf $(IK)/archive/*.tar.gz -C $(IK)/src --strip-components 1
	cmake -S $(IK)/src/vendor/ik_llama.cpp -B $(IK)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
		-DBUILD_SHARED_LIBS=ON $(foreach part,$(LLAMACPP_PARTS),-D$(part)=OFF)
	cmake --build $(IK)/build --target ggml llama --parallel 2
	$(IK)/bin/pip install --quiet numpy
	@touch $@

# Compiles llama.cpp: ten minutes on one core. CMAKE_BUILD_PARALLEL_LEVEL sets how many files at a time. The package gguf is for
# `benchmarks.gguf.gguf_writer`, which writes the float32 file.
LLAMACPP_PARTS := LLAVA_BUILD LLAMA_CURL LLAMA_BUILD_TESTS LLAMA_BUILD_TOOLS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_SERVER \
	LLAMA_BUILD_COMMON
# The same beside Slipstream, for `benchmarks.gguf`, whose files of fewer than eight bits llama.cpp writes.
gguf: $(READY)
	CMAKE_ARGS="$(foreach part,$(LLAMACPP_PARTS),-D$(part)=OFF)" \
		$(BIN)/pip install --quiet --constraint constraints.txt llama-cpp-python gguf

$(LLAMACPP)/.ready: benchmarks/peers/constraints-llamacpp.txt | $(READY)
	$(PYTHON) -m venv $(LLAMACPP)
	CMAKE_ARGS="$(foreach part,$(LLAMACPP_PARTS),-D$(part)=OFF)" \
		$(LLAMACPP)/bin/pip install --quiet --requirement $<
	$(BIN)/pip install --quiet --constraint constraints.txt gguf
	@touch $@

# llama-server from the source package of llama-cpp-python: 20 minutes on two cores. The package gguf writes its files.
.PHONY: llama-server
llama-server: $(LLAMA_SERVER)/build/bin/llama-server
$(LLAMA_SERVER)/build/bin/llama-server: | $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt gguf
	$(PYTHON) -m venv $(LLAMA_SERVER)
	$(LLAMA_SERVER)/bin/pip download --quiet --no-deps --no-binary :all: --dest $(LLAMA_SERVER)/archive \
		llama-cpp-python==$(LLAMA_SERVER_VERSION)
	mkdir -p $(LLAMA_SERVER)/src
	tar -xzf $(LLAMA_SERVER)/archive/*.tar.gz -C $(LLAMA_SERVER)/src --strip-components 1
	echo '"$(LLAMA_SERVER_VERSION)"' > $(LLAMA_SERVER)/version.json
	cmake -S $(LLAMA_SERVER)/src/vendor/llama.cpp -B $(LLAMA_SERVER)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
		-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	cmake --build $(LLAMA_SERVER)/build --target llama-server --parallel 2

# ONNX Runtime GenAI, for the lossless board.
.PHONY: ortgenai
ortgenai: $(ORTGENAI)/.ready
$(ORTGENAI)/.ready: benchmarks/peers/constraints-ortgenai.txt
	$(PYTHON) -m venv $(ORTGENAI)
	$(ORTGENAI)/bin/pip install --quiet $(TORCH)
	$(ORTGENAI)/bin/pip install --quiet --constraint constraints.txt --requirement $<
	@touch $@

$(VLLM)/.ready: benchmarks/peers/constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(TORCH)
	$(VLLM)/bin/pip install --quiet --no-deps --requirement $<
	@touch $@

# Which engine says the same when it speculates? Every cell without a record, and docs/lossless-board.md. Engines whose environment
# is not made (`make peer-genai`, `make vllm`, `make llama-server`, `make ortgenai`) are "not tested". BOARD="--engine transformers" for some.
.PHONY: lossless-board
lossless-board: $(READY)
	$(BIN)/python -m benchmarks.board $(BOARD)

# The animated picture at the top of README, recorded anew.
.PHONY: recording
recording: $(READY) $(VENV)/.smollm2
	$(BIN)/python -m benchmarks.recording $(RECORDING)

# Every figure, table and number of docs/tutorial.md, measured anew.
.PHONY: figures
figures: $(READY) $(VENV)/.smollm2
	$(BIN)/python -m benchmarks.tutorial $(FIGURES)

# Drafts of forced text under schemas of real tools, ten minutes: make bench-forced FORCED="--bits 4".
bench-forced: $(READY) $(VENV)/.smollm2
	$(BIN)/python -m benchmarks.forced $(FORCED)

# The worst cell of the default drafter against plain decoding. A run that is cut goes on: make never-slower SLOWER="--minutes 10".
never-slower: $(READY) $(VENV)/.smollm2
	$(BIN)/python -m benchmarks.never_slower $(SLOWER)
