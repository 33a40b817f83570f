"""`MtpLayers`: the MTP layers of a checkpoint, built and loaded by transformers (`MtpModel`), as an `EagleRuntime`.

They run in packed passes over our own KV blocks (see `packed_pass`), one layer at a time. Row i of layer k is in slot
i. It reads a hidden state of token i (from the target, or from layer k - 1), and token i + 1 + k. So in every layer but
the first, the last rows read draft tokens, and run again when the real tokens are known. A row is called *open* until
every layer has run it with real tokens.
"""

import copy
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from slipstream.backends.torch.torch_paged import SPREAD
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.weights import check_finite
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.errors import ConfigError, UnsupportedModelError, reading
from slipstream.executor.executor import Batch, check_ids, check_steps
from slipstream.heads.mtp_names import COUNTS, FAMILIES, check_stored
from slipstream.host.torch_threads import all_threads
from slipstream.targets.huggingface.few_rows import FewRows
from slipstream.targets.huggingface.module_blocks import ModuleBlocks
from slipstream.targets.huggingface.packed_inputs import PackedCache
from slipstream.targets.huggingface.packed_module import PackedLayers, attend_packed
from slipstream.targets.huggingface.packed_pass import KINDS, running
from slipstream.targets.huggingface.trials import fault_of, limit_of, same

MOST_OPEN = 64
"""Largest number of rows that layers run again for a draft; only drafts with fewer tokens than layers reach it."""


@dataclass
class _Open:
    """The open rows of a sequence: slot and position of the first row, layer 0's input at each row [n, d], the last
    layer's output, and the rows' tokens followed by draft tokens."""

    first: int
    position: int
    features: Tensor
    outputs: Tensor
    tokens: list[int]

    @property
    def rows(self) -> int:
        return len(self.features)

    def close(self, rows: int) -> None:
        """Remove the first rows, which every layer has run with real tokens."""
        if rows <= 0:
            return
        self.first, self.position = self.first + rows, self.position + rows
        self.features, self.tokens = self.features[rows:].clone(), self.tokens[rows:]


