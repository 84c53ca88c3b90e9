"""Continuous rollouts with a real vLLM server on the CPU, and TRL's worker in a process of its own."""

import subprocess
import time

import pytest
import requests
import torch
from peft import get_peft_model
from support.models import LORA, load_weights
from support.rollouts import addition_dataset
from support.runs import Recorder, build_trainer, spy_on
from support.vllm_process import end, start_server, wait_until_ready
from transformers import AutoModelForCausalLM, TrainerCallback

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.errors import FailedRun


SETTINGS = {
    "use_vllm": True,
    "vllm_mode": "server",
    "rollout_schedule": "continuous",
    "max_staleness": 2,
    "max_completion_length": 80,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "save_strategy": "no",
    "vllm_server_timeout": 120,
}
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", str(SETTINGS["max_staleness"] + 2))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with open(tmp_path_factory.mktemp("server") / "output", "w") as output:
        process, url = start_server(checkpoint, output)
        try:
            wait_until_ready(process, url)
            yield process, url
        finally:
            if process.poll() is None:
                end(process)


def trainer_of(directory, checkpoint, url, trainer_class=PACSTrainer, callbacks=(), lora=None, **settings):
    return build_trainer(
        directory,
        model=checkpoint,
        trainer_class=trainer_class,
        more={"train_dataset": addition_dataset(12), "callbacks": list(callbacks), "peft_config": lora},
        **(SETTINGS | {"vllm_server_base_url": url} | settings),
    )


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
def test_each_token_has_the_log_prob_of_the_weights_that_it_is_noted_with(tmp_path, checkpoint, server, trainer_class):
    """Given the whole prefix, also where weights were replaced inside a completion. Whether the server decodes one at
    a replacement depends on time, so the run goes on until it does."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            is_mixed = any(group.num_mixed > 0 for step in groups for group in step)
            control.should_training_stop = is_mixed and state.global_step >= 12

    recorder, groups = Recorder(), []
    trainer = trainer_of(tmp_path, checkpoint, server[1], trainer_class, [recorder, Stop()], max_steps=100)
    create = trainer._create_source

    def take(taken):
        """Pause the server during the update: completions that it decodes are not finished when it gets weights."""
        groups.append(taken)
        time.sleep(0.03 * (len(groups) % 10))  # at another moment of each step
        requests.post(f"{server[1]}/pause", params={"mode": "keep"}, timeout=60).raise_for_status()

    def create_source():
        source = create()
        spy_on(source, "_take_groups", take)
        return source

    trainer._create_source = create_source
    trainer.train()
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert num_mixed_with_log_probs_of(policy, recorder.weights, groups) > 0


def num_mixed_with_log_probs_of(policy, weights, groups) -> int:
    """The number of completions with tokens of several versions, after all have the log-probs of their versions.
    `weights` are those of the versions, `groups` those of each step."""
    sequences = [(group, i) for step in groups for group in step for i in range(len(group.completions))]
    assert len(groups) >= 12 and len(sequences) == 8 * len(groups)
    num_tokens, num_mixed = 0, 0
    for group, i in sequences:
        prompt, completion = group.prompt_ids[i], group.completion_ids[i]
        versions, logps = torch.tensor(group.versions[i]), torch.tensor(group.logps[i])
        assert (versions[1:] >= versions[:-1]).all()
        num_mixed += len(set(group.versions[i])) > 1
        for version in set(group.versions[i]):
            load_weights(policy, weights[version])
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            is_of_version = versions == version
            num_tokens += int(is_of_version.sum())
            assert (expected - logps)[is_of_version].abs().max() < 1e-5
    assert num_tokens == sum(len(group.completion_ids[i]) for group, i in sequences)
    return num_mixed


def test_each_completion_has_the_log_probs_of_the_adapter_with_which_it_began(tmp_path, checkpoint):
    """Adapters reach a server that is never paused; those that no completion uses are unloaded."""
    recorder, groups = Recorder(), []
    with open(tmp_path / "output", "w") as output:
        process, url = start_server(checkpoint, output, ADAPTERS)
        try:
            wait_until_ready(process, url)
            settings = {"max_steps": 12, "learning_rate": 3e-2, "vllm_sync_adapter": True}
            trainer = trainer_of(tmp_path / "run", checkpoint, url, callbacks=[recorder], lora=LORA, **settings)
            spy_on(trainer, "_create_source", lambda source: spy_on(source, "_take_groups", groups.append))
            trainer.train()
            served = [entry["id"] for entry in requests.get(f"{url}/v1/models", timeout=10).json()["data"]]
        finally:
            end(process)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), LORA)
    assert num_mixed_with_log_probs_of(policy, recorder.weights, groups) == 0
    assert served == [checkpoint, trainer.vllm_generation.vllm_client.model]
    versions = {version for step in groups for group in step for each in group.versions for version in each}
    assert len(versions) > 4


def seconds_to_notice(caplog, since: float) -> float:
    """The seconds from `since`, since the epoch, to the message that a server has failed."""
    (message,) = [record for record in caplog.records if record.name == "pacs_trl.rollouts.server_watch"]
    return message.created - since


def test_a_server_with_weights_of_another_run_is_noticed(tmp_path, checkpoint, server, caplog):
    """A server that was restarted has them too: its weights are named `default`."""

    class Replace(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                body = {"new_version": "default"}
                requests.post(f"{server[1]}/update_weight_version", json=body, timeout=10).raise_for_status()
                self.replaced_at = time.time()

    replace = Replace()
    trainer = trainer_of(tmp_path, checkpoint, server[1], callbacks=[replace], max_steps=6)
    with pytest.raises(FailedRun, match="was restarted or got weights of another run after optimizer step 2"):
        trainer.train()
    assert seconds_to_notice(caplog, replace.replaced_at) < 10
    assert (tmp_path / "checkpoint-2").is_dir()


def test_a_server_that_is_killed_is_noticed_and_a_run_goes_on_with_another(tmp_path, checkpoint, caplog):
    """Within ten seconds; the state after the last optimizer step is saved, and no prompt is lost or trained twice."""

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trained.extend(group.position for group in trainer._source._taken)
            if state.global_step == 2 and len(processes) == 1:
                end(processes[0])
                self.killed_at = time.time()

    trained: list[int] = []
    processes: list[subprocess.Popen] = []
    with open(tmp_path / "output", "w") as output:
        try:
            process, url = start_server(checkpoint, output)
            processes.append(process)
            wait_until_ready(process, url)
            kill = Kill()
            trainer = trainer_of(tmp_path, checkpoint, url, callbacks=[kill], max_steps=6)
            with pytest.raises(FailedRun, match="after optimizer step 2"):
                trainer.train()
            assert seconds_to_notice(caplog, kill.killed_at) < 10
            assert time.time() - kill.killed_at < 30  # with those to save on a slow machine
            process, url = start_server(checkpoint, output)
            processes.append(process)
            wait_until_ready(process, url)
            requests.post(f"{url}/pause", params={"mode": "keep"}, timeout=10)
            trainer = trainer_of(tmp_path, checkpoint, url, callbacks=[kill], max_steps=6)
            trainer.train(resume_from_checkpoint=True)
        finally:
            for process in processes:
                if process.poll() is None:
                    end(process)
    assert sorted(trained) == list(range(12))
