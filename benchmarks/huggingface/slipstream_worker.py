"""Worker of Slipstream with a target that transformers runs: plain, with drafters, in batches, and inside
`generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import slipstream
from benchmarks.protocol import THREADS, serve, versions
from slipstream import LLM, SamplingParams
from slipstream.settings import AUTO, TRANSFORMERS
from slipstream.targets.describe import as_target

modules: dict[str, Any] = {}
targets: dict[tuple[str, str], Any] = {}
loaded: dict[str, dict[str, Any]] = {}  # arguments of `load` by name
engines: dict[tuple[str, int], Any] = {}  # (name, draft length): reused, with what it has learnt


def load(
    name: str, target: str, draft: str | None = None, draft_executor: str = AUTO, custom: bool = False
) -> dict[str, Any]:
    """Store settings of decoding under a name. Each model is loaded once, in float32.

    draft  a drafter's name, or the folder of a draft model. custom: whether to decode with
           `generate(custom_generate=...)`.
    """
    loaded[name] = {"target": target, "draft": draft, "draft_executor": draft_executor, "custom": custom}
    _engine(name, 0)
    return {}


def _module(path: str) -> Any:
    if path not in modules:
        modules[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        # As in `transformers_peer`, end-of-text tokens are ignored.
        modules[path].generation_config.eos_token_id = modules[path].config.eos_token_id = None
        modules[path].generation_config.pad_token_id = 0
    return modules[path]


def _target(path: str, executor: str) -> Any:
    key = path, executor
    if key not in targets:
        source = _module(path) if executor == TRANSFORMERS else path
        targets[key] = as_target(source, executor=executor, **({} if source is not path else {"threads": THREADS}))
    return targets[key]


def _draft(draft: str | None, executor: str) -> Any:
    return _target(draft, executor) if draft is not None and "/" in draft else draft


def _engine(name: str, draft_tokens: int) -> Any:
    """Return an engine, which is made at its first use. draft_tokens: draft length; 0: chosen in each step."""
    key = name, draft_tokens
    if key not in engines:
        how, most = loaded[name], draft_tokens or AUTO
        draft = _draft(how["draft"], how["draft_executor"])
        if how["custom"]:
            engines[key] = slipstream.custom_generate(draft, draft_tokens=most)
        else:
            engines[key] = LLM(_target(how["target"], TRANSFORMERS), draft, draft_tokens=most)
    return engines[key]


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens. draft_tokens: draft length; 0: chosen in each step.

    In the result, seconds is the wall time of the call, prefill included, and stats are the engine's statistics.
    """
    engine = _engine(name, draft_tokens)
    if loaded[name]["custom"]:
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        out = _module(loaded[name]["target"]).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            custom_generate=engine,
        )
        seconds = time.perf_counter() - start
        generated, stats = out[0, len(ids) :].tolist(), engine.stats[0]
    else:
        start = time.perf_counter()
        done = engine.generate([ids], _params(tokens))[0]
        seconds = time.perf_counter() - start
        generated, stats = list(done.token_ids), done.stats
    if stats.drafter_faults:
        raise RuntimeError(f"the drafter of {name!r} failed {stats.drafter_faults} times; see the log above")
    return {"tokens": generated, "seconds": seconds, "stats": stats.as_dict()}


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def batch(name: str, prompts: Seq[list[int]], tokens: int, rounds: int) -> dict[str, Any]:
    """Measure the seconds of all prompts in one batch, and of the same prompts one after another, in turns."""
    engine, params = _engine(name, 0), _params(tokens)
    assert len(prompts) <= engine.max_batch
    together, apart, same = list[float](), list[float](), True
    for number in range(rounds + 1):  # the first warms up
        start = time.perf_counter()
        joint = engine.generate(list(prompts), params)
        middle = time.perf_counter()
        each = [engine.generate([ids], params)[0] for ids in prompts]
        if number:
            together.append(middle - start)
            apart.append(time.perf_counter() - middle)
        same = same and [c.token_ids for c in joint] == [c.token_ids for c in each]
    return {"together": together, "apart": apart, "same_texts": same}


def load_t5(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Make a T5 with random weights for `batch`. Its speed depends only on its shape."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    module = T5ForConditionalGeneration(T5Config(**config, decoder_start_token_id=0)).eval()
    engines[name, 0] = LLM(module)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    info = lambda: {"versions": versions("slipstream", "torch", "transformers", "numba")}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate, "batch": batch, "load_t5": load_t5})
