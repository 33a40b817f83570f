"""The pinned requests, and the form in which their results are stored, for the recorder and the test. This module uses
only the public interface: the exports of `slipstream`, and `main` of the command line."""

import contextlib
import importlib
import inspect
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import slipstream
from slipstream import LLM, Completion, SamplingParams, SpecStats, errors
from slipstream.cli.main import main
from tests.tiny_checkpoints import OTHER_TEXTS, make_model, make_tokenizer

HERE = Path(__file__).parent
EXECUTORS = ("native", "torch")


def pinned(name: str) -> Any:
    """Return the content of a JSON file of this folder."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


VARIANCE = """\
def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def variance(values):
"""
PROMPTS: dict[str, str] = {
    "code": VARIANCE,
    "short": "try:\n    value = int(text)\nexcept ValueError:\n",
    "chat": "Add a docstring.\n\ndef add(a, b):\n    return a + b\n",
}
"""Prompts of different lengths. "chat" uses the chat template, and its greedy output ends with an end-of-text token."""

GREEDY = {name: SamplingParams(max_tokens=n, seed=1) for name, n in (("code", 28), ("short", 20), ("chat", 60))}
"""Greedy parameters. They have a seed, because two drafters sample some of their draft tokens."""
SAMPLED = {
    "code": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, max_tokens=16),
    "short": SamplingParams(temperature=0.8, max_tokens=16),
    "chat": SamplingParams(
        temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1,
        logit_bias={40: 2.0, 300: -100.0}, bad_words=["pass", [13, 13]], min_tokens=8, stop=["+ b"], max_tokens=24,
    ),
}  # fmt: skip
"""Sampling parameters of one request per prompt. Every field of `SamplingParams` that changes the distribution occurs
in one of them."""
EDITED = {name: replace(p, seed=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) for name, p in SAMPLED.items()}
EDITED["short"] = replace(EDITED["short"], repetition_penalty=1.3, logprobs=2)
EDITED["code"] = replace(EDITED["code"], frequency_penalty=0.5, stop_token_ids=[5], ignore_eos=True)
"""Greedy parameters with fields that change the logits."""


@dataclass(frozen=True)
class Speculation:
    """Arguments of `LLM.use`, and the draft length."""

    draft: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    draft_tokens: int = 4


def speculations(scratch: Path) -> dict[str, Speculation]:
    """Return settings of every registered drafter, for most drafters several. scratch: see `make_scratch`."""
    return {
        "none": Speculation(None), "model": Speculation("embedded"), "layerskip": Speculation("layerskip", {"exit": 4}),
        "ngram": Speculation("ngram", {}, 10), "suffix": Speculation("suffix", {}, 10),
        "lookahead": Speculation("lookahead", {}, 8), "medusa": Speculation("medusa"),
        "eagle": Speculation("eagle", {"head": scratch / "eagle"}), "eagle3": Speculation("eagle3", {}, 5),
        "eagle3, tree": Speculation("eagle3", {"shape": "tree", "width": 2, "nodes": 8}),
        "hybrid": Speculation("hybrid", {"model": "embedded"}, 10),
        "suffix+eagle3": Speculation(["suffix", "eagle3"], {}, 10),
    }  # fmt: skip


def rules(name: str) -> list[str]:
    """Return the rules under which a drafter's sampled outputs are pinned. They support the drafter's drafts."""
    return ["rejection", *(rule for rule, drafters in RULES.items() if name in drafters)]


RULES = {
    "block": ("none", "model", "layerskip", "ngram", "eagle3", "hybrid"),
    "coupled": ("none", "model", "layerskip", "ngram", "suffix", "lookahead", "medusa", "eagle", "eagle3", "hybrid"),
}  # fmt: skip
"""The default rule, rejection, is pinned for all of them."""


def requests(llm: LLM) -> dict[str, str | list[int]]:
    """Return the prompts as arguments of `LLM.generate`."""
    chat = llm.chat_prompt(PROMPTS["chat"])
    return {name: chat if name == "chat" else text for name, text in PROMPTS.items()}


def ask(llm: LLM, wanted: Mapping[str, SamplingParams], alone: bool = False) -> dict[str, Completion]:
    """Complete the prompts named in `wanted`, in one batch or one after the other."""
    prompts = requests(llm)
    if alone:
        return {name: llm.generate([prompts[name]], params)[0] for name, params in wanted.items()}
    done = llm.generate([prompts[name] for name in wanted], list(wanted.values()))
    return dict(zip(wanted, done, strict=True))


def set_up(llm: LLM, speculation: Speculation, rule: str = "rejection") -> None:
    """Change drafter, draft length and rule of an engine."""
    llm.use(speculation.draft, **speculation.options)
    llm.draft_tokens, llm.rule = speculation.draft_tokens, rule


def text_of(done: Completion) -> dict[str, Any]:
    """Return the output of a completion in the form of the files."""
    return {
        "ids": done.token_ids, "text": done.text, "finish": [done.finish_reason, done.stop_cause],
        "prompt": done.prompt_token_ids,
    }  # fmt: skip


COURSE = ("drafted", "steps", "proposed", "accepted", "undrafted", "histogram", "position_rates")


def course_of(done: Completion) -> dict[str, Any]:
    """Return how an output was generated: which tokens were drafted, and its statistics, without times and without
    statistics that follow from others (see `derived`). The files contain only the values, in the order of `COURSE`."""
    stats = done.stats.as_dict()
    drafted = "".join(str(int(each)) for each in done.drafted)
    rates = [round(rate, 4) for rate in stats["position_rates"]]
    return {name: stats.get(name) for name in COURSE} | {"drafted": drafted, "position_rates": rates}


def derived(done: Completion) -> dict[str, Any]:
    """Return the other statistics of `as_dict`, computed by their definitions from the statistics of `course_of`."""
    stats = done.stats
    return {
        "tokens": len(done.token_ids),
        "drafter_faults": 0,
        "acceptance_rate": stats.accepted / stats.proposed if stats.proposed else None,
        "mean_acceptance_length": len(done.token_ids) / stats.steps,
    }


Recording = Mapping[tuple[int, ...], Seq[int]]
"""The target's greedy continuation of each prompt."""


