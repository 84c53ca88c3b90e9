"""LoRA adapters sent to a real vLLM engine on the CPU."""

import pytest
from peft import LoraConfig
from test_colocate import trainer_on

from pacs_trl.errors import FailedRun


pytestmark = pytest.mark.trains

LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")


def trainer_with_adapter(checkpoint, output_dir, colocated, **more):
    more = {"learning_rate": 3e-2, "max_steps": 4, "vllm_sync_adapter": True} | more
    return trainer_on(checkpoint, output_dir, colocated, arguments={"peft_config": LORA}, **more)


def test_adapters_reach_the_engine_after_every_update(tmp_path, checkpoint, colocated):
    trainer = trainer_with_adapter(checkpoint, tmp_path, colocated)
    trainer.train()
    sync = trainer.vllm_generation.adapter_sync
    assert (sync.seen[1][1] - sync.seen[0][1]).abs().mean() > 0.05  # the adapter has an effect
    for entry in trainer.state.log_history[:4]:
        assert entry["time/weight_sync"] > 0.0
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3


def test_a_lost_adapter_stops_the_run(tmp_path, checkpoint, colocated):
    trainer = trainer_with_adapter(checkpoint, tmp_path, colocated)
    trainer.vllm_generation.llm.load_adapter = lambda path: None
    with pytest.raises(FailedRun, match="does not generate with the trained adapter"):
        trainer.train()
    assert trainer.state.global_step >= 1
