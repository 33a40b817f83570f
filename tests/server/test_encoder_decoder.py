"""A server of an encoder-decoder: the prompt is a source."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream import LLM
from tests.server.hosting import Host, hosted, refused
from tests.targets.huggingface.encoder_decoders import make_encoder_decoder

SOURCES = ["def add(first, second):", "for name in"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Source -> greedy text of transformers; "" -> the folder of the model."""
    folder = tmp_path_factory.mktemp("t5")
    model = make_encoder_decoder(folder)
    tokenizer = LLM(folder, dtype="float64").tokenizer
    folders = {"": str(folder)}
    for source in SOURCES:
        out = model.double().generate(torch.tensor([tokenizer.encode(source)]), do_sample=False, max_new_tokens=8)
        folders[source] = tokenizer.decode(out[0, 1:].tolist(), skip_special_tokens=True)
    return folders


@pytest.fixture(scope="module")
def host(texts: dict[str, str]) -> Iterator[Host]:
    with hosted(LLM(Path(texts[""]), "suffix", dtype="float64", draft_tokens=3)) as host:
        yield host


def test_prompts_are_answered_with_log_probabilities_and_predictions(host: Host, texts: dict[str, str]) -> None:
    answer = host.post("/v1/completions", prompt=SOURCES, max_tokens=8, temperature=0).json()
    assert [choice["text"] for choice in answer["choices"]] == [texts[source] for source in SOURCES]
    parts = host.parts("/v1/completions", prompt=SOURCES[1], max_tokens=8, temperature=0)
    assert "".join(part["text"] for part in parts) == texts[SOURCES[1]]
    encode = host.service.tokenizer.encode
    assert answer["usage"]["prompt_tokens"] == sum(len(encode(source)) for source in SOURCES)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len({tuple(texts[source]) for source in SOURCES}) == 2
    given = {"prompt": SOURCES[0], "max_tokens": 8, "temperature": 0}
    [choice] = host.post("/v1/completions", **given, logprobs=3).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"][:3])
    predicted = host.post("/v1/completions", **given, prediction={"type": "content", "content": texts[SOURCES[0]]})
    assert predicted.json()["choices"][0]["text"] == texts[SOURCES[0]]


def test_what_does_not_fit_an_encoder_decoder_is_refused_by_name(host: Host) -> None:
    echoed = host.post("/v1/completions", prompt=SOURCES[0], max_tokens=3, echo=True)
    assert "the text of an encoder-decoder has no prompt in it" in refused(echoed, 400, "echo")
    chat = host.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert "no chat template" in refused(chat, 400, "messages")
