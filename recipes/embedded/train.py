"""Train an embedded model from scratch on the Python source that this environment contains.

    python -m recipes.embedded.train --out runs/target --budget-minutes 90
    python -m recipes.embedded.train --out runs/draft --role draft --teacher runs/target --budget-minutes 60

Ctrl-C saves and stops, --resume continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

from recipes.embedded.token_cache import Mix
from recipes.embedded.trainer import DRAFT, TARGET, BaseConfig, train_base
from slipstream.errors import SlipstreamError

WRITE_SHARE = 0.08
"""Share of requests to write a function in a batch."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m recipes.embedded.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--out", type=Path, required=True, help="folder of the run: token cache, checkpoint, log")
    add("--role", default="target", help="'target' (LayerSkip) or 'draft' (distilled); default: target")
    add("--budget-minutes", type=float, help="wall-clock budget of the whole run")
    add("--budget-tokens", type=int, help="token budget, instead of minutes")
    add("--decay-share", type=float, default=0.3, help="last share of the budget, in which the learning rate falls")
    add("--teacher", type=Path, help="run folder of the target that a draft model learns from")
    add("--start", type=Path, help="exported model of the same shape to start from; its tokenizer may be another")
    add("--resume", action="store_true", help="continue from the checkpoint in OUT, exactly")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--edit-share", type=float, default=0.25, help="share of edit requests in a batch; they teach copying")
    add("--pre-tokenizer", default="code", help="'code', or 'gpt2', which makes a vocabulary of its own")
    add("--seed", type=int, default=0, help="seed of weights, data order and layer dropout")
    add("--device", default="cpu", help="'cpu' or 'cuda'")
    add("--threads", type=int, default=2, help="CPU threads")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the layers (needs a C++ compiler on a CPU)",
    )
    add("--step-tokens", type=int, default=8192, help="tokens of one optimiser step")
    return options


def config_of(arguments: Seq[str] | None = None) -> BaseConfig:
    """The run that a command line describes.

    Raises:
        ParameterError: when settings contradict each other.
    """
    given = vars(parser().parse_args(arguments))
    edit = given.pop("edit_share")
    return BaseConfig(
        **given,
        shape=TARGET if given["role"] == "target" else DRAFT,
        mix=Mix(raw=1 - WRITE_SHARE - edit, write=WRITE_SHARE, edit=edit),
        micro_tokens=min(8192, given["step_tokens"]),
    )


def main(arguments: Seq[str] | None = None) -> int:
    """Train. Returns the exit code: 0 done, 2 bad input, 128 and the number of the signal that stopped it."""
    try:
        stopped_by = train_base(config_of(arguments))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
