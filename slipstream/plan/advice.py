"""What to do in which situation, with the command that does it."""

from dataclasses import dataclass

from slipstream.core.params import Strict


@dataclass(frozen=True)
class Advice(Strict):
    """A recommendation for a situation, its reason, and its commands. Words in capitals are placeholders."""

    situation: str
    recommendation: str
    why: str
    commands: tuple[str, ...]


ADVICE = (
    Advice(
        "single GPU, latency matters",
        "Speculate with a draft model of the same family",
        "At batch 1 decoding is memory-bound, so verifying a few draft tokens costs almost nothing; a draft model "
        "below a tenth of the target's size with 70 % acceptance gives about 2x",
        (
            "slipstream simulate --pairs",
            "slipstream info TARGET DRAFT",
            "slipstream bench -m TARGET -md DRAFT --drafter model",
            "slipstream generate PROMPT -m TARGET -md DRAFT -k 4",
        ),
    ),
    Advice(
        "multi-GPU production server",
        "vLLM with speculative decoding, and a draft length planned for your load",
        "Speculation lowers latency while the batch is small, and lowers throughput once decoding is compute-bound: "
        "plan first, then let the server switch it off above that batch size",
        (
            "slipstream simulate --hardware h100 -m Llama-3.1-70B -md Llama-3.2-3B --latency-ms 30 --users 1000",
            "vllm serve TARGET --tensor-parallel-size 4 --speculative-config "
            '\'{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 4}\'',
        ),
    ),
    Advice(
        "no suitable draft model",
        "Draft heads on the target itself (EAGLE-3, Medusa); lookup drafters until a head is trained",
        "A head reads the target's hidden states, so it works with any vocabulary and a draft token is cheap; suffix "
        "and n-gram lookup need no training and save time if text repeats",
        (
            "slipstream generate PROMPT -m TARGET --drafter eagle3 -md HEAD",
            "slipstream generate PROMPT -m TARGET --drafter suffix",
        ),
    ),
    Advice(
        "CPU or Apple silicon",
        "Quantised weights first, then lookup or a very small draft model",
        "Smaller weights help most if memory is slow; verifying more tokens costs more here than on a GPU, so measure "
        "before you use long drafts. On Apple silicon: llama.cpp with GGUF Q4_K_M",
        (
            "slipstream generate PROMPT -m TARGET --quantize int8 --drafter ngram",
            "slipstream simulate --measure -m TARGET -md DRAFT",
            "llama-server -m TARGET-Q4_K_M.gguf --spec-type draft-simple --spec-draft-model DRAFT-Q4_K_M.gguf",
        ),
    ),
    Advice(
        "hosted API, no local model",
        "Prompt caching: put the constant part first; pass the expected answer if the API accepts one",
        "You cannot draft for a model that you do not run. Cached input was introduced at half price and is processed "
        "faster; OpenAI's `prediction` parameter is speculation on their side, for answers that mostly copy",
        (
            "curl https://api.openai.com/v1/chat/completions -H 'Authorization: Bearer KEY' -H 'Content-Type: "
            "application/json' -d @REQUEST.json | jq .usage.prompt_tokens_details.cached_tokens",
        ),
    ),
)
