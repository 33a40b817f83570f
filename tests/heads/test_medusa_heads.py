"""Medusa heads: what they compute, on both executors, and their checkpoints."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from slipstream.backends.native.native_heads import NativeMedusa
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.target import HeadHost
from slipstream.errors import CheckpointError, ConfigError, PairError, ParameterError
from slipstream.heads.medusa_format import fit, load_medusa, save_medusa
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads, MedusaRuntime
from slipstream.heads.recognition import recognise
from tests.heads.dense_eagle import Damage, assert_refused
from tests.heads.tiny_heads import head_host, tiny_heads
from tests.tiny_checkpoints import rewrite

KINDS = {
    "plain": {}, "two blocks": {"layers": 2}, "no bias": {"bias": False, "layers": 2},
    "borrowed lm_head": {"own_lm_head": False}, "truncated": {"draft_vocab": 6},
    "truncated and borrowed": {"draft_vocab": 6, "own_lm_head": False, "layers": 2},
}  # fmt: skip


@pytest.fixture(params=KINDS)
def heads(request: pytest.FixtureRequest) -> MedusaHeads:
    return tiny_heads(**KINDS[request.param])


def host(hidden: int = 8, vocab: int = 11, dtype: torch.dtype = torch.float64) -> HeadHost:
    return head_host(hidden, 2, vocab, dtype, torch.arange(vocab * hidden, dtype=dtype).reshape(vocab, hidden) / 50)


def by_hand(heads: MedusaHeads, hidden: torch.Tensor) -> torch.Tensor:
    """Head by head, as the reference implementation runs them: [M, d] -> [M, K, draft_vocab]."""
    c, rows = heads.config, []
    for k in range(c.heads):
        x = hidden
        for layer in range(c.layers):
            bias = None if heads.biases is None else heads.biases[layer, k]
            x = x + F.silu(F.linear(x, heads.blocks[layer, k], bias))
        rows.append(F.linear(x, heads.lm_head if heads.lm_heads is None else heads.lm_heads[k]))
    return torch.stack(rows, 1)


def test_all_heads_at_once_are_each_head_by_itself(heads: MedusaHeads) -> None:
    hidden = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(heads(hidden), by_hand(heads, hidden), rtol=1e-12, atol=1e-12)
    assert heads(hidden).shape == (4, heads.config.heads, heads.config.width)
    batch = hidden.reshape(2, 2, 8)  # the shape of training, [B, T, d]
    torch.testing.assert_close(heads(batch).flatten(0, 1), heads(hidden), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [[1, 1], [3, 1, 3], [80, 2]])
def test_the_native_backend_computes_the_same(heads: MedusaHeads, rows: list[int]) -> None:
    there: MedusaRuntime = NativeMedusa(heads)
    for n in rows:  # memory is reused, and grows
        hidden = torch.randn(n, 8, dtype=torch.float64)
        torch.testing.assert_close(there(hidden).double(), heads(hidden), rtol=1e-4, atol=1e-4)
    assert there.config is heads.config


@pytest.mark.parametrize("quantize", [None, "w8a16", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_is_the_same_bit_for_bit_for_any_batch_and_close_to_the_exact_one(heads, quantize, dtype):
    rounded = heads.to(dtype).float()
    quantised = LoadSettings(quantize=quantize, role="draft").weight_format
    one, several = (NativeMedusa(rounded, threads, quantised) for threads in (1, 3))
    several._workspace._small = False
    hidden = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([one(hidden[i : i + 1]).clone() for i in range(40)])
    for count in (2, 13, 40):
        assert torch.equal(several(hidden[:count]), alone[:count])
    error = (alone - rounded(hidden)).abs().max() / rounded(hidden).abs().max()
    assert error < (1e-5 if quantize is None else 0.1)


def test_new_heads_propose_the_targets_next_token_and_without_an_lm_head_are_refused() -> None:
    lm_head, hidden = torch.randn(11, 8), torch.randn(3, 8)
    for own in (True, False):
        for ids in (None, torch.tensor([1, 4, 9])):
            medusa = MedusaHeads(MedusaConfig(2, 1, 8, 11, draft_vocab=None if ids is None else 3, own_lm_head=own))
            if ids is not None:
                medusa.select_vocabulary(ids)
            medusa.start_from(lm_head)
            said = hidden @ (lm_head if ids is None else lm_head[ids]).T
            torch.testing.assert_close(medusa(hidden), said[:, None].expand(-1, 2, -1))
    with pytest.raises(PairError, match="no lm_head"):
        MedusaHeads(MedusaConfig(2, 1, 8, 11, own_lm_head=False))(torch.randn(1, 8))


def in_blocks(name: str, layers: int) -> str:
    """The name of a tensor in the layout "blocks"."""
    name = re.sub(rf"^(\d+)\.{layers}\.", r"lm_heads.\1.", name)
    return re.sub(r"^(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name)


@pytest.mark.parametrize("layout", ["medusa", "blocks"])
def test_what_is_written_is_read_back(heads: MedusaHeads, layout: str, tmp_path: Path) -> None:
    heads.config = replace(heads.config, accuracies=((0.5, 0.25), (0.4, 0.1), (0.3, 0.0)))
    heads = heads.float()
    save_medusa(heads, tmp_path, torch.float32, target="some/target")
    file = tmp_path / "model.safetensors"
    if layout == "blocks":
        save_file({in_blocks(name, heads.config.layers): tensor for name, tensor in load_file(file).items()}, file)
    loaded = load_medusa(tmp_path)
    if not heads.config.own_lm_head:
        assert not loaded.has_lm_head
        loaded.borrow(heads.lm_head)
    assert loaded.config == heads.config
    assert torch.equal(loaded.token_map, heads.token_map)
    hidden = torch.randn(5, 8)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "some/target"
    assert recognise(Checkpoint.open(tmp_path)) == "medusa"


def test_the_files_have_the_standard_names_and_types(tmp_path: Path) -> None:
    medusa = tiny_heads(heads=2, layers=2)
    save_medusa(medusa, tmp_path / "a")
    names = {f"{h}.{n}.linear.{k}" for h in range(2) for n in range(2) for k in ("weight", "bias")}
    loaded = load_file(tmp_path / "a" / "model.safetensors")
    assert set(loaded) == names | {"0.2.weight", "1.2.weight"}
    assert {t.dtype for t in loaded.values()} == {torch.float16}
    save_medusa(tiny_heads(heads=1, layers=1, draft_vocab=4), tmp_path / "b")
    loaded = load_file(tmp_path / "b" / "model.safetensors")
    assert loaded["token_map"].dtype == torch.int64
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["truncated_vocab_size"], config["vocab_size"], config["medusa_num_heads"]) == (4, 11, 1)
    save_medusa(tiny_heads(own_lm_head=False), tmp_path / "c")
    assert not any(name.endswith(".1.weight") for name in load_file(tmp_path / "c" / "model.safetensors"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Heads on disk, in float32."""
    save_medusa(tiny_heads().float(), tmp_path, torch.float32)
    return tmp_path


