"""`SpeculativeDecoder` and `load_model_pair`: the small interface that tutorials teach."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams, SpeculativeDecoder, load_model_pair
from slipstream.errors import PairError, ParameterError
from tests.tiny_checkpoints import EXACT, OTHER_TEXTS, Tiny, make_model, make_tokenizer


@pytest.fixture(scope="module")
def pair(tiny: Tiny):
    return load_model_pair(tiny.target, tiny.draft, **EXACT)


@pytest.fixture(scope="module")
def expected(tiny: Tiny):
    """Plain greedy output of transformers itself, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float64)

    def run(ids: torch.Tensor, new: int) -> torch.Tensor:
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    return run


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_decode_equals_transformers_greedy(tiny, pair, expected, k):
    target, draft, tokenizer = pair
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    decoder = SpeculativeDecoder(target, draft, draft_tokens=k)
    out = decoder.decode(ids, max_new_tokens=24, ignore_eos=True)
    assert torch.equal(out, expected(ids, 24))
    assert decoder.stats.tokens == 24
    assert bool(decoder.stats.accepted) is bool(k)


def test_loaded_transformers_models_and_paths_agree(tiny, pair):
    ids = torch.tensor([[5, 6, 7]])
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (tiny.target, tiny.draft)]
    outputs = [
        SpeculativeDecoder(*models, draft_tokens=3, **options).decode(ids, 16)
        for models, options in ((pair[:2], {}), (loaded, {}), ((str(tiny.target), tiny.draft), EXACT))
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_program_reads_the_vocabulary_from_the_configuration(pair):
    assert pair[0].config.vocab_size == pair[1].config.vocab_size == pair[0].vocab_size


def test_shapes_dtypes_and_padding(pair):
    decoder = SpeculativeDecoder(*pair[:2])
    one = decoder.decode(torch.tensor([5, 6, 7], dtype=torch.int32), 8)
    assert (one.shape, one.dtype) == ((1, 11), torch.int32)
    first, second = decoder.decode(torch.tensor([[5, 6], [9, 8]]), 12, ignore_eos=True)[:, 2:].tolist()
    end = next(t for t in first[:6] if t not in second)
    both = decoder.decode(torch.tensor([[5, 6], [9, 8]]), 12, stop_token_ids=[end], ignore_eos=True)
    assert both.shape == (2, 14)
    cut = first.index(end) + 1
    assert both[0, 2:].tolist() == first[:cut] + [end] * (12 - cut)
    assert both[1, 2:].tolist() == second


def test_sampling_and_options_are_passed_on(tiny, pair):
    target, draft, tokenizer = pair
    decoder = SpeculativeDecoder(target, draft, rule="coupled")
    ids = torch.tensor([[5, 6, 7]])
    params = {"temperature": 0.9, "seed": 4, "top_p": 0.9}
    plain = LLM(target, rule="coupled", tokenizer=tokenizer, draft_tokens=4).generate(
        [5, 6, 7], SamplingParams(max_tokens=16, **params)
    )[0]
    assert decoder.decode(ids, 16, **params)[0, 3:].tolist() == plain.token_ids
    with pytest.raises(ParameterError, match="did you mean 'temperature'"):
        decoder.decode(ids, 16, temprature=0.9)


def test_bad_input_ids_are_refused(pair):
    decoder = SpeculativeDecoder(*pair[:2])
    with pytest.raises(ParameterError, match="but must be integers"):
        decoder.decode(torch.zeros(1, 3), 4)


def test_load_model_pair_refuses_incompatible_pairs(tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    with pytest.raises(PairError, match="do not share a vocabulary"):
        load_model_pair(tiny.target, tmp_path)


def test_generate_takes_the_arguments_that_transformers_takes(pair, expected):
    """As tutorials of assisted generation write them, with the pair that `load_model_pair` returns."""
    target, draft, tokenizer = pair
    inputs = tokenizer("def add(first, second):", return_tensors="pt").to("cpu")
    length = inputs.input_ids.shape[1]
    wanted = expected(inputs.input_ids, 24)[0, length:].tolist()
    wanted = wanted[: wanted.index(0) + 1] if 0 in wanted else wanted  # the end of text
    more = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **more)
    fast = target.generate(**inputs, assistant_model=draft, num_assistant_tokens=5, **more)
    assert plain[0][length:].tolist() == fast[0][length:].tolist() == wanted
    drafted = next(decoder for given, decoder in target._decoders if given is draft)
    assert (drafted.llm.draft_tokens, drafted.stats.accepted > 0) == (5, True)


def test_generate_reads_padding_on_the_left_and_samples_if_asked(pair):
    target, draft = pair[:2]
    ids, mask = torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    both = target.generate(ids, mask, max_new_tokens=8, assistant_model=draft, ignore_eos=True)
    assert torch.equal(both[:, :4], ids)
    assert torch.equal(both[:1, 2:], target.generate(ids[:1, 2:], max_new_tokens=8, ignore_eos=True))
    more = {"max_new_tokens": 8, "num_assistant_tokens": 3, "seed": 1}
    hot = target.generate(ids, mask, assistant_model=draft, do_sample=True, **more)
    decoder = SpeculativeDecoder(target, draft, draft_tokens=3)
    assert torch.equal(hot, decoder.decode(ids, 8, mask, temperature=1.0, seed=1))
    warm, wanted = (target.generate(ids, mask, max_new_tokens=8, **more) for more in ({"temperature": 0.9}, {}))
    assert torch.equal(warm, wanted)
    end = both[0, 4].item()
    padded = target.generate(ids, mask, max_new_tokens=8, stop_token_ids=[end], pad_token_id=3)
    assert padded[0, 4:].tolist() == [end] + [3] * (padded.shape[1] - 5)
