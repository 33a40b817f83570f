"""Compares our own decoder with transformers on one GPU, with and without drafts, on targets of 1.1B and 3B parameters.

    python -m benchmarks.gpu            # make gpu-check: needs an NVIDIA GPU; about four minutes

The targets are in bfloat16 and write the same text as the embedded target (`benchmarks.derived_models`). The draft
model has 46M parameters. Outputs are greedy and of fixed length. In each pass every contender runs each prompt once, in
rotating order, first one request at a time, then eight. Compilation and graph capture happen before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.derived_models import NORMS
from benchmarks.figures import spread
from benchmarks.markdown import bound
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT
from slipstream import LLM, SamplingParams, zoo
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence as Text
from slipstream.measure.estimates import estimate_mean, estimate_ratio
from slipstream.measure.prompts import choose_prompts
from slipstream.measure.provenance import commit, now, versions
from slipstream.targets.decoder import Decoder

SIZES = {"1.1B": (6, 12), "3B": (8, 22)}
"""For each target, the factor on the embedded target's width, and the number of added layers."""
DRAFT = (4, 2)
"""For the draft model of 46M, the factor on the embedded draft model's width, and the number of added layers."""
FIXED = (2, 4, 6, 8)
"""Fixed draft lengths that are tried."""
OURS, THEIRS = "Slipstream", "transformers"

Tokens = list[list[int]]
Run = Callable[[Seq[list[int]]], Tokens]
"""Function from prompts to the new tokens of each prompt."""


def derived(source: Path, times: int, idle: int) -> Any:
    """Make a Llama model on the GPU that writes the same text as the checkpoint `source`, with `times` its width and
    `idle` more layers. Added weights are random numbers that are multiplied by zeros, so that all weights are read at
    the same speed."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = small.config.to_dict()
    layers = config["num_hidden_layers"]
    counts = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    larger = {name: times * config[name] for name in counts} | {"num_hidden_layers": layers + idle}
    larger |= {"rms_norm_eps": config["rms_norm_eps"] / times, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config | larger)).to(torch.bfloat16)
    model.to_empty(device="cuda")
    model.tie_weights()
    taken, generator = small.state_dict(), torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            part = name.split(".")
            silent = part[1] == "layers" and int(part[2]) >= layers
            values = taken[".".join([*part[:2], "0", *part[3:]]) if silent else name].cuda()
            weight.normal_(0, 0.02, generator=generator)
            if name.endswith(NORMS):
                weight.zero_()
                values = values / times**0.5
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[values.shape[0] :] = 0  # nothing is added to the wider part of the residual stream
                if silent:
                    weight.zero_()
                    continue
            elif "embed_tokens" in name:
                weight[:, values.shape[1] :] = 0
            else:
                weight[values.shape[0] :, : values.shape[1]] = 0
            weight[tuple(map(slice, values.shape))] = values
    rotary = model.model.rotary_emb  # its buffer has no values yet
    model.model.rotary_emb = type(rotary)(model.config).cuda()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval()


@dataclass
class Cell:
    """Measurements of one contender: seconds per token as [prompt][pass], and its texts in the first pass."""

    seconds: list[list[float]]
    texts: list[Tokens]


def ours(target: Decoder, draft: Any, length: int | str, tokens: int, options: dict[str, Any] | None = None) -> Run:
    """Return a function that runs our own decoder. draft: as in `LLM`. length: draft length."""
    llm = LLM(target, draft, draft_tokens=length, draft_options=options)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return lambda prompts: [list(each.token_ids) for each in llm.generate(list(prompts), params)]


def theirs(model: nn.Module, tokens: int, **options: Any) -> Run:
    def run(prompts: Seq[list[int]]) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts], device="cuda")
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device="cuda")
        settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=mask, **settings, **options)  # type: ignore[operator]
        return out[:, longest:].tolist()  # type: ignore[no-any-return]

    return run


def measure(ways: dict[str, Run], prompts: Seq[Seq[list[int]]], passes: int, tokens: int) -> dict[str, Cell]:
    """Run every contender on every batch of prompts, `passes` times, in rotating order."""
    cells = {name: Cell([[] for _ in prompts], []) for name in ways}
    for number in range(passes):
        for place, batch in enumerate(prompts):
            turn, names = (number + place) % len(ways), list(ways)
            for name in names[turn:] + names[:turn]:
                torch.cuda.synchronize()
                began = time.perf_counter()
                texts = ways[name](batch)
                torch.cuda.synchronize()
                cells[name].seconds[place].append((time.perf_counter() - began) / (tokens * len(batch)))
                if not number:
                    cells[name].texts.append(texts)
    return cells


def busy(run: Run, prompt: list[int], seconds: float) -> float:
    """Return the share of time in which the GPU computes during a run. seconds: time of the run without profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        run([prompt])
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in watched.key_averages()) / 1e6 / seconds  # type: ignore[no-any-return]


