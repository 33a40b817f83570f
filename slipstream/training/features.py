"""The inputs of head training: the target's hidden states and distributions at every position of a window.

The target runs in the executor that will decode with the heads, so a head is trained on the same inputs that it gets
when decoding. Each window starts with an empty KV cache; many windows run as one batch. Hidden states are computed when
needed, or once and stored on disk (`HiddenCache`), which saves time if the data is read more than once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.sizes import size
from slipstream.errors import TrainingError
from slipstream.models.executor import batch_of
from slipstream.targets.decoder import Decoder
from slipstream.training.packing import Stream
from slipstream.training.resume_state import writing

FINAL = -1
"""The tap after the final norm: the input of the output head."""


@dataclass(frozen=True)
class Window:
    """A batch of training windows.

    tokens  int64 [B, T].
    counts  bool [B, T]: whether the prediction of the token at that position counts in the loss (answers only, or all).
    taps    tap -> [B, T, d], as in `TargetOut.hidden`.
    """

    tokens: Tensor
    counts: Tensor
    taps: dict[int, Tensor]


class Teacher:
    """The frozen target.

    embedding [V, d] and head [V, d] are copies of its tables, on `device`, in float32 (float64 if its weights are).
    parameters: how many weights it has.
    identity: a short digest of its configuration, final norm and first embeddings, to tell targets apart.
    """

    def __init__(self, decoder: Decoder, device: torch.device | str = "cpu"):
        if decoder.weights is None:
            raise TrainingError("this target does not expose its weights", fix="load it with Decoder.load")
        self.decoder, self.device, self.config = decoder, torch.device(device), decoder.weights.config
        self.dtype = torch.float64 if decoder.weights.dtype == torch.float64 else torch.float32

        def table(name: str) -> Tensor:
            return decoder.weights[name].to(self.device, self.dtype).clone()  # type: ignore[index]

        self.embedding = table("embed_tokens.weight")
        self.head = self.embedding if decoder.weights.head == "embed_tokens.weight" else table(decoder.weights.head)
        self.norm = table("norm.weight")
        self.parameters = decoder.weights.nbytes // decoder.weights.dtype.itemsize
        digest = hashlib.sha256(repr(decoder.config).encode())
        for seen in (decoder.weights["norm.weight"], decoder.weights["embed_tokens.weight"][:64]):
            digest.update(seen.double().numpy().tobytes())
        self.identity = digest.hexdigest()[:12]

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: Seq[int]) -> dict[int, Tensor]:
        """Hidden states of windows [B, T] at the taps: tap -> [B, T, d], on `device`."""
        seqs = [Sequence(row) for row in tokens.tolist()]
        batch = batch_of(seqs, Draft.empty(len(seqs)), [0] * len(seqs), self.decoder.device)
        out = self.decoder.executor.forward(batch, tuple(dict.fromkeys(taps)))
        shape = (*tokens.shape, self.config.hidden_size)
        # Copies: the executor's are only valid until its next forward, and autograd cannot use inference tensors.
        features = {t: out.taps[t].reshape(shape).to(self.device, self.dtype, copy=True).clone() for t in taps}
        for seq in seqs:
            self.decoder.release(seq.id)
        for tap, x in features.items():
            if not bool(torch.isfinite(x).all()):
                raise TrainingError(
                    f"the target's hidden states at tap {tap} are not finite",
                    fix="load the target in float32 or bfloat16",
                )
        return features

    def logits(self, final: Tensor) -> Tensor:
        """Hidden states after the final norm [..., d] -> logits of the next token [..., V]."""
        return F.linear(final, self.head.to(final.dtype))


class HiddenCache:
    """Hidden states of every window of a stream, float16, in shards of `SHARD` windows.

    Each shard is written atomically, so an interrupted run continues with the next one.
    """

    SHARD = 64

    def __init__(self, folder: Path, stream: Stream, length: int, taps: Seq[int], identity: str):
        self.stream, self.length, self.taps = stream, length, tuple(taps)
        self.count = len(stream.windows(length))
        key = json.dumps([identity, length, list(taps), int(stream.starts[-1]), len(stream.starts), stream.whole])
        self.folder = folder / hashlib.sha256(key.encode()).hexdigest()[:12]

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def nbytes(self, width: int) -> int:
        """Size on disk in bytes when complete."""
        return 2 * self.count * self.length * width * len(self.taps)

    def missing(self) -> list[int]:
        return [s for s in range(-(-self.count // self.SHARD)) if not self._path(s).is_file()]

    def build(self, teacher: Teacher, rows: int, say: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Write the missing shards. say: called with (tokens done, tokens in total) after each.

        Raises TrainingError if the disk is too small (before it starts) or a state exceeds the float16 range.
        """
        todo = self.missing()
        shards = -(-self.count // self.SHARD)
        need = int(self.nbytes(teacher.config.hidden_size) * len(todo) / max(1, shards))
        at = next(folder for folder in self.folder.absolute().parents if folder.exists())
        free = shutil.disk_usage(at).free
        if need * 1.1 > free:
            raise TrainingError(
                f"the hidden states take {size(need)}, the disk of {self.folder.parent} has {size(free)} free",
                why="the run would stop when the disk is full",
                fix="free some space, choose another --out, or remove --cache-hidden",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for shard in todo:
            windows = range(shard * self.SHARD, min(self.count, (shard + 1) * self.SHARD))
            parts = []
            for i in range(0, len(windows), rows):
                parts.append(teacher.read(self.stream.rows(windows[i : i + rows], self.length)[:, :-1], self.taps))
            tensors = {}
            for tap in self.taps:
                whole = torch.cat([p[tap] for p in parts]).cpu()
                if float(whole.abs().max()) > torch.finfo(torch.float16).max:
                    raise TrainingError(
                        f"hidden states at tap {tap} reach {float(whole.abs().max()):.0f}, float16 ends at 65504",
                        fix="remove --cache-hidden: the states are then computed when needed",
                    )
                tensors[str(tap)] = whole.half().contiguous()
            with writing(self._path(shard), "the hidden states ") as temporary:
                save_file(tensors, temporary)
            say((windows[-1] + 1) * self.length, self.count * self.length)

    def read(self, window: int) -> dict[int, Tensor]:
        """Hidden states of one window: tap -> [T, d], float16."""
        shard, row = divmod(window, self.SHARD)
        with safe_open(self._path(shard), framework="pt") as file:
            return {tap: file.get_slice(str(tap))[row] for tap in self.taps}
