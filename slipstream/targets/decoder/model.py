"""`Decoder`: a Llama-, Mistral-, Qwen- or GPT-2-like checkpoint as a `Target`.

It turns sequences and drafts into packed batches (`layout`), hands them to an executor, and tells the executor
which KV to keep. That is all: arithmetic is the executor's, decisions are the step's.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.core.draft import Draft
from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.core.sequence import Sequence
from slipstream.errors import LoadError, ParameterError, TargetError, UnsupportedModelError
from slipstream.targets.base import TargetOut
from slipstream.targets.decoder.ahead import Ahead
from slipstream.targets.decoder.checkpoint import resolve
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch, Executor, Output
from slipstream.targets.decoder.layout import batch_of, prompt_piece
from slipstream.targets.decoder.native_weights import check_suits, leads_in_int8, matrix_values, suits
from slipstream.targets.decoder.weights import Progress, Weights, from_module, load_weights

_log = logging.getLogger(__name__)
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


EXECUTORS = ("auto", "native", "openvino", "torch")


class Decoder:
    """A `Target` around one executor.

    chunk    longest run of prompt tokens in one forward; longer prompts are prefilled in pieces, which bounds the
             memory of activations.
    weights  where the executor's weights came from, by canonical name; read again on access. Draft heads borrow the
             embedding and the output head.
    source   folder of the checkpoint, None for a model from memory.
    """

    def __init__(
        self, executor: Executor, chunk: int = 512, weights: Weights | None = None, source: Path | None = None
    ):
        if chunk < 1:
            raise ParameterError(f"chunk is {chunk}, must be at least 1", fix="choose chunk >= 1")
        self.executor, self.config, self.chunk = executor, executor.config, chunk
        self.weights, self.source = weights, source
        self.vocab_size, self.context = executor.config.vocab_size, executor.config.context
        self.device: torch.device = executor.device
        self._ahead = Ahead(executor)
        self.eos_ids = frozenset(executor.config.eos_ids)
        self.host_threads = None if executor.name == "torch" else 1  # see `core.threads`

    @staticmethod
    def load(
        source: str | Path,
        executor: str = "auto",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        quantize: str | None = None,
        threads: int | None = None,
        chunk: int = 512,
        progress: Progress | None = None,
    ) -> Decoder:
        """Load a folder or hub id.

        executor  "native" (our own kernels, for decoders like Llama's, Mistral's and Qwen's), "openvino", "torch", or
                  "auto": on a CPU native where it suits, in int8 only small models or where the processor lacks
                  VNNI, else OpenVINO (experts aside); else torch.
        dtype     None: bfloat16 on CUDA, float32 on a CPU.
        device    None: CUDA if there is one and the executor is "auto" or "torch", else the CPU.
        quantize  None or "int8" (CPU).
        threads   None leaves it to the executor. For torch the setting holds for the whole process.
        progress  called with (bytes read, bytes in all).

        Raises the family of `LoadError`, and `ParameterError` for a setting that cannot be honoured.
        """
        config = DecoderConfig.load(source)
        kind, on, of = choose_executor(config, executor, dtype, device, quantize)
        weights = load_weights(source, config, of, progress)
        made = _make(kind, config, weights, on, quantize, threads, executor == "auto")
        weights.let_go()
        return Decoder(made, chunk, weights, resolve(source))

    @staticmethod
    def from_module(
        model: nn.Module,
        executor: str = "torch",
        dtype: torch.dtype | str | None = None,
        quantize: str | None = None,
        threads: int | None = None,
        chunk: int = 512,
    ) -> Decoder:
        """The same decoder from a transformers model in memory, on its device and (if None) in its dtype."""
        parameter = next(model.parameters())
        config = DecoderConfig.from_dict(model.config.to_dict())  # type: ignore[union-attr, operator]
        kind, on, of = choose_executor(config, executor, dtype or parameter.dtype, parameter.device, quantize)
        weights = from_module(model, config, of)
        return Decoder(_make(kind, weights.config, weights, on, quantize, threads, executor == "auto"), chunk, weights)

    # --- Target ------------------------------------------------------------------------------------------------

    def run(
        self,
        seqs: Seq[Sequence],
        draft: Draft,
        taps: Seq[int] = (),
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> TargetOut:
        """Run pending tokens and nodes (see `Target.run`).

        layers  run only layers a..b-1 and apply the head there; `TargetOut.hidden[b]` then holds the residual
                stream, to be passed as `hidden` [M, d] to a run of the layers from b on (same seqs, same draft).

        Without `layers`, leading rows that `ahead` or `chains` ran already resume where they stopped.
        """
        wanted = tuple(taps) if layers is None else tuple(dict.fromkeys((*taps, layers[1])))
        if any(len(seq.tokens) - seq.kv_len > self.chunk for seq in seqs):
            return self._run_long(seqs, draft, wanted, layers, hidden)
        batch = batch_of(seqs, draft, [seq.kv_len for seq in seqs], self.device, self.context)
        self._check_positions(batch.positions)
        out = self._forward(batch, seqs, draft, wanted, layers, hidden)
        self._check_finite(out.logits, seqs, draft)
        return TargetOut(out.logits, out.taps, batch.splits)

    def _forward(
        self,
        batch: Batch,
        seqs: Seq[Sequence],
        draft: Draft,
        taps: tuple[int, ...],
        layers: tuple[int, int] | None,
        hidden: Tensor | None,
    ) -> Output:
        if layers is None:
            return self._ahead.forward(batch, seqs, draft, taps)
        for seq in seqs:
            self._ahead.drop(seq.id)  # this pass writes over it
        return self.executor.forward(batch, taps, layers, hidden)

    def ahead(self, seqs: Seq[Sequence], chains: Seq[Seq[int]], exit: int) -> Tensor:
        """Logits [B, V] of the first `exit` layers behind each sequence's pending tokens and its chain of guesses, for
        a draft by the target itself (see `ahead`). Rows that an earlier call ran are not run again, nor are they by
        the `run` that verifies them. Pending tokens must fit in one `chunk`."""
        out = self._ahead.extend(seqs, chains, exit, self.context)
        self._check_finite(out, seqs, Draft.empty(len(seqs)))
        return out

    @property
    def unrolls(self) -> bool:
        """Whether `chains` is there: several steps in one call."""
        return hasattr(self.executor, "unrolled")

    @property
    def few_rows(self) -> Seq[int]:
        """The numbers of pending tokens that `chains` is best asked with, increasing; none if all are as good."""
        return getattr(self.executor, "few_rows", ())

    def chains(
        self,
        seqs: Seq[Sequence],
        steps: int,
        draws: Draws = GREEDY,
        exit: int | None = None,
    ) -> Drawn:
        """Decode `steps` tokens of each sequence in one call, picked by `draws`. KV is written for the pending tokens,
        which must fit in one `chunk`, and for all but the last of the new ones. What a small model costs is the number
        of calls, hence this; only where `unrolls`.

        exit  use the first so many layers only; the rows are run ahead, as by `ahead`, the last one too.
        """
        batch = batch_of(seqs, Draft.empty(len(seqs)), [seq.kv_len for seq in seqs], self.device, self.context)
        made = self.executor.unrolled(batch, steps, draws, exit)  # type: ignore[attr-defined]
        for seq in seqs:
            self._ahead.drop(seq.id)
        if exit is not None:
            self._ahead.keep(seqs, batch, made, exit)
        return Drawn(made.tokens, made.logits, made.laws)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            base = len(seq.tokens)  # slot of node 0: every token so far has its KV after the run
            moved = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
            if moved < len(nodes):
                src = [base + node for node in nodes[moved:]]
                self.executor.move(seq.id, src, range(base + moved, base + len(nodes)))

    def release(self, seq_id: int) -> None:
        self._ahead.drop(seq_id)
        self.executor.release(seq_id)

    # --- parts -------------------------------------------------------------------------------------------------

    def _run_long(
        self,
        seqs: Seq[Sequence],
        draft: Draft,
        taps: tuple[int, ...],
        layers: tuple[int, int] | None,
        hidden: Tensor | None,
    ) -> TargetOut:
        """Prefill all but the last piece of each long run of pending tokens, then run as usual."""
        starts: list[int] = []
        early: list[list[dict[int, Tensor]]] = []  # for each sequence, the taps of its pieces
        row = 0  # first row of the sequence in `hidden` [M, d], which covers pieces and all
        late_rows: list[int] = []
        for b, seq in enumerate(seqs):
            start, stop = seq.kv_len, len(seq.tokens)
            pieces: list[dict[int, Tensor]] = []
            end = row + stop - start + draft.splits[b + 1] - draft.splits[b]
            while stop - start > self.chunk:
                batch = prompt_piece(seq, start, start + self.chunk, self.device, self.context)
                self._check_positions(batch.positions)
                given = None if hidden is None else hidden[row : row + self.chunk]  # [chunk, d]
                out = self.executor.forward(batch, taps, layers, given)
                pieces.append({tap: h.clone() for tap, h in out.taps.items()})  # valid until the next forward only
                start, row = start + self.chunk, row + self.chunk
            starts.append(start)
            early.append(pieces)
            late_rows += range(row, end)
            row = end
        batch = batch_of(seqs, draft, starts, self.device, self.context)
        self._check_positions(batch.positions)
        late = None if hidden is None else hidden[late_rows]
        out = self._forward(batch, seqs, draft, taps, layers, late)
        self._check_finite(out.logits, seqs, draft)
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
        if self.config.position == "learned" and max(positions) >= self.context:
            raise TargetError(
                f"position {max(positions)} was asked for, the model has {self.context} learned positions",
                why="there is no embedding beyond them",
                fix="shorten the prompt or max_tokens",
            )

    def _check_finite(self, logits: Tensor, seqs: Seq[Sequence], draft: Draft) -> None:
        # A state that overflowed makes its whole row NaN, so one column tells (a single strange logit is refused
        # where the law is made). On CUDA this would be a second synchronisation a step.
        if self.device.type != "cpu" or all(map(math.isfinite, logits[:, 0].tolist())):
            return
        rows = [logits[draft.splits[b] + b : draft.splits[b + 1] + b + 1] for b in range(len(seqs))]
        bad = [seq.id for seq, row in zip(seqs, rows, strict=True) if not row.isfinite().all()]
        raise TargetError(
            f"the target returned logits that are not finite for sequences {bad}",
            why="no token can be drawn from them",
            fix="use dtype='float32' if the model overflows in float16, and check the weights",
        )


# --- choosing an executor --------------------------------------------------------------------------------------


def choose_executor(
    config: DecoderConfig,
    executor: str,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    quantize: str | None = None,
) -> tuple[str, torch.device, torch.dtype]:
    """(executor, device, dtype) with every None and "auto" decided. A mixture of experts goes to torch: the OpenVINO
    graph would run every expert on every token."""
    if executor not in EXECUTORS:
        raise ParameterError(f"executor is {executor!r}", fix="choose one of " + ", ".join(map(repr, EXECUTORS)))
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise ParameterError(f"dtype is {dtype!r}", fix="choose one of " + ", ".join(_DTYPES))
        dtype = _DTYPES[dtype]
    on_cpu = executor in ("native", "openvino")
    if device is None:
        device = "cuda" if not on_cpu and torch.cuda.is_available() else "cpu"
    on = torch.device(device)
    if on.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"device is {str(on)!r}, but PyTorch finds no CUDA device", fix="choose device='cpu'")
    if on_cpu and (on.type != "cpu" or dtype not in (None, torch.float32)):
        raise ParameterError(
            f"executor={executor!r} was asked for on {on.type} in {dtype}",
            why="it runs on the CPU in float32",
            fix="choose executor='torch', or drop device and dtype",
        )
    if executor == "auto":
        executor = _suiting(config, quantize) if on.type == "cpu" and dtype in (None, torch.float32) else "torch"
    return executor, on, dtype or (torch.bfloat16 if on.type == "cuda" else torch.float32)


def _suiting(config: DecoderConfig, quantize: str | None) -> str:
    """The executor for a decoder on a CPU in float32. Our own kernels read weights of 16 bits as they are, half of what
    OpenVINO reads; in int8 both read the same."""
    if suits(config, quantize) and (quantize is None or leads_in_int8(matrix_values(config))):
        return "native"
    if config.experts is not None:
        return "torch"
    if importlib.util.find_spec("openvino") is None:
        _log.warning("openvino is not installed: the torch executor runs instead, slower on a CPU")
        return "torch"
    return "openvino"


def _make(
    kind: str,
    config: DecoderConfig,
    weights: Weights,
    device: torch.device,
    quantize: str | None,
    threads: int | None,
    may_fall_back: bool,
) -> Executor:
    if kind == "native":
        check_suits(config, quantize)
        from slipstream.targets.decoder.native_executor import NativeExecutor  # which needs Numba

        return NativeExecutor(config, weights, quantize, threads)
    if kind == "openvino":
        try:
            from slipstream.targets.decoder.openvino_executor import OpenVinoExecutor

            return OpenVinoExecutor(config, weights, quantize=quantize, threads=threads)
        except (ImportError, UnsupportedModelError) as error:
            if not may_fall_back and isinstance(error, ImportError):
                fix = "pip install openvino, or choose executor='torch'"
                raise LoadError(f"OpenVINO cannot be used: {error}", fix=fix) from error
            if not may_fall_back:
                raise
            _log.warning("OpenVINO cannot run this model (%s): the torch executor runs instead, slower on a CPU", error)
    from slipstream.targets.decoder.torch_executor import TorchExecutor

    if threads is not None:
        torch.set_num_threads(threads)
    return TorchExecutor(config, weights, device, quantize)
