"""The same optimizer steps on a GPU and on the CPU, in float32."""

import pytest
import torch
from replay import Replay, build_trainer, trainable_weights


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