def bandwidth() -> float:
    """Return the bytes per second that a sum over 4 GB reads."""
    numbers, times = torch.ones(1 << 30, device="cuda"), []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        numbers.sum()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return numbers.nbytes / min(times)


def margins(target: Decoder, texts: Seq[Tokens], others: Seq[Tokens], prompts: Seq[Seq[list[int]]]) -> dict[str, Any]:
    """Count equal greedy outputs. For other outputs, return the target's margin, the distance between its two largest
    logits, at the first difference."""
    equal, gaps = 0, []
    pairs = [
        (p, a, b) for ps, xs, ys in zip(prompts, texts, others, strict=True) for p, a, b in zip(ps, xs, ys, strict=True)
    ]
    for prompt, one, other in pairs:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is None:
            equal += 1
            continue
        seq = Text([*prompt, *one[:at]])
        logits = target.run([seq], Draft.empty(1)).logits[0]
        gaps.append(float(logits[one[at]] - logits[other[at]]))
        target.release(seq.id)
    return {"texts": len(pairs), "equal": equal, "margins": gaps}


def examine(size: str, options: argparse.Namespace, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Measure everything with one target."""
    model, small = derived(zoo.target_dir(), *SIZES[size]), derived(zoo.draft_dir(), *DRAFT)
    useless = derived(zoo.draft_dir(), *DRAFT)
    useless.model.norm.weight.data.neg_()  # the least likely token becomes the most likely
    settings = LoadSettings(executor=options.executor)
    target, draft, bad = (Decoder.of_module(each, settings) for each in (model, small, useless))
    del useless
    tokens, plain = options.tokens, f"{OURS}, plain"
    code, edits = prompts["code"], prompts["edit"]
    ways = {
        plain: ours(target, None, 0, tokens),
        **{f"{OURS}, draft model, K = {k}": ours(target, draft, k, tokens) for k in FIXED},
        f"{OURS}, draft model, chosen lengths": ours(target, draft, "auto", tokens),
        f"{OURS}, suffix, chosen lengths": ours(target, "suffix", "auto", tokens),
        f"{OURS}, draft model that is never right, chosen lengths": ours(target, bad, "auto", tokens),
        f"{THEIRS}, plain": theirs(model, tokens),
        f"{THEIRS}, static cache and torch.compile": theirs(model, tokens, cache_implementation="static"),
        f"{THEIRS}, assisted": theirs(model, tokens, assistant_model=small),
    }
    if options.ours:
        ways = {name: run for name, run in ways.items() if name.startswith(OURS)}
    copying = {name: ways[name] for name in ways if name == plain or "suffix" in name}
    many = {name: ways[name] for name in ways if name == plain or "K = 4" in name or name == f"{THEIRS}, plain"}
    tables = {}
    for what, some, asked in (
        ("code", ways, [[each] for each in code]),
        ("edits", copying, [[each] for each in edits]),
        ("code, 8 at once", many, [(code * 8)[:8]]),
    ):
        for run in some.values():  # warms up: compiles, captures, allocates
            for _ in range(2):
                run(asked[0])
        cells = measure(some, asked, options.passes, tokens)
        tables[what] = {
            "seconds": {name: cell.seconds for name, cell in cells.items()},
            "texts": {name: margins(target, cells[plain].texts, cell.texts, asked) for name, cell in cells.items()},
        }
        print(what, {name: round(1 / estimate_mean(cell.seconds).value) for name, cell in cells.items()}, flush=True)
    nbytes = sum(weight.nbytes for weight in model.parameters())
    took = estimate_mean(tables["code"]["seconds"][plain]).value
    four = f"{OURS}, draft model, K = 4"
    share = busy(ways[four], code[0], tokens * sum(tables["code"]["seconds"][four][0]) / options.passes)
    return {"tables": tables, "bandwidth": nbytes / took / bandwidth(), "busy": share, "bytes": nbytes}


def figures(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the measurements with one target with the bars."""
    code, edits = (found["tables"][what]["seconds"] for what in ("code", "edits"))
    plain, chosen = code[f"{OURS}, plain"], code[f"{OURS}, draft model, chosen lengths"]
    lines = [
        ("draft model, chosen lengths, over our plain decoding", 1.8, estimate_ratio(plain, chosen).value),
        ("suffix on edits, over our plain decoding", 2.0,
         estimate_ratio(edits[f"{OURS}, plain"], edits[f"{OURS}, suffix, chosen lengths"]).value),
        ("a draft model that is never right, chosen lengths, over our plain decoding", 0.97,
         estimate_ratio(plain, code[f"{OURS}, draft model that is never right, chosen lengths"]).value),
        ("plain decoding: share of the read bandwidth", 0.6, found["bandwidth"]),
        ("a step with K = 4: share of the time in which the GPU computes", 0.9, found["busy"]),
    ]  # fmt: skip
    compiled = f"{THEIRS}, static cache and torch.compile"
    if compiled in code:
        lines.insert(0, (f"plain decoding, over {compiled}", 1.0, estimate_ratio(code[compiled], plain).value))
    return [{"text": text, "reach": bar, "value": value, "reached": value >= bar} for text, bar, value in lines]


def report(results: dict[str, Any]) -> str:
    """Render the results as Markdown. Missed figures come first."""
    source = results["provenance"]
    lines = [
        "# One GPU",
        "",
        f"`{source['command']}`, {source['date']}, {source['device']}, commit {source['commit']}, "
        + ", ".join(f"{name} {version}" for name, version in source["versions"].items())
        + f". {source['prompts']} prompts, {source['tokens']} tokens, {source['passes']} passes, bfloat16, greedy.",
    ]
    for size, found in results["targets"].items():
        lines += ["", f"## A target of {size}", ""]
        each = sorted(found["figures"], key=lambda row: row["reached"])
        lines.append(rows(["figure", "must reach", "measured"],
                          [(r["text"], bound(r["reach"]), f"{r['value']:.2f}") for r in each]))  # fmt: skip
        for what, table in found["tables"].items():
            plain = table["seconds"][f"{OURS}, plain"]
            body = []
            for name, seconds in table["seconds"].items():
                rate, same = spread([[1 / s for s in text] for text in seconds]), table["texts"][name]
                gap = max(map(abs, same["margins"]), default=0.0)
                body.append((
                    name, f"{rate['median']:.0f} ({rate['q1']:.0f} to {rate['q3']:.0f})",
                    f"{estimate_ratio(plain, seconds).value:.2f}x", f"{same['equal']} of {same['texts']}",
                    f"{gap:.3f}" if same["margins"] else "-",
                ))  # fmt: skip
            heads = [what, "tokens/s of a request", "over our plain", "texts equal", "largest margin where they differ"]
            lines += ["", rows(heads, body)]
    return "\n".join(lines) + "\n"


def main(words: Seq[str] | None = None) -> int:
    """Measure, and write gpu.json and gpu.md. Returns 1 if a bar is missed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts of each kind")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--executor", default="cuda", help="executor of our own decoder")
    parser.add_argument("--ours", action="store_true", help="do not run transformers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("PyTorch finds no CUDA device: this benchmark needs one", file=sys.stderr)
        return 2
    reader = LLM(zoo.target_dir(), executor="torch", device="cpu")
    prompts = {kind: choose_prompts(reader, kind, options.prompts).ids for kind in ("code", "edit")}
    source = {
        "command": " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if words is None else words)]),
        "date": now(), "device": torch.cuda.get_device_name(), "commit": commit(), "versions": versions(),
        "prompts": options.prompts, "tokens": options.tokens, "passes": options.passes,
    }  # fmt: skip
    results: dict[str, Any] = {"schema": 1, "provenance": source, "targets": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        found = examine(size, options, prompts)
        results["targets"][size] = found | {"figures": figures(found)}
        torch.cuda.empty_cache()
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / "gpu.md").write_text(report(results))
    print(report(results))
    return 0 if all(row["reached"] for each in results["targets"].values() for row in each["figures"]) else 1


if __name__ == "__main__":
    sys.exit(main())
