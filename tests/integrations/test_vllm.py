"""`integrations.vllm` without vLLM: its modules are stand-ins with what the plug-in uses of them, and a call sequence
of the real runner is replayed. `make test-vllm` runs the real one."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import ParameterError
from slipstream.integrations import vllm as plugin

RECORDING = Path(__file__).parent / "data" / "vllm_calls.json"
VOCAB, CONTEXT = 200_000, 512


class Log:
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def info(self, *args: Any) -> None:
        pass

    def error(self, text: str, exc_info: BaseException) -> None:
        self.errors.append(exc_info)


class Words:
    """A tokenizer of numbers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


class BaseRequest:
    """A request of vLLM's server: fields that it does not know are in `model_extra`."""

    def __init__(self, **fields: Any) -> None:
        self.vllm_xargs = fields.pop("vllm_xargs", None)
        self.model_extra = fields

    def to_sampling_params(self, most: int) -> tuple[int, Any]:
        return most, self.vllm_xargs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins of vLLM's modules. log: of the plug-in; runner: a class with `step`."""

    class GPUModelRunner:
        def __init__(self, config: Any) -> None:
            self.drafter = plugin.Proposer(config)
            self.drafter.load_model(object())
            self.requests: dict[str, Any] = {}
            self.input_batch: Any = None

        def propose_draft_token_ids(self, scheduler_output: Any, sampled: list[list[int]], *more: Any) -> Any:
            batch = self.input_batch
            return self.drafter.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None)

    stubs = SimpleNamespace(log=Log(), runner=GPUModelRunner, words=Words())
    stubs.chats, stubs.completions = type("Chats", (BaseRequest,), {}), type("Completions", (BaseRequest,), {})
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.logger": {"init_logger": lambda name: stubs.log},
        "vllm.tokenizers": {"cached_tokenizer_from_config": lambda model: stubs.words},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner},
        "vllm.v1.sample.rejection_sampler": {
            "apply_top_k_top_p": lambda logits, k, p: logits.max(),
            "expand_batch_to_tokens": lambda x, ends, count, old=0, new=0: x.new_empty(count),
        },
        "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": stubs.chats},
        "vllm.entrypoints.openai.completion.protocol": {"CompletionRequest": stubs.completions},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for path in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for key, value in members.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    return stubs


