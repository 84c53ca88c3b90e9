"""train.py: real problems in their Hub column layout, both methods, resume, and refusals before anything expensive."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from support.scripted import play_products, run_recipe
from transformers.integrations import integration_utils

from pacs_trl import PACSTrainer
from pacs_trl.data import PROMPT_INSTRUCTION
from pacs_trl.errors import UserError
from pacs_trl.rewards import shared_code_verifier


DATA = Path(__file__).parent / "data"


def run(output_dir, model_path, *words, **settings):
    small = {"max_completion_length": 8, "max_train_samples": 64}
    return run_recipe(output_dir, model_path, *words, **(small | settings))


def test_a_recipe_trains_on_real_problems(tmp_path, model_path):
    problems = ["--dataset_name", "gsm8k", "--dataset_path", str(DATA / "gsm8k_test_200.jsonl")]
    instruction = ["--prompt_instruction", PROMPT_INSTRUCTION, "--max_prompt_length", "400"]
    trainer = run(tmp_path, model_path, *problems, *instruction)
    assert type(trainer) is PACSTrainer
    prompt = trainer.train_dataset[0]["prompt"]
    assert prompt[-1]["content"].endswith(" " + PROMPT_INSTRUCTION)
    logs = [entry for entry in trainer.state.log_history if "rewards/math_reward/mean" in entry]
    assert [entry["step"] for entry in logs] == [1, 2]
    assert all(entry["pacs/unscorable_fraction"] == 0 for entry in logs)  # every gold was understood
    saved = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert saved["max_steps"] == 2 and saved["method"] == "pacs"
    card = (tmp_path / "README.md").read_text()
    assert "2509.02522" in card and "pacs" in card and "li2025implicit" in card


@pytest.mark.parametrize(("name", "words"), [("wandbb", "wandbb is not supported"), ("comet_ml", "requires comet-ml")])
def test_trackers_that_cannot_be_used_are_refused_before_weights_are_loaded(
    tmp_path, model_path, monkeypatch, name, words
):
    monkeypatch.setattr(integration_utils, "_is_comet_installed", False)
    monkeypatch.setattr(PACSTrainer, "__init__", None)
    with pytest.raises(UserError, match=f"report_to: .*{words}.*install the package"):
        run(tmp_path, model_path, "--report_to", name)


def test_fsdp_in_one_process_is_refused_before_weights_are_loaded(tmp_path, model_path, monkeypatch):
    monkeypatch.setattr(PACSTrainer, "__init__", None)
    with pytest.raises(UserError, match="fsdp shards over processes.*accelerate launch"):
        run(tmp_path, model_path, "--fsdp", "full_shard")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [("lora_target_modules", "q_prj", "q_prj.*Choose among .*q_proj"), ("lora_task_type", "LM", "task type.*Correct")],
)
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_loaded(
    tmp_path, model_path, monkeypatch, setting, value, words
):
    monkeypatch.setattr(PACSTrainer, "__init__", None)
    with pytest.raises(UserError, match=words):
        run(tmp_path, model_path, "--use_peft", f"--{setting}", value)


@pytest.mark.trains
def test_a_recipe_trains_on_programs(tmp_path, model_path, capsys, confined):
    trainer = run(tmp_path, model_path, "--prompt_instruction", "", recipe="code.yaml")
    shared_code_verifier().close()
    assert "Programs run with landlock" in capsys.readouterr().out
    logs = [entry for entry in trainer.state.log_history if "rewards/code_reward/mean" in entry]
    assert [entry["verification/no_answer"] for entry in logs] == [1.0, 1.0]  # an untrained model writes no block


@pytest.mark.trains
def test_an_agent_is_trained_and_resumes_bit_by_bit(tmp_path, monkeypatch, capsys, confined, tool_model_path):
    """Of a product it asks the tool, in the sandbox, or guesses."""
    play_products(monkeypatch)
    saving = ["--max_completion_length", "96", "--save_strategy", "steps", "--save_steps", "1"]
    straight = run(tmp_path / "straight", tool_model_path, *saving, recipe="agent.yaml")
    assert "Programs run with landlock" in capsys.readouterr().out
    logs = [entry for entry in straight.state.log_history if "loss" in entry]
    calls = [entry["tools/call_frequency"] for entry in logs]
    assert calls == [entry["reward"] for entry in logs] and 0 < sum(calls) < 2
    assert [entry["tools/failure_frequency"] for entry in logs] == [0, 0]
    assert "tools:\n- run_python" in (tmp_path / "straight" / "recipe.yaml").read_text()
    assert "trained to call `run_python` before it answers" in (tmp_path / "straight" / "README.md").read_text()
    shutil.rmtree(tmp_path / "straight" / "checkpoint-2")
    (tmp_path / "straight" / "trainer_state.json").unlink()
    saving += ["--resume_from_checkpoint", "last"]
    resumed = run(tmp_path / "straight", tool_model_path, *saving, recipe="agent.yaml")
    shared_code_verifier().close()
    weights = straight.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize("method", ["pacs", "grpo"])
def test_a_readme_by_hand_is_kept(tmp_path, model_path, method, monkeypatch):
    """Also by the checkpoints on the way, for which TRL drafts a card, and they get one; a local model is no Hub
    id."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base").symlink_to(model_path)
    monkeypatch.chdir(tmp_path)
    save = ["--save_strategy", "steps", "--save_steps", "1"]
    token = ["--model_init_kwargs", '{"token": "s3cr3t"}']
    run("out", "models/base", *save, "--method", method, *token, recipe=f"{method}.yaml")
    assert (tmp_path / "out" / "README.md").read_text() == "---\nlicense: mit\n---\nMine.\n"
    card = ModelCard((tmp_path / "out" / "checkpoint-1" / "README.md").read_text())
    assert card.data.base_model is None and "models/base" not in card.content and method.upper() in card.text
    saved = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert Path(saved["model_name_or_path"]) == Path(model_path).resolve()  # repeats the run from any folder
    assert "s3cr3t" not in (tmp_path / "out" / "recipe.yaml").read_text()


