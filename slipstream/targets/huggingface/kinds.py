"""How each architecture of transformers runs, as `huggingface_target` finds out by trying it.

This table is only for `slipstream info` and docs/support.md; no code decides by it. Tests try each entry.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A way in which models run. name and note: for users. trees, heads, early_exit: as in `Capabilities`. A kind
    with trees runs a batch in one forward pass."""

    name: str
    note: str
    trees: bool
    early_exit: bool
    heads: bool = True


DECODER = Kind("decoder", "our own decoder: native kernels on a CPU, PyTorch elsewhere", True, True)
PACKED = Kind("packed", "transformers, rows of several sequences over our own KV blocks", True, True)
ONE_EACH = Kind("one each", "transformers, one cache for each sequence", False, False)
STATES = Kind("states", "the same; recurrent states are copied", False, False)
ONE_BY_ONE = Kind("one by one", "the same; one token at a time: exact, but not faster", False, False)
_ENCODED = "transformers, a source that is encoded once, rows of several texts over our own KV blocks"
ENCODER_DECODER = Kind("encoder-decoder", _ENCODED, True, False, heads=False)
ENCODER_DECODER_EACH = Kind("encoder-decoder, one each", "the same, a cache for each text", False, False, heads=False)

KINDS = (DECODER, PACKED, ONE_EACH, STATES, ONE_BY_ONE, ENCODER_DECODER, ENCODER_DECODER_EACH)

ARCHITECTURES: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "cohere", "cohere2", "codegen", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma2", "gemma3_text",
            "gemma4_text", "glm4", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "nemotron", "olmo2",
            "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2_moe", "smollm3", "stablelm", "starcoder2",
        ),
        PACKED,
    ),
    **dict.fromkeys(
        ("bloom", "deepseek_v32", "falcon (alibi)", "gemma4_text (shared keys)", "gpt_neo", "mpt"), ONE_EACH
    ),
    **dict.fromkeys(("bamba", "lfm2", "mamba2", "qwen3_next"), STATES),
    **dict.fromkeys(("jamba", "mamba"), ONE_BY_ONE),
    **dict.fromkeys(("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5"), ENCODER_DECODER),
    "mvp": ENCODER_DECODER_EACH,
}  # fmt: skip
"""`model_type` of transformers 5.23 -> how it runs. Models of other types run, too, if the trials succeed."""