def config(most: int = 8, world: int = 1, hybrid: bool = False, device: str = "cpu", **settings: Any) -> Any:
    """A `VllmConfig`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: VOCAB, is_hybrid=hybrid),
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(world_size=world),
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        additional_config={"slipstream": {"lengths": "full", **settings}},
    )


def step(runner: Any, rows: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """One call of the runner. rows: id -> prompt, text, gained, rows, drafted, max_tokens, extra_args."""
    tokens = np.zeros((len(rows), CONTEXT), np.int32)
    for i, row in enumerate(rows.values()):
        tokens[i, : len(row["text"])] = row["text"]
    runner.input_batch = SimpleNamespace(
        req_ids=list(rows), token_ids_cpu=tokens,
        num_tokens_no_spec=np.array([len(row["text"]) for row in rows.values()], np.int32),
        num_prompt_tokens=np.array([row["prompt"] for row in rows.values()], np.int32),
    )  # fmt: skip
    runner.requests = {
        key: SimpleNamespace(
            sampling_params=SimpleNamespace(max_tokens=row.get("max_tokens"), extra_args=row.get("extra_args"))
        )
        for key, row in rows.items()
    }
    scheduled = SimpleNamespace(
        num_scheduled_tokens={key: row.get("rows", 1) for key, row in rows.items()},
        scheduled_spec_decode_tokens={key: row["drafted"] for key, row in rows.items() if row.get("drafted")},
    )
    sampled = [row["text"][len(row["text"]) - row.get("gained", 1) :] for row in rows.values()]
    drafts = runner.propose_draft_token_ids(scheduled, sampled, None)
    return dict(zip(rows, drafts, strict=True))


def begun(text: list[int], prompt: int, **more: Any) -> dict[str, Any]:
    """A row whose prompt was read in this step."""
    return {"text": text, "prompt": prompt, "rows": prompt, "gained": len(text) - prompt, **more}


def test_a_row_is_drafted_for_from_its_own_text(vllm: SimpleNamespace) -> None:
    runner = vllm.runner(config())
    drafts = step(runner, {"a": begun([1, 2, 3, 4, 5, 1, 2], 6), "b": begun([7, 8, 9, 7], 3)})
    assert drafts["a"][:3] == [3, 4, 5]
    assert drafts["b"][:2] == [8, 9]
    assert not vllm.log.errors


def test_a_prompt_that_is_still_read_gets_no_draft(vllm: SimpleNamespace) -> None:
    runner = vllm.runner(config())
    assert step(runner, {"a": begun([1, 2, 1, 2, 1], 9, gained=0, rows=5)}) == {"a": []}


@pytest.mark.parametrize("given", ["5 6 7 8", [5, 6, 7, 8]])
def test_a_prediction_is_read_as_text_or_as_ids(vllm: SimpleNamespace, given: Any) -> None:
    runner = vllm.runner(config())
    drafts = step(runner, {"a": begun([1, 2, 5], 2, extra_args={"prediction": given})})
    assert drafts["a"][:3] == [6, 7, 8]


@pytest.mark.parametrize("given", [[VOCAB], [-1], ["5"], {"a": 1}, 7, "no numbers"])
def test_a_prediction_that_cannot_be_read_is_ignored_and_logged_once(vllm: SimpleNamespace, given: Any) -> None:
    runner = vllm.runner(config())
    for key in "ab":
        drafts = step(runner, {key: begun([1, 2, 3, 1], 3, extra_args={"prediction": given})})
        assert drafts[key][:2] == [2, 3]
    assert len(vllm.log.errors) == 1


def test_a_draft_never_reaches_beyond_what_the_request_may_hold(vllm: SimpleNamespace) -> None:
    runner = vllm.runner(config())
    text = [1, 2, 3, 4, 5, 1]
    assert len(step(runner, {"a": begun(text, 5, max_tokens=4)})["a"]) == 2  # one of four is there, one is the bonus
    assert step(runner, {"b": begun(text, 5, max_tokens=1)}) == {"b": []}
    full = [1, 2, 3, 4] * (CONTEXT // 4)
    assert step(runner, {"c": begun(full, CONTEXT - 1)}) == {"c": []}


def test_a_fault_in_a_drafter_costs_its_drafts_and_is_logged_once(vllm, monkeypatch):
    runner = vllm.runner(config())
    rows = {"a": begun([1, 2, 3, 1], 3)}

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("planted")

    for _ in range(2):
        monkeypatch.setattr(runner.drafter._drafts.drafter, "propose", broken)
        assert step(runner, rows) == {"a": []}
    assert len(vllm.log.errors) == 1
    assert step(runner, rows)["a"][:2] == [2, 3]
    for _ in range(plugin.MOST_FAULTS):
        monkeypatch.setattr(runner.drafter._drafts.drafter, "propose", broken)
        step(runner, rows)
    monkeypatch.undo()
    assert step(runner, rows) == {"a": []}  # a fault that stays ends drafting


def test_a_step_without_drafts_does_not_reach_filters_that_fail_there(vllm: SimpleNamespace) -> None:
    vllm.runner(config())
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]
    assert sampler.apply_top_k_top_p(torch.empty(0, 5), None, None).shape == (0, 5)
    assert sampler.apply_top_k_top_p(torch.ones(2, 5), None, None) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_parameters_of_requests_are_spread_over_their_rows_without_triton(vllm, dtype):
    vllm.runner(config())
    spread = sys.modules["vllm.v1.sample.rejection_sampler"].expand_batch_to_tokens
    result = spread(torch.tensor([5, 0, 7, 8], dtype=dtype), torch.tensor([2, 3, 3, 6], dtype=torch.int32), 6, 0, 1)
    assert result.tolist() == [5, 5, 1, 8, 8, 8]
    assert result.dtype == dtype


@pytest.mark.parametrize("world", [1, 2])
def test_lengths_are_learned_unless_several_ranks_must_draft_alike(vllm: SimpleNamespace, world: int) -> None:
    runner = vllm.runner(config(world=world, lengths="learned"))
    assert runner.drafter._drafts.timed == (world == 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafter": "model"}, "does not run inside vLLM"), ({"drafter": "lookahead"}, "does not run inside vLLM"),
        ({"drafter": "sufix"}, "suffix"), ({"drafter": ["suffix", ["eagle3", {}]]}, "does not run inside vLLM"),
        ({"drafter": [["ngram", {"max_ngram": 0}], "suffix"]}, "max_ngram"), ({"options": {"nonsense": 1}}, "nonsense"),
        ({"length": "full"}, "length"), ({"lengths": "some"}, "lengths"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_honoured_are_refused(vllm, settings, words):
    with pytest.raises(ParameterError, match=words):
        plugin.Proposer(config(**settings))


def test_a_vllm_without_the_runner_is_refused_with_the_versions_that_have_it(vllm: SimpleNamespace) -> None:
    del vllm.runner.propose_draft_token_ids
    with pytest.raises(ParameterError, match=r"0\.33") as raised:
        plugin.Proposer(config())
    assert plugin.VERSIONS in str(raised.value)


@pytest.mark.parametrize(
    ("version", "hybrid", "device", "refused"),
    [("0.32.0", True, "cpu", True), ("0.29.1+cpu", True, "cpu", True), ("0.33.0", True, "cpu", False),
     ("0.32.0", True, "cuda", False), ("0.32.0", False, "cpu", False)],
)  # fmt: skip
def test_hybrid_models_are_refused_where_a_short_draft_would_end_the_engine(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, hybrid: bool, device: str, refused: bool
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    with pytest.raises(ParameterError, match="hybrid model on a CPU") if refused else nullcontext():
        plugin.Proposer(config(hybrid=hybrid, device=device))


def test_the_server_hands_predictions_on(vllm: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()  # twice in one process: each request is still read once
    for kind in (vllm.chats, vllm.completions):
        asked = kind(prediction={"type": "content", "content": [{"type": "text", "text": "as before"}]})
        assert asked.to_sampling_params(5) == (5, {"prediction": "as before"})
        given = kind(prediction={"type": "content", "content": "b"}, vllm_xargs={"prediction": "a", "other": 1})
        assert given.to_sampling_params(5)[1] == {"prediction": "a", "other": 1}
        assert kind().to_sampling_params(5) == (5, None)


@pytest.mark.parametrize("field", ["text", {"type": "content"}, {"type": "text", "content": "a"}, {"content": "a"},
                                   {"type": "content", "content": [{"type": "image_url"}]}, 5])  # fmt: skip
def test_a_malformed_prediction_is_refused(vllm: SimpleNamespace, field: Any) -> None:
    plugin.register()
    with pytest.raises(ValueError, match="prediction"):
        vllm.chats(prediction=field).to_sampling_params(5)


def test_calls_of_the_real_runner_give_the_recorded_drafts(vllm: SimpleNamespace) -> None:
    recorded = json.loads(RECORDING.read_text())
    runner = vllm.runner(config(most=recorded["most"]))
    texts: dict[str, list[int]] = {}
    for call in recorded["calls"]:
        rows = {}
        for row in call:
            text = texts.setdefault(row["id"], [])
            text += row["new"]
            rows[row["id"]] = {"text": text, **row}
        assert step(runner, rows) == {row["id"]: row["draft"] for row in call}
    assert not vllm.log.errors
