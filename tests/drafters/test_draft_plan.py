"""What a `draft` argument means: names, checkpoints, objects, pairs and lists, in Python and on the command line."""

from pathlib import Path

import pytest
from torch import nn

from slipstream import LLM, zoo
from slipstream.checkpoints.checkpoint import read_json
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.cli.loading import load
from slipstream.cli.options import ModelOptions
from slipstream.drafters.draft_plan import DraftPlan, find_role, names_of, parse_draft
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.errors import CheckpointError, PairError, ParameterError
from slipstream.heads.eagle_format import save_eagle
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.tuning import write_configurations
from slipstream.targets.decoder import Decoder
from tests.heads.tiny_heads import config as eagle_config, head as eagle_head
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import OTHER_TEXTS, Tiny, make_model, make_tokenizer, random_llama

V = 6


@pytest.fixture
def llm() -> LLM:
    return LLM(ToyTarget(V, seed=1), draft_tokens=4)


@pytest.fixture
def head(tiny: Tiny, tmp_path: Path) -> Path:
    """An EAGLE-3 head, never trained, that fits the tiny target."""
    target = read_json(tiny.target / "config.json")
    width = target["hidden_size"]
    save_eagle(eagle_head(eagle_config(3, vocab=target["vocab_size"], width=width, target=width)), tmp_path / "head")
    return tmp_path / "head"


def drafter_names(llm: LLM) -> list[str]:
    return [member.name for member in getattr(llm.drafter, "members", [llm.drafter])]


class TestOnTheCommandLine:
    @pytest.mark.parametrize(
        ("names", "draft", "expected"),
        [
            (("none",), "d", (None, {})), (("ngram",), "d", ("ngram", {})), (("model",), "d", ("d", {})),
            (("layerskip",), "embedded", ("layerskip", {})), (("eagle3",), "d", ("eagle3", {"head": "d"})),
            (("medusa",), None, ("medusa", {})), (("eagle3",), "embedded", ("eagle3", {})),
            (("hybrid",), "embedded", ("hybrid", {"model": "embedded"})),
            (("suffix", "model"), "d", (["suffix", "d"], {})),
            (("suffix", "eagle3"), "embedded", (["suffix", "eagle3"], {})),
            (("suffix", "eagle3"), "d", (["suffix", ("eagle3", {"head": "d"})], {})),
            (("none", "ngram"), None, ([None, "ngram"], {})),
        ],
    )  # fmt: skip
    def test_each_named_drafter_gets_the_checkpoint_that_it_reads(self, names, draft, expected) -> None:
        assert parse_draft(names, draft) == expected

    def test_without_a_name_a_model_drafts_a_head_drafts_after_a_lookup_and_else_a_lookup(self, tiny, head):
        assert parse_draft((), None) == ("suffix", {})
        target = str(tiny.target)
        for draft, drafter in ((tiny.draft, "model"), (head, "hybrid")):
            models = ModelOptions(target=target, draft=str(draft), executor="torch")
            plan, _ = models.speculation
            llm = load(models, quiet=True)
            assert drafter_names(llm) == {"model": ["model"], "hybrid": ["suffix", "eagle3"]}[drafter]
            read = [len(each) for each in plan.ready(None, LoadSettings(role="draft")).loads[:2]]
            assert read == ([1, 0] if draft is tiny.draft else [0, 1])  # a model, a head

    def test_a_draft_model_that_is_needed_and_not_named_is_refused(self) -> None:
        for names in (("model",), ("suffix", "model")):
            with pytest.raises(ParameterError, match="'model' needs a draft model"):
                parse_draft(names, None)

    def test_names_are_checked_one_by_one(self) -> None:
        assert names_of("suffix,eagle3") == ("suffix", "eagle3")
        with pytest.raises(ParameterError, match="did you mean 'ngram'"):
            names_of("suffix,n-gram")

    def test_embedded_heads_belong_to_the_embedded_target_alone(self, tiny: Tiny) -> None:
        models = ModelOptions(target=str(tiny.target), drafter="eagle3", draft="embedded", executor="torch")
        with pytest.raises(ParameterError, match="brings no eagle3 head for"):
            load(models, quiet=True)

    @pytest.mark.parametrize(
        ("names", "members"),
        [("eagle3", ["eagle3"]), ("model", ["eagle3"]), ("suffix,eagle3", ["suffix", "eagle3"])],
    )
    def test_a_head_drafts_under_its_name_as_the_draft_model_and_as_a_member(self, tiny, head, names, members):
        models = ModelOptions(target=str(tiny.target), drafter=names, draft=str(head), executor="torch")
        assert drafter_names(load(models, quiet=True)) == members