def put(name: str, tensor: torch.Tensor) -> Damage:
    return lambda state: state.update({name: tensor})


def drop(*names: str) -> Damage:
    return lambda state: [state.pop(name) for name in names]


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_names_may_have_the_usual_prefixes(prefix: str, folder: Path) -> None:
    rewrite(folder, lambda s: [s.update({prefix + name: s.pop(name)}) for name in list(s)])
    (folder / "config.json").write_text("{}")  # sizes are taken from the tensors
    loaded, hidden = load_medusa(folder), torch.randn(2, 8)
    assert loaded.config == tiny_heads().config
    torch.testing.assert_close(loaded(hidden), tiny_heads().float()(hidden))
    assert recognise(Checkpoint.open(folder)) == "medusa"


def test_more_heads_than_the_config_names_are_used_and_reported(tmp_path, caplog):
    """Published checkpoints name two heads and hold five."""
    save_medusa(tiny_heads(heads=5), tmp_path)
    rewrite(tmp_path, medusa_num_heads=2)
    assert load_medusa(tmp_path).config.heads == 5
    assert "says 2 heads, the weights have 5" in caplog.text


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_a_copy_of_the_targets_lm_head_in_the_file_is_used(name: str, tmp_path: Path) -> None:
    medusa, whole = tiny_heads(own_lm_head=False, draft_vocab=6), torch.randn(11, 8)
    save_medusa(medusa, tmp_path)
    for rows in (whole, whole[medusa.token_map]):  # both exist in published checkpoints
        rewrite(tmp_path, put(name, rows))
        loaded = load_medusa(tmp_path)
        assert loaded.has_lm_head
        assert torch.equal(loaded.lm_head, whole[medusa.token_map])


