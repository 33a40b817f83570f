"""Computes an EAGLE-3, EAGLE-3.1 or P-EAGLE head as vLLM 0.32 does, from the files of its checkpoint and without a
cache.

The code follows vLLM's `model_executor/models/llama_eagle3.py` and `qwen3_eagle3.py`,
`transformers_utils/configs/speculators`, and `v1/spec_decode/llm_base_proposer.py` for the inputs of a draft. It does
not use `slipstream.heads`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class AsVLLM:
    """embedding: the target's embedding [V, d], for a head without an embedding."""

    def __init__(self, folder: Path, embedding: Tensor):
        values = json.loads((folder / "config.json").read_text())
        self.c: dict[str, Any] = values.get("transformer_layer_config", {}) | values
        self.eagle = self.c.get("eagle_config") or {}
        tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
        self.t = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", embedding)
        ids = torch.arange(self.c["draft_vocab_size"])
        self.ids = ids + self.t["d2t"].long() if "d2t" in self.t else ids

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).rsqrt() * self.t[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"{name}.weight"].T + self.t.get(f"{name}.bias", torch.zeros(()))

    def combined(self, taps: Tensor) -> Tensor:
        """Combine the taps [n, taps * target_hidden] to features [n, d]."""
        if self.eagle.get("norm_before_fc", self.c.get("norm_before_fc", False)):
            taps = self.norm(taps, "input_norm")
        if self.c.get("fc_norm", False):
            parts = taps.chunk(self.c["num_aux_hidden_states"], -1)
            taps = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self.linear(taps, "fc")

    def attention(self, x: Tensor, at: str) -> Tensor:
        """Compute causal attention with NeoX rotary embedding at positions 0, 1, ..."""
        n, dim, heads = len(x), self.c["head_dim"], self.c["num_attention_heads"]
        q, k, v = (self.linear(x, f"{at}.{name}_proj").view(n, -1, dim).transpose(0, 1) for name in "qkv")
        if f"{at}.q_norm.weight" in self.t:  # qwen3_eagle3.py
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        angles = torch.arange(n)[:, None] / self.c["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        cos, sin = angles.cos(), angles.sin()

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k, v = turned(q), turned(k).repeat_interleave(heads // len(k), 0), v.repeat_interleave(heads // len(v), 0)
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1), f"{at}.o_proj")

    def forward(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [n, draft_vocab], the hidden states [n, d] that the next step reads)."""
        residual = hidden
        for i in range(self.c["num_hidden_layers"]):
            at = f"layers.{i}"
            if i == 0:
                embedded = self.norm(self.embedding[tokens], f"{at}.input_layernorm")
                normed = self.norm(hidden, f"{at}.hidden_norm")
                residual = normed if self.c.get("norm_before_residual", False) else hidden
                x = torch.cat((embedded, normed), -1)
            else:
                x = self.norm(residual, f"{at}.input_layernorm")
            residual = residual + self.attention(x, f"{at}.self_attn")
            x = self.norm(residual, f"{at}.post_attention_layernorm")
            gate, up = (self.linear(x, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
            residual = residual + self.linear(torch.nn.functional.silu(gate) * up, f"{at}.mlp.down_proj")
        out = self.norm(residual, "norm")
        return self.linear(out, "lm_head"), out if self.c.get("norm_output", False) else residual

    def draft(self, text: list[int], taps: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Draft greedily after a text with n tokens. taps: [n - 1, ...], of all its tokens except the last. Returns the
        draft tokens and their logits [count, draft_vocab]. A head with mask tokens drafts in one pass."""
        tokens, hidden = text[1:], self.combined(taps)
        if "mask_hidden" in self.t:
            keys = ("mask_token_id", "pard_token", "ptd_token_id")
            mask = next(self.c[key] for key in keys if self.c.get(key) is not None)
            masked = self.combined(self.t["mask_hidden"].view(1, -1)).expand(count - 1, -1)
            logits, _ = self.forward(tokens + [mask] * (count - 1), torch.cat((hidden, masked)))
            return self.ids[logits[-count:].argmax(-1)].tolist(), logits[-count:]
        drafted = []
        for _ in range(count):
            logits, after = self.forward(tokens, hidden)
            drafted.append(logits[-1])
            tokens, hidden = [*tokens, int(self.ids[logits[-1].argmax()])], torch.cat((hidden, after[-1:]))
        return tokens[len(text) - 1 :], torch.stack(drafted)
