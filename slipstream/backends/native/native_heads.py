"""EAGLE, DFlash and Medusa heads and MTP layers on the native backend. Their weights have the formats of a decoder."""

from collections.abc import Callable, Sequence as Seq
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels import passes
from slipstream.backends.native.kernels.arithmetic import MAXIMUM, Picks
from slipstream.backends.native.kernels.compiled import compile_lock
from slipstream.backends.native.kernels.products import ALIGN
from slipstream.backends.native.kernels.records import EAGLE, LAYER, MATRIX, MEDUSA, MODEL
from slipstream.backends.native.packed_weights import (
    Layout,
    SharedTables,
    choose_format,
    choose_formats,
    decoder_weights,
    describe_layer,
    describe_model,
    narrowest,
)  # fmt: skip
from slipstream.backends.native.paged import NativePaged, PackedRows, as_int64, check_finite, cut_steps, make_picks
from slipstream.backends.native.quantise import GROUP
from slipstream.backends.native.threads import Workspace, kernel_lock
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weight_formats import WeightFormat
from slipstream.checkpoints.weights import Weights
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.errors import TargetError
from slipstream.executor.executor import Batch, check_steps
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_head import EagleConfig, EagleHead, scatter
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads

INPUTS = {
    "qkv": [f"self_attn.{p}_proj" for p in "qkv"],
    "o": ["self_attn.o_proj"],
    "up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
"""For each matrix of the kernels, the linear layers that it joins."""


class NativeEagle(NativePaged):
    """Implements `EagleRuntime`, with the KV cache and packed rows of a decoder. One call drafts several tokens, which
    are drawn in float64. It is created only if `table.backend_for_head` chooses this backend. Its KV cache is float32
    under every `kv_dtype`, because a head has few layers and a smaller format would save little memory.

    head       the head with the target's weights, in any float dtype (computed in float32); not needed afterwards.
    shared     the target's tables, if they are in memory already; None: copy the tables from `head`.
    threads    as in `NativeExecutor`."""

    name = "native"

    def __init__(
        self,
        head: EagleHead,
        threads: int | None = None,
        quantised: WeightFormat | None = None,
        shared: SharedTables | None = None,
    ):
        mask = head.mask_taps
        self.mask = None if mask is None else mask.float().cpu()
        ids = head.target_ids.cpu()
        self._start(head.config, ids, threads, shared, partial(_eagle_record, head, ids, quantised, shared))

    def _start(
        self,
        config: EagleConfig,
        ids: Tensor,
        threads: int | None,
        shared: SharedTables | None,
        pack: Callable[[Layout], np.ndarray],
    ) -> None:
        """Pack the weights as EAGLE [1] and run a first pass, whose bytes include an output head of the target."""
        self.config, self.device, self.ids = config, torch.device("cpu"), ids
        with compile_lock():
            super().__init__(config.decoder, ahead=1)
            self._layout, self._shared = Layout(), shared
            self._head = pack(self._layout)
            output = self._head["decoder"]["head"][0]
            borrowed = int(output["outs"] * output["out_bytes"]) if config.decoder.after else 0
            self._workspace = Workspace(threads, self._layout.nbytes + borrowed)
            self._padded = int(output["outs"])
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,))
            self.decode_steps(token, torch.zeros(1, len(self.config.taps) * self.config.target_hidden), 1)
        self._reset_cache()

    def extend(self, batch: Batch, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
        picks = make_picks(ARGMAX, 0, len(batch.select), self.config.draft_vocab)
        _, after, logits, _ = self._run(batch, features, from_head, 0, picks)
        return after, logits[0]

    def decode_steps(self, batch: Batch, features: Tensor, steps: int, sampling: StepSampling = ARGMAX) -> DecodedSteps:
        check_steps(steps)
        picks = make_picks(sampling, steps, len(batch.select), self.config.draft_vocab)
        drawn, _, logits, probs = self._run(batch, features, False, steps, picks)
        return cut_steps(picks, drawn, logits, probs)

    def _run(
        self, batch: Batch, features: Tensor, from_head: bool, steps: int, picks: Picks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Call `passes.draft_eagle`: draft ids [K, B], next features [A, d], logits [K or 1, A, V], distributions."""
        vocab = self.config.draft_vocab
        wanted = np.asarray(batch.select, np.int64)
        count, sampled = len(wanted), picks.kind != MAXIMUM
        drawn = np.empty((steps, count if steps else 0), np.int64)
        after = np.empty((count, self.config.hidden_size), np.float32)
        logits = np.empty((max(steps, 1), count, self._padded), np.float32)
        probs = np.empty((steps, count if steps else 0, vocab if sampled else 0))
        expected = self.config.hidden_size if from_head else len(self.config.taps) * self.config.target_hidden
        given = _read_features(features, batch.splits[-1], expected)
        with kernel_lock():
            rows = self._rows(batch, max(steps - 1, 0))
            status = self._call(
                *(passes.draft_eagle, self._head, self._caches(batch), rows.record[:1], rows.record[1:]),
                *(as_int64(batch.tokens), given, from_head, wanted, picks),
                *(drawn, after, logits, probs),
                rows=batch.splits[-1],
            )
        if steps:
            check_finite(status)
        drafted, raw = torch.from_numpy(drawn), torch.from_numpy(logits)[..., :vocab]
        return drafted, torch.from_numpy(after), raw, torch.from_numpy(probs) if sampled else None


class NativeMtp(NativeEagle):
    """The MTP layer of a checkpoint. It drafts like an EAGLE-1 head: its output is the next feature.

    config     configuration of the layer (see `DecoderConfig.mtp_layer`).
    weights    weights of the layer, read once.
    quantised  the format of its matrices; None: as they are stored.
    shared     the target's embedding and output head.
    vocab      only the first `vocab` ids are drafted, and only their rows of the output head are read."""

    mask: Tensor | None = None

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        shared: SharedTables,
        threads: int | None = None,
        quantised: WeightFormat | None = None,
        vocab: int | None = None,
    ):
        width, count = config.hidden_size, config.vocab_size if vocab is None else vocab
        head = EagleConfig(version=1, decoder=config, taps=(-1,), target_hidden=width, draft_vocab=count)
        self._start(head, torch.arange(count), threads, shared, partial(_mtp_record, head, weights, quantised, shared))

    def memory(self) -> dict[str, int]:
        """As `NativeExecutor.memory`, without the target's tables."""
        return {"weights": self._layout.nbytes, "kv": self._pool.used * self._blocks.block_bytes}


class NativeDFlash(NativePaged):
    """Implements `DFlashRuntime`. A block is a pass of the head's layers over a tree. The arguments are as for
    `NativeEagle`. If the target's own output head is in memory, it is used in its format there."""

    name = "native"
    mask: Tensor | None = None

    def __init__(
        self,
        head: DFlashHead,
        threads: int | None = None,
        quantised: WeightFormat | None = None,
        shared: SharedTables | None = None,
    ):
        self.config, self.device, self.width = head.config, torch.device("cpu"), head.width
        self._ids = head.target_ids
        with compile_lock():
            super().__init__(head.config.decoder, ahead=1)
            self._layout, self._shared = Layout(), shared
            self._head, self._markov = _dflash_records(head, quantised, shared, self._layout)
            output = self._head["decoder"]["head"][0]
            self._workspace = Workspace(threads, self._layout.nbytes + int(output["outs"] * output["out_bytes"]))
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,))
            self.extend(token, torch.zeros(1, len(self.config.taps) * self.config.target_hidden))
            self.run_blocks(token)
        self._reset_cache()

    def extend(self, batch: Batch, features: Tensor) -> None:
        given = _read_features(features, batch.splits[-1], len(self.config.taps) * self.config.target_hidden)
        with kernel_lock():
            rows = self._rows(batch)  # a reference keeps the rows alive until the call returns
            args = self._head, self._caches(batch), rows.record[:1], given
            self._call(passes.read_context, *args, rows=batch.splits[-1])

    def run_blocks(self, batch: Batch) -> Tensor:
        with kernel_lock():
            return self._logits(
                self._head["decoder"], self._rows(batch), self._caches(batch), batch.tokens, batch.select
            )

    def after(self, logits: Tensor, before: Tensor) -> Tensor:
        if self.config.markov_rank:
            rows = PackedRows([(0, 0, 0, 1, 0)] * len(before), None, (np.empty(0, np.int64), []), 0)
            with kernel_lock():
                added = self._logits(self._markov, rows, self._record, before, range(len(before)))
            logits = logits + added[:, : logits.shape[-1]]
        return scatter(logits, self._ids, self.width)

    def _logits(
        self, model: np.ndarray, rows: PackedRows, caches: np.ndarray, tokens: Tensor, select: Seq[int]
    ) -> Tensor:
        """Run a pass over all layers of `model`, and return logits [len(select), ids of the model]."""
        logits = np.empty((len(select), int(model["head"]["outs"][0])), np.float32)
        none, taps = np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.float32)
        self._call(
            *(passes.forward, model, caches, rows.record[:1], as_int64(tokens), none, 0, int(model["count"][0])),
            *(np.asarray(select, np.int64), True, np.empty(0, np.int64), taps, none, logits),
            rows=len(tokens),
        )
        return torch.from_numpy(logits)[:, : int(model["vocab"][0])]


