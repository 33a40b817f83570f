"""`slipstream convert`: writes a checkpoint in the format of another program."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.cli.loading import checkpoint, quieten
from slipstream.errors import ParameterError
from slipstream.settings import one_of

FORMATS = ("gguf",)


def convert(
    model: Annotated[str, typer.Argument(help="Model: folder, hub id, or 'embedded'.")],
    to: Annotated[str, typer.Option("--to", help="Format: gguf.")] = "gguf",
    quantize: Annotated[
        str, typer.Option(help="f32, f16, q8_0, or what llama.cpp quantises: q4_k_m, q5_k_m, q6_k, ...")
    ] = "f16",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write.", show_default="MODEL-QUANTIZE.gguf")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a checkpoint to GGUF, for llama.cpp and for `slipstream generate MODEL.gguf`.

    Llama, Mistral, Qwen2, Qwen3 and GPT-2. The tokenizer is compared token by token."""
    quieten()
    one_of("--to", to, FORMATS)
    file = out or Path(f"{Path(model).name}-{quantize}.gguf")
    if file.exists() and not overwrite:
        raise ParameterError(f"{str(file)!r} is there already", fix="choose another --out, or add --overwrite")
    from slipstream.models.gguf_convert import convert_to_gguf

    made = convert_to_gguf(checkpoint(model, "target"), file, quantize)
    if as_json:
        print(json.dumps(asdict(made) | {"file": str(made.file)}))
        return
    sizes = " + ".join(f"{render.size(n)} in {kind}" for kind, n in made.stored.items())
    render.line(f"{made.file}: {sizes}")
    if made.tokens:
        render.line(f"{render.counted(made.tokens, 'token')} compared one by one: the same")
    if made.differing:
        render.message(
            "note",
            "programs of llama.cpp split texts into words in another way: their prompts may have other tokens",
            "Slipstream reads the checkpoint's own tokenizer, which is in the file",
        )
