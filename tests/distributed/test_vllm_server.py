"""A vLLM server that dies: the process that speaks to it and the one that does not stop alike, and save together."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


sys.path.insert(0, str(Path(__file__).parent.parent))

from loopback_vllm import LoopbackVLLM, play_installed, server_settings
from replay import addition_dataset, build_trainer, tiny_model


def test_both_processes_stop_and_save(tmp_path):
    model = str(tmp_path / "model")
    tiny_model().save_pretrained(model)
    env = os.environ | {"ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    with LoopbackVLLM(model) as server:
        server.fail_generation = 2
        arguments = [str(tmp_path), model, server.url]
        result = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    of_main, of_other = ((tmp_path / f"stopped.{rank}").read_text() for rank in range(2))
    assert "stopped answering after optimizer step 2" in of_main and "the engine is dead" in of_main
    assert "stopped answering after optimizer step 2" in of_other and "GET /health has status 503" in of_other
    states = [torch.load(tmp_path / "run" / "checkpoint-2" / f"pacs_state_{rank}.pt") for rank in range(2)]
    assert states[0]["num_requests"] == states[1]["num_requests"] == 2 * 4 and states[0]["step"] == 2


if __name__ == "__main__":
    directory, model, url = sys.argv[1:]
    play_installed(setattr)
    trainer = build_trainer(
        Path(directory) / "run",
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        more={"train_dataset": addition_dataset(64)},
        per_device_train_batch_size=4,
        max_steps=4,
        **server_settings(url),
    )
    try:
        trainer.train()
    except RuntimeError as error:
        (Path(directory) / f"stopped.{os.environ['RANK']}").write_text(str(error))
