"""`slipstream convert`: writes a checkpoint in the format of another program."""

import json
from dataclasses import asdict
from pathlib import Path

from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.errors import ParameterError
from slipstream.settings import HEAD_FORMATS, SMALL_HEAD, one_of
from slipstream.zoo import EMBEDDED


@grouped
def convert(
    model: str = argument("Model or draft head: folder, hub id, or 'embedded'."),
    to: str = option("gguf", f"Format: gguf for a model; {', '.join(HEAD_FORMATS)}, {SMALL_HEAD} for a draft head."),
    quantize: str | None = option(
        None, "gguf: f32, f16, q8_0, or what llama.cpp quantises: q4_k_m, q5_k_m, q6_k, ...", shown="f16"
    ),
    target: str | None = option(None, "Draft head: the target that it drafts for, if it is needed.", "--target", "-m"),
    out: Path | None = option(
        None, "File or folder to write.", "--out", "-o", shown="MODEL-QUANTIZE.gguf or HEAD-FORMAT"
    ),
    overwrite: bool = option(False, "gguf: replace the file if it is there."),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Convert a model to GGUF, or a draft head for other programs.

    GGUF: Llama, Mistral, Qwen2, Qwen3 and GPT-2, for llama.cpp and `slipstream generate -m MODEL.gguf`. The tokenizer
    is compared token by token. Draft heads: EAGLE-3 and Medusa, for vLLM, SGLang, speculators and SpecForge; int8: an
    EAGLE-3 or DFlash head in half the size, for Slipstream."""
    quieten()
    one_of("--to", to, ("gguf", *HEAD_FORMATS, SMALL_HEAD))
    head = to != "gguf"
    foreign: dict[str, object] = {"--quantize": quantize, "--overwrite": overwrite} if head else {"--target": target}
    for name, given in foreign.items():
        if given:
            raise ParameterError(f"{name} has no effect with --to {to}", fix="leave it out")
    place = out or Path(f"{Path(model).name}-{to}" if head else f"{Path(model).name}-{quantize or 'f16'}.gguf")
    if place.exists() and not overwrite:
        more = "" if head else ", or add --overwrite"
        raise ParameterError(f"{str(place)!r} is there already", fix=f"choose another --out{more}")
    if head:
        _head(model, to, target or (EMBEDDED if model == EMBEDDED else None), place, as_json)
        return
    from slipstream.targets.gguf.gguf_convert import convert_to_gguf

    written = convert_to_gguf(model, place, quantize or "f16")
    if as_json:
        print(json.dumps(asdict(written) | {"file": str(written.file)}))
        return
    sizes = " + ".join(f"{render.size(n)} in {kind}" for kind, n in written.stored.items())
    render.line(f"{written.file}: {sizes}")
    if written.tokens:
        render.line(f"{render.counted(written.tokens, 'token')} compared one by one: the same")
    if written.differing:
        render.message(
            "note",
            "programs of llama.cpp split texts into words in another way: their prompts may have other tokens",
            "Slipstream reads the checkpoint's own tokenizer, which is in the file",
        )


def _head(model: str, to: str, target: str | None, folder: Path, as_json: bool) -> None:
    from slipstream.heads.head_convert import convert_head

    written = convert_head(model, to, folder, target)
    if as_json:
        print(json.dumps(asdict(written) | {"folder": str(written.folder)}))
        return
    render.line(f"{written.folder}: {render.size(written.stored_bytes)} in {written.dtype}")
    if to == SMALL_HEAD:
        return
    options = {"method": written.method, "model": str(written.folder), "num_speculative_tokens": written.draft_tokens}
    options |= {"parallel_drafting": True} if written.parallel else {}
    render.line(f"vllm serve TARGET --speculative-config '{json.dumps(options)}'")
