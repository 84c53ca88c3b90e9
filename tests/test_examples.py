"""The scripts in examples/ run from start to end, with a tiny model, data on disk, and no vLLM."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.examples import EXAMPLES, MESSAGES, SMALL, check_finished, run_example
from support.fake_llm import play_colocated
from support.vllm_server import LoopbackVLLM, play_installed

from pacs_trl import rewards


QUESTIONS = [{"question": f"{a} plus 1?", "answer": f"One more than {a}.\n#### {a + 1}"} for a in range(8)]
PROGRAMS = [
    {
        "text": f"Add {a}.",
        "code": f"def add(x):\n    return x + {a}",
        "test_list": [f"assert add(1) == {1 + a}", f"assert add(2) == {2 + a}"],
        "test_setup_code": "",
    }
    for a in range(8)
]


@pytest.fixture
def run(tmp_path, monkeypatch, tool_model_path):
    """Run an example with the tiny model."""

    def run_tiny(name: str, rows: list[dict] | None = None, **options) -> dict:
        return run_example(tmp_path, monkeypatch, name, rows, **{"model": tool_model_path, **options})

    return run_tiny


def reply(*texts: str) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_the_example_of_a_reward_function_trains(run):
    script = run("reward_function", QUESTIONS, **SMALL)
    check_finished(script)
    answers = ["6 times 200\n#### 1,200", "#### 3", "#### 3"]
    reward = script["last_number_is_correct"]
    assert reward(completions=reply("6 * 200 = 1,200", "3 or 4", "none"), answer=answers) == [1, 0, 0]


def test_lora_saves_an_adapter(run):
    script = run("lora", MESSAGES, **SMALL)
    check_finished(script)
    assert (Path(script["args"].output_dir) / "adapter_config.json").is_file()


def test_the_example_of_conversational_data_trains_without_a_network(run):
    script = run("conversational", **SMALL)
    check_finished(script)
    example = script["sum_then_product"](2, 3)
    assert [turn["role"] for turn in example["prompt"]] == ["system", "user", "assistant", "user"]
    assert example["solution"] == "10"


def test_the_example_of_a_colocated_vllm_trains(run, monkeypatch):
    play_colocated(monkeypatch)
    script = run("vllm_colocate", MESSAGES, **SMALL, vllm_max_model_length=256)
    check_finished(script)
    assert len(script["trainer"].vllm_generation.llm.requests) == 8


def test_the_example_of_a_vllm_server_trains(run, monkeypatch, tool_model_path):
    play_installed(monkeypatch.setattr)
    with LoopbackVLLM(tool_model_path) as server:
        script = run("vllm_server", MESSAGES, **SMALL, vllm_server_base_url=server.url, vllm_group_port=0)
    check_finished(script)
    assert server.requests and server.num_updates


def test_environment_counts_seven_guesses(run):
    script = run("environment", **SMALL)
    check_finished(script)
    game = script["GuessTheNumber"]()
    game.reset(seed=0)
    number = game.number
    assert [game.guess(number - 1), game.guess(number + 1)] == ["larger", "smaller"]
    for _ in range(4):
        game.guess(0)
    assert game.get_reward() == 0 and game.guess(number) == "found" and game.get_reward() == 1
    game.reset(seed=0)
    assert game.number == number
    for _ in range(7):
        game.guess(0)
    assert game.guess(number) == "found" and game.get_reward() == 0


def test_the_example_of_tools_trains(run, confined):
    script = run("tools", **SMALL)
    check_finished(script)
    assert script["digit_sum"](2, 10)["solution"] == "7"  # 1024


def test_the_example_of_a_code_reward_trains(run, confined):
    script = run("code_reward", PROGRAMS, **SMALL)
    check_finished(script)
    program = "```python\ndef add(x):\n    return x + 3\n```"
    tests = [script["dataset"][3]["solution"]] * 2
    assert script["code_reward"](completions=reply(program, "no idea"), solution=tests) == [1, 0]


def test_a_run_that_was_stopped_continues_bit_by_bit(run, monkeypatch):
    stops, num_calls = [], 0

    def parity(completions, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if stops:
            signal.raise_signal(stops.pop())
        return [float(sum(map(ord, turns[0]["content"])) % 2) for turns in completions]

    monkeypatch.setattr(rewards, "math_reward", parity)
    settings = {**SMALL, "max_steps": 3, "learning_rate": 0.01}
    whole = run("resume", MESSAGES, **settings, output_dir="whole")["trainer"]
    stops.append(signal.SIGTERM)
    assert run("resume", MESSAGES, **settings, output_dir="parts")["trainer"].state.global_step == 1
    num_calls = 0
    parts = run("resume", MESSAGES, **settings, output_dir="parts")["trainer"]
    assert whole.state.global_step == parts.state.global_step == 3 and num_calls == 2
    weights, resumed = (load_file(f"{folder}/model.safetensors") for folder in ("whole", "parts"))
    first = load_file("parts/checkpoint-1/model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name
    assert not all(torch.equal(weight, first[name]) for name, weight in weights.items())


def test_evaluate_prints_intervals(run, capsys):
    run("evaluate", num_samples=2, max_new_tokens=2)
    assert "pass@1: 0.000 (0.000 to " in capsys.readouterr().out


def test_each_script_is_listed_and_short():
    page = (EXAMPLES / "README.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"[{script.name}]({script.name})" in page
        assert 10 <= len(script.read_text().splitlines()) <= 40, script.name
