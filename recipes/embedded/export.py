"""Export a training run as a folder that transformers loads as it is, with float16 weights and a model card.

python -m recipes.embedded.export RUN FOLDER
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from recipes.embedded.agreement import Agreement, draft_agreement, exit_agreement
from recipes.embedded.card import model_card
from recipes.embedded.compact import CompactLlama, ModelShape
from recipes.embedded.token_cache import HeldOut
from recipes.embedded.tokenizer import ASSISTANT, END, EOS, save_tokenizer, special_id
from slipstream.training.resume_state import load_checkpoint

SAMPLE_CODE = "import json\nfrom pathlib import Path\n\n\ndef read_config(path: Path) -> dict:"
SAMPLE_EDIT = (
    "Rename the variable `total` to `amount`.\n\n"
    "def mean(values):\n    total = 0\n    for value in values:\n"
    "        total += value\n    return total / len(values)"
)


@dataclass(frozen=True)
class Run:
    """A training run as its folder describes it: `config` as written by `train_base`, `state` of the checkpoint."""

    folder: Path
    config: dict[str, Any]
    model: CompactLlama
    state: dict[str, Any]
    data: Path

    @classmethod
    def open(cls, folder: Path) -> Run:
        config = json.loads((folder / "config.json").read_text())
        model = CompactLlama(ModelShape(**config["shape"]))
        state = load_checkpoint(folder / "checkpoint.safetensors", model)
        data = Path(config["data"] or (config["teacher"] or folder)) / ("" if config["data"] else "data")
        return cls(folder, config, model, state, data)

    def commands(self) -> list[str]:
        """The command lines of the run's parts, in order."""
        return [e["command"] for e in self.entries() if "command" in e]

    def entries(self) -> list[dict[str, Any]]:
        """The run's log."""
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_losses(self) -> dict[str, float]:
        """The latest held-out losses of the run's log, in nats a token."""
        return next((e["heldout"] for e in reversed(self.entries()) if "heldout" in e), {})


def samples(folder: Path, new_tokens: int = 96) -> list[tuple[str, str]]:
    """Greedy samples of an exported model through transformers: (prompt, continuation) pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": SAMPLE_EDIT}], tokenize=False, add_generation_prompt=True
    )
    texts = []
    for prompt in (SAMPLE_CODE, asked):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        texts.append((prompt, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False)))
    return texts


def measured_facts(run: Run, tokenizer: Tokenizer, rows: int = 16) -> dict[str, str]:
    """Facts for the card about acceptance: of a draft model for its teacher, of a target's early exits."""
    heldout = HeldOut.open(
        run.data, rows, run.config["length"], special_id(tokenizer, ASSISTANT), special_id(tokenizer, END)
    )
    facts = {}
    if run.config["role"] == "target":
        for layers, agreement in exit_agreement(run.model, heldout.raw[:, :-1]).items():
            facts[f"exit after {layers} layers against all, held-out files"] = describe(agreement)
    elif run.config["teacher"]:
        teacher = Run.open(Path(run.config["teacher"])).model
        on_files = draft_agreement(teacher, run.model, heldout.raw[:, :-1])
        on_edits = draft_agreement(teacher, run.model, heldout.edit[:, :-1], heldout.edit_mask)
        facts["agreement with the target, held-out files"] = describe(on_files)
        facts["agreement with the target, answers of edit requests"] = describe(on_edits)
    return facts


def describe(agreement: Agreement) -> str:
    return f"top-1 {agreement.top1:.1%}, sum of min(p, q) {agreement.overlap:.3f} ({agreement.positions:,} positions)"


def export(run_folder: Path, to: Path, extra: dict[str, str] | None = None) -> None:
    """Write `config.json`, `generation_config.json`, float16 `model.safetensors`, tokenizer and model card.

    Args:
        run_folder: the `out` of a `train_base` run.
        to: the folder to write; files of the same names are replaced.
        extra: more measured facts for the card, label to value.

    Raises:
        OverflowError: when a weight does not fit float16.
    """
    run = Run.open(run_folder)
    tokenizer = Tokenizer.from_file(str(run.data / "tokenizer.json"))
    eos = [special_id(tokenizer, EOS), special_id(tokenizer, END)]
    to.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(torch.float16).contiguous() for name, w in run.model.state_dict().items()}
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise OverflowError(f"{name} has values beyond float16's 65504; the run has diverged.")
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner only
    shape = run.model.shape
    (to / "config.json").write_text(json.dumps(shape.hf_config(eos, eos[0]), indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[0]}
    (to / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, to, shape.max_position_embeddings)
    card = model_card(
        role=run.config["role"],
        parameters=sum(p.numel() for p in run.model.parameters()),
        config=run.config,
        commands=run.commands(),
        data=json.loads((run.data / "data.json").read_text()),
        progress=run.state["progress"],
        heldout=run.last_losses(),
        samples=samples(to),
        extra={**measured_facts(run, tokenizer), **(extra or {})},
    )
    (to / "README.md").write_text(card)


def main() -> None:
    """Parse the command line, export, say where to."""
    parser = argparse.ArgumentParser(description="Export a run of recipes.embedded.train for transformers.")
    parser.add_argument("run", type=Path, help="folder of the run, finished or not")
    parser.add_argument("folder", type=Path, help="folder to write, in Hugging Face layout")
    options = parser.parse_args()
    export(options.run, options.folder)
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
