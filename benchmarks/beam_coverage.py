"""Measures how often a draft model predicts all beams of the next step, which decides whether speculation could save
steps of a beam search.

    python -m benchmarks.beam_coverage

The embedded target runs a beam search on its code prompts. In each step the draft model ranks the continuations of the
running beams, as the target does. A drafted step could be used only if all beams of the next step were drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream import LLM, BeamParams, zoo
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.engine.beams import Beams

PROMPTS, TOKENS, NODES = 8, 24, (1, 2, 4)
"""Number of prompts, most output tokens, and numbers of drafted continuations for each beam."""


def logits(llm: LLM, texts: list[list[int]]) -> Tensor:
    """Return the logits [B, V] after each text."""
    seqs = [Sequence(text) for text in texts]
    logits = llm.target.run(seqs, Draft.empty(len(seqs))).logits.clone()
    for seq in seqs:
        llm.target.release(seq.id)
    return logits


def main() -> None:
    target, draft = LLM("embedded"), LLM(zoo.draft_dir())
    for count in (2, 4):
        steps = foreseen = 0
        whole = dict.fromkeys(NODES, 0)
        for given in zoo.prompts("code")[:PROMPTS]:
            prompt = target.tokenizer.encode(given["prompt"])[-200:]
            params = BeamParams(beams=count, early_stopping="never", max_tokens=TOKENS)
            beams = Beams(params, target.target.capabilities.eos_ids, TOKENS)
            while not beams.done:
                running = beams.running
                texts = [[*prompt, *text.output] for text in running]
                logprobs = torch.tensor([[text.logprob] for text in running], dtype=torch.float64)
                drafted = torch.log_softmax(logits(draft, texts).double(), -1) + logprobs  # [R, V]
                beams.advance(logits(target, texts))
                wanted = {text.output for text in beams.running}
                if len(running) < count or not wanted:
                    continue
                best = drafted.flatten().topk(max(NODES) * count).indices.tolist()
                vocab = drafted.shape[1]
                ranked = [(*running[at // vocab].output, at % vocab) for at in best]
                steps += 1
                foreseen += len(wanted & set(ranked[:count]))
                for each in NODES:
                    whole[each] += wanted <= set(ranked[: each * count])
        one = f"a beam is among {count} drafted {foreseen / steps / count:.2f}"
        shares = ", ".join(f"among {each * count} drafted {met / steps:.2f}" for each, met in whole.items())
        print(f"{count} beams, {steps} steps: {one}; all are {shares}")


if __name__ == "__main__":
    main()
