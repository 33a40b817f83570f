"""GGUF metadata: each key is honoured, known to have no effect, or named. Values of any kind end in our errors."""

import contextlib
import logging
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.generation_defaults import generation_defaults
from slipstream.checkpoints.gguf_config import refusal
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.targets.describe import as_target, describe
from slipstream.tokens.text import tokenizer_of
from tests.checkpoints.odd_gguf_files import DIVISORS, added, fused, without_biases, write

FREQUENCIES = 1 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
FACTOR, OLD, TYPE = "llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.type"
ATTENTION = "llama.rope.scaling.attn_factor"


@pytest.mark.parametrize(
    ("metadata", "factor", "scale"),
    [
        ({OLD: 4.0}, 4, 1), ({OLD: 4.0, FACTOR: 2.0}, 2, 1), ({FACTOR: 4.0}, 4, 1), ({FACTOR: 4.0, TYPE: "none"}, 1, 1),
        ({FACTOR: 0.0, TYPE: "linear"}, 1, 1), ({TYPE: "linear"}, 1, 1),
        ({ATTENTION: 1.5}, 1, 1.5), ({FACTOR: 2.0, ATTENTION: 0.5}, 2, 0.5), ({TYPE: "yarn", ATTENTION: 0.5}, 1, 0.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stored", [None, "F32", "F16"])
def test_rotary_positions_are_those_of_llamacpp(metadata, factor, scale, stored, tmp_path):
    """Divided frequencies hold beside a scaling, in whatever type they are stored."""
    divided = {} if stored is None else {"change": lambda tensors: tensors | {"rope_freqs.weight": DIVISORS}}
    file = write(tmp_path / "a.gguf", kinds={"rope_freqs.weight": stored or "F32"}, **divided, **metadata)
    config = DecoderConfig.load(file)
    (seen, seen_scale), shown = config.rope(), config.rope_parameters.get("factor", 1)
    wanted = FREQUENCIES / factor / (1 if stored is None else torch.from_numpy(DIVISORS))
    assert torch.allclose(seen, wanted, rtol=1e-6 if stored != "F16" else 1e-3)
    assert (seen_scale, shown) == (pytest.approx(scale), factor)


def test_biases_that_are_not_there_are_zero_and_fused_tensors_are_their_parts(tmp_path: Path) -> None:
    change = added("attn_q", "attn_k", "attn_v", "ffn_down")
    parts, whole = (
        write(tmp_path / "a.gguf", change=change),
        write(tmp_path / "b.gguf", change=lambda t: fused(change(t))),
    )
    plain = write(tmp_path / "c.gguf", family="qwen2", change=without_biases)
    read = load_weights(parts, DecoderConfig.load(parts))
    again, none = load_weights(whole, DecoderConfig.load(whole)), load_weights(plain, DecoderConfig.load(plain))
    assert set(read) == set(again)
    assert all(torch.equal(read[name], again[name]) for name in read)
    for name in read:
        if name.endswith(".bias"):
            assert read[name].any() == all(part not in name for part in ("o_proj", "gate_proj", "up_proj")), name
    assert not none["layers.0.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("output.bias", {"change": lambda t: t | {"output.bias": np.zeros(300)}}),
        ("causal", {"llama.attention.causal": False}),
        ("head_count differs", {"llama.attention.head_count": [4, 2]}), ("nextn", {"llama.nextn_predict_layers": 1}),
        ("layer_norm_rms_epsilon", {"llama.attention.layer_norm_rms_epsilon": None}),
        ("some of the biases of blk.", {"change": lambda tensors: added("attn_q")(fused(tensors))}),
        ("value_length", {"llama.attention.value_length": 8}), ("dimension_count", {"llama.rope.dimension_count": 8}),
        ("expert_group_count", {"llama.expert_group_count": 2}), ("longrope", {TYPE: "longrope"}),
    ],
)  # fmt: skip
def test_what_our_own_decoder_would_run_otherwise_is_refused_by_name(name, changes, tmp_path):
    assert name in str(refusal(read_header(write(tmp_path / "a.gguf", **changes))))


@pytest.mark.parametrize("divisors", [DIVISORS[:4], DIVISORS * 0, DIVISORS * np.nan, DIVISORS[None]])
def test_what_cannot_divide_frequencies_is_refused(divisors: np.ndarray, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", change=lambda tensors: tensors | {"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight' of a\.gguf does not contain 8 positive numbers"):
        DecoderConfig.load(file)


def test_divided_frequencies_are_unknown_to_other_families(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", "qwen2", lambda tensors: tensors | {"rope_freqs.weight": DIVISORS})
    with pytest.raises(CheckpointError, match=r"holds rope_freqs\.weight"):
        as_target(file)


def test_keys_without_an_effect_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = {"general.name": "x", "general.base_model.0.name": "y", "llama.tensor_data_layout": "z", "split.count": 1}
    odd = {
        "llama.logit_scale": 0.5,
        "general.sampling.mirostat": 2,
        "vendor.key": "x",
        "llama.attention.sliding_window": 8,
    }
    caplog.set_level(logging.WARNING)
    as_target(write(tmp_path / "a.gguf", **silent), executor="torch")
    assert not caplog.records
    as_target(write(tmp_path / "a.gguf", **silent, **odd), executor="torch")
    assert [record.getMessage() for record in caplog.records] == [
        f"a.gguf has metadata without an effect here: {', '.join(map(repr, odd))}"
    ]


def test_what_a_file_says_of_sampling_is_what_generation_config_json_would_say(tmp_path: Path) -> None:
    given = {"general.sampling.temp": 0.5, "general.sampling.top_k": -1, "general.sampling.top_p": 0.25}
    file = write(tmp_path / "a.gguf", **given, **{"tokenizer.ggml.suppress_tokens": [5, 6]})
    defaults = generation_defaults("auto", None, Checkpoint.open(file), encoder_decoder=False)
    assert defaults.sampling == {"temperature": 0.5, "top_k": 0, "top_p": 0.25}
    assert defaults.suppressed == (5, 6)


HOSTILE: tuple[Any, ...] = (
    0, -1, 2**31, 2**63 - 1, 3, struct.pack("<IQ", 10, 2**64 - 1), 0.0, -2.0, 1e-38, 1e38, float("nan"), float("inf"),
    "", "x", "\0é", True, False, [], [1, 2], [-5, 3], ["a", "b"], [0.5], struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 5),
)  # fmt: skip


def run(file: Path) -> None:
    """What commands do with a file."""
    assert describe(file).token_map or not read_header(file).has_tokenizer
    if tokenizer := tokenizer_of(file):
        tokenizer.decode(tokenizer.encode("a <s>"), skip_special_tokens=True)
    generation_defaults("auto", None, Checkpoint.open(file), encoder_decoder=False)
    as_target(file, executor="torch", dtype="float32", kv_tokens=64)


KEYS = {
    "text": "general.architecture tokenizer.ggml.model tokenizer.ggml.pre tokenizer.chat_template "
    "tokenizer.chat_template.tool_use tokenizer.huggingface.json slipstream.eos_ids",
    "list": "tokenizer.ggml.tokens tokenizer.ggml.merges tokenizer.chat_templates tokenizer.ggml.token_type "
    "tokenizer.ggml.suppress_tokens",
    "size": "llama.vocab_size llama.context_length llama.embedding_length llama.block_count llama.feed_forward_length "
    "llama.attention.head_count llama.attention.head_count_kv llama.attention.key_length llama.attention.value_length "
    "llama.rope.dimension_count llama.expert_count llama.expert_used_count llama.expert_group_count llama.pard_token "
    "llama.nextn_predict_layers llama.expert_feed_forward_length llama.rope.scaling.original_context_length",
    "id": " ".join(f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding"))
    + " general.file_type split.count tokenizer.ggml.fim_pad_token_id",
    "number": "llama.rope.freq_base llama.rope.scale_linear llama.rope.scaling.factor llama.rope.scaling.attn_factor "
    "llama.rope.scaling.yarn_beta_fast llama.rope.scaling.yarn_beta_slow llama.attention.layer_norm_rms_epsilon "
    "general.sampling.temp general.sampling.top_k general.sampling.top_p general.sampling.min_p",
    "other": "llama.rope.scaling.type llama.attention.causal tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token",
}


@pytest.mark.parametrize("kind", KEYS)
def test_hostile_values_of_each_key_end_in_our_errors(kind: str, tmp_path: Path) -> None:
    """At random, and two keys at a time as well. A text instead of a number is refused by the name of the key."""
    keys, rng = KEYS[kind].split(), random.Random(kind)
    pairs = [[(key, value)] for key in keys for value in rng.sample(HOSTILE, 6)]
    pairs += [[(rng.choice(keys), rng.choice(HOSTILE)) for _ in range(2)] for _ in range(20)]
    for changes in pairs:
        file = write(tmp_path / "a.gguf", **dict(changes))
        with contextlib.suppress(SlipstreamError):
            run(file)
    for key in keys if kind != "text" else ():
        with pytest.raises(CheckpointError, match=re.escape(f"its {key} is 'x'")):
            run(write(tmp_path / "a.gguf", **{key: "x"}))


def test_damaged_headers_end_in_our_errors(tmp_path: Path) -> None:
    """Bytes changed, cut out or put in, and lengths and types replaced, at random."""
    whole, rng = write(tmp_path / "whole.gguf").read_bytes(), random.Random(0)
    end = read_header(tmp_path / "whole.gguf").weights_at
    for _ in range(150):
        at = rng.choice((rng.randrange(end), rng.randrange(1000), rng.randrange(end - 1600, end)))  # tensors are last
        gone, new = rng.choice(
            [
                (1, bytes([rng.randrange(256)])), (rng.randint(1, 16), b""), (0, rng.randbytes(rng.randint(1, 9))),
                (8, struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)))),
                (4, struct.pack("<I", rng.choice((0, 1, 8, 9, 30, 2**32 - 1)))),
            ]
        )  # fmt: skip
        (tmp_path / "a.gguf").write_bytes(whole[:at] + new + whole[at + gone :])
        with contextlib.suppress(SlipstreamError):
            run(tmp_path / "a.gguf")
