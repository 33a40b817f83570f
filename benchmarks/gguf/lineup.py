"""The systems that are compared on GGUF files, and the bars that must be reached."""

from __future__ import annotations

from dataclasses import dataclass

SLIPSTREAM, IK, LLAMACPP = "slipstream", "ik_llama.cpp", "llama.cpp"
GENAI, TRANSFORMERS = "OpenVINO GenAI", "transformers"  # they run the checkpoint, not a file
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "510M": "synthetic target, 510M", "1.1B": "synthetic target, 1.1B"}


@dataclass(frozen=True)
class Side:
    """One contender: a system, the format of its GGUF file (`files.file_of`) or of its checkpoint, and the bits of its
    weights. quantize: Slipstream's setting for the file in 16 bits."""

    who: str
    kind: str
    bits: int
    quantize: str | None = None

    @property
    def label(self) -> str:
        return f"{self.who} {self.quantize or self.kind}"


@dataclass(frozen=True)
class Bar:
    """A bar: `top` must be `reach` times as fast as the fastest of `bottoms` that counts by its perplexity. what: key
    of `Run.seconds`."""

    what: str
    top: str
    bottoms: tuple[str, ...]
    reach: float


def sides(model: str) -> dict[str, Side]:
    """Return all contenders by label."""
    small = "Q4_1" if model == "smollm2" else "Q4_K_M"  # SmolLM2's own file
    sides = [
        *(Side(SLIPSTREAM, kind, bits) for kind, bits in (("F16", 16), ("Q8_0", 8), (small, 4))),
        Side(SLIPSTREAM, "F16", 8, "w8a8"),
        *(Side(who, kind, bits) for who in (IK, LLAMACPP) for kind, bits in (("F16", 16), ("Q8_0", 8), ("Q4_K_M", 4))),
    ]
    if model == "smollm2":
        sides += [Side(who, small, 4) for who in (IK, LLAMACPP)]
    else:
        sides.append(Side(SLIPSTREAM, "F16", 4, "int4"))
    return {side.label: side for side in sides}


def bars(model: str) -> list[Bar]:
    """Return the bars for a model."""
    ik, llamacpp = ((f"{who} Q8_0", f"{who} Q4_K_M") for who in (IK, LLAMACPP))
    if model == "smollm2":
        top = f"{SLIPSTREAM} Q4_1"
        pairs = ((ik, 1.2, 1.4), ((*llamacpp, f"{LLAMACPP} Q4_1"), 2.0, 3.0))
        return [
            bar
            for rivals, plain, reading in pairs
            for bar in (Bar("requests", top, rivals, plain), Bar("prompt of 512", top, rivals, reading))
        ]
    bars = []
    for top, rival, plain, reading in (
        (f"{SLIPSTREAM} F16", f"{IK} F16", 1.0, 1.1),
        (f"{SLIPSTREAM} w8a8", f"{IK} Q8_0", 1.0, 1.5),
        (f"{SLIPSTREAM} Q4_K_M", f"{IK} Q4_K_M", 1.15, 1.5),
    ):
        bars.append(Bar("decoding", top, (rival,), plain))
        bars += [Bar(f"prompt of {length}", top, (rival,), reading) for length in (512, 2048)]
    return [*bars, Bar("decoding", f"{SLIPSTREAM} Q4_K_M", (f"{SLIPSTREAM} w8a8",), 1.4)]
