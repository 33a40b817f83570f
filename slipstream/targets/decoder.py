"""`Decoder`: a Llama-, Mistral-, Qwen- or GPT-2-like checkpoint as a `Target`.

It turns sequences and drafts into packed batches, passes them to an executor, and tells the executor which KV to keep.
The executor does the arithmetic; `core.step` decides what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.backends.table import backend, choose, resolve, warn_slower
from slipstream.checkpoints.checkpoint import Checkpoint, CheckpointName
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import keys_read
from slipstream.checkpoints.gguf_keys import warn_of_keys
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.lora import Adapter
from slipstream.checkpoints.weight_formats import FORMATS, KV_FORMATS
from slipstream.checkpoints.weights import Progress, Weights, from_module, load_weights, stored_as
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, HeadHost, MultiStep, TargetOut
from slipstream.errors import ParameterError, TargetError
from slipstream.executor.executor import Batch, Executor, Output, check_finite, make_batch
from slipstream.heads.mtp_layer import count_stored_bytes, describe_mtp_layer
from slipstream.settings import AUTO
from slipstream.targets.described import Described, check_memory
from slipstream.targets.early_exit import EarlyExits
from slipstream.targets.huggingface.kinds import DECODER, Kind
from slipstream.targets.target_costs import ExpertReads


class Decoder:
    """A `Target` around one executor.

    chunk    largest number of prompt tokens in one forward pass; longer prompts are prefilled in chunks, which bounds
             the memory of activations.
    weights  the source of the executor's weights, by canonical name; each access reads the tensor again. Draft heads
             borrow the embedding and the output head. None: `head_host` provides both.
    checkpoint   folder of the checkpoint, None for a model from memory.

    exits    runs the first layers alone (see `core.target.EarlyExit`).
    """

    def __init__(
        self,
        executor: Executor,
        chunk: int = 512,
        weights: Weights | None = None,
        checkpoint: Path | None = None,
        head_host: HeadHost | None = None,
    ):
        if chunk < 1:
            raise ParameterError(f"chunk is {chunk}, but must be at least 1", fix="give chunk >= 1")
        self.executor, self.config, self.chunk = executor, executor.config, chunk
        self.weights, self.checkpoint = weights, checkpoint
        self.vocab_size, self.context = executor.config.vocab_size, executor.config.context
        self.device: torch.device = executor.device
        self._runtime = replace(executor.runtime, checkpoint=checkpoint)
        self._head_host = head_host if weights is None else self._lends(weights)
        self.exits = EarlyExits(executor)
        self._expert_reads = ExpertReads.of(self.config)
        self.capabilities = self.declare()

    def declare(self) -> Capabilities:
        """Return the capabilities that the executor allows."""
        executor, config = self.executor, self.config
        return Capabilities(
            eos_ids=frozenset(config.eos_ids),
            trees=not config.recurrences,
            multi_step=DecoderSteps(executor.multi_step, self.exits, self.device) if executor.multi_step else None,
            early_exit=self.exits if config.layers > 1 and executor.slices else None,
            max_pending=self.chunk,
            head_host=self._head_host,
            runtime=self._runtime,
            memory=executor.kv_memory,
            fork=executor.fork,
            torch_threads=executor.torch_threads,
            experts=config.routed,
            relative_cost=self._expert_reads,
            mask_token=config.mask_token,
        )

    def _lends(self, weights: Weights) -> HeadHost:
        device = self.device
        return HeadHost(
            hidden_size=self.config.hidden_size,
            layers=self.config.layers,
            vocab_size=self.vocab_size,
            context=self.context,
            device=device,
            dtype=weights.dtype,
            embedding=lambda: weights["embed_tokens.weight"].to(device),
            lm_head=lambda: weights[weights.head].to(device),
            tied=weights.head == "embed_tokens.weight",
            runtime=self._runtime,
            packed_tables=self.executor.packed_tables,
            family=self.config.model_type,
        )

    @staticmethod
    def load(
        checkpoint: CheckpointName,
        executor: str = AUTO,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        chunk: int = 512,
        progress: Progress | None = None,
        **settings: object,
    ) -> Decoder:
        """Load a folder or hub id. executor, dtype, device, settings: fields of `LoadSettings`. progress: called with
        (bytes read, bytes in all). Raises the family of `LoadError`, and `ParameterError` for unsupported settings."""
        given = {"executor": executor, "dtype": dtype, "device": device, **settings}
        described = DescribedDecoder.of(Checkpoint.open(checkpoint), LoadSettings.of(given, "Decoder.load"))
        check_memory(described)
        return described.load(progress, chunk)

    @staticmethod
    def of_module(model: nn.Module, settings: LoadSettings, chunk: int = 512) -> Decoder:
        """Make the decoder of a transformers model in memory, on its device, in its dtype unless another is given."""
        parameter, config = next(model.parameters()), DecoderConfig.of_module(model)
        settings = resolve(replace(settings, dtype=settings.dtype or parameter.dtype, device=parameter.device))
        chosen, refusals = choose(config, settings)
        warn_slower(refusals, chosen.name, settings)
        weights = from_module(model, config, chosen.load_dtype or settings.dtype)
        return Decoder(chosen.executor(weights.config, weights, settings), chunk, weights)

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """Run pending tokens and nodes (see `Target.run`). Rows that have passed the first layers already (see
        `EarlyExit`) continue with the next layer."""
        for seq in seqs:
            if seq.end - seq.kv_len > self.chunk:
                return self._run_long(seqs, draft, tuple(taps))
        batch = make_batch(seqs, draft, self.device)
        out = self._forward(batch, seqs, draft, tuple(taps))
        if not out.finite:
            check_finite(out.logits, seqs, draft)
        return TargetOut(out.logits, out.taps, batch.splits, out.maxima)

    def _forward(self, batch: Batch, seqs: Seq[Sequence], draft: Draft, taps: tuple[int, ...]) -> Output:
        if self.config.position == "learned":
            self._check_positions(batch.positions)
        if self.exits.rows:
            return self.exits.forward(batch, seqs, draft, taps)
        out = self.executor.forward(batch, taps)
        if self._expert_reads and out.experts_read:
            self._expert_reads.learn(batch.splits[-1], out.experts_read)
        return out

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            if nodes and nodes[-1] != len(nodes) - 1:  # otherwise the path is the first nodes, in order
                base = seq.end  # slot of node 0: every token before it has KV
                moved = next(i for i, node in enumerate(nodes) if node != i)
                src = [base + node for node in nodes[moved:]]
                self.executor.move(seq.id, src, range(base + moved, base + len(nodes)))

    def release(self, seq_id: int) -> None:
        if self.exits.rows:
            self.exits.drop([seq_id])
        self.executor.release(seq_id)

    def _run_long(self, seqs: Seq[Sequence], draft: Draft, taps: tuple[int, ...]) -> TargetOut:
        """Prefill all but the last chunk of each long prompt, then run as usual."""
        starts: list[int] = []
        early: list[list[dict[int, Tensor]]] = []  # hidden states of each sequence's chunks, by tap
        for seq in seqs:
            start = seq.kv_len
            early.append([])
            while seq.end - start > self.chunk:
                batch = make_batch([seq], Draft.empty(1), self.device, [start], start + self.chunk)
                if self.config.position == "learned":
                    self._check_positions(batch.positions)
                seen = self.executor.forward(batch, taps).taps
                early[-1].append({tap: h.clone() for tap, h in seen.items()})  # valid until the next forward only
                start += self.chunk
            starts.append(start)
        batch = make_batch(seqs, draft, self.device, starts)
        out = self._forward(batch, seqs, draft, taps)
        check_finite(out.logits, seqs, draft)
        splits, joined = [0], {}
        for b in range(len(seqs)):
            splits.append(splits[-1] + self.chunk * len(early[b]) + batch.splits[b + 1] - batch.splits[b])
        for tap, last in out.taps.items():
            parts = []
            for b in range(len(seqs)):
                parts += [piece[tap] for piece in early[b]] + [last[batch.splits[b] : batch.splits[b + 1]]]
            joined[tap] = torch.cat(parts)  # [M, d]
        return TargetOut(out.logits, joined, splits)

    def _check_positions(self, positions: Seq[int]) -> None:
        if max(positions) >= self.context:
            raise TargetError(
                f"position {max(positions)} is too large: the model has only {self.context} learned positions",
                why="there are no embeddings for later positions",
                fix="shorten the prompt or max_tokens",
            )


class DecoderSteps:
    """Decodes several tokens of a decoder's sequences in one call: see `MultiStep`.

    calls  the executor's `MultiStep`. exits: the decoder's early exits, which keep the rows of a call with `exit` for
           the pass that verifies them."""

    def __init__(self, calls: MultiStep[Batch], exits: EarlyExits, device: torch.device):
        self.steps_per_call, self.has_states = calls.steps_per_call, calls.has_states
        self._calls, self._exits, self._device = calls, exits, device

    def decode_steps(
        self,
        seqs: Seq[Sequence],
        /,
        steps: int,
        sampling: StepSampling = ARGMAX,
        exit: int | None = None,
        taps: Seq[int] = (),
    ) -> DecodedSteps:
        batch = make_batch(seqs, Draft.empty(len(seqs)), self._device)
        decoded = self._calls.decode_steps(batch, steps, sampling, exit, taps)
        if exit is not None:
            self._exits.keep(seqs, batch, decoded, exit)
        elif self._exits.rows:
            self._exits.drop(batch.seq_ids)
        return decoded


@dataclass(frozen=True)
class DescribedDecoder(Described):
    """A checkpoint that our own decoder runs, before its weights are read."""

    config: DecoderConfig = field(kw_only=True)

    @staticmethod
    def of(checkpoint: Checkpoint, settings: LoadSettings) -> DescribedDecoder:
        """Describe a checkpoint. Raises UnsupportedModelError for an architecture that this decoder or the requested
        backend does not run; ParameterError if weights would be quantised twice."""
        if stored_as(checkpoint) is not None:
            settings.refuse(
                ("quantize",),
                "given for a GGUF file" if checkpoint.is_gguf else "given for a quantised checkpoint",
                "its weights are quantised already, and quantising them again would lose accuracy",
                ("draft_quantize='none'" if settings.role == "draft" else "leave it out")
                + ", or give the folder of the unquantised checkpoint",
            )
        config, resolved = DecoderConfig.load(checkpoint), resolve(settings)
        chosen, refusals = choose(config, resolved)
        return DescribedDecoder(checkpoint, resolved, chosen.name, refusals, config=config)

    @property
    def kind(self) -> Kind:
        return DECODER

    @property
    def stored_as(self) -> str | None:
        if self.runner != "native":
            return None
        quantised = self.settings.weight_format
        return quantised.quantize if quantised else stored_as(self.checkpoint)

    @property
    def weight_bytes(self) -> int:
        """Approximate bytes of the weights in memory. The native executor keeps 16-bit weights as they are stored."""
        quantised = self.settings.weight_format
        whole = self._bytes_of(self.config, sum((self.stored or {}).values()))
        if quantised is None:
            return whole
        head = FORMATS[quantised.head or quantised.name].bytes_per_weight - quantised.bytes_per_weight
        return whole + round(self.config.vocab_size * self.config.hidden_size * head)

    def _bytes_of(self, config: DecoderConfig, stored: int) -> int:
        """Return the bytes in memory of weights that take `stored` bytes in the files; 0: unknown size in the files."""
        quantised = self.settings.weight_format
        if quantised is not None:
            return round(config.parameters * quantised.bytes_per_weight)
        whole = config.parameters * self.settings.dtype.itemsize
        return min(whole, stored) if self.runner == "native" and stored else whole

    @property
    def mtp_bytes(self) -> tuple[int, int]:
        if self.runner != "native" or not self.mtp_layers:
            return 0, 0
        layer = describe_mtp_layer(self.checkpoint, self.config)
        stored = count_stored_bytes(self.checkpoint, self.config) if self.stored else 0
        return self._bytes_of(layer, stored), layer.kv_bytes()

    @property
    def kv_bytes(self) -> int:
        if self.runner != "native":
            return super().kv_bytes
        fmt = KV_FORMATS[self.settings.kv_dtype or "float32"]
        return sum(2 * each.kv_heads * fmt.head_bytes(each.head_dim) for each in self.config.described if each.has_kv)

    @property
    def state_bytes(self) -> int:
        return self.config.state_bytes() if self.runner == "native" else 0

    def usual_kv_tokens(self, requests: int) -> int:
        return self.settings.kv_tokens or requests * self.config.context

    def load(self, progress: Progress | None = None, chunk: int = 512) -> Decoder:
        settings, chosen, place = self.settings, backend(self.runner), self.checkpoint.download()
        warn_slower(self.refusals, self.runner, settings)
        if self.checkpoint.is_gguf:
            header = self.checkpoint.header
            warn_of_keys(place.name, header.metadata, keys_read(header))
        adapter = None if settings.lora is None else Adapter(settings.lora)
        dtype = chosen.load_dtype or settings.dtype
        weights = load_weights(self.checkpoint, self.config, dtype, progress, adapter)
        executor = chosen.executor(weights.config, weights, settings)
        weights.unmap()
        return Decoder(executor, chunk, weights, place)


def check_is_chain(draft: Draft) -> None:
    """Raise TargetError for a draft with siblings, in targets that run chains only."""
    if not draft.is_chain:
        raise TargetError(
            "the draft is a tree, but this model verifies only chains",
            fix="draft chains, or use LLM or Engine, which cut trees to chains",
        )


def check_fork(parent_id: int, child_id: int, length: int, computed: int | None, begun: bool) -> None:
    """Raise TargetError if the parent is unknown (`computed` is None) or too short, or if the child has begun."""
    if computed is None or length > computed or begun:
        raise TargetError(
            f"sequence {child_id} cannot begin with {length} tokens of sequence {parent_id}",
            why=f"the parent has {computed or 0} tokens, and the id of the new sequence must be unused",
            fix="fork between two steps, with another id",
        )
