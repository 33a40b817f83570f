"""`model.generate(..., custom_generate=slipstream.custom_generate(...))` against `model.generate` alone."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import slipstream
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.errors import ParameterError
from tests.significance import assert_distribution, distribution
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.tiny_checkpoints import Tiny

PADDED = torch.tensor([[0, 0, 5, 9, 33], [7, 8, 9, 10, 11], [0, 0, 0, 0, 40]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
ONE = torch.tensor([[5, 9, 33, 5, 9]])


@functools.cache
def model(name: str = "stablelm") -> Any:
    loaded = random_model(name)
    loaded.generation_config.pad_token_id = 0
    return loaded


@functools.cache
def disturbed(name: str = "stablelm") -> Any:
    """A draft model that often agrees."""
    return random_model(name, noise=0.05)


def both(of: Any, draft: Any, ids: torch.Tensor = PADDED, **how: Any) -> tuple[Any, Any, Any]:
    """(what transformers returns, what it returns with custom_generate, the object), greedily."""
    mask = MASK if ids is PADDED else torch.ones_like(ids)
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False} | how
    fast = slipstream.custom_generate(draft=draft, draft_tokens=4)
    return of.generate(ids, **given), of.generate(ids, custom_generate=fast, **given), fast


@functools.cache
def plain() -> torch.Tensor:
    output: torch.Tensor = model().generate(PADDED, attention_mask=MASK, do_sample=False, max_new_tokens=12)
    return output


DRAFTS = {"none": lambda: None, "a lookup": lambda: "lookahead", "a model": disturbed, "another": lambda: model("opt")}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("ids", [ONE, PADDED], ids=["one", "padded"])
def test_greedy_ids_are_those_of_generate(draft: str, ids: torch.Tensor) -> None:
    wanted, output, fast = both(model(), DRAFTS[draft](), ids)
    assert torch.equal(output, wanted)
    assert output.dtype == wanted.dtype
    if draft == "a model":
        assert sum(s.accepted for s in fast.stats) > 3


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "deepseek-v3", "gpt-j", "qwen3-next"])
def test_other_architectures(name: str) -> None:
    wanted, output, _ = both(model(name), disturbed(name))
    assert torch.equal(output, wanted)


def test_texts_of_our_own_families_may_run_in_our_own_decoder(tiny: Tiny) -> None:
    of = transformers.AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float64)
    fast = slipstream.custom_generate(draft=str(tiny.draft), executor="auto")
    how = {"max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([[65, 66, 67, 68]])
    assert torch.equal(of.generate(ids, custom_generate=fast, **how), of.generate(ids, **how))


ENDS = list(range(20))
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7}, "bad words": {"bad_words_ids": [[63], [40, 44], [56, 48]]},
    "least new tokens": {"min_new_tokens": 8, "eos_token_id": ENDS},
    "least length": {"min_length": 11, "eos_token_id": ENDS}, "an early end, padded": {"eos_token_id": ENDS},
    "bias": {"sequence_bias": [[[4], 3.0], [[9], -7.5]]},
    "suppressed": {"suppress_tokens": [1, 2, 3, 40], "renormalize_logits": True},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_generate_are_honoured(setting: str) -> None:
    ids = ONE if setting == "repetition penalty" else PADDED  # transformers counts the padding as a repeated token
    without = both(model(), None, ids)[0]
    for draft in ("lookahead", disturbed()):
        wanted, output, fast = both(model(), draft, ids, **SETTINGS[setting])
        assert torch.equal(output, wanted)
        assert not torch.equal(output, without)
    assert sum(s.proposed for s in fast.stats) > 0


class Last(StoppingCriteria):
    """Ends a text at one of these ids."""

    def __init__(self, ids: list[int]):
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.ids)


@pytest.mark.parametrize("eos", [None, 2, -1])
@pytest.mark.parametrize("places", [[6], [8, 13, 9], [5, 5, 5], [16, 7, 7]])
def test_texts_end_where_a_criterion_holds_and_without_an_end_token_where_it_has_held_for_all(places, eos):
    """transformers pads texts only where there is an end token; it may be one that never comes."""
    criteria = StoppingCriteriaList([Last([int(plain()[b, at]) for b, at in enumerate(places)])])
    for draft in (None, disturbed()):
        wanted, output, _ = both(model(), draft, stopping_criteria=criteria, eos_token_id=eos)
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("eos", [-1, [2, -1], VOCAB, [3, VOCAB + 7]])
def test_an_end_token_that_the_vocabulary_lacks_never_comes(eos: Any) -> None:
    wanted, output, _ = both(model(), disturbed(), eos_token_id=eos)
    assert torch.equal(output, wanted)


def test_a_dictionary_has_the_sequences() -> None:
    wanted, output, _ = both(model(), disturbed(), return_dict_in_generate=True)
    assert type(output) is type(wanted)
    assert torch.equal(output.sequences, wanted.sequences)


@pytest.mark.parametrize("draft", ["a model", "a lookup"])
def test_sampled_texts_have_the_distribution_of_generate(draft: str) -> None:
    """The first two tokens, with filters and a penalty: G-test at a p-value of 1e-6."""
    how = {"do_sample": True, "temperature": 0.8, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.4}
    fast = slipstream.custom_generate(draft=DRAFTS[draft](), draft_tokens=2)
    torch.manual_seed(3)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(5):
        out = model().generate(ONE, max_new_tokens=3, num_return_sequences=300, custom_generate=fast, **how)
        counts.update(tuple(row[5:7]) for row in out.tolist())
    prepared = transformers.GenerationConfig(**how)
    processors = model()._get_logits_processor(prepared, input_ids_seq_length=5, device="cpu")

    def after(text: list[int]) -> list[float]:
        ids = torch.tensor([[*ONE[0].tolist(), *text]])
        with torch.no_grad():
            return processors(ids, model()(ids).logits[:, -1].float()).softmax(-1)[0].tolist()

    assert_distribution(counts, distribution(after, 2))


def test_the_seed_of_torch_decides() -> None:
    fast = slipstream.custom_generate(draft=disturbed(), draft_tokens=4)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model().generate(ONE, do_sample=True, max_new_tokens=12, custom_generate=fast))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


class Kept:
    def __init__(self) -> None:
        self.put_in: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_in.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_each_token() -> None:
    kept = Kept()
    fast = slipstream.custom_generate(draft=disturbed(), streamer=kept)
    out = model().generate(ONE, do_sample=False, max_new_tokens=7, custom_generate=fast)
    assert kept.put_in == [ONE[0].tolist(), *[[token] for token in out[0, 5:].tolist()]]
    assert kept.ended


def test_a_text_that_the_context_cuts_is_said_to_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.arange(3, 123)[None] % VOCAB
    for tokens, warned in ((8, False), (12, True)):
        wanted, output, _ = both(model(), disturbed(), ids, max_new_tokens=tokens)
        assert torch.equal(output, wanted[:, :128])
        assert ("ends at the context of 128 tokens" in caplog.text) == warned


def test_draft_lengths_are_chosen_and_what_was_learned_is_kept() -> None:
    fast = slipstream.custom_generate(draft=disturbed())
    wanted = model().generate(ONE, do_sample=False, max_new_tokens=12)
    for _ in range(2):
        assert torch.equal(model().generate(ONE, do_sample=False, max_new_tokens=12, custom_generate=fast), wanted)
    learned = fast.draft_tokens
    assert isinstance(learned, DraftLengths)
    model().generate(ONE, do_sample=False, max_new_tokens=12, custom_generate=fast)
    assert fast.draft_tokens is learned


def test_new_weights_are_seen_in_the_next_call() -> None:
    of = random_model("phi")
    fast = slipstream.custom_generate(draft="ngram")
    before = of.generate(ONE, do_sample=False, max_new_tokens=6, custom_generate=fast)
    with torch.no_grad():
        for p in of.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    wanted = of.generate(ONE, do_sample=False, max_new_tokens=6)
    assert torch.equal(of.generate(ONE, do_sample=False, max_new_tokens=6, custom_generate=fast), wanted)
    assert not torch.equal(before, wanted)


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"streamer": Kept()}, r"streamer is not supported.*custom_generate\(\.\.\., streamer=streamer\)"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"logits_processor": LogitsProcessorList([Unknown()])}, "the logits processor Unknown is not supported"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor is not supported"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor is not supported"),
        ({"sequence_bias": [[[4, 4], -9.0]]}, "SequenceBiasLogitsProcessor is not supported"),
        ({"begin_suppress_tokens": [9]}, "SuppressTokensAtBeginLogitsProcessor is not supported"),
        ({"forced_eos_token_id": 3, "eos_token_id": 3}, "ForcedEOSTokenLogitsProcessor is not supported"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]}, "PrefixConstrainedLogitsProcessor is not supported"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "attention_mask of text 0"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        model().generate(ONE, do_sample=False, max_new_tokens=3, custom_generate=slipstream.custom_generate(), **how)


def test_the_cache_of_an_earlier_call_and_a_streamer_for_several_texts_are_refused() -> None:
    with torch.no_grad():
        cache = model()(ONE, use_cache=True).past_key_values
    longer = torch.cat((ONE, torch.tensor([[3]])), 1)
    with pytest.raises(ParameterError, match=r"(past_key_values|cache) of an earlier call"):
        model().generate(longer, past_key_values=cache, custom_generate=slipstream.custom_generate())
    with pytest.raises(ParameterError, match="a streamer for 3 texts"):
        model().generate(PADDED, attention_mask=MASK, custom_generate=slipstream.custom_generate(streamer=Kept()))


def test_the_draft_of_a_path_is_loaded_once(tmp_path: Path) -> None:
    random_model("stablelm", torch.float32).save_pretrained(tmp_path)
    fast = slipstream.custom_generate(draft=str(tmp_path))
    first = model().generate(ONE, do_sample=False, max_new_tokens=6, custom_generate=fast)
    for file in tmp_path.iterdir():
        file.unlink()
    assert torch.equal(model().generate(ONE, do_sample=False, max_new_tokens=6, custom_generate=fast), first)
