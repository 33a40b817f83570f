"""Files that anyone may have written: whatever stands in them, a model runs or is refused by one of our errors, in
bounded memory. Seeded and short; a longer run is `SEEDS=20 pytest tests/checkpoints/test_hostile_files.py`."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams, zoo
from slipstream.core.target import Target
from slipstream.errors import SlipstreamError
from tests.tiny_checkpoints import EXACT, clone, config_of, make_tokenizer

SEEDS = range(int(os.environ.get("SEEDS", "1")))
MOST_KILOBYTES = 2_000_000
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 2**31, 2**63, 10**30, -(2**31), 0.0, 0.5, -1.5, 1e-300, 1e300,
    float("inf"), float("nan"), "", "x", "1", "auto", "\ud800", "a" * 5000, "../../etc/passwd", "yarn", "llama3",
    "longrope", "dynamic", "fp8", [], [None], [-1], [1, 2], ["x"], [10**30], [[1]], [{}], {}, {"x": 1},
    {"a": {"b": []}}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 2.0}, {"quant_method": "x"},
    {"type": 5}, DEEP,
]  # fmt: skip
KEYS = [
    "rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor",
    "quantization_config", "auto_map", "architectures", "model_type", "text_config", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "head_dim", "num_key_value_heads", "torch_dtype", "is_causal",
    "per_layer_config", "num_experts", "num_local_experts", "mlp_only_layers", "eos_token_id", "bos_token_id",
    "pad_token_id", "pard_token", "tie_word_embeddings", "is_encoder_decoder", "id2label", "attn_implementation",
    "num_nextn_predict_layers", "medusa_num_heads", "dflash_config", "speculators_model_type", "eagle_config",
    "tokenizer_class", "chat_template", "vocab_size", "suppress_tokens", "bad_words_ids", "top_k", "top_p",
    "temperature", "repetition_penalty", "min_new_tokens", "added_tokens_decoder", "extra_special_tokens",
    "model_max_length", "draft_vocab_size", "num_aux_hidden_states", "mask_token_id",
    "eagle_aux_hidden_state_layer_ids", "transformer_layer_config", "medusa_num_layers", "original_lm_head",
    "block_size",
]  # fmt: skip
FILES = [*9 * ["config.json"], *3 * ["generation_config.json"], "tokenizer_config.json", "tokenizer.json"]
KINDS = [
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.bool, torch.int64,
    torch.complex64,
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


def spoil_json(file: Path, rng: random.Random) -> None:
    """Put one or two hostile values into a file, in the place of others or under keys that some reader knows."""
    document = json.loads(file.read_text()) if file.exists() else {}
    known = list(places(document)) or [(KEYS[0],)]
    for _ in range(rng.choice((1, 1, 2))):
        *path, key = rng.choice(known) if rng.random() < 0.6 else (rng.choice(KEYS),)
        inner = document
        try:
            for step in path:
                inner = inner[step]
            inner[key] = rng.choice(VALUES)
        except (TypeError, KeyError, IndexError):  # the first value has taken the place of the second
            continue
    file.write_text(json.dumps(document))


def spoil_tensors(file: Path, rng: random.Random) -> None:
    """Change a tensor of a file, its name, or the bytes of the file."""
    held = load_file(file)
    name = rng.choice(list(held))
    tensor, module = held[name], name.rpartition(".")[0]
    more = [
        {f"{module}.weight_scale": torch.ones(3)},
        {"lm_head.weight": torch.ones(9, 9)},
        {f"model.{name}": tensor.clone()},
    ]
    changes: list[Callable[[], Any]] = [
        lambda: held.update({name: tensor.to(rng.choice(KINDS))}), lambda: held.pop(name),
        lambda: held.update({name: tensor.flatten()[:5].clone()}), lambda: held.update({name: torch.tensor(1.0)}),
        lambda: held.update({name: torch.zeros(0)}), lambda: held.update({name: tensor * float("nan")}),
        lambda: held.update({rng.choice(["", "é", "model.layers.-1.x", "lm_head.weight"]): held.pop(name)}),
        lambda: held.update(rng.choice(more)),
    ]  # fmt: skip
    rng.choice(changes)()
    save_file({n: t.contiguous() for n, t in held.items()}, file, metadata={"format": "pt"})
    data = bytearray(file.read_bytes())
    if rng.random() < 0.3:
        for _ in range(3):
            data[rng.randrange(min(len(data), 3000))] = rng.randrange(256)
        file.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


@pytest.fixture(scope="session")
def models(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """(folder, settings) of checkpoints that our own decoder runs, and that transformers runs."""
    import transformers

    shape = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    t5 = {"vocab_size": 320, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    made = tmp_path_factory.mktemp("hostile")
    for config in (
        config_of("GPTNeoX", **shape, intermediate_size=32, max_position_embeddings=128),
        config_of("T5", **t5, decoder_start_token_id=0),
    ):
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        kind.from_config(config).save_pretrained(made / config.model_type)
    own = [clone(checkpoint(family), made / family) for family in ("llama3.1", "qwen2-window", "qwen3-moe", "gpt2")]
    for folder in (*own, made / "gpt_neox", made / "t5"):
        make_tokenizer(folder)
    by_transformers = [
        (folder, {"executor": "transformers", "device": "cpu"}) for folder in (made / "gpt_neox", made / "t5")
    ]
    return [*3 * [(folder, EXACT) for folder in own], *by_transformers]


def memory(what: str) -> int:
    """Kilobytes of this process: VmRSS now, VmHWM at most so far."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{what}:"))
    return int(line.split()[1])


def forget_peak() -> int:
    """Begin to count the most memory anew: other tests of this process may have needed more. Returns that of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def try_all(runs: int, model: Callable[[random.Random, Path], Any]) -> None:
    """Generate with hostile models. model: makes one in a folder. Fails for errors that are not ours, with the run."""
    wrong, before = [], forget_peak()
    for seed in SEEDS:
        for run in range(runs):
            rng = random.Random(1000 * seed + run)
            try:
                model(rng, Path(f"{seed}-{run}")).generate([[1, 2]], SamplingParams(max_tokens=2))
            except SlipstreamError:
                pass
            except Exception as fault:
                wrong.append((seed, run, repr(fault)))
            shutil.rmtree(f"{seed}-{run}")
    assert not wrong
    assert memory("VmHWM") - before < MOST_KILOBYTES


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("spoil", "runs"), [(spoil_json, 100), (spoil_tensors, 60)])
def test_a_hostile_checkpoint_runs_or_is_refused(
    spoil: Any, runs: int, models: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    def made(rng: random.Random, folder: Path) -> LLM:
        source, settings = rng.choice(models)
        clone(source, folder)
        spoil(folder / (rng.choice(FILES) if spoil is spoil_json else "model.safetensors"), rng)
        llm = LLM(folder, **settings)
        llm.checks.prompt("abc" if llm.tokenizer else [1])
        return llm

    try_all(runs, made)


def test_a_hostile_draft_head_runs_or_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    target: Target = LLM("embedded", executor="torch").target

    def made(rng: random.Random, folder: Path) -> LLM:
        clone(zoo.HERE / "models" / rng.choice(["eagle3", "medusa"]), folder)
        if rng.random() < 0.7:
            spoil_json(folder / "config.json", rng)
        else:
            spoil_tensors(folder / "model.safetensors", rng)
        return LLM(target, str(folder), draft_tokens=3)

    try_all(12, made)
