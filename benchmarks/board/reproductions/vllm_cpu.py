"""vLLM without triton-cpu: the sampling parameters of verified rows are never written (run in `.venv-vllm`)."""

import torch
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand  # in place of Triton's expand_kernel

current_platform.import_kernels()
for name, value in (("temperature", torch.tensor([0.7])), ("top_k", torch.tensor([5], dtype=torch.int32))):
    buffer = torch.full((3,), -1, dtype=value.dtype)  # the rejection sampler passes torch.empty
    expand(buffer, value, torch.tensor([3], dtype=torch.int32), 0, 1)
    print(name, "expected", value.tolist() * 3, "got", buffer.tolist())