STEP = r"step 1/2  reward \d\.\d\d  entropy \d\.\d\d  length \d  truncated \d\.\d\d  grad_norm \S+  "
STEP += r"(tokens/s \d+  )?\d+\.\d s"


@pytest.mark.parametrize("method", ["pacs", "grpo", "ppo"])
def test_one_key_switches_between_methods_and_the_console_is_short(tmp_path, model_path, method, capfd):
    evaluating = ["--eval_strategy", "steps", "--eval_steps", "2", "--eval_split_size", "8"]
    assert run(tmp_path, model_path, "--method", method, *evaluating).__class__.__name__ == f"{method.upper()}Trainer"
    out, errors = capfd.readouterr()
    lines = out.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("Generation: ")) :]
    assert re.fullmatch(STEP, lines[1]) and lines[2].startswith("step 2/2  reward")
    assert lines[3].startswith("evaluation at step 2/2  reward ") and lines[4].startswith("Reward 0.")
    assert "{" not in out and str(tmp_path) in lines[-1] and "README.md" in lines[-1]
    assert "/2 [" not in errors  # no bar of the steps


def test_each_optimizer_step_has_a_line_where_two_use_one_generation(tmp_path, model_path, capfd):
    run(tmp_path, model_path, "--steps_per_generation", "2", "--max_steps", "3")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[0].startswith("step 1/3  reward ") and lines[2].startswith("step 3/3  reward ")
    assert re.fullmatch(
        r"step 2/3  same rollouts  entropy \d\.\d\d  grad_norm \S+  (tokens/s \d+  )?\d+\.\d s", lines[1]
    )


@pytest.mark.parametrize("target", ["q_proj", "all-linear", r".*\.(q|v)_proj"])
def test_lora_adapts_the_named_modules(tmp_path, model_path, target):
    trainer = run(tmp_path, model_path, "--use_peft", "--lora_target_modules", target, "--max_steps", "1")
    adapted = {name.split(".")[-1] for name, module in trainer.model.named_modules() if hasattr(module, "lora_A")}
    assert "q_proj" in adapted and ("down_proj" in adapted) == (target == "all-linear")


