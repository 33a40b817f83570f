"""Makes a target and a draft model with the shapes of GPT-2 and DistilGPT-2, for benchmarks without a download.

    python -m benchmarks.gpt2_pair FOLDER      # writes FOLDER/target and FOLDER/draft, about 0.9 GB

Speed depends only on shapes, so it is the same as GPT-2's. Acceptance depends on the weights, which are random here. As
in DistilGPT-2, whose layers were copied from GPT-2, the draft model is the target with fewer layers. The layers that
the draft model lacks are scaled down, so that both models agree on about two tokens in three, as in this family. The
output has no meaning.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

DAMPING = 0.22
"""Factor on the output of the upper half of the layers. Agreement with the draft model per token: 0.28 at 0.5, 0.61 at
0.25, 0.81 at 0.12 (greedy, 64 tokens of random prompts)."""
POSITIONS = 0.1
"""Standard deviation of the position embeddings. With 0.02, as in GPT-2, a random model repeats one token forever."""


def make(folder: Path, layers: int = 12, width: int = 768, vocabulary: int = 50257) -> tuple[Path, Path]:
    """Write both checkpoints, with the embedded tokenizer, which has tokens only for the first ids. Returns their
    folders."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from slipstream import zoo

    def config(depth: int) -> GPT2Config:
        return GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, vocab_size=vocabulary)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        target, draft = GPT2LMHeadModel(config(layers)), GPT2LMHeadModel(config(layers // 2))
        target.transformer.wpe.weight.normal_(std=POSITIONS)
        draft.load_state_dict(target.state_dict(), strict=False)  # the upper layers are not used
        for layer in target.transformer.h[layers // 2 :]:
            layer.attn.c_proj.weight.mul_(DAMPING)
            layer.mlp.c_proj.weight.mul_(DAMPING)
    written = folder / "target", folder / "draft"
    for model, path in zip((target, draft), written, strict=True):
        model.save_pretrained(path)
        for file in zoo.target_dir().glob("tokenizer*"):
            shutil.copy(file, path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for path in make(parser.parse_args().folder):
        print(f"wrote {path}")
