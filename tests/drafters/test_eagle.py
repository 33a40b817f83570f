"""The EAGLE drafter: its draft tokens against a recomputation from the target's true features, always-right heads, its
q, its limits, and how it is made."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, SamplingParams, zoo
from slipstream.backends.native.native_heads import NativeEagle
from slipstream.backends.torch.torch_heads import TorchEagle
from slipstream.core.drafter import Budget
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.core.warp import distributions_after
from slipstream.drafters import eagle
from slipstream.drafters.eagle import EagleDraftConfig, EagleDrafter, make, make_eagle3
from slipstream.drafters.registry import make_drafter
from slipstream.errors import PairError, ParameterError
from slipstream.heads.eagle_format import lay_out_native, lay_out_speculators, load_eagle, save_eagle
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.recognition import write
from slipstream.targets.decoder import Decoder
from tests.drafters.conformance import Recorder
from tests.drafters.head_targets import PROMPTS, V, features, fitting_head, greedy_drafts, prefilled, tiny_decoder, toy
from tests.heads.as_vllm import AsVLLM
from tests.heads.dense_eagle import dense
from tests.heads.tiny_heads import PARALLEL, config, eagle_drafter, head, knowing_head
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

DEPENDENT = {"temperature": 1.3, "top_k": 4, "repetition_penalty": 1.6, "presence_penalty": 0.9, "seed": 5}
"""Sampling parameters: the distribution of each token depends on the draft tokens before it."""
WIDE = {"head_dim": 16}  # of the kernels
TWO = WIDE | {"layers": 2, "windows": (None, None)}
TAPPED = {"taps": (0, 1, 2)}
AS_VLLM: dict[str, dict[str, Any]] = {
    "3": {"decoder": WIDE, **TAPPED},
    "3, norm before residual": {"decoder": TWO | {"qk_norm": True}, **TAPPED, "norm_before_residual": True},
    "3, joined norm": {"decoder": WIDE, **TAPPED, "norm_before_fc": True, "norm_output": True},
    "3.1": {"decoder": WIDE, **TAPPED, "fc_norm": True, "norm_output": True},
    "parallel": {"decoder": WIDE, **TAPPED, "mask_token": 0, "depths": 8},
    "parallel, 3.1": {
        "decoder": TWO | {"qkv_bias": True, "o_bias": True}, **TAPPED, "mask_token": 4, "fc_norm": True,
        "norm_output": True, "own_embedding": True, "norm_before_residual": True,
    },
}  # fmt: skip


def logits_by_hand(eagle_head: EagleHead, target: Target, text: list[int], drafted: list[int]) -> Tensor:
    """The head's logits after a text and some draft tokens, everything recomputed: [draft_vocab]."""
    known = features(target, text, eagle_head.config.taps)[:-1]
    hidden = eagle_head.fuse(list(known.split(eagle_head.config.target_hidden, -1)))
    tokens = [*text[1:], *drafted]
    while True:
        n = len(hidden)
        after, x = dense(eagle_head, tokens[:n], hidden, torch.ones(n, n).tril().bool(), list(range(n)))
        if n == len(tokens):
            return eagle_head.logits(x[-1])
        hidden = torch.cat((hidden, after[-1:]))


def ids_of(eagle_head: EagleHead) -> list[int]:
    return list(range(V)) if eagle_head.config.version == 1 else eagle_head.target_ids.tolist()


def q_by_hand(
    eagle_head: EagleHead, target: Target, text: list[int], drafted: list[int], temperature: float, top_k: int
) -> Tensor:
    """The head's distribution after a text and some draft tokens, over the target's ids: [V]."""
    logits = logits_by_hand(eagle_head, target, text, drafted)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probs = torch.zeros(V, dtype=torch.float64)
    probs[ids_of(eagle_head)] = torch.softmax(logits / temperature, -1)
    return probs