class TestInPython:
    def test_nothing_is_plain_decoding(self, llm: LLM) -> None:
        assert isinstance(llm.drafter, NoDrafter)
        llm.use("none")
        assert isinstance(llm.drafter, NoDrafter)

    def test_a_name_takes_options_and_an_object_is_used_as_it_is(self, llm: LLM) -> None:
        llm.use("ngram", max_ngram=2)
        assert llm.drafter.config == NgramConfig(max_ngram=2)
        ngram = NgramDrafter(NgramConfig())
        llm.use(ngram)
        assert llm.drafter is ngram

    def test_a_list_is_a_stack_and_a_pair_a_drafter_each_with_options(self, llm: LLM) -> None:
        llm.use([("ngram", {"max_ngram": 2}), "suffix", ToyTarget(V, seed=2)], min_match=3)
        stack = llm.drafter
        assert isinstance(stack, HybridDrafter)
        assert [member.name for member in stack.members] == ["ngram", "suffix", "model"]
        assert (stack.config.min_match, stack.members[0].config.max_ngram) == (3, 2)  # type: ignore[attr-defined]
        for members in (["ngram", ("suffix", {})], "ngram,suffix"):
            llm.use("hybrid", members=members, min_match=3)
            assert drafter_names(llm) == ["ngram", "suffix"]
            assert llm.drafter.config.min_match == 3
        llm.use(("ngram", {"max_ngram": 2, "min_ngram": 2}), max_ngram=3)
        assert (llm.drafter.config.max_ngram, llm.drafter.config.min_ngram) == (3, 2)

    def test_a_model_may_be_a_target_a_path_or_a_loaded_model(self, tiny: Tiny) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(tiny.draft)
        for draft, options in (
            (tiny.draft, {}), (loaded, {}), ("model", {"model": tiny.draft}), ("model", {"model": loaded}),
            ("model", {"model": ToyTarget(320)}),
        ):  # fmt: skip
            llm = LLM(tiny.target, draft, executor="torch", draft_options=options, draft_tokens=4)
            assert llm.drafter.name == "model"

    @pytest.mark.parametrize("given", ["itself", "option", "member"])
    def test_a_model_in_memory_with_another_number_of_ids_is_refused_where_it_is_given(self, llm, given):
        other = ToyTarget(2 * V)
        drafts = {"itself": (other, {}), "option": ("model", {"model": other}), "member": (["suffix", other], {})}
        draft, options = drafts[given]
        with pytest.raises(PairError, match=f"the target has {V} logits, the draft model {2 * V}"):
            llm.use(draft, **options)

    def test_a_loaded_transformers_model_with_another_number_of_ids_is_refused(self, tiny: Tiny) -> None:
        with pytest.raises(PairError, match="the target has 320 logits, the draft model 64"):
            LLM(tiny.target, random_llama(vocab_size=64), executor="torch", device="cpu")

    def test_loaded_targets_are_compared_by_the_tokens_of_their_checkpoints(self, tiny: Tiny, tmp_path: Path) -> None:
        padded, other = tmp_path / "padded", tmp_path / "other"
        make_model(padded, vocab_size=448)
        make_tokenizer(padded)
        make_model(other)
        make_tokenizer(other, texts=OTHER_TEXTS)
        target = Decoder.load(tiny.target, executor="torch")
        assert LLM(target, Decoder.load(padded, executor="torch")).drafter.name == "model"
        with pytest.raises(PairError, match="common ids map to different tokens"):
            LLM(target, Decoder.load(other, executor="torch"))

    def test_embedded_is_the_shipped_head_as_the_option_of_a_drafter_that_reads_one(self) -> None:
        llm = LLM("embedded", "eagle3", draft_options={"head": "embedded"}, executor="torch", draft_tokens=4)
        assert llm.drafter.name == "eagle3"
        llm.use(["suffix", ("eagle3", {"head": "embedded"})])
        assert drafter_names(llm) == ["suffix", "eagle3"]

    def test_an_incomplete_drafter_object_is_refused_with_what_it_lacks(self, llm: LLM) -> None:
        class Half:
            name = "half"

            def propose(self, seqs, budgets):
                return None

        with pytest.raises(ParameterError, match="of the class 'Half' lacks observe, release, traits"):
            llm.use(Half())

    @pytest.mark.parametrize(
        ("thing", "error", "says"),
        [
            *(
                (thing, ParameterError, "is not a model")
                for thing in (42, object(), {"model": "d"}, [], nn.Linear(2, 2))
            ),
            ("model", ParameterError, "'model' needs a draft model"),
            ("no/such/draft", CheckpointError, "no/such/draft"),
        ],
    )
    def test_a_name_that_needs_a_model_a_missing_path_and_anything_else_are_refused(self, llm, thing, error, says):
        with pytest.raises(error, match=says):
            llm.use(thing)


def test_every_checkpoint_to_be_read_is_known_in_advance() -> None:
    """Results record which files a draft model or head was read from."""
    assert DraftPlan.of("d", {}).checkpoints == ["d"]
    assert DraftPlan.of("ngram", {"max_ngram": 2}).checkpoints == []
    assert DraftPlan.of("eagle3", {"head": "h"}).checkpoints == ["h"]
    assert DraftPlan.of(["suffix", "d", ("eagle3", {"head": "h"}), None, NoDrafter()], {}).checkpoints == ["d", "h"]
    assert DraftPlan.of("hybrid", {"model": ToyTarget(V)}).checkpoints == []


def test_embedded_is_replaced_by_the_real_checkpoint_in_settings_for_other_programs() -> None:
    assert find_role("suffix,model") == "draft"
    assert find_role("suffix,eagle3") == "eagle3"
    for name, folder in (("eagle3", "eagle3"), ("model", "draft")):
        settings = write_configurations(DrafterChoice(name, 4, draft="embedded"))
        assert settings.vllm.values["speculative_config"]["model"] == str(zoo.HERE / "models" / folder)
        assert settings.slipstream["draft"] == "embedded"
