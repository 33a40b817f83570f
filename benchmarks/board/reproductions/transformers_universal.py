"""transformers, universal assisted generation: logits of the draft are taken for those of other tokens. Columns of the
pruned head have the order of `get_vocab()`, but `get_target_logits` takes them in the order of ids."""

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

words = {"unk": 0} | {f"w{i}": i for i in range(1, 20)}
tokenizers = (Tokenizer(models.WordLevel(each, "unk")) for each in (words, words | {"other": 20}))
target, draft = (PreTrainedTokenizerFast(tokenizer_object=each) for each in tokenizers)
size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
translator = AssistantToTargetTranslator(target, draft, 20, LlamaForCausalLM(LlamaConfig(vocab_size=21, **size)), True)
tokens = translator._assistant_to_target_input_ids[translator.assistant_overlap_token_ids]  # of the head's columns
print("tokens", [*range(20)], "get logits of", translator.get_target_logits(tokens[None].float())[0].int().tolist())
