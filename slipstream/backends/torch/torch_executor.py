"""The reference executor runs PyTorch on packed tokens, with a KV cache in blocks, on CPU and CUDA, in float64 to
bfloat16.

The M tokens of all sequences go through the linear layers together. Attention runs per sequence, because the cached
lengths differ. D = head_dim, H query heads, Hk key/value heads, G = H / Hk, S = visible slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.backends.torch.rows_apart import FOLD_ROWS, may_spoil, rows_apart
from slipstream.backends.torch.torch_paged import SPREAD, TorchBlocks, TorchPaged
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import DEFAULTS, LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.target import MultiStep, Runtime, Slice
from slipstream.errors import TargetError
from slipstream.executor.executor import Batch, Output, check_ids
from slipstream.host.torch_threads import all_threads

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
_ROWS = 8
"""Number of rows for which oneDNN packs weights: one pending token and seven draft tokens."""


class TorchExecutor(TorchPaged[TorchBlocks]):
    """Runs one decoder with PyTorch; implements `executor.Executor`."""

    slices = True
    torch_threads = None
    packed_tables = None

    def __init__(self, config: DecoderConfig, weights: Weights, settings: LoadSettings = DEFAULTS):
        self.config, self.device, self.dtype = config, torch.device(settings.device or "cpu"), weights.dtype
        self.runtime = Runtime("torch", self.dtype)
        with torch.inference_mode():
            self._load(weights)
        super().__init__(TorchBlocks(config, self.dtype, self.device), settings.kv_blocks, SPREAD)

    @property
    def multi_step(self) -> MultiStep[Batch] | None:
        return None

    def _load(self, weights: Weights) -> None:
        """Load and pack one tensor at a time, so that only one unpacked tensor is in memory."""
        config, nbytes = self.config, 0

        def tensor(name: str) -> Tensor | None:
            nonlocal nbytes
            if name not in weights:
                return None
            value = weights[name].to(self.device)
            if repacks(self.dtype, self.device):
                value = value.clone()  # a view would keep the whole file mapped
            nbytes += value.nbytes
            return value

        def pack(*names: str) -> Linear:
            """Join linear layers with the same input into one."""
            nonlocal nbytes
            rows = [weights[f"{n}.weight"] for n in names]
            bias = [weights[f"{n}.bias"] for n in names if f"{n}.bias" in weights]
            joined = rows[0] if len(rows) == 1 else torch.cat(rows)
            layer = Linear(joined, torch.cat(bias) if bias else None, self.device)
            nbytes += layer.nbytes
            return layer

        def norm(name: str) -> _Norm:
            return _Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"), config)

        def mlp(name: str) -> _MLP:
            parts = ("gate", "up") if config.gated else ("up",)
            return _MLP(config, pack(*(f"{name}.{p}_proj" for p in parts)), pack(f"{name}.down_proj"))

        embedding, self._embed_positions = tensor("embed_tokens.weight"), tensor("embed_positions.weight")
        assert embedding is not None
        self.embedding = embedding
        self.layers = []
        for i in range(config.layers):
            at = f"layers.{i}"
            block: _MLP | _Mixture
            if config.sparse(i):
                assert config.experts is not None
                experts = [mlp(f"{at}.mlp.experts.{e}") for e in range(config.experts.count)]
                block = _Mixture(config, pack(f"{at}.mlp.gate"), experts)
            else:
                block = mlp(f"{at}.mlp")
            self.layers.append(
                _Layer(
                    input_norm=norm(f"{at}.input_layernorm"),
                    qkv=pack(*(f"{at}.self_attn.{p}_proj" for p in "qkv")),
                    q_norm=tensor(f"{at}.self_attn.q_norm.weight"),
                    k_norm=tensor(f"{at}.self_attn.k_norm.weight"),
                    o=pack(f"{at}.self_attn.o_proj"),
                    post_norm=norm(f"{at}.post_attention_layernorm"),
                    mlp=block,
                )
            )
        self.final_norm = norm("norm")
        self.head = pack(weights.head.removesuffix(".weight"))
        self.frequencies: Tensor | None = None
        self.rope_factor = 1.0
        if config.position == "rope":
            inv_freq, self.rope_factor = config.rope()  # [D/2]
            self.frequencies = inv_freq.to(self.device)
        self._weight_bytes = nbytes

    @all_threads()
    @torch.inference_mode()
    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), layers: Slice = None, hidden: Tensor | None = None
    ) -> Output:
        with self._calls:
            out = self._forward(batch, taps, layers, hidden)
            if may_spoil(out.hidden, len(batch.seq_ids)):
                out = self._forward(batch, taps, layers, hidden, apart=True)
            return out

    def _forward(
        self, batch: Batch, taps: Seq[int], layers: Slice, hidden: Tensor | None, apart: bool = False
    ) -> Output:
        """Run the pass. apart: whether attention is computed separately for each row (see `rows_apart`)."""
        first, last = layers or (0, self.config.layers)
        places = [place for slots in self._reserve(batch) for place in slots]
        positions, written = torch.tensor([[*batch.positions], places], device=self.device)  # [M] each
        x = self._embeddings(batch.tokens, positions) if first == 0 else hidden  # [M, d]
        if x is None:
            raise TargetError(f"layers {first}..{last} need the hidden states that layer {first} starts from")
        rotary = self._rotary(positions)
        scattered: list[int] = []
        rows = [self._row(batch, b, positions, scattered) for b in range(len(batch.seq_ids))]
        blocks = torch.tensor(scattered, device=self.device) if scattered else None
        seen: dict[int, Tensor] = {first: x} if first in taps else {}
        for i in range(first, last):
            layer = self.layers[i]
            attended = self._attention(i, layer, layer.input_norm(x), rotary, rows, written, blocks, apart)
            x = x + layer.o(attended)  # [M, d]
            x = x + layer.mlp(layer.post_norm(x))  # [M, d]
            if i + 1 in taps:
                seen[i + 1] = x
        if -1 in taps:
            seen[-1] = self.final_norm(x)  # [M, d]
        if not len(batch.select):
            return Output(x.new_empty(0, self.config.vocab_size), seen, x)
        picked = x if len(batch.select) == len(x) else x[list(batch.select)]  # [R, d]
        logits = self.head(seen[-1][list(batch.select)] if -1 in seen else self.final_norm(picked))  # [R, V]
        return Output(logits if logits.dtype == torch.float64 else logits.float(), seen, x)

    def memory(self) -> dict[str, int]:
        return {"weights": self._weight_bytes, "kv": self._blocks.nbytes}

    def _embeddings(self, tokens: Tensor, positions: Tensor) -> Tensor:
        check_ids(tokens, len(self.embedding))
        x = F.embedding(tokens, self.embedding)  # [M, d]
        if self._embed_positions is None:
            return x
        check_ids(positions, len(self._embed_positions), "position")
        return x + F.embedding(positions, self._embed_positions)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and signed sin of each token, [M, 1, D]; angles in float64, so that large positions stay accurate."""
        if self.frequencies is None:
            return None
        angles = torch.outer(positions.to(torch.float64), self.frequencies)  # [M, D/2]
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor  # [M, D/2]
        cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)  # [M, D]
        return cos.to(self.dtype).unsqueeze(1), sin.to(self.dtype).unsqueeze(1)

    def _row(self, batch: Batch, b: int, positions: Tensor, scattered: list[int]) -> _Row:
        """Describe sequence `b` of the batch: its rows, its place in the cache, and its masks. Adds its blocks to
        `scattered` if they are not consecutive."""
        start, stop = batch.splits[b], batch.splits[b + 1]
        total, in_place, first = self._place(batch, b, scattered)
        fold = self.config.heads // self.config.kv_heads if stop - start <= FOLD_ROWS else 1
        masks = {
            window: _mask(batch.past[b], positions[start:stop], batch.trees[b], window, fold, self.dtype)
            for window in set(self.config.windows)
        }
        return _Row(start, stop, in_place, first, total, fold, masks)

    def _attention(
        self,
        i: int,
        layer: _Layer,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows: list[_Row],
        written: Tensor,
        scattered: Tensor | None,
        apart: bool,
    ) -> Tensor:
        """Compute attention of layer `i`: x [M, d] -> [M, H * D]. Writes the new keys and values to places `written`
        [M]. scattered: ids of the blocks that have to be gathered first."""
        c = self.config
        heads, kv_heads = c.heads, c.kv_heads
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, c.head_dim)  # [M, H + 2 Hk, D]
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]  # [M, H + Hk, D], [M, Hk, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(qk[:, :heads], (c.head_dim,), layer.q_norm, c.norm_eps)
            k = F.rms_norm(qk[:, heads:], (c.head_dim,), layer.k_norm, c.norm_eps)
            qk = torch.cat((q, k), 1)
        if rotary is not None:
            low, high = qk.chunk(2, -1)
            qk = torch.addcmul(qk * rotary[0], torch.cat((high, low), -1), rotary[1])
        out = torch.empty(len(x), heads, c.head_dim, dtype=x.dtype, device=x.device)  # [M, H, D]
        stored = self._blocks.write(i, written, qk[:, heads:], v)
        gathered = stored if scattered is None else self._blocks.gather(i, scattered)
        for row in rows:
            n, fold = row.stop - row.start, row.fold
            keys, values = stored if row.in_place else gathered  # [Hk, places, D] each
            mask, hidden = row.masks[c.windows[i]]  # [G n, S] or None; slots before `hidden` are outside the window
            q = qk[row.start : row.stop, :heads].transpose(0, 1)  # [H, n, D]
            given = (
                q.reshape(1, heads // fold, fold * n, c.head_dim),  # [1, Hk, G n, D]: a group's heads are rows
                keys[None, :, row.first + hidden : row.first + row.total],
                values[None, :, row.first + hidden : row.first + row.total],
                mask,
            )
            attend = partial(F.scaled_dot_product_attention, enable_gqa=heads // fold != kv_heads)
            seen = rows_apart(attend, *given, n) if apart else attend(*given)
            out[row.start : row.stop] = seen.view(heads, n, c.head_dim).transpose(0, 1)
        return out.view(len(x), heads * c.head_dim)


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of a batch: rows start:stop, and slots 0..total-1 after the pass."""

    start: int
    stop: int
    in_place: bool  # whether its blocks are consecutive, so that they are read without a copy
    first: int  # place of slot 0 in the cache, or in the gathered blocks
    total: int
    fold: int  # query heads per key/value head that become rows
    masks: dict[int | None, tuple[Tensor | None, int]]  # window -> (mask, first visible slot)


def _mask(
    past: int, positions: Tensor, tree: Tensor | None, window: int | None, fold: int, dtype: torch.dtype
) -> tuple[Tensor | None, int]:
    """Return an additive mask [fold * n, S] of n new tokens over slots first:past + n, and `first`. The mask is None if
    every row sees all slots up to its own.

    The window counts *positions*, because the nodes of a draft tree have more slots than positions.
    """
    n = len(positions)
    if tree is None:
        if n == 1 and window is None:
            return None, 0
        tree = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()  # [n, n]
    first = 0
    seen = torch.cat((tree.new_ones(n, past), tree), 1).to(positions.device)  # [n, past + n]
    if window is not None:
        at = torch.cat((torch.arange(past, device=positions.device), positions))  # [past + n]: position of each slot
        seen &= positions[:, None] - at[None, :] < window
        first = max(0, past - window + 1)  # new tokens have positions `past` or later
        seen = seen[:, first:]
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device).masked_fill_(~seen, -torch.inf)
    return (mask if fold == 1 else mask.repeat(fold, 1)), first


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: _Norm
    qkv: Linear
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Linear
    post_norm: _Norm
    mlp: _MLP | _Mixture


class _Norm:
    def __init__(self, weight: Tensor | None, bias: Tensor | None, config: DecoderConfig):
        assert weight is not None
        self.weight, self.bias, self.eps, self.rms = weight, bias, config.norm_eps, config.norm == "rms"

    def __call__(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: DecoderConfig, up: Linear, down: Linear):
        self.up, self.down, self.gated = up, down, config.gated
        self.activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        h = self.up(x)  # [M, 2 I] with the gate first, or [M, I]
        if self.gated:
            gate, up = h.chunk(2, 1)  # [M, I]
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(h))


class _Mixture:
    """A mixture of experts: the router picks `per_token` experts for each token. Only picked experts run."""

    def __init__(self, config: DecoderConfig, router: Linear, experts: list[_MLP]):
        assert config.experts is not None
        self.router, self.experts = router, experts
        self.per_token, self.norm_topk = config.experts.per_token, config.experts.norm_topk

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # [M, E]
        # routing decisions are made in float32 at least, as in training
        probs = scores.softmax(1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weight, picked = probs.topk(self.per_token, 1)  # [M, K]
        if self.norm_topk:
            weight = weight / weight.sum(1, keepdim=True)
        weight = weight.to(x.dtype)
        out = torch.zeros_like(x)  # [M, d]
        for e in picked.unique().tolist():
            token, rank = torch.where(picked == e)  # [m] each: tokens that picked e
            out.index_add_(0, token, self.experts[e](x[token]) * weight[token, rank, None])
        return out


class Linear:
    """The fastest available layer y = x W^T + b for `weight` [out, in] and `bias` [out] on `device`, packed once at
    load. The caller frees the unpacked weights.

    Decoding is memory-bound: it takes as long as reading W. A good kernel reads W once for M = 1 and for M = 8, which
    makes verifying a draft cheap. `F.linear` on a CPU is not such a kernel: with a 2048x2048 layer on one AVX-512 core,
    8 rows take 1.20 ms and 1 row 0.21 ms. oneDNN with weights reordered for a few rows takes 0.33 and 0.18 ms. If
    PyTorch lacks this operator, `F.linear` runs instead.

    nbytes  bytes of weights and bias in memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device):
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = None if bias is None else bias.to(device)
        self._packed = repacks(weight.dtype, device)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self._packed else weight.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]"""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def repacks(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if `Linear` copies the weights into a layout of oneDNN, so that the unpacked weights can be freed."""
    return device.type == "cpu" and dtype == torch.float32 and _has_packed()


def _has_packed() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