def test_a_full_lm_head_with_a_token_map_is_cut_to_its_rows(tmp_path: Path) -> None:
    save_medusa(tiny_heads(draft_vocab=6), tmp_path)
    whole = torch.randn(11, 8)
    rewrite(tmp_path, lambda s: s.update({f"{h}.1.weight": whole.clone() for h in range(3)}))
    loaded = load_medusa(tmp_path)
    assert torch.equal(loaded.lm_heads[1], whole[loaded.token_map])  # type: ignore[index]


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (drop("1.0.linear.weight"), CheckpointError, r"lacks the tensors 1\.0\.linear\.weight"),
        (drop("2.0.linear.bias", "0.1.weight"), CheckpointError, r"lacks the tensors 0\.1\.weight, 2\.0\.linear\.bias"),
        (put("3.5.linear.weight", torch.zeros(8, 8)), CheckpointError, r"lacks .* and \d+ more"),
        (put("model.layers.0.up", torch.zeros(2)), CheckpointError, r"do not have: model\.layers\.0\.up"),
        (put("1.0.linear.weight", torch.zeros(8, 7)), CheckpointError, r"\(8, 7\), but must have \(8, 8\)"),
        (put("1.0.linear.weight", torch.full((8, 8), torch.nan)), CheckpointError, "NaN"),
        (put("0.1.weight", torch.zeros(10, 8)), ConfigError, "10 rows, but the vocabulary has 11"),
        (put("token_map", torch.tensor([0, 1, 1, 2])), ConfigError, "4"),
        ({"hidden_size": 16}, ConfigError, "says hidden_size 16, but the tensors have 8"),
        ({"medusa_num_layers": 2}, ConfigError, "says medusa_num_layers 2, but the tensors have 1"),
        ({"medusa_num_heads": 4}, CheckpointError, r"lacks the tensors 3\.0\.linear\.bias"),
        ({"medusa_num_heads": "many"}, ConfigError, "'many'"),
        ({"truncated_vocab_size": 5}, ConfigError, "says truncated_vocab_size 5, but the tensors have 11"),
        ({"medusa_head_accuracies": [[0.5]]}, ConfigError, "1 rows, but there are 3 heads"),
        ({"medusa_head_accuracies": [[0.5, 0.7]] * 3}, ConfigError, "is 1.2, but must be at most 1"),
        ({"medusa_head_accuracies": [["x"]] * 3}, ConfigError, "not a table of numbers"),
        ({"medusa_head_accuracies": 3}, ConfigError, "not a table of numbers"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(damage, error, says, folder):
    assert_refused(folder, damage, load_medusa, error, says)


@pytest.mark.parametrize("ids", [[0, 1, 1, 2, 3, 4], [0, 1, 2, 3, 4, 11], [-1, 0, 1, 2, 3, 4]])
def test_an_invalid_token_map_is_refused(ids: list[int], tmp_path: Path) -> None:
    save_medusa(tiny_heads(draft_vocab=6), tmp_path)
    assert_refused(tmp_path, put("token_map", torch.tensor(ids)), load_medusa, CheckpointError, "token_map")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x02}.")
    assert recognise(Checkpoint.open(tmp_path)) == "medusa"
    with pytest.raises(CheckpointError, match="pickle"):
        load_medusa(tmp_path)


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"token_map": torch.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no residual block"):
        load_medusa(tmp_path)


def test_heads_take_the_dtype_and_the_lm_head_of_the_target() -> None:
    lender = host(dtype=torch.float32)
    medusa = MedusaHeads(MedusaConfig(2, 1, 8, 11, own_lm_head=False))
    fitted = fit(medusa, lender)
    assert fitted.dtype == torch.float32
    assert torch.equal(fitted.lm_head, lender.lm_head())
    assert fit(tiny_heads(), host()).dtype == torch.float64


@pytest.mark.parametrize("own", [True, False])
def test_a_vocabulary_padded_to_more_ids_than_the_targets_is_cut(own: bool) -> None:
    """The heads know 200 ids, the target 198: the same tokens, padded."""
    medusa = tiny_heads(vocab=200, own_lm_head=own)
    fitted = fit(medusa, host(vocab=198))
    assert fitted.token_map.tolist() == list(range(198))
    hidden = torch.randn(2, 8, dtype=torch.float64)
    torch.testing.assert_close(fitted(hidden), medusa(hidden)[..., :198])


def test_a_vocabulary_smaller_than_the_targets_uses_its_rows() -> None:
    medusa = MedusaHeads(MedusaConfig(2, 1, 8, 198, own_lm_head=False))
    lender = host(vocab=200)
    assert torch.equal(fit(medusa, lender).lm_head, lender.lm_head()[:198])


@pytest.mark.parametrize(
    "config",
    [{"heads": 0}, {"layers": 0}, {"draft_vocab": 12}, {"accuracies": ((0.5,),)}, {"accuracies": ((0.9, 0.2),) * 3}],
)
def test_impossible_heads_are_refused(config: dict) -> None:
    with pytest.raises((ParameterError, ConfigError)):
        MedusaConfig(**{"heads": 3, "layers": 1, "hidden_size": 8, "vocab_size": 11} | config)