def _read_features(features: Tensor, rows: int, width: int) -> np.ndarray:
    """Convert features to the only layout for which the kernels are compiled."""
    if tuple(features.shape) != (rows, width):
        raise TargetError(f"the features have the shape {tuple(features.shape)}, but the head needs {(rows, width)}")
    return features.float().contiguous().numpy()


def _eagle_record(
    head: EagleHead, ids: Tensor, quantised: WeightFormat | None, shared: SharedTables | None, layout: Layout
) -> np.ndarray:
    """Pack an EAGLE head as EAGLE [1]."""
    c, d, weights = head.config, head.config.decoder, head.state_dict()
    output = head.borrowed("lm_head") if c.version == 1 else weights["lm_head.weight"]
    prefixes = [f"layers.{i}." for i in range(d.layers)]
    if c.version == 3:
        prefixes[0] = "midlayer."
    eagle, fmt, _ = _head_record(head, prefixes, [output], quantised, layout)
    record, model, vector = eagle[0], eagle[0]["decoder"], partial(layout.find_vector, weights)
    if c.version == 1:  # EAGLE-1 has neither of these norms
        model["norm"] = layout.vector(torch.ones(c.hidden_size))
    if shared is None or c.own_embedding:
        table = weights["embed_tokens.weight"] if c.own_embedding else head.borrowed("embedding")
        model["embed"] = layout.embedding({"": table}, "")
    else:
        model["embed"] = shared.embedding
    model["head"], model["vocab"] = layout.matrix(output, fmt), c.draft_vocab
    _set_ids(record, ids, layout)
    if c.fc_norm:
        record["tap_norms"] = layout.vector(torch.stack([weights[f"fc_norm.{i}.weight"] for i in range(len(c.taps))]))
    record["joint_norm"] = vector("input_norm.weight") if c.norm_before_fc else 0
    record["feature_norm"] = vector("midlayer.hidden_norm.weight") if c.version == 3 else 0
    record["normed_start"], record["normed_end"] = c.norm_before_residual, c.norm_output
    return eagle


