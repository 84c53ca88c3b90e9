"""The same optimizer steps on a GPU and on the CPU, in float32; attention of packed rows in half precision."""

import numpy as np
import pytest
import torch
from replay import Replay, build_trainer, trainable_weights

from pacs_trl.update import packing


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETTINGS = {
    "rollout": {"steps_per_generation": 2, "max_steps": 4},
    "padded": {"steps_per_generation": 2, "max_steps": 4, "padding_free": "never"},
    "snapshot": {"reference": "snapshot", "reference_reset_steps": 2, "max_steps": 4},
    "snapshot on the CPU": {"reference": "snapshot", "reference_offload": True, "max_steps": 4},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_weights_after_four_updates(tmp_path, settings):
    weights = []
    for use_cpu in (True, False):
        trainer = build_trainer(tmp_path / str(use_cpu), replay=Replay(), use_cpu=use_cpu, **settings)
        assert use_cpu == (trainer.accelerator.device.type == "cpu")
        trainer.train()
        weights.append({name: value.cpu() for name, value in trainable_weights(trainer.model).items()})
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)


def test_variable_length_kernel_sees_prompt_and_branch():
    """PyTorch's kernel in bfloat16, forward and backward, against float32 with the queries of the prompt once more."""
    rows = packing.PackedRows([np.arange(41)] * 3 + [np.arange(7)], [np.zeros(n, dtype=int) for n in (5, 0, 90, 30)])
    shapes = [(1, heads, len(rows.ids), 64) for heads in (4, 2, 2)]
    bounds = {k: v.cuda() if torch.is_tensor(v) else v for k, v in rows.kernel_inputs().items()}
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]
        assert packing.takes_varlen(*inputs, 0.0) == (dtype == torch.bfloat16)
        out, _ = packing._packed_sdpa(None, *inputs, None, packed=rows, **bounds)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for expected, value in zip(*found, strict=True):
        assert (value.float() - expected).norm() < 0.02 * expected.norm()
