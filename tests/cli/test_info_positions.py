"""`slipstream info`: positions of models whose kinds of layers rotate differently."""

from slipstream.cli.info import positions


def test_rotary_parameters_by_kind_of_layer_are_shown() -> None:
    """Gemma 3 and 4."""
    rope = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
    assert positions({"position": "rope", "rope": rope}) == (
        "rotary, theta 1e+06, scaled linear by 8 (full_attention); rotary, theta 10000 (sliding_attention)"
    )