def _mtp_record(
    head: EagleConfig, weights: Weights, quantised: WeightFormat | None, shared: SharedTables, layout: Layout
) -> np.ndarray:
    """Pack an MTP layer as EAGLE [1]."""
    model = decoder_weights(head.decoder, weights, quantised, torch.float32, layout, shared)
    model[0]["vocab"], model[0]["head"]["outs"] = head.draft_vocab, -(-head.draft_vocab // ALIGN) * ALIGN
    record = np.zeros(1, EAGLE)
    eagle, (fmt, _) = record[0], choose_formats(weights, quantised, torch.float32)
    eagle["decoder"], eagle["fc"] = model[0], layout.join_linear(weights, ["eh_proj"], fmt, quantised is None)
    norms = torch.stack([weights["enorm.weight"], weights["hnorm.weight"]])
    eagle["input_norms"], eagle["normed_end"] = layout.vector(norms), head.decoder.final_norm
    eagle["taps"], eagle["target_width"] = 1, head.hidden_size
    _set_ids(eagle, torch.arange(head.draft_vocab), layout)
    return record


def _set_ids(record: np.void, ids: Tensor, layout: Layout) -> None:
    """Note the target id of each draft id in an EAGLE record."""
    target = ids.to(torch.int64).contiguous().numpy().copy()
    layout.arrays.append(target)
    record["ids"], record["id_count"] = target.ctypes.data, len(target)


def _dflash_records(
    head: DFlashHead, quantised: WeightFormat | None, shared: SharedTables | None, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """Pack a DFlash head as EAGLE [1], and its Markov head as MODEL [1], a decoder without layers and final norm."""
    c, weights = head.config, head.state_dict()
    tables = [weights[name] for name in ("lm_head.weight", "markov_head.markov_w2.weight") if name in weights]
    names = [f"layers.{i}." for i in range(c.decoder.layers)]
    dflash, fmt, layers = _head_record(head, names, tables, quantised, layout)
    layers["window"] = [window or 0 for window in c.decoder.windows]
    layers["causal"] = [c.causal_windows and window is not None for window in c.decoder.windows]
    model, markov = dflash[0]["decoder"], np.zeros(1, MODEL)
    dflash[0]["feature_norm"] = layout.find_vector(weights, "hidden_norm.weight")
    embedding, output = head.embedding, head.output_head
    model["embed"] = layout.embedding({"": embedding}, "") if shared is None or c.own_embedding else shared.embedding
    model["head"] = layout.matrix(output, fmt) if shared is None or c.own_lm_head else shared.head
    model["vocab"] = len(output)
    if c.markov_rank:
        name, into = "markov_head.markov_w1.weight", weights["markov_head.markov_w2.weight"]
        fmt = fmt if c.markov_rank % GROUP == 0 else narrowest([into])  # some formats need rows of GROUP columns
        markov[0]["embed"], markov[0]["head"] = layout.embedding(weights, name), layout.matrix(into, fmt)
        markov[0]["vocab"], markov[0]["width"] = len(into), c.markov_rank
        markov[0]["embedding_scale"] = markov[0]["logits_scale"] = 1
    return dflash, markov


def _head_record(
    head: EagleHead | DFlashHead,
    prefixes: Seq[str],
    tables: Seq[Tensor],
    quantised: WeightFormat | None,
    layout: Layout,
) -> tuple[np.ndarray, str, np.ndarray]:
    """Pack `fc` and the decoder layers of a head, whose names begin with `prefixes`. Returns EAGLE [1], the format of
    the matrices, and LAYER [L]. tables: the head's other matrices, for which this format must be exact, too."""
    c, d, weights = head.config, head.config.decoder, head.state_dict()
    linear = [weights[f"{at}{name}.weight"] for at in prefixes for names in INPUTS.values() for name in names]
    fmt = choose_format(quantised) if quantised else narrowest([weights["fc.weight"], *tables, *linear])
    vector, layers = partial(layout.find_vector, weights), np.zeros(len(prefixes), LAYER)
    ones = layout.vector(torch.ones(d.hidden_size))  # the first layer of EAGLE-1 has no norm
    for number, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        describe_layer(layer, d, number, layout)
        layer["norm"] = vector(f"{prefix}input_layernorm.weight") or ones
        layer["mlp_norm"] = vector(f"{prefix}post_attention_layernorm.weight")
        layer["q_norm"], layer["k_norm"] = (vector(f"{prefix}self_attn.{x}_norm.weight") for x in "qk")
        for group, names in INPUTS.items():
            layer[group] = layout.join(weights, [f"{prefix}{n}" for n in names], fmt)
    layout.arrays.append(layers)
    records = np.zeros(1, EAGLE)
    record, model = records[0], records[0]["decoder"]
    describe_model(model, d)
    model["layers"], model["count"] = layers.ctypes.data, len(layers)
    model["gated"], model["norm"] = 1, vector("norm.weight")
    record["fc"] = layout.join(weights, ["fc"], fmt)
    record["taps"], record["target_width"] = len(c.taps), c.target_hidden
    return records, fmt, layers


class NativeMedusa:
    """Computes the same logits as a `MedusaHeads`. Its weights are copied, so the module is not needed afterwards.
    threads: as in `NativeExecutor`."""

    dtype = torch.float32

    def __init__(self, heads: MedusaHeads, threads: int | None = None, quantised: WeightFormat | None = None):
        self.config: MedusaConfig = heads.config
        self.token_map = heads.token_map
        with compile_lock():
            self._layout = Layout()
            self._heads = _medusa_record(heads, quantised, self._layout)
            self._workspace = Workspace(threads, self._layout.nbytes)
            self._padded = -(-self.config.width // 64) * 64
            self(torch.zeros(1, self.config.hidden_size))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, d] -> [B, K, draft_vocab]"""
        c, rows = self.config, len(hidden)
        if tuple(hidden.shape) != (rows, c.hidden_size):
            raise TargetError(f"hidden states are {tuple(hidden.shape)}, but the heads need {(rows, c.hidden_size)}")
        states = np.empty((c.heads, rows, c.hidden_size), np.float32)
        logits = np.empty((c.heads, rows, self._padded), np.float32)
        given = hidden.float().contiguous().numpy()
        with kernel_lock():
            self._workspace.run(passes.draft_medusa, self._heads, given, states, logits, rows=rows)
        return torch.from_numpy(logits)[..., : c.width].transpose(0, 1)


def _medusa_record(heads: MedusaHeads, quantised: WeightFormat | None, layout: Layout) -> np.ndarray:
    """MEDUSA [1]"""
    out = heads.lm_head if heads.lm_heads is not None else heads.lm_head[None]  # [K or 1, V, d]
    blocks, biases = heads.blocks.detach(), None if heads.biases is None else heads.biases.detach()
    fmt = choose_format(quantised) if quantised else narrowest([blocks, out.detach()])
    medusa = np.zeros(1, MEDUSA)
    record = medusa[0]
    record["first"] = layout.matrix(blocks[0].flatten(0, 1), fmt, None if biases is None else biases[0].flatten())
    later = np.zeros(len(blocks[1:].flatten(0, 1)), MATRIX)
    for i, block in enumerate(blocks[1:].flatten(0, 1)):
        later[i] = layout.matrix(block, fmt, None if biases is None else biases[1:].flatten(0, 1)[i])
    outs = np.zeros(len(out), MATRIX)
    for i, each in enumerate(out.detach()):
        outs[i] = layout.matrix(each, fmt)
    layout.arrays += [later, outs]
    record["later"], record["laters"] = later.ctypes.data, len(later)
    record["out"], record["outs"] = outs.ctypes.data, len(outs)
    return medusa