class MtpLayers(PackedLayers):
    """model: the layers, with the target's embedding and output head; device: of the embedding. context: largest number
    of tokens in a sequence. kind: how attention runs, one of `packed_pass.KINDS`. place: device of the layers."""

    name = "transformers"
    mask: Tensor | None = None

    def __init__(self, model: Any, device: torch.device, context: int, kind: str = "blocks"):
        self.model, self.device, self.kind = model, device, kind
        self.layers: int = model.num_mtp_layers
        self.place = next(model.layers.parameters()).device
        self.config: Any = SimpleNamespace(
            version=1, taps=(-1,), reduced=False, decoder=SimpleNamespace(context=context)
        )
        self.ids = torch.arange(model.shared_head.out_features, device=device)
        self._few_rows, self._cache = FewRows(model), PackedCache(self.layers)
        self._open: dict[int, _Open] = {}
        super().__init__(ModuleBlocks(self.layers), spread=SPREAD, ahead=self.layers)

    @all_threads()
    @torch.inference_mode()
    def extend(self, batch: Batch, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
        """Run as `EagleRuntime.extend`, through the layer of the rows' depth. Rows `from_head` must be chains."""
        with self._calls, self._few_rows.fast():
            batch = replace(batch, positions=[p + 1 for p in batch.positions])
            if self.layers == 1:
                hidden = self.run(0, batch, features)[list(batch.select)]
            elif from_head:
                hidden = self._draft(batch, features)
            else:
                hidden = self._read(batch, features)
            logits = self.model._project_to_logits(hidden).to(self.device)
            return hidden, logits if logits.dtype == torch.float64 else logits.float()

    @torch.inference_mode()
    def decode_steps(self, batch: Batch, features: Tensor, steps: int, sampling: StepSampling = ARGMAX) -> DecodedSteps:
        check_steps(steps)
        ends, each = batch.splits[1:], range(len(batch.seq_ids))
        lengths = [past + end - start for past, start, end in zip(batch.past, batch.splits, ends, strict=False)]
        hidden, logits = self.extend(replace(batch, select=[end - 1 for end in ends]), features)
        tokens, scores = [sampling.pick(logits, 0)], [logits]
        for j in range(1, steps):
            positions, past = [batch.positions[end - 1] + j for end in ends], [n + j - 1 for n in lengths]
            one = Batch(batch.seq_ids, tokens[-1], positions, [*each, len(lengths)], past, [None] * len(lengths), each)
            hidden, logits = self.extend(one, hidden, from_head=True)
            scores.append(logits)
            tokens.append(sampling.pick(logits, j))
        return DecodedSteps(torch.stack(tokens), torch.stack(scores))

    def settle(self, seq_ids: Iterable[int]) -> None:
        """Run all layers for the open rows that need no draft tokens, and close these rows."""
        for seq_id in seq_ids:
            state = self._open.get(seq_id)
            if state is not None and (closed := state.rows - self.layers + 1) > 0:
                part = replace(state, features=state.features[:closed], outputs=state.features[:closed])
                for layer in range(self.layers):
                    self._through(layer, [seq_id], [part])
                state.close(closed)

    def release(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)
        super().release(seq_id)

    def _read(self, batch: Batch, features: Tensor) -> Tensor:
        """Add these rows, which have real tokens, to the open rows. Returns layer 0's last outputs, [B, d]."""
        for b, seq_id in enumerate(batch.seq_ids):
            rows, past = slice(batch.splits[b], batch.splits[b + 1]), batch.past[b]
            state, new, ids = self._open.get(seq_id), features[rows], batch.tokens[rows].tolist()
            if state is None or state.first + state.rows != past:
                self._open[seq_id] = _Open(past, batch.positions[rows.start], new.clone(), new, ids)
            else:
                state.features, state.tokens = torch.cat((state.features, new)), state.tokens[: state.rows] + ids
        self.settle(seq_id for seq_id in batch.seq_ids if self._open[seq_id].rows > MOST_OPEN)
        open_rows = [self._open[seq_id] for seq_id in batch.seq_ids]
        for state in open_rows:
            state.outputs = state.features
        return self._through(0, batch.seq_ids, open_rows)

    def _draft(self, batch: Batch, features: Tensor) -> Tensor:
        """Add one draft token to each sequence. Returns the outputs [B, d] for the last rows."""
        each = [self._open[seq_id] for seq_id in batch.seq_ids]
        depth = batch.past[0] + 1 - each[0].first - each[0].rows
        if depth >= self.layers:  # every layer has run all open rows: run one more row
            past = [state.first + state.rows + depth // self.layers - 1 for state in each]
            return self.run(depth % self.layers, replace(batch, past=past), features)
        for state, token in zip(each, batch.tokens.tolist(), strict=True):
            state.tokens = [*state.tokens[: state.rows + depth - 1], token]
        hidden = self._through(depth, batch.seq_ids, each)
        if depth == self.layers - 1:
            for state in each:
                state.close(state.rows - depth)
        return hidden

    def _through(self, layer: int, seq_ids: Seq[int], each: Seq[_Open]) -> Tensor:
        """Run open rows through one layer. Returns the outputs [B, d] of each sequence's last row."""
        splits = [0, *accumulate(state.rows for state in each)]
        tokens = [token for state in each for token in state.tokens[layer : layer + state.rows]]
        positions = [state.position + layer + i for state in each for i in range(state.rows)]
        ids = torch.tensor(tokens, device=self.device)
        batch = Batch(seq_ids, ids, positions, splits, [state.first for state in each], [None] * len(each), ())
        out = self.run(layer, batch, torch.cat([state.outputs for state in each]))
        for b, state in enumerate(each):
            state.outputs = out[splits[b] : splits[b + 1]]
        return out[[end - 1 for end in splits[1:]]]

    @torch.inference_mode()
    def run(self, layer: int, batch: Batch, hidden: Tensor) -> Tensor:
        """Run one layer on hidden states [M, d], with the tokens and positions that the rows read; outputs [M, d]."""
        check_ids(batch.tokens, self.model.embed_tokens.num_embeddings)
        at = [p + past - batch.positions[start]
              for start, stop, past in zip(batch.splits, batch.splits[1:], batch.past, strict=False)
              for p in batch.positions[start:stop]]  # fmt: skip
        one = self._pack(replace(batch, positions=at))  # masks compare slots
        positions = torch.tensor([list(batch.positions)], device=self.place)
        with attend_packed(self.model.config), running(one):
            given = hidden[None].to(self.place, self.model.dtype)
            out: Tensor = self.model.forward_layer(layer, given, positions, self._cache, input_ids=batch.tokens[None])
        one.check_used(1)
        return out[0]


def load_mtp(module: PreTrainedModel, checkpoint: Path | None, device: torch.device, context: int) -> MtpLayers:
    """Load the MTP layers of a transformers model's checkpoint, in the first kind of packed pass whose results equal
    transformers' own. checkpoint: its folder; None: as the model says. Raises the family of LoadError."""
    config = module.config.get_text_config(decoder=True)
    if getattr(module, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            "drafter 'mtp' does not work with a quantised target",
            why="transformers loads MTP layers in floating point only",
            fix="use the checkpoint that the target was quantised from, or another drafter",
        )
    opened = Checkpoint.open(checkpoint or module.config.name_or_path or "a model in memory")
    folder = opened.download()
    stored = FAMILIES[config.model_type].count_layers(opened.tensor_names, config.num_hidden_layers)
    declared = next((n for key in COUNTS if (n := getattr(config, key, None))), stored)
    check_stored(folder, stored, declared)
    model, why = _load(module, folder, declared), ""
    for kind in KINDS:
        layers = MtpLayers(model, device, context, kind)
        fault = fault_of(_check, layers)
        if fault is None:
            return layers
        why = why or fault
    raise UnsupportedModelError(
        f"the MTP layers of a {config.model_type!r} model cannot run for several sequences at once",
        why=why,
        fix="use another drafter",
    )


def _load(module: PreTrainedModel, folder: Path, layers: int) -> Any:
    """Build and load `MtpModel`, which copies what it needs from a target. It gets a stand-in that shares the target's
    modules but has another configuration, so the target is not changed."""
    text = module.config.get_text_config(decoder=True)
    family, first = FAMILIES[text.model_type], text.num_hidden_layers
    stand_in = copy.copy(module)
    stand_in.config = copy.deepcopy(module.config)
    stand_in.config.name_or_path, stand_in.config.dtype = str(folder), module.dtype
    config = stand_in.config.get_text_config(decoder=True)
    config.num_mtp_layers = layers
    for key, value in (*((k, [v] * layers) for k, v in family.types.items()), *family.config.items()):
        setattr(config, key, value)
    ignored = [rf"model\.layers\.{first + k}\." for k in range(layers)] if family.numbered else []
    # The class's own patterns name the MTP layers of released checkpoints.
    stand_in._keys_to_ignore_on_load_unexpected = ignored or list(module._keys_to_ignore_on_load_unexpected or ())
    renamed = [WeightRenaming(source_patterns=a, target_patterns=b) for a, b in family.renamed.items()]
    known = getattr(module, "_weight_conversions", None)  # set if the model was loaded from files
    conversions = [*renamed, *(get_model_conversion_mapping(module) if known is None else known)]
    setattr(stand_in, "_weight_conversions", conversions)  # noqa: B010 its class does not declare it
    place = next(module.get_decoder().layers[-1].parameters()).device
    why, fix = "config.json and the weights must match", "download the checkpoint again, or use another drafter"
    with reading(f"transformers cannot build the MTP layers of {folder}", fix, ConfigError, why):
        model = MtpModel.from_pretrained(stand_in, device_map={"": place}).eval()
    for name, parameter in model.layers.named_parameters():
        check_finite(f"{name} of the MTP layers in {folder}", parameter)
    return model


@torch.inference_mode()
def _check(layers: MtpLayers) -> None:
    """Raise unless packed passes over two sequences give the same as transformers' own pass over each."""
    model, at = layers.model, [*range(7), *range(5)]
    ids = ((torch.arange(12) * 37 + 11) % model.embed_tokens.num_embeddings).to(layers.device)
    hidden = torch.randn(12, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(layers.place)
    hidden, batch = hidden.to(model.dtype), Batch((0, 1), ids, at, [0, 7, 12], (0, 0), (None, None), ())
    for k in range(layers.layers):
        alone = []
        for part in (slice(0, 7), slice(7, 12)):
            places, cache = torch.tensor([at[part]], device=layers.place), MtpCache(config=model.config)
            alone.append(model.forward_layer(k, hidden[None, part], places, cache, input_ids=ids[None, part])[0, -1])
        layers.run(k, batch.cut([range(6), range(4)]), hidden[[*range(6), *range(7, 11)]])
        rows = layers.run(k, batch.cut([range(6, 7), range(4, 5)]), hidden[[6, 11]])
        same(rows, torch.stack(alone), limit_of(model.dtype), "a packed pass of an MTP layer")
    layers.release(0)
    layers.release(1)
