"""The inputs of head training: the target's hidden states and distributions at every position of a window.

The target runs in the executor that will decode with the heads, so a head is trained on the inputs that it will get
when decoding. Each window starts with an empty KV cache; many windows run as one batch. Hidden states are computed when
they are needed. Or they are computed once and stored on disk (`HiddenCache`), which saves time if the data is read more
than once.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import TrainingError
from slipstream.executor.executor import make_batch
from slipstream.targets.decoder import Decoder
from slipstream.templates.sizes import size
from slipstream.training.packing import TokenStream

FINAL = -1
"""The tap after the final norm: the input of the output head."""


@dataclass(frozen=True)
class Window:
    """A batch of training windows.

    tokens  int64 [B, T].
    counts  bool [B, T]: whether the prediction of the token at this position counts in the loss. It may count only in
            answers.
    taps    hidden states [B, T, d] by tap, as in `TargetOut.hidden`.
    """

    tokens: Tensor
    counts: Tensor
    taps: dict[int, Tensor]


class Teacher:
    """The frozen target.

    embedding, head  copies of its embedding and output head, [V, d] each, on `device`, in float32 (or float64 if the
                     weights are float64).
    parameters       number of its weights.
    identity         a short digest of its configuration, final norm and first embeddings, to distinguish targets."""

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
        """Return the hidden states of windows [B, T] by tap, [B, T, d] each, on `device`."""
        seqs = [Sequence(row) for row in tokens.tolist()]
        batch = make_batch(seqs, Draft.empty(len(seqs)), self.decoder.device)
        out = self.decoder.executor.forward(batch, tuple(dict.fromkeys(taps)))
        shape = (*tokens.shape, self.config.hidden_size)
        # Copy the tensors: they are valid only until the executor's next forward pass, and autograd cannot use them.
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
        """Turn hidden states after the final norm [..., d] into logits of the next token [..., V]."""
        return F.linear(final, self.head.to(final.dtype))


class HiddenCache:
    """The hidden states of every window of a stream, in a file of float16 [windows, taps, length, d]. Windows are
    appended, so an interrupted run continues after the last complete window."""

    def __init__(self, folder: Path, stream: TokenStream, length: int, taps: Seq[int], teacher: Teacher):
        self.stream, self.length, self.taps, self.teacher = stream, length, tuple(taps), teacher
        self.count = len(stream.windows(length))
        self.shape = len(self.taps), length, teacher.config.hidden_size
        self.window_bytes = 2 * math.prod(self.shape)
        key = [teacher.identity, length, list(taps), int(stream.starts[-1]), len(stream.starts), stream.whole]
        self.path = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.bin"

    @property
    def nbytes(self) -> int:
        """Bytes of the complete file."""
        return self.count * self.window_bytes

    @property
    def missing(self) -> int:
        """Number of windows that are not stored yet."""
        return self.count - (self.path.stat().st_size // self.window_bytes if self.path.is_file() else 0)

    def build(self, rows: int, say: Callable[[int, int], None]) -> None:
        """Append the missing windows, `rows` at a time. say: called with (tokens done, tokens in total) after each
        write.

        Raises TrainingError if the disk is too small (before writing) or a state exceeds the float16 range."""
        folder, need, begin = self.path.parent, self.missing * self.window_bytes, self.count - self.missing
        free = shutil.disk_usage(next(each for each in folder.absolute().parents if each.exists())).free
        if need * 1.1 > free:
            raise TrainingError(
                f"the hidden states take {size(need)}, but the disk of {folder} has {size(free)} free",
                why="the run would stop when the disk is full",
                fix="free some space, choose another --out, or remove --cache-hidden",
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("ab") as file:
                file.truncate(begin * self.window_bytes)  # cut off a window that was not written completely
                for i in range(begin, self.count, rows):
                    windows = range(i, min(self.count, i + rows))
                    states = self.teacher.read(self.stream.rows(windows, self.length)[:, :-1], self.taps)
                    whole = torch.stack([states[tap] for tap in self.taps], 1).cpu()  # [rows, taps, T, d]
                    if (most := float(whole.abs().max())) > torch.finfo(torch.float16).max:
                        raise TrainingError(
                            f"the hidden states reach {most:.0f}, but float16 ends at 65504",
                            fix="remove --cache-hidden: the states are then computed when needed",
                        )
                    file.write(whole.half().numpy().tobytes())
                    say(windows.stop * self.length, self.count * self.length)
        except OSError as fault:
            text = f"the hidden states {self.path} could not be written ({fault})"
            raise TrainingError(text, fix="free some space there") from fault

    def read(self, window: int) -> dict[int, Tensor]:
        """Return the hidden states of one window by tap, float16 [T, d] each."""
        stored = np.fromfile(self.path, np.float16, math.prod(self.shape), offset=window * self.window_bytes)
        return dict(zip(self.taps, torch.from_numpy(stored.reshape(self.shape)), strict=True))
