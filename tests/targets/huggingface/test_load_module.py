"""Paths and loaded models that our own decoder does not run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.errors import CheckpointError, LoadError, PairError, ParameterError, TargetError, UnsupportedModelError
from slipstream.targets.decoder import Decoder
from slipstream.targets.describe import as_target, describe
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.targets.pair_check import check_pair
from tests.targets.huggingface.architectures import ARCHITECTURES, PACKED, VOCAB, generated, random_model
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder
from tests.tiny_checkpoints import make_tokenizer, random_llama, rewrite

PROMPTS = [[5, 9, 33], [7, 8, 9, 10]]
SHORT = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX, which our own decoder does not run."""
    folder = tmp_path_factory.mktemp("gpt-neox")
    random_model("gpt-neox", torch.float32).save_pretrained(folder)
    return folder


def made(name: str) -> Any:
    """A model of our own decoder, or one of transformers."""
    return random_llama(vocab_size=VOCAB, eos_token_id=None).double() if name == "llama" else random_model(name)


def texts_of(own: Any) -> list[list[int]]:
    return generated(own, PROMPTS, 6)


def damaged(folder: Path, into: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in config.json."""
    return rewrite(Path(shutil.copytree(folder, into, dirs_exist_ok=True)), **changes)


def test_a_path_that_our_decoder_does_not_run_is_run_by_transformers_and_said_so_once(folder, caplog):
    llm = LLM(folder, dtype="float64", device="cpu")
    done = llm.generate(PROMPTS, SHORT)
    said = [r.getMessage() for r in caplog.records if r.name == "slipstream"]
    assert said == ["our own decoder does not run the architecture 'gpt_neox': transformers runs it instead, slower"]
    runtime = llm.target.capabilities.runtime
    assert (runtime.backend, runtime.dtype, runtime.checkpoint) == ("transformers", torch.float64, folder)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    module.generation_config.eos_token_id = None
    for wanted, one in zip(texts_of(module), done, strict=True):
        assert one.token_ids == wanted[: len(one.token_ids)]


def test_a_loaded_model_of_our_own_families_runs_in_our_own_decoder() -> None:
    llama = random_llama()
    assert as_target(llama).capabilities.runtime.backend != "transformers"  # type: ignore[union-attr]
    assert as_target(llama, executor="transformers").capabilities.runtime.backend == "transformers"  # type: ignore[union-attr]


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_an_executor_that_was_named_is_not_replaced(folder: Path, executor: str) -> None:
    with pytest.raises(UnsupportedModelError, match="gpt_neox"):
        LLM(folder, executor=executor)


def test_a_loaded_model_whose_modules_were_changed_is_run_as_it_is() -> None:
    """For example by a tool that puts adapters into it."""
    module = random_llama().double()

    class Added(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.inner, self.bias = inner, torch.nn.Parameter(torch.randn(module.config.hidden_size).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.bias

    module.model.layers[0].mlp.down_proj = Added(module.model.layers[0].mlp.down_proj)
    module.generation_config.eos_token_id = None
    done = LLM(module, "ngram", draft_tokens=4).generate(PROMPTS, SHORT)
    assert [one.token_ids for one in done] == texts_of(module)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("gemma2", "qwen3-next"), ("bloom", "gpt-neox"), ("mamba2", "mamba2"), ("deepseek-v3", "jamba"),
        ("opt", "falcon"), ("llama", "stablelm"), ("stablelm", "llama"),
    ],
)  # fmt: skip
def test_any_model_can_draft_for_any_other(ours: str, theirs: str) -> None:
    module = made(ours)
    llm = LLM(module, made(theirs), draft_tokens=3)
    done = llm.generate(PROMPTS, SHORT)
    assert [one.token_ids for one in done] == texts_of(module)
    assert all(one.stats.drafter_faults == 0 < one.stats.proposed for one in done)


@pytest.mark.parametrize(
    ("name", "length"),
    [("stablelm", 1), ("stablelm", 7), ("bloom", 4), ("lfm2", 2), ("lfm2", 7), ("qwen3-next", 4), ("jamba", 4)],
)
def test_a_model_that_drafts_for_itself_is_always_right(name: str, length: int) -> None:
    """So its cache never misses or keeps a token, whatever the draft length."""
    module = random_model(name)
    done = LLM(module, of_module(module), draft_tokens=length).generate(PROMPTS, SamplingParams(max_tokens=9))
    for one in done:
        assert one.stats.accepted == one.stats.proposed > 0


def test_the_vocabularies_of_a_pair_are_compared_where_transformers_runs_one(folder: Path, tmp_path: Path) -> None:
    ours = damaged(folder, tmp_path)
    make_tokenizer(ours)
    other = damaged(folder, tmp_path / "other")
    make_tokenizer(other, texts=["SELECT column FROM table WHERE value > 17;\n"])
    check_pair(ours, ours).require()
    with pytest.raises(PairError, match="different tokens"):
        check_pair(ours, other).require()


@pytest.mark.parametrize("name", PACKED)
def test_the_facts_of_a_checkpoint_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    module = random_model(name, torch.float32)
    module.config.save_pretrained(tmp_path)
    shape = describe(tmp_path).config
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert not shape.tie_embeddings
    assert shape.layers == module.config.get_text_config().num_hidden_layers
    assert shape.vocab_size == VOCAB
    assert 0 < shape.step_parameters <= shape.active_parameters <= shape.parameters


def test_keys_and_values_are_counted_by_layer(tmp_path: Path) -> None:
    """Gemma 4 has other heads in layers of full attention than in those with a window, and layers that keep none."""
    moe = random_model("gemma4-experts", torch.float32)
    moe.config.save_pretrained(tmp_path)
    shape = describe(tmp_path).config
    assert (shape.kv_heads, shape.head_dim, shape.windows) == (2, 12, (6, None))
    assert shape.kv_bytes(1) == 2 * (2 * 8 + 1 * 12)
    moe.config.update({"num_hidden_layers": 4, "layer_types": 2 * moe.config.layer_types, "num_kv_shared_layers": 2})
    moe.config.save_pretrained(tmp_path)
    assert describe(tmp_path).config.kv_bytes(1) == 2 * (2 * 8 + 1 * 12)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = describe(tmp_path).config
    assert shape.tie_embeddings
    module = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == shape.step_parameters == sum(p.numel() for p in module.parameters())


CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def test_code_of_a_checkpoint_is_refused_and_that_of_a_draft_even_where_the_targets_is_trusted(folder, tmp_path):
    damaged_folder = damaged(folder, tmp_path, model_type="own", auto_map=CODE)
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('the code was run')\n")
    named = r"brings its own Python code.*trust_remote_code=True.*--trust-remote-code"
    with pytest.raises(UnsupportedModelError, match=named):
        LLM(damaged_folder)
    with pytest.raises(LoadError, match="own"):
        LLM(folder, damaged_folder, trust_remote_code=True)
    with pytest.raises(UnsupportedModelError, match="holds only for the target"):
        LLM(random_model("gpt-neox"), damaged_folder, trust_remote_code=True)


def test_code_that_is_trusted_runs(tmp_path: Path) -> None:
    known, own = tmp_path / "known", tmp_path / "own"
    random_model("stablelm", torch.float32).save_pretrained(known)
    damaged(known, own, model_type="own_stablelm", auto_map=CODE, architectures=["OwnForCausalLM"])
    (own / "configuration_own.py").write_text(
        "from transformers import StableLmConfig\n\n\n"
        "class OwnConfig(StableLmConfig):\n    model_type = 'own_stablelm'\n"
    )
    (own / "modeling_own.py").write_text(
        "from transformers import StableLmForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(StableLmForCausalLM):\n    config_class = OwnConfig\n"
    )
    done = LLM(own, dtype="float64", trust_remote_code=True, kv_tokens=320).generate(PROMPTS, SHORT)
    wanted = LLM(known, dtype="float64").generate(PROMPTS, SHORT)
    assert [c.token_ids for c in done] == [c.token_ids for c in wanted]


NAME = "gpt_neox.layers.1.attention.dense.weight"


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda f: rewrite(f, model_type="nonsense"), UnsupportedModelError, "known neither to Slipstream nor"),
        (lambda f: rewrite(f, lambda held: held.pop(NAME)), CheckpointError, rf"lacks 1 tensors.*{NAME[9:]}"),
        (lambda f: rewrite(f, lambda held: held[NAME][3, 4].fill_(torch.nan)), CheckpointError, "NaN or infinity"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), CheckpointError, "only as a pickle"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(damage, error, says, folder, tmp_path):
    damaged_folder = damaged(folder, tmp_path)
    damage(damaged_folder)
    with pytest.raises(error, match=says):
        LLM(damaged_folder)


def rwkv() -> Any:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**shape)).eval()


def encoder() -> Any:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


@pytest.mark.parametrize(
    ("make", "settings", "error", "says"),
    [
        (lambda: random_model("gpt-neox", torch.float32), {"dtype": "bfloat16"}, ParameterError, "loaded model is in"),
        (lambda: random_model("gpt-neox").train(), {}, ParameterError, r"model\.eval\(\)"),
        (encoder, {}, UnsupportedModelError, "not a causal language model or an encoder-decoder"),
        (rwkv, {}, UnsupportedModelError, "does not use a cache object of transformers"),
    ],
)
def test_a_loaded_model_that_cannot_be_run_is_refused(make, settings, error, says):
    with pytest.raises(error, match=says):
        LLM(make(), **settings)


@pytest.mark.parametrize(("name", "value"), [("quantize", "int8"), ("kv_dtype", "q8_0")])
def test_settings_that_transformers_does_not_have_are_refused(folder: Path, name: str, value: str) -> None:
    loaded = random_model("gpt-neox", torch.float32)
    for model, executor, why in (
        (folder, "auto", "does not run the architecture"), (folder, "transformers", "executor='transformers' was"),
        (loaded, "auto", "The model is loaded already"),
    ):  # fmt: skip
        with pytest.raises(
            ParameterError, match=f"{name}='{value}' was given for a model that transformers runs.*{why}"
        ):
            LLM(model, executor=executor, **{name: value})


@pytest.mark.parametrize("kind", ["Bert", "T5"])
def test_a_model_that_needs_more_than_a_text_is_refused_with_its_own_words(kind: str, monkeypatch: Any) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "Bert":
        module: Any = transformers.BertLMHeadModel(transformers.BertConfig(**shape, is_decoder=True)).eval()
    else:
        module = random_encoder_decoder("t5")

    def forward(**given: Any) -> None:
        raise ValueError("pixel_values are missing")

    monkeypatch.setattr(module, "forward", forward)
    with pytest.raises(
        UnsupportedModelError, match=f"a {kind}.* cannot run with only token ids: ValueError: pixel_val"
    ):
        LLM(module)


def test_a_model_whose_own_positions_begin_elsewhere_is_run_as_generate_runs_it() -> None:
    """RoBERTa's begin after the id of padding, `generate` passes those from 0 on."""
    config = transformers.RobertaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, is_decoder=True, initializer_range=0.25, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    module = transformers.RobertaForCausalLM(config).double().eval()
    module.generation_config.eos_token_id = None
    done = LLM(module, "ngram", draft_tokens=4).generate(PROMPTS, SHORT)
    assert [one.token_ids for one in done] == texts_of(module)


def test_draft_heads_are_refused_where_layers_pass_on_several_streams() -> None:
    module = transformers.Gemma3nForCausalLM(
        transformers.Gemma3nTextConfig(
            vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, hidden_size=32, intermediate_size=48, head_dim=8,
            num_hidden_layers=4, num_attention_heads=4, hidden_size_per_layer_input=8, laurel_rank=8,
            layer_types=2 * ["sliding_attention", "full_attention"], num_kv_shared_layers=2, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    target = of_module(module)
    assert target.capabilities.head_host is None
    with pytest.raises(TargetError, match="not \\[batch, tokens, width\\]"):
        target.run([Sequence(PROMPTS[0])], Draft.empty(1), (1,))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_context_ends_where_frequencies_would_change(kind: str) -> None:
    config = ARCHITECTURES["phi3"]()
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        config.original_max_position_embeddings = 32
    config.rope_parameters = rope
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert of_module(module).context == 32


def test_training_refuses_the_executor_of_transformers(tiny: Any) -> None:
    with pytest.raises(ParameterError, match="but this needs our own decoder"):
        Decoder.load(tiny.target, "transformers")


def test_a_kv_cache_of_fixed_size_is_honoured_or_refused(folder: Path) -> None:
    memory = LLM(folder, kv_tokens=320).target.capabilities.memory
    assert (memory.capacity, memory.block) == (10, 32)
    with pytest.raises(ParameterError, match="kv_tokens"):
        LLM(random_model("bloom"), kv_tokens=320)
