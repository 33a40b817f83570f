"""`slipstream convert`: writes a draft head in the format of another program."""

import json
from dataclasses import asdict
from pathlib import Path

from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.errors import ParameterError
from slipstream.settings import HEAD_FORMATS, SMALL_HEAD, one_of
from slipstream.zoo import EMBEDDED

FORMATS = (*HEAD_FORMATS, SMALL_HEAD)


@expand_groups
def convert(
    model: str = argument("Draft head: folder, hub id, or 'embedded'."),
    to: str = option("eagle3", f"Format: {', '.join(FORMATS)}."),
    target: str | None = option(
        None, "Target of the head; only some formats need it, and an error says so.", "--target", "-m"
    ),
    out: Path | None = option(None, "Folder to write.", shown="HEAD-FORMAT"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Convert a draft head for other programs.

    EAGLE-3 and Medusa heads are written for vLLM, SGLang, speculators and SpecForge. The format int8 halves the size of
    an EAGLE-3 or DFlash head for Slipstream. To convert a model to GGUF, use llama.cpp's convert_hf_to_gguf.py."""
    quieten()
    if to == "gguf":
        raise ParameterError(
            "--to gguf was given, but Slipstream writes no GGUF files",
            why="llama.cpp's own script converts models, and knows more model families",
            fix="run python convert_hf_to_gguf.py MODEL --outtype q8_0, then slipstream generate -m FILE.gguf",
        )
    one_of("--to", to, FORMATS)
    folder = out or Path(f"{Path(model).name}-{to}")
    if folder.exists():
        raise ParameterError(f"the folder {str(folder)!r} exists already", fix="give another --out")
    from slipstream.heads.head_convert import convert_head

    target = target or (EMBEDDED if model == EMBEDDED else None)
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