class TestDraftTokens:
    @pytest.mark.parametrize("version", [1, 3])
    def test_greedy_chains_are_what_true_features_give_at_every_step(self, version: int) -> None:
        """A wrong token shift, a stale state in the cache, a wrong norm or position: each fails here."""
        drafter, other = eagle_drafter(V, version), toy()
        eagle_head = drafter.runtime.head
        for text, drafted in greedy_drafts(drafter, 3, steps=4, max_tokens=14):
            for i, token in enumerate(drafted):
                best = int(logits_by_hand(eagle_head, other, text, drafted[:i]).argmax())
                assert token == ids_of(eagle_head)[best]

    @pytest.mark.parametrize("backend", ["torch", "native"])
    @pytest.mark.parametrize("to", ["eagle3", "speculators"])
    @pytest.mark.parametrize("kind", AS_VLLM)
    def test_greedy_chains_are_those_that_vllm_would_draft(self, tmp_path, kind, to, backend):
        """EAGLE-3, -3.1 and P-EAGLE: `AsVLLM` reads the same files, and computes each draft anew."""
        embedding = torch.randn(V, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
        form = config(3, V, width=5, target=V, draft_vocab=V - 1, **AS_VLLM[kind])
        layout = (
            lay_out_native(head(form, 3)) if to == "eagle3" else lay_out_speculators(head(form, 3), "some/target", ())
        )
        write(tmp_path, *layout, torch.float64)
        loaded = load_eagle(tmp_path).borrow(None if form.own_embedding else embedding)
        drafter = EagleDrafter(NativeEagle(loaded) if backend == "native" else TorchEagle(loaded), V)
        recorder, target, other = Recorder(drafter, V), toy(), AsVLLM(tmp_path, embedding)
        seqs = prefilled(recorder, PROMPTS, target, max_tokens=30)
        for index in range(1, 6):
            step(seqs, target, recorder, RULES["rejection"], index)
            for seq in seqs:
                text, drafted, _, _ = recorder.proposed[seq.id][-1]
                assert drafted == other.draft(text, features(toy(), text, form.taps)[:-1], index)[0]
                assert len(drafted) == index

    @pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 3}, DEPENDENT], ids=["warped", "dependent"])
    def test_q_of_a_parallel_head_is_what_each_place_gives(self, params: dict[str, float]) -> None:
        target, drafter = toy(), eagle_drafter(V, 3, PARALLEL)
        recorder = Recorder(drafter, V)
        seqs = prefilled(recorder, PROMPTS, target, **params)
        step(seqs, target, recorder, RULES["rejection"], 4)
        eagle_head, calls = drafter.runtime.head, 4
        for prompt, seq in zip(PROMPTS, seqs, strict=True):
            text, drafted, _, q = recorder.proposed[seq.id][-1]
            known = features(toy(), text, eagle_head.config.taps)[:-1]
            taps = torch.cat((known, eagle_head.mask_hidden.view(1, -1).expand(calls - 1, -1)))
            n = len(taps)
            mask = [eagle_head.config.mask_token] * (calls - 1)
            _, x = dense(
                eagle_head, [*text[1:], *mask], eagle_head.fuse(list(taps.split(V, -1))),
                torch.ones(n, n).tril().bool(), list(range(n)),
            )  # fmt: skip
            for j, token in enumerate(drafted):
                logits = torch.full((V,), -torch.inf, dtype=torch.float64)
                logits[eagle_head.target_ids] = eagle_head.logits(x[n - calls + j])
                before = Sequence(prompt, seq.params)
                before.tokens += text[len(prompt) :]
                wanted = distributions_after(logits[None], [before], [drafted[:j]])[0]
                torch.testing.assert_close(torch.tensor(q[j], dtype=torch.float64), wanted)
                assert wanted[token] > 0

    def test_a_parallel_head_drafts_in_one_pass_and_not_beyond_its_training(self, monkeypatch):
        for params in ({}, {"temperature": 0.8, "seed": 1}, DEPENDENT):
            drafter = eagle_drafter(V, 3, PARALLEL)
            (seq,) = prefilled(drafter, [[1, 2, 3]], **params)
            calls: list[int] = []
            extend = drafter.runtime.extend
            monkeypatch.setattr(drafter.runtime, "extend", lambda *a, e=extend, c=calls: c.append(1) or e(*a))
            assert len(drafter.propose([seq], [Budget(9)])) == 6
            assert calls == [1]
            assert drafter.traits.longest == 6
        with pytest.raises(ParameterError, match=r"shape is 'tree', but the head is a parallel head"):
            eagle_drafter(V, 3, PARALLEL, shape="tree")

    def test_a_topk_tree_holds_the_most_probable_of_all_paths(self) -> None:
        """If the tree is wide enough, growing it level by level finds the same paths as an exhaustive search."""
        target, other, nodes = toy(), toy(), 9
        drafter = eagle_drafter(V, 3, shape="tree", width=25, nodes=nodes)
        eagle_head = drafter.runtime.head
        recorder = Recorder(drafter, V)
        (seq,) = prefilled(recorder, [[1, 2, 3, 0]], target, max_tokens=14)
        for _ in range(3):
            step([seq], target, recorder, RULES["rejection"], 3)
        text, drafted, parents, _ = recorder.proposed[seq.id][-1]
        paths = []
        for i in range(nodes):
            path = [i]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            paths.append(tuple(drafted[n] for n in path))
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        ids = ids_of(eagle_head)
        for path in [p for d in range(3) for p in itertools.product(ids, repeat=d)]:
            probs = torch.softmax(logits_by_hand(eagle_head, other, text, list(path)), -1).tolist()
            chances |= {(*path, token): chances[path] * p for token, p in zip(ids, probs, strict=True)}
        del chances[()]
        assert set(paths) == set(sorted(chances, key=lambda p: -chances[p])[:nodes])


