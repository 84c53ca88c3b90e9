"""vLLM for CPUs in the engine process of `rollout_lag`."""

import pytest
import torch
from support.late_runs import check_logps, trainer_of
from support.models import assert_same_models
from support.runs import Recorder
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("stale_logps", ["engine", "recompute"])
def test_vllm_generates_beside_training(tmp_path, checkpoint, stale_logps):
    def build(name, **more):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return trainer_of(tmp_path / name, model=model, **settings, **more)

    recorder = Recorder()
    settings = {"rollout_engine": "vllm", "stale_logps": stale_logps}
    settings |= {"vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.02}
    straight = build("straight", callbacks=[recorder])
    straight.train()
    resumed = build("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))
    assert_same_models(straight, resumed)
    check_logps(straight, recorder, 1)
