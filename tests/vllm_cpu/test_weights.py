"""Weights sent to a real vLLM engine on the CPU in one call, and the comparison after a wake from sleep mode."""

import pytest
import torch
from peft import LoraConfig
from test_colocate import compare_at_every_generation, trainer_on

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.engine_weights import WakeCheck
from pacs_trl.update.forward_pass import ForwardPass


pytestmark = pytest.mark.trains

LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)


def test_merged_lora_reaches_the_engine_in_one_call(tmp_path, checkpoint, colocated):
    arguments = {"peft_config": LORA}
    trainer = trainer_on(checkpoint, tmp_path, colocated, arguments=arguments, learning_rate=3e-2, max_steps=3)
    base = {name: weight.clone() for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
    worker, calls = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker, []
    model, load = worker.model_runner.model, worker.model_runner.model.load_weights
    model.load_weights = lambda weights: calls.append(load(weights))
    comparisons = compare_at_every_generation(trainer)
    del model.load_weights
    assert len(comparisons) == len(calls) == 3
    assert all(loaded == {name for name, _ in model.named_parameters()} for loaded in calls)
    assert all(agree and difference < 1e-3 for agree, difference in comparisons), comparisons
    assert all(torch.equal(trainer.model.get_parameter(name), weight) for name, weight in base.items())


def test_engine_and_trainer_give_the_same_log_probs_to_a_text(tmp_path, checkpoint, colocated):
    trainer = trainer_on(checkpoint, tmp_path, colocated)
    engine, model = trainer.vllm_generation, trainer.model
    check = WakeCheck(ForwardPass(model, torch.device("cpu")), range(40, 60))
    for _ in range(2):
        engine.sync_weights()
        check.run(engine.llm, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-2)
    with pytest.raises(FailedRun, match="does not generate with the trained weights"):
        check.run(engine.llm, model)