class TestAlwaysRight:
    """A head whose distributions are the target's own."""

    @pytest.mark.parametrize("k", range(1, 9))
    @pytest.mark.parametrize("runtime", [TorchEagle, NativeEagle], ids=["torch", "native"])
    def test_every_greedy_draft_token_is_accepted_at_every_draft_length(self, runtime: Any, k: int) -> None:
        target = ToyTarget(V, order=1, seed=3)
        llm = LLM(target, EagleDrafter(runtime(knowing_head(target, 1e-9, head_dim=16)), V), draft_tokens=k)
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=33))
        assert [c.token_ids for c in done] == [Oracle(target).greedy(p, 33) for p in PROMPTS]
        assert all(c.stats.acceptance_rate == 1 and c.stats.drafter_faults == 0 for c in done)
        assert done[0].stats.steps == 1 + -(-32 // (k + 1))  # prefill, then k + 1 tokens a step

    @pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
    @pytest.mark.parametrize(
        "options",
        [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "presence_penalty": 0.5}],
        ids=str,
    )
    def test_every_sampled_draft_token_is_accepted_under_every_rule(self, rule: str, options: dict[str, float]) -> None:
        """Plain softmaxes in one call, other distributions token by token; under `coupled` both use the target's
        noise."""
        target = ToyTarget(V, order=1, seed=3)
        llm = LLM(target, EagleDrafter(TorchEagle(knowing_head(target)), V), draft_tokens=4, rule=rule)
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=33, seed=5, **options))
        assert all(c.stats.acceptance_rate == 1 and c.stats.drafter_faults == 0 for c in done)

    @pytest.mark.parametrize("rule", ["rejection", "coupled"])
    def test_the_first_of_sampled_siblings_is_always_accepted(self, rule: str) -> None:
        target = ToyTarget(V, order=1, seed=3)
        drafter = EagleDrafter(TorchEagle(knowing_head(target)), V, EagleDraftConfig(shape="tree", width=3, nodes=9))
        llm = LLM(target, drafter, draft_tokens=3, rule=rule)
        for c in llm.generate(PROMPTS, SamplingParams(max_tokens=33, temperature=1.0, seed=5)):
            assert c.stats.accepted_at[1] == c.stats.drafted_at[1] > 0
            assert c.stats.drafter_faults == 0


