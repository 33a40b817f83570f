"""What the processor that Numba compiles for has."""

import pytest
from numba import config

from slipstream.backends.native.kernels import processor


@pytest.mark.skipif(not processor.is_arm(), reason="processors of Arm")
@pytest.mark.parametrize(
    ("name", "features", "dots", "bfloat16"),
    [
        ("cortex-a53", None, False, False), ("neoverse-n1", None, True, False), ("neoverse-v1", None, True, True),
        ("generic", "", False, False), ("generic", "+dotprod,+i8mm", True, False), ("generic", "+bf16", False, True),
    ],
)  # fmt: skip
def test_features_of_Arm_that_follow_from_the_processors_name_are_known(name, features, dots, bfloat16, monkeypatch):
    monkeypatch.setattr(config, "CPU_NAME", name)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    processor.has.cache_clear()
    try:
        assert (processor.has_byte_dots(), processor.has("bf16")) == (dots, bfloat16)
    finally:
        processor.has.cache_clear()
