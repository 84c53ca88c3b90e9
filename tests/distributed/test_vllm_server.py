"""A vLLM server that dies: the process that speaks to it and the one that does not stop alike, and save together."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch
from support.late_runs import trainer_of
from support.processes import on_two
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.scripted_worker import server_of
from support.vllm_server import LoopbackVLLM, play_installed, server_settings
from transformers import AutoModelForCausalLM

from pacs_trl.errors import FailedRun


def train_until_it_stops(directory, model, url):
    play_installed(setattr)
    trainer = build_trainer(
        directory / "run",
        model=model,
        more={"train_dataset": addition_dataset(64)},
        per_device_train_batch_size=4,
        max_steps=4,
        **server_settings(url),
    )
    with pytest.raises(RuntimeError) as stopped:
        trainer.train()
    print(stopped.value)


def test_both_processes_stop_and_save(tmp_path, model_path):
    with LoopbackVLLM(model_path) as server:
        server.fail_generation = 2
        main_output, other_output = on_two(train_until_it_stops, tmp_path, model_path, server.url, outputs=tmp_path)
    assert "stopped answering after optimizer step 2" in main_output and "the engine is dead" in main_output
    assert "stopped answering after optimizer step 2" in other_output and "GET /health has status 503" in other_output
    states = [torch.load(tmp_path / "run" / "checkpoint-2" / f"pacs_state_{rank}.pt") for rank in range(2)]
    assert all(
        state["attributes"] | {"_num_generated_batches": 2, "_step": 2} == state["attributes"] for state in states
    )


@pytest.mark.slow
def test_both_processes_stop_if_the_server_does_not_take_the_weights(tmp_path, model_path):
    with LoopbackVLLM(model_path) as server:
        server.answers["/finish_weight_update"] = 500
        outputs = on_two(train_until_it_stops, tmp_path, model_path, server.url, outputs=tmp_path)
    for output in outputs:
        assert "did not take the weights after optimizer step 0" in output and "500" in output


def fail_and_resume_with_a_lag(directory, model, url):
    """The server answers one of the two requests for the second batch, and fails."""
    play_installed(setattr)
    settings = server_settings(url) | {"vllm_sync_adapter": True, "save_strategy": "no"}

    def build():
        return trainer_of(directory / "run", lora=True, model=model, per_device_train_batch_size=4, **settings)

    stopped = build()
    with pytest.raises(FailedRun, match="the engine is dead"):
        stopped.train()
    rank = stopped.accelerator.process_index
    states = torch.load(directory / "run" / "checkpoint-2" / f"pacs_state_{rank}.pt")
    print("arrived:", sorted(states["late_batches"]))
    Path(directory, f"stopped.{rank}").touch()
    while not Path(directory, "server-runs").exists():
        time.sleep(0.01)
    resumed = build()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_both_processes_resume_with_a_lag_and_generate_with_the_adapters(tmp_path, model_path):
    """Also the process whose batch had arrived, and the one that did not send adapters to the server, which generates
    with the base model for requests that name none."""
    with server_of(AutoModelForCausalLM.from_pretrained(model_path)) as server:
        server.fail_generation = 3

        def restart_server():
            while len(list(tmp_path.glob("stopped.*"))) < 2:
                time.sleep(0.01)
            server.dead, server.fail_generation = False, None
            Path(tmp_path, "server-runs").touch()

        threading.Thread(target=restart_server, daemon=True).start()
        outputs = on_two(fail_and_resume_with_a_lag, tmp_path, model_path, server.url, outputs=tmp_path, seconds=240)
    assert sorted(re.findall("arrived: .*", "".join(outputs)), key=len) == ["arrived: []", "arrived: [1]"]
    names = [request["model"].rpartition("-")[2] for request in server.requests]
    assert sorted(names) == ["1"] * 4 + ["2"] * 4
