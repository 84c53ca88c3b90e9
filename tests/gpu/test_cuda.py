"""Attention of packed rows in half precision, kernel by kernel. The pieces of `pacs-trl gpu-check` are in `test_pieces.py`."""

import numpy as np
import pytest
import torch
from seeds import shifted

from pacs_trl.update import packing


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_variable_length_kernel_sees_prompt_and_branch():
    """PyTorch's kernel in bfloat16, forward and backward, against float32 with the queries of the prompt once more."""
    rows = packing.PackedRows([np.arange(41)] * 3 + [np.arange(7)], [np.zeros(n, dtype=int) for n in (5, 0, 90, 30)])
    shapes = [(1, heads, len(rows.ids), 64) for heads in (4, 2, 2)]
    bounds = {k: v.cuda() if torch.is_tensor(v) else v for k, v in rows.kernel_inputs().items()}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(shifted(0))
        inputs = [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]
        assert packing.takes_varlen(*inputs, 0.0) == (dtype == torch.bfloat16)
        out, _ = packing._packed_sdpa(None, *inputs, None, packed=rows, **bounds)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for expected, value in zip(*found, strict=True):
        assert (value.float() - expected).norm() < 0.02 * expected.norm()
