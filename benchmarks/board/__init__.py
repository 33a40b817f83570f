"""The lossless board: does an engine emit the same texts when it speculates?

To add an engine, write a module of about 60 lines like `transformers_engine.py`, which runs in the engine's own
environment and answers three operations on its standard input:

- `info()` returns `versions`: the versions of the relevant packages.
- `load(method, target, draft, streams, prefix_cache)` loads the models. `method` is "plain" or one of the engine's
  methods of speculation. At most `streams` texts are decoded at once. `prefix_cache`: keep states of prompts.
- `generate(ids, tokens, sampling, schema, seeds)` returns `texts`, one list of token ids for each seed: exactly
  `tokens` ids, or fewer with the JSON schema `schema`. `sampling` is empty for greedy decoding, else it has fields such
  as `top_k`. `drafted` is the number of draft tokens, if the engine reports it.
  For a method or parameter that the engine lacks, raise NotImplementedError: the cell is then "refused".

Then add an `Engine` to `lineup.py`, with the promise of its documentation. A difference is "open" until the engine's
field `known` names the maintainers' issue or fix, says that the newest version was tried, and names a program of at
most 15 lines, without Slipstream, that reproduces it.
"""