def recording_of(texts: Mapping[str, Any]) -> Recording:
    """Return the recording of greedy outputs in the form of `text_of`."""
    return {tuple(text["prompt"]): text["ids"] for text in texts.values()}


def make_scratch(folder: Path, recording: Recording) -> Path:
    """Create the files that the cases use: an EAGLE-1 head, a model with another vocabulary, broken and unusual
    files."""
    make_eagle(folder / "eagle", recording)
    make_model(folder / "other")
    make_tokenizer(folder / "other", texts=OTHER_TEXTS)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "llama", ')
    for name, text in {
        "prompt.txt": "import os\n",
        "empty.txt": "",
        "prompts.jsonl": '{"prompt": "import os\\n"}\n',
        "config.json": '{"drafter": "ngram", "draft_tokens": 3}',
        "garbled.json": "{",
    }.items():
        (folder / name).write_text(text)
    return folder


def make_eagle(folder: Path, recording: Recording) -> None:
    """Make an EAGLE-1 head for the embedded target in the standard layout, because no such head is embedded. It is
    constructed, not trained: its first matrix maps each token to the token that follows it in the recording. The other
    weights disturb this, so that some draft tokens are wrong."""
    target = Path(json.loads(invoke(["info", "--json"])[1])["folder"])
    shape = json.loads((target / "config.json").read_text(encoding="utf-8"))
    width, narrow = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].double()
    embedding /= embedding.norm(dim=1, keepdim=True)
    pairs = {pair for prompt, said in recording.items() for pair in pairwise([*prompt, *said])}
    before, behind = (embedding[list(side)] for side in zip(*sorted(pairs), strict=True))

    def waves(rows: int, columns: int, pitch: float) -> torch.Tensor:
        angles = pitch * torch.arange(rows * columns, dtype=torch.float64)
        return (0.02 * torch.sin(angles)).reshape(rows, columns).float()

    layer, inner = "layers.0.", 64
    weights = {
        "fc.weight": torch.cat([10 * (behind.T @ before).float(), waves(width, width, 0.7)], 1).contiguous(),
        layer + "self_attn.q_proj.weight": waves(width, width, 1.1),
        layer + "self_attn.k_proj.weight": waves(narrow, width, 1.3),
        layer + "self_attn.v_proj.weight": waves(narrow, width, 1.7),
        layer + "self_attn.o_proj.weight": waves(width, width, 1.9),
        layer + "post_attention_layernorm.weight": torch.ones(width),
        layer + "mlp.gate_proj.weight": waves(inner, width, 2.3),
        layer + "mlp.up_proj.weight": waves(inner, width, 2.9),
        layer + "mlp.down_proj.weight": waves(width, inner, 3.1),
    }
    own = {
        "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "intermediate_size": inner, "bias": False,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | own | {"tie_word_embeddings": False}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


COMMANDS = tuple(pinned("commands"))
"""Command lines without `slipstream`; {NAME} is replaced by a file of `make_scratch`. Refused command lines that are in
the table of tests/cli/test_bad_input.py are not repeated here. To pin a further command line, add its key to the file,
and record."""
SUBCOMMANDS = tuple(pinned("names")["options"])
ALIASES = tuple(pinned("names")["aliases"])
"""Option names of other programs, which are accepted."""

STDIN = {
    "generate - -n 4 -q": "import os\n", "chat -n 4": "hello\n/stats\n/quit\n", "chat --raw -n 4 --system hello": "x\n",
}  # fmt: skip


def run_command(line: str, scratch: Path) -> tuple[int, str, str]:
    """Run `slipstream LINE` in this process. Returns exit code, standard output and standard error."""
    names = {f"{{{path.name}}}": str(path) for path in scratch.iterdir()}
    words = shlex.split(line)
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
    return invoke(words, STDIN.get(line, ""))


def invoke(words: Seq[str], stdin: str = "") -> tuple[int, str, str]:
    """Run `main(words)`. Returns exit code, standard output and standard error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    with (
        mock.patch.dict(os.environ, plain, clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(list(words))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
    return code, out.getvalue(), err.getvalue()


def kind_of(code: int, out: str, err: str) -> dict[str, Any]:
    """Describe the result of a command independently of its wording: exit code, kind of output, whether it reported an
    error, and the keys of its JSON output."""
    kind: dict[str, Any] = {"code": code, "out": "text" if out.strip() else "nothing"}
    kind["error"] = any(line.lower().startswith("error") for line in err.splitlines())
    if "Usage:" in out:
        kind["out"] = "help"
    elif out.startswith("{"):
        kind |= {"out": "json", "keys": sorted(paths_of(json.loads(out)))}
    return kind


def paths_of(recorded: Mapping[str, Any], depth: int = 2) -> set[str]:
    """Return the keys of a JSON object, and of the objects in it."""
    inner = {name: value for name, value in recorded.items() if isinstance(value, dict) and depth > 1}
    return {*recorded, *(f"{name}.{each}" for name, value in inner.items() for each in paths_of(value, depth - 1))}


def options_of(command: str) -> dict[str, int]:
    """Return the options of a command from its parser, each with its number of values."""
    command_parser: Any = importlib.import_module(main.__module__).parser()
    for word in command.split():
        command_parser = command_parser.commands[word]
    options = [each for each in command_parser.params if each.param_type_name == "option"]
    return {name: 0 if each.is_flag else each.nargs for each in options for name in (*each.opts, *each.secondary_opts)}


def members_of(name: str, llm: LLM) -> list[str]:
    """Return the public attributes of the object that `slipstream` exports under this name. For requests and counters,
    return only attributes that users read or set; their other attributes are for the engine."""
    thing = getattr(slipstream, name)
    if not inspect.isclass(thing) or issubclass(thing, (Exception, SamplingParams)):
        return []
    instance: Any = llm if thing is LLM else thing
    if thing is SpecStats:
        return sorted({*SpecStats().as_dict(), "as_dict", "drafted_at", "accepted_at", "total_seconds"})
    names = {*dir(instance), *getattr(thing, "__dataclass_fields__", ())}
    return sorted(each for each in names if not each.startswith("_"))


def parameters_of(path: str) -> dict[str, str]:
    """Return the parameters of an exported callable, or of a method ("LLM.generate"), in order, each with its
    default."""
    thing: Any = slipstream
    for name in path.split("."):
        thing = getattr(thing, name)
    return {
        each.name: "" if each.default is each.empty or callable(each.default) else repr(each.default)
        for each in inspect.signature(thing).parameters.values()
        if each.name != "self" and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


CALLABLES = tuple(pinned("names")["parameters"])


def error_families() -> dict[str, list[str]]:
    """Return for every error class the classes as which it can be caught."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    return {kind.__name__: [c.__name__ for c in kind.__mro__ if c.__module__ == kind.__module__] for kind in kinds}
