"""`Recurrence`: the parts of a recurrent layer. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

CONVOLUTION, DELTA, STATE_SPACE = "convolution", "delta", "state space"

SNAPSHOTS = 64
"""Largest number of state snapshots that are kept for later requests with the same prefix."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Describes a layer's recurrent mixer, which replaces attention.

    kind       CONVOLUTION: a short convolution of a product of two projections, multiplied by a third projection
               (LFM2). DELTA: Gated DeltaNet (arXiv 2412.06464). STATE_SPACE: Mamba-2 (2405.21060).
    taps       length of the causal convolution over channels, which is the number of tokens that one output sees.
    heads      number of heads, each with a state [key, value]; a convolution has one head, with key = 0.
    groups     number of groups of heads that share queries and keys (in Mamba-2: C and B).
    conv_bias, bias  whether the convolution, and the projections, have a bias.
    normed     number of outputs that one RMS norm covers: the outputs of one head or of several heads; 0: no norm.
    gate_first whether outputs are gated before the norm. eps: epsilon of this norm; None: as in the other norms.
    doubled    whether beta is in 0..2 instead of 0..1.
    tiled      whether head i is in group i % groups, as in GGUF files of Qwen3.5; else a group's heads are neighbours.
    """

    kind: str
    taps: int
    heads: int = 1
    groups: int = 1
    key: int = 0
    value: int
    conv_bias: bool = False
    bias: bool = False
    normed: int = 0
    gate_first: bool = False
    eps: float | None = None
    doubled: bool = False
    tiled: bool = False

    @property
    def width(self) -> int:
        """Number of outputs of all heads."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key + self.width

    @property
    def per_head(self) -> tuple[str, ...]:
        """Names of projections to one number for each head."""
        return {CONVOLUTION: (), DELTA: ("betas", "steps"), STATE_SPACE: ("steps",)}[self.kind]

    @property
    def kept(self) -> int:
        """How many input values of a token a later pass may need."""
        return self.channels + len(self.per_head) * self.heads

    @property
    def cells(self) -> int:
        """Number of values in the states of all heads."""
        return self.heads * self.key * self.value

    @property
    def mixed(self) -> dict[str, int]:
        """The number of outputs of each projection that the convolution reads."""
        if self.kind == CONVOLUTION:
            return {"values": self.width}
        return {"queries": self.groups * self.key, "keys": self.groups * self.key, "values": self.width}

    @property
    def projections(self) -> dict[str, int]:
        """The number of outputs of each projection of the input, in the order of the kernels."""
        factors = {"factors": self.width} if self.kind == CONVOLUTION else {}
        return self.mixed | factors | dict.fromkeys(self.per_head, self.heads) | {"gates": self.width}

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by its canonical part."""
        out: dict[str, tuple[int, ...]] = {}
        for name, outs in self.projections.items():
            out[f"{name}.weight"] = (outs, hidden)
            if self.bias:
                out[f"{name}.bias"] = (outs,)
        for name, outs in self.mixed.items():
            out[f"conv_{name}.weight"] = (outs, 1, self.taps)
            if self.conv_bias:
                out[f"conv_{name}.bias"] = (outs,)
        if self.kind != CONVOLUTION:
            out["A_log"] = out["dt_bias"] = (self.heads,)
        if self.kind == STATE_SPACE:
            out["D"] = (self.heads,)
        if self.normed:
            out["norm.weight"] = (self.value if self.kind == DELTA else self.width,)
        out["out_proj.weight"] = (hidden, self.width)
        if self.bias:
            out["out_proj.bias"] = (hidden,)
        return out
