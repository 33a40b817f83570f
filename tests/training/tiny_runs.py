"""A tiny target, trained in seconds, on which every objective is tested."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.training.methods import RunConfig
from slipstream.training.packing import write_stream
from slipstream.training.trainable import make_llama, save_model

VOCAB = 48


def texts(rng: np.random.Generator, count: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return random texts [count, length] in which the next id depends on the last two ids: one id is likely, and three
    are less likely. 0 is the end of a text, and 1 never occurs."""
    ids = rng.integers(2, VOCAB, (count, length))
    steps = np.array((0, 1, 5, 11))[np.searchsorted((0.7, 0.85, 0.95), rng.random((count, length)))]
    for t in range(2, length):
        ids[:, t] = 2 + (5 * (ids[:, t - 2] % 6) + 7 * ids[:, t - 1] + steps[:, t]) % (VOCAB - 2)
    return ids


def write_data(path: Path, documents: int = 160, length: int = 60, seed: int = 0) -> Path:
    write_stream(path, texts(np.random.default_rng(seed), documents, length).tolist(), eos=0)
    return path


def train_target(folder: Path, steps: int = 120) -> Path:
    """Train a target on such texts, and save it as a folder."""
    rng = np.random.default_rng(1)
    model = make_llama(
        0, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, max_position_embeddings=128, eos_token_id=0, pad_token_id=0,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 10) * (1 - step / steps)
        batch = torch.from_numpy(texts(rng, 16, 49))
        loss = torch.nn.functional.cross_entropy(model.lm(batch[:, :-1]).logits.transpose(1, 2), batch[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    save_model(model, folder, None)
    return folder


def run_config(kind: str, options: Any, target: Path, data: Path, out: Path, **more: Any) -> RunConfig:
    """Return the configuration of a run of about 60 steps of 256 tokens, in float32 on one thread."""
    settings = {
        "budget_tokens": 60 * 256, "length": 32, "rows": 8, "lr": 1e-2, "optimiser": "adamw",
        "warmup_steps": 5, "bf16": False, "threads": 1,
        "eval_steps": 0, "eval_rows": 8, "heldout_share": 0.1, "texts": 16, "text_prompt": 8, "text_tokens": 40,
    }  # fmt: skip
    return RunConfig(
        kind=kind, target=str(target), data=(str(data),), options=options, out=out, executor="torch", **settings | more
    )


def quiet(text: str) -> None:
    """Print nothing."""


def logged(out: Path) -> list[Any]:
    """Return the entries of a run's log. Each must be strict JSON, without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "log.jsonl").read_text().splitlines()]
