"""A real OpenEnv server on this machine with an environment of OpenEnv: training and evaluation over its client."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from support.optional_packages import openenv  # noqa: F401 (skips without it)
from support.scripted import TOKENIZER, run_recipe
from trl import GRPOTrainer

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.run import evaluate
from pacs_trl.verification import Verifier


@pytest.fixture
def server(tmp_path, monkeypatch):
    """`openenv init` writes the echo environment, uvicorn serves it; `advances` makes it choose by its resets."""
    import uvicorn
    from openenv.cli.commands.init import init
    from openenv.core.env_server.http_server import create_app

    monkeypatch.setenv("PATH", "")  # it would lock versions with uv
    init("echo_env", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    from echo_env.models import EchoAction, EchoObservation
    from echo_env.server.echo_env_environment import EchoEnvironment

    class Chosen(EchoEnvironment):
        """The same, with a word that follows from `seed`, or from the number of resets."""

        advances = False

        def reset(self, seed: int | None = None, **kwargs):
            observation = super().reset()
            number = self._reset_count if self.advances else seed
            return observation.model_copy(update={"echoed_message": f"Say {number}."})

    app = create_app(Chosen, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=32)
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    while not uvicorn_server.started and thread.is_alive():
        time.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    user = (Path(__file__).parents[1] / "data" / "echo_environment.txt").read_text()
    (tmp_path / "echo_of_a_user.py").write_text(user.replace("URL", f"http://127.0.0.1:{port}"))
    yield Chosen
    uvicorn_server.should_exit = True
    thread.join()
    for name in [name for name in sys.modules if name.startswith(("echo_env", "echo_of_a_user"))]:
        del sys.modules[name]


@pytest.mark.slow
def test_runs_train_and_evaluate_in_an_environment_on_a_server(tmp_path, server, monkeypatch, tool_model_path):
    asked = []

    def generate(self, prompt_ids, images, fields, num_generations, **kwargs):
        """Say a word of as many letters as the row, then stop."""
        texts = TOKENIZER.batch_decode(prompt_ids)
        if num_generations > 1:
            asked.append([text.split("Say ")[1].partition(".")[0] for text in texts])
            said = ["@say|text=" + "a" * (i % 4 + 2) for i in range(len(texts))]
        else:
            said = ["done"] * len(texts)
        return [TOKENIZER(text + "<|im_end|>")["input_ids"] for text in said], None

    arguments = {"recipe": "environment.yaml", "environment": "echo_of_a_user:spec"}
    with monkeypatch.context() as scripted:
        scripted.setattr(GRPOTrainer, "_generate_single_turn", generate)
        trainer = run_recipe(tmp_path / "out", tool_model_path, **arguments)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rewards/Echo/mean"] for entry in logs] == [pytest.approx((0.4 + 0.6 + 0.8 + 1.0) / 4)] * 2
    assert [entry["tools/failure_frequency"] for entry in logs] == [0, 0]
    groups = [rows[start : start + 4] for rows in asked for start in (0, 4)]
    assert sorted(group[0] for group in groups) == list("0123") and all(len(set(group)) == 1 for group in groups)

    settings = {
        "model": tool_model_path,
        "engine": "transformers",
        "n": 2,
        "k": "1",
        "max_problems": 2,
        "max_new_tokens": 20,
    }
    args = EvaluationArguments(benchmarks="echo_of_a_user:spec", output_dir=str(tmp_path / "results"), **settings)
    with Verifier(num_workers=1) as verifier:
        evaluate(args, verifier, progress=False)
    lines = (tmp_path / "results" / "samples" / "echo_of_a_user:spec.jsonl").read_text().splitlines()[1:]
    prompts = [json.loads(line)["conversation"][0]["content"] for line in lines]
    assert sorted(prompts) == ["Say 1000000."] * 2 + ["Say 1000001."] * 2

    server.advances = True  # each session by its own resets
    with monkeypatch.context() as scripted:
        scripted.setattr(GRPOTrainer, "_generate_single_turn", generate)
        trainer = run_recipe(tmp_path / "advancing", tool_model_path, **arguments)
    assert "environments/different_start_fraction" in trainer.state.log_history[0]
