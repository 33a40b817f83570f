"""`slipstream demo`."""

DEMO = ["demo", "-n", "12", "--prompts", "1", "--rounds", "2", "--executor", "torch", "--dtype", "float64"]


def test_the_demo_shows_text_and_one_table(cli, embedded):
    result = cli(*DEMO, code=0)
    for part in (
        "Continue code: ", "Edit code: ", "s, plain]", "s, suffix; token-identical]", "tokens/s",
        "speed-up", "accept", "mean", "lossless", "draft model, K=4", "suffix, K=10",
        "Every speculative text is token-identical to plain decoding.",
    ):  # fmt: skip
        assert part in result.shown
    table = result.out[result.out.index("task") :]
    assert max(map(len, table.splitlines())) <= 80
    assert "NO" not in table
    assert "\x1b" not in result.out
    assert "speculative decoding: draft model" in result.said
    assert "not enough passes for an interval: raise --rounds" in result.said, "the warnings of bench"


def test_the_demo_fails_if_texts_differ(cli, embedded, wrong_token):
    wrong_token("model", 5)
    result = cli(*DEMO, code=1)
    for part in ("NO", "draft model, code prompt 1, token 5: the target's two best logits are", "this is a bug"):
        assert part in result.shown