class TestDistributions:
    def test_q_of_a_chain_is_the_heads_distribution_at_every_draft_token(self) -> None:
        for temperature, top_k in ((0.7, 0), (1.5, 2)):
            drafter = eagle_drafter(V, 3)
            (seq,) = prefilled(drafter, PROMPTS[2:], seed=4, temperature=temperature, top_k=top_k)
            draft = drafter.propose([seq], [Budget(4)])
            for i in range(4):
                q = q_by_hand(drafter.runtime.head, toy(), seq.tokens, draft.ids[:i], temperature, top_k)
                torch.testing.assert_close(draft.q[i], q)

    @pytest.mark.parametrize("top_k", [0, 3])
    def test_q_of_a_sampled_sibling_excludes_the_earlier_siblings(self, top_k: int) -> None:
        for seed in range(5):
            drafter = eagle_drafter(V, 3, shape="tree", width=3, nodes=8)
            (seq,) = prefilled(drafter, PROMPTS[2:], seed=seed, temperature=0.7, top_k=top_k)
            draft = drafter.propose([seq], [Budget(3)])
            assert max(draft.depths) == 3
            assert len(draft) == 8 or top_k
            for nodes in draft.children(0).values():
                path = draft.ancestors(0, draft.parents[nodes[0]])
                drafted = [draft.ids[i] for i in path]
                probs = q_by_hand(drafter.runtime.head, toy(), seq.tokens, drafted, 0.7, top_k)
                for node in nodes:
                    torch.testing.assert_close(draft.q[node], probs / probs.sum())
                    probs[draft.ids[node]] = 0

    def test_the_number_of_children_is_decided_before_they_are_sampled(self) -> None:
        """Fault F: a shape that depends on the tokens of the same level would prune siblings by their q."""
        shapes = set()
        for seed in range(40):
            drafter = eagle_drafter(V, 3, shape="tree", width=3, nodes=3)
            (seq,) = prefilled(drafter, PROMPTS[2:], seed=seed, temperature=1.0)
            seq.tokens[-1] = 1  # replaces what was sampled: the same text for every seed
            shapes.add(len(drafter.propose([seq], [Budget(1)])))
        assert len(shapes) == 1


class TestMaking:
    def test_a_head_of_the_other_version_runs_as_its_own_version_with_one_warning(self, tmp_path, caplog):
        save_eagle(fitting_head("eagle3"), tmp_path / "three", torch.float64)
        save_eagle(fitting_head("eagle"), tmp_path / "one", torch.float64)
        for asked, folder, kind in (("eagle", "three", "eagle3"), ("eagle3", "one", "eagle")):
            caplog.clear()
            assert make_drafter(asked, tiny_decoder(), head=tmp_path / folder).name == kind
            assert [kind in r.message and "it runs as" in r.message for r in caplog.records] == [True]
        caplog.clear()
        make(tiny_decoder(), head=tmp_path / "one")
        make_eagle3(tiny_decoder(), head=tmp_path / "three")
        assert not caplog.records

    def test_ids_that_the_target_lacks_are_never_drafted(self) -> None:
        """Vocabularies padded to different widths: the head's last id has no logit in the target."""
        target = tiny_decoder(vocab_size=400)
        eagle_head = head(config(3, 402, target=24, draft_vocab=402, own_embedding=True, taps=(1, 2, 4)))
        drafter = make_eagle3(target, head=eagle_head)
        assert drafter.runtime.ids.tolist() == list(range(400))

    def test_a_mask_token_that_the_target_lacks_is_refused(self) -> None:
        head_config = config(3, 402, width=48, target=48, draft_vocab=402, taps=(1, 2, 4), mask_token=401)
        with pytest.raises(PairError, match=r"EAGLE-3 head .* mask token 401, but the target has the ids 0\.\.399"):
            make_eagle3(tiny_decoder(vocab_size=400, hidden_size=48), head=head(head_config))

    def test_the_head_of_a_quantised_target_is_quantised_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtimes, real = list[Any](), eagle.backend_for_head
        monkeypatch.setattr(eagle, "backend_for_head", lambda *given: runtimes.append(real(*given)) or runtimes[-1])
        for quantize in (None, "w8a8"):
            target = Decoder.load(zoo.target_dir(), "native", quantize=quantize)
            make_eagle3(target)
            make_eagle3(target, quantize="none")
        assert [settings.quantize for _, settings in runtimes] == [None, None, "int8", None]