def test_resume_and_refusal_to_start_over(tmp_path, model_path, capsys):
    saving = ["--save_strategy", "steps", "--save_steps", "1"]
    run(tmp_path, model_path, *saving)
    with pytest.raises(ValueError, match="checkpoint-2"):
        run(tmp_path, model_path, *saving)
    capsys.readouterr()
    trainer = run(tmp_path, model_path, *saving, "--resume_from_checkpoint", "last", "--max_steps", "3")
    out = capsys.readouterr().out
    assert f"Continuing from {tmp_path}/checkpoint-2, after optimizer step 2 of 3.\nstep 3/3" in out
    assert trainer.state.global_step == 3 and "of 3).\n" in out  # rewards of the whole run, before and after
    with pytest.raises(ValueError, match="checkpoint-9"):
        run(tmp_path, model_path, "--resume_from_checkpoint", str(tmp_path / "checkpoint-9"))


def test_a_recipe_trains_on_prompts_alone_with_a_reward_that_needs_no_gold_answer(tmp_path, model_path, monkeypatch):
    (tmp_path / "rewards_of_length.py").write_text(
        "def short(completions, solution=None, **kwargs):\n    return [float(len(text) < 9) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    data = Path(tmp_path, "prompts.jsonl")
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1 ="}) + "\n" for i in range(16)))
    words = ["--dataset_name", str(data), "--reward_funcs", "rewards_of_length.short"]
    trainer = run(tmp_path / "run", model_path, *words)
    assert trainer.state.global_step == 2 and trainer.train_dataset.column_names == ["prompt"]
    with pytest.raises(ValueError, match="`solution_column` 'solution' is not a column"):
        run(tmp_path / "other", model_path, "--dataset_name", str(data))  # math_reward needs gold answers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tools", "run_pyton"], "run_pyton"),
        (["--reward_funcs", "math.nothing"], "math.nothing"),
        (["--reward_funcs", "broken.sure"], r"broken\.py line 1"),
        (["--reward_funcs", "bare.bare"], "bare"),
        (["--reward_funcs", "bare.graded"], "difficulty"),
        (["--max_prompt_length", "1"], "max_prompt_length"),
        (["--dataset_name", "FOLDER"], "FOLDER"),
        (["--dataset_name", "data.csv"], "data.csv"),
        (["--dataset_name", "nowhere/addition_train.jsonl"], "nowhere"),
        (["--dataset_name", str(DATA / "math_500.jsonl"), "--problem_column", "question"], "problem_column"),
        (["--dataset_name", "./rows"], "./rows"),
        (["--max_train_samples", "1"], "1 prompts"),
        (["--use_vllm", "true"], "vLLM"),
        (["--report_to", "wandbb"], "wandbb"),
        (["--model_name_or_path", "outputs/models/additoin"], "additoin"),
        (["--model_name_or_path", "ADAPTER"], "./no/base"),
        (["--model_name_or_path", "LORA"], "LORA"),
        (["--model_name_or_path", "BASELESS"], "base_model_name_or_path"),
        (["--model_name_or_path", "data.csv"], "data.csv"),
    ],
)
def test_mistakes_are_errors_before_training(tmp_path, model_path, arguments, message, monkeypatch):
    (tmp_path / "data.csv").write_text("problem,answer\n1+1,2\n")
    (tmp_path / "broken.py").write_text("import nowhere")
    (tmp_path / "bare.py").write_text(
        "def bare(completions):\n    return [0.0 for _ in completions]\n\n"
        "def graded(completions, difficulty, **kwargs):\n    return difficulty\n"
    )
    (tmp_path / "FOLDER").mkdir()
    for name, base in (("ADAPTER", "./no/base"), ("LORA", str(model_path)), ("BASELESS", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("pacs_trl.settings.names.installed_vllm", lambda: None)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, model_path, *arguments)
    shared_code_verifier().close()
