"""vLLM for CPUs in the engine process of `rollout_lag`."""

from late_runs import assert_equal, check_logps, trainer_of
from replay import Recorder, trainable_weights


def test_vllm_generates_beside_training(tmp_path):
    recorder = Recorder()
    settings = {"rollout_engine": "vllm", "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.02}
    straight = trainer_of(tmp_path / "straight", callbacks=[recorder], **settings)
    straight.train()
    resumed = trainer_of(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))
    assert_equal(straight.model, trainable_weights(resumed.model))
    check_logps(straight, recorder, 1)
