"""Worker of `family_logits`: llama.cpp's converter and library. They run in their own process, because a failed
assertion of llama.cpp ends the process.

llama.cpp computes in float32 on one thread, without flash attention, with keys and values in float32. Logits are
written to files of numpy.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import ROOT, serve

BUILD = "BENCHMARKS_LLAMA_SERVER"
"""Environment variable with the folder that `make llama-server` makes."""
CONTEXT = 256
"""llama.cpp chooses between LongRoPE's two tables by the size of its context, not by the text."""
_ERROR = 4
"""Log level of llama.cpp (ggml.h)."""


def environment(build: Path) -> dict[str, str]:
    """Return the environment variables of this worker. The last line that llama.cpp prints shall be its error."""
    source = build / "src" / "vendor" / "llama.cpp"
    return {
        BUILD: str(build), "LLAMA_CPP_LIB_PATH": str(build / "build" / "bin"), "GGML_NO_BACKTRACE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, source, source / "gguf-py"))),
    }  # fmt: skip


def load_library() -> Any:
    """Import the module `rival_worker` with llama.cpp's C interface. The package llama_cpp has an __init__ that imports
    more than is installed here; only its module of C functions is needed."""
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(Path(os.environ[BUILD]) / "src" / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    sys.modules["llama_cpp"] = importlib.import_module("llama_cpp.llama_cpp")
    return importlib.import_module("benchmarks.gguf.rival_worker")


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def print_errors(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def convert(checkpoint: str, file: str) -> dict[str, Any]:
    """Run llama.cpp's converter, in float32 and without a tokenizer."""
    conversion, gguf = importlib.import_module("conversion"), importlib.import_module("gguf")
    parameters = conversion.ModelBase.load_hparams(Path(checkpoint), False)
    kind = conversion.get_model_class(conversion.get_model_architecture(parameters, conversion.ModelType.TEXT))
    with torch.inference_mode():
        model = kind(Path(checkpoint), gguf.LlamaFileType.ALL_F32, Path(file))
        model = getattr(model, "impl", model)  # Mistral 3 and 4 share a class in front of theirs

        def set_vocab() -> None:
            model.gguf_writer.add_tokenizer_model("none")
            model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

        model.set_vocab = set_vocab
        model.write()
    return {}


@contextmanager
def loaded(file: str) -> Iterator[Any]:
    sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), CONTEXT)
    model = rival.Model(file, 1, **sizes, flash_attn_type=0, type_k=0, type_v=0)
    try:
        yield model
    finally:
        rival.api.llama_batch_free(model.batch)
        rival.api.llama_free(model.context)
        rival.api.llama_model_free(model.model)


def logits(file: str, texts: Seq[list[int]], out: str) -> dict[str, Any]:
    """Write the logits after each token of texts of equal lengths, [texts, n, V]."""
    rows = []
    with loaded(file) as model:
        for ids in texts:
            model.clear()
            rows.append(model.decode(ids, 0, every=True))
    np.save(out, np.stack(rows))
    return {}


def sample(file: str, firsts: Seq[int], length: int) -> dict[str, Any]:
    """Sample texts of `length` tokens at temperature 1, each after a given first token."""
    rng, texts = np.random.default_rng(0), []
    with loaded(file) as model:
        for first in firsts:
            model.clear()
            text = [first]
            while len(text) < length:
                row = model.decode(text[-1:], len(text) - 1)[-1].astype(np.float64)
                text.append(int((row + rng.gumbel(size=len(row))).argmax()))
            texts.append(text)
    return {"texts": texts}


def quantise(file: str, file_type: int, out: str) -> dict[str, Any]:
    """Write a file in another format, also from a quantised file. file_type: llama.cpp's number (`llama_ftype`)."""
    params = rival.api.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = file_type, 1, True
    if rival.api.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot write {Path(file).name} as {Path(out).name}")
    return {}


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the converter names every tensor
    rival = load_library()
    rival.api.llama_log_set(print_errors, ctypes.c_void_p(0))
    rival.api.llama_backend_init()
    serve({"convert": convert, "logits": logits, "sample": sample, "quantise": quantise})
