"""Writes thousands of texts at once with a model of the Llama family: PyTorch, one KV cache of fixed size, and on a GPU
one CUDA graph for a decoding step. For making training text; `slipstream` itself decodes with other goals.

R slots hold one text each. A slot whose text has ended gets the next prompt. H query heads, Hk key/value heads,
G = H / Hk, D = head_dim, T slots of KV cache a text, L of them visible in a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import Weights

BUCKET = 128
"""Step of L, the visible part of the KV cache: each has a graph."""
PREFILL_TOKENS = 65536
"""Tokens of prompts that are read at once, padding included."""


@dataclass(frozen=True)
class Ask:
    """A prompt and how to continue it: by `tokens` tokens at most, at this temperature (0: greedy), without tokens
    less probable than `min_p` of the most probable one."""

    prompt: list[int]
    temperature: float
    tokens: int
    min_p: float = 0.0


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class BatchWriter:
    """slots: R, texts side by side. length: T, the longest prompt with its answer."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, slots: int, length: int, device: str, dtype: torch.dtype
    ):
        self.config, self.slots, self.length, self.device = config, slots, length, torch.device(device)

        def load(*names: str) -> Tensor:
            return torch.cat([weights[f"{name}.weight"] for name in names]).to(self.device, dtype)

        self.embedding, self.norm = load("embed_tokens"), load("norm")
        self.head = load(weights.head.removesuffix(".weight"))
        self.layers = [
            Layer(
                load(f"{at}.input_layernorm"),
                load(*(f"{at}.self_attn.{part}_proj" for part in "qkv")),
                load(f"{at}.self_attn.o_proj"),
                load(f"{at}.post_attention_layernorm"),
                load(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                load(f"{at}.mlp.down_proj"),
            )
            for at in (f"layers.{i}" for i in range(config.layers))
        ]
        inv_freq, scale = config.rope()
        angles = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq.double())
        cos, sin = (angles.cos() * scale).repeat(1, 2), angles.sin() * scale
        self.cos, self.sin = (x.to(self.device, dtype) for x in (cos, torch.cat((-sin, sin), 1)))  # [T, D]
        shape = config.layers, 2, slots, config.kv_heads, length, config.head_dim
        self.cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.token, self.place, self.last = torch.zeros(3, slots, dtype=torch.int64, device=self.device)
        self.alive = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.temperature, self.floor = torch.zeros(2, slots, device=self.device)
        self.text = torch.zeros(slots, length + 1, dtype=torch.int64, device=self.device)
        self.each = torch.arange(slots, device=self.device)
        self.eos = torch.tensor(config.eos_ids, device=self.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def write(self, asks: Seq[Ask], seconds: float = 1e9, every: int = 24) -> Iterator[tuple[int, list[int]]]:
        """(index of the request, its answer with the EOS token if there is one), as they end; `every` steps at a time.
        After `seconds` no request is started."""
        until, waiting, running = time.monotonic() + seconds, iter(enumerate(asks)), dict[int, int]()
        while True:
            started = list[tuple[int, Ask]]()
            free = [slot for slot in range(self.slots) if slot not in running]
            while free and time.monotonic() < until and (following := next(waiting, None)):
                running[slot := free.pop()] = following[0]
                started.append((slot, following[1]))
            self._start(started)
            if not running:
                return
            reach = int(self.place.max()) + every + 1
            for _ in range(every):
                self._advance(min(self.length, -(-reach // BUCKET) * BUCKET))
            alive, place = self.alive.tolist(), self.place.tolist()
            if ended := [slot for slot in running if not alive[slot]]:
                texts = self.text[ended].tolist()
                self.place[ended] = 0
                for slot, text in zip(ended, texts, strict=True):
                    index = running.pop(slot)
                    yield index, text[len(asks[index].prompt) : place[slot] + 1]

    # --- parts ------------------------------------------------------------------------------------------------

    def _start(self, started: list[tuple[int, Ask]]) -> None:
        """Give these slots their prompts. The next step reads the last token of each again, for its logits."""
        ordered = sorted(started, key=lambda each: len(each[1].prompt))
        while ordered:
            longest = 32 * -(-len(ordered[-1][1].prompt) // 32)
            part = [ordered.pop() for _ in range(min(len(ordered), max(1, PREFILL_TOKENS // longest)))]
            slots, asks = [slot for slot, _ in part], [ask for _, ask in part]
            ids = torch.tensor([ask.prompt + [0] * (longest - len(ask.prompt)) for ask in asks], device=self.device)
            self._prefill(ids[:, : min(longest, self.length)], torch.tensor(slots, device=self.device))
            self.text[slots, : ids.shape[1]] = ids
            lengths = torch.tensor([len(ask.prompt) for ask in asks], device=self.device)
            self.place[slots] = lengths - 1
            self.token[slots] = ids.gather(1, lengths[:, None] - 1)[:, 0]
            ends = [min(len(ask.prompt) - 1 + ask.tokens, self.length - 1) for ask in asks]
            self.last[slots] = torch.tensor(ends, device=self.device)
            self.temperature[slots] = torch.tensor([ask.temperature for ask in asks], device=self.device)
            floors = torch.tensor([ask.min_p for ask in asks], device=self.device)
            self.floor[slots] = self.temperature[slots] * floors.log().clamp(min=-1e9)
            self.alive[slots] = True

    def _advance(self, visible: int) -> None:
        if self.device.type != "cuda":
            return self._step(visible)
        if visible not in self.graphs:
            kept = [x.clone() for x in (self.token, self.place, self.alive, self.text)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(visible)
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[visible] = graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if len(self.graphs) > 1 else None
            with torch.cuda.graph(graph, pool=pool):
                self._step(visible)
            for x, old in zip((self.token, self.place, self.alive, self.text), kept, strict=True):
                x.copy_(old)  # the step for warming up is undone
        self.graphs[visible].replay()
        return None

    def _step(self, visible: int) -> None:
        """One token for each slot; slots whose text has ended stay as they are."""
        c, R = self.config, self.slots
        x = F.embedding(self.token, self.embedding)  # [R, d]
        cos, sin = self.cos[self.place][:, None], self.sin[self.place][:, None]  # [R, 1, D]
        hidden = torch.arange(visible, device=self.device) > self.place[:, None]  # [R, L]
        hidden = hidden[:, None, None].expand(-1, c.kv_heads, c.heads // c.kv_heads, -1).flatten(0, 1)  # [R Hk, G, L]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)  # [R, heads, D]
            keys, values = self.cache[i]  # [R, Hk, T, D]
            keys[self.each, :, self.place], values[self.each, :, self.place] = k, v
            keys, values = keys.flatten(0, 1)[:, :visible], values.flatten(0, 1)[:, :visible]  # [R Hk, L, D]
            q = q.unflatten(1, (c.kv_heads, -1)).flatten(0, 1) * c.head_dim**-0.5  # [R Hk, G, D]
            scores = (q @ keys.transpose(1, 2)).float().masked_fill_(hidden, -torch.inf)
            seen = scores.softmax(-1).to(x.dtype) @ values  # [R Hk, G, D]
            x = self._rest(layer, x, seen.reshape(R, -1))
        logits = F.linear(F.rms_norm(x, (c.hidden_size,), self.norm, c.norm_eps), self.head).float()  # [R, V]
        logits = logits.masked_fill_(logits < logits.amax(1, keepdim=True) + self.floor[:, None], -torch.inf)
        # Gumbel's trick: at temperature 0 the noise vanishes, and the argmax is the greedy token.
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        picked = (logits - self.temperature[:, None] * noise).argmax(1)
        alive = self.alive.clone()
        self.token.copy_(torch.where(alive, picked, self.token))
        self.place.add_(alive)
        self.text[self.each, self.place] = torch.where(alive, picked, self.text[self.each, self.place])
        ended = (picked[:, None] == self.eos).any(1)
        self.alive.copy_(alive & (self.place < self.last) & ~ended)

    def _prefill(self, ids: Tensor, slots: Tensor) -> None:
        """Write the keys and values of padded prompts [n, P]. Those of the padding are overwritten before they are
        visible."""
        c, (n, length) = self.config, ids.shape
        x = F.embedding(ids, self.embedding).flatten(0, 1)  # [n P, d]
        cos, sin = (table[:length].repeat(n, 1)[:, None] for table in (self.cos, self.sin))  # [n P, 1, D]
        for i, layer in enumerate(self.layers):
            q, k, v = (part.unflatten(0, (n, length)).transpose(1, 2) for part in self._qkv(layer, x, cos, sin))
            self.cache[i, 0, slots, :, :length], self.cache[i, 1, slots, :, :length] = k, v
            k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [n, H, P, D]
            x = self._rest(layer, x, seen.transpose(1, 2).reshape(n * length, -1))

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, d], cos and signed sin [M, 1, D] -> queries [M, H, D], keys and values [M, Hk, D]."""
        c = self.config
        normed = F.rms_norm(x, (c.hidden_size,), layer.input_norm, c.norm_eps)
        qkv = F.linear(normed, layer.qkv).unflatten(1, (-1, c.head_dim))
        turned = qkv[:, : c.heads + c.kv_heads]
        low, high = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((high, low), -1) * sin
        return turned[:, : c.heads], turned[:, c.heads :], qkv[:, c.heads + c.kv_heads :]

    def _rest(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer.out)
        normed = F.rms_norm(x, (self.config.hidden_size,), layer.post_norm, self.config.norm_eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, 1)
        return x + F.linear(F.silu(gate) * up, layer.down)
