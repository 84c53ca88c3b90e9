"""The model card: the same after training and after pushing, with a snippet and a command that run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id
from optional import needs
from peft import LoraConfig, PeftModel
from replay import addition_dataset, build_trainer
from results_world import make_results

from pacs_trl import train
from pacs_trl.evaluation.provenance import checkpoint_digest
from pacs_trl.hub.model_card import CardInputs, build_card, license_of
from pacs_trl.hub.push import push
from pacs_trl.hub.readme import NOTHING, hand_written, with_our_part
from pacs_trl.miniature import warm_start
from pacs_trl.miniature.model import build_model


RECIPE = Path(__file__).parents[2] / "recipes" / "miniature" / "pacs.yaml"
REPO = "user/pacs-mini"
LICENSES = {"apache-2.0", "mit", "llama3.1", "other", "unknown"}  # of those that the Hub knows, the ones used here


def valid_metadata(text: str) -> ModelCard:
    """The card as the Hub reads it, each of its fields checked as the Hub does."""
    card = ModelCard(text)  # a ValueError for a model-index that is none
    data = card.data.to_dict()
    for repository in [data.get("base_model"), *data.get("datasets", [])]:
        assert repository is None or validate_repo_id(repository) is None
    assert data["license"] in LICENSES and data["pipeline_tag"] == "text-generation"
    assert data["library_name"] in ("transformers", "peft") and all(isinstance(tag, str) for tag in data["tags"])
    assert "<" not in text.split("---")[1]  # nothing that only Python could read
    links = re.findall(r"\]\((https://huggingface\.co/[^)]*)\)", card.text)
    known = {f"https://huggingface.co/{data.get('base_model')}"}
    known |= {f"https://huggingface.co/datasets/{name}" for name in data.get("datasets", [])}
    assert all(link in known or "/papers/" in link or "/datasets/org/" in link for link in links), links
    return card


def block(text: str, language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return code


def run_snippet(directory: Path, text: str, monkeypatch, capsys) -> str:
    monkeypatch.chdir(directory)
    capsys.readouterr()
    exec(block(text, "python"), {})
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, tokenizer):
    """In the place of the warm start."""
    directory = tmp_path_factory.mktemp("start") / "base"
    build_model(tokenizer, "tiny").save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trained(untrained, tmp_path_factory):
    """The folder of a run from a shipped recipe, with a checkpoint inside."""
    directory = tmp_path_factory.mktemp("runs") / "pacs"
    sizes = "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 8 --max_steps 5 --disable_tqdm true"
    saves = "--save_strategy steps --save_steps 5 --save_total_limit 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "warm_start", lambda task: untrained)
        train.main(["--config", str(RECIPE), "--output_dir", str(directory), *sizes.split(), *saves.split()])
    return directory


@needs("matplotlib")
def test_the_card_of_a_trained_model(trained):
    card = valid_metadata((trained / "README.md").read_text())
    assert card.data.base_model is None and card.data.datasets is None and card.data.license == "apache-2.0"
    for words in (
        "A miniature model made from scratch (`miniature/addition`), fine-tuned with PACS on `miniature/addition` (generated",
        "pacs-trl train --config recipe.yaml\n",
        "Trained with 1 process on",
        "![Reward, entropy, completion length and time per step](training.png)",
        "@article{li2025implicit",
        "No evaluation results were recorded",
    ):
        assert words in card.text
    assert "not in the repository" not in card.text and str(trained.parent) not in card.content
    of_checkpoint = (trained / "checkpoint-5" / "README.md").read_text()
    assert block(of_checkpoint, "python") == block(card.text, "python") and valid_metadata(of_checkpoint).text


def test_it_is_the_same_after_pushing(trained, hub, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "pacs")
    push(copy, REPO, api=HfApi(endpoint=hub.url, token="hf_x"))
    pushed = hub.files[REPO]["README.md"].decode()
    here = (trained / "README.md").read_text()
    named = here.replace("# pacs\n", "# pacs-mini\n").replace("model_name: pacs\n", "model_name: pacs-mini\n")
    assert pushed == named.replace('model=".")  # this folder', f'model="{REPO}")') == (copy / "README.md").read_text()


def test_the_command_repeats_the_run_from_the_repository(trained, untrained, hub, tmp_path, monkeypatch):
    copy = shutil.copytree(trained, tmp_path / "pacs")
    push(copy, REPO, api=HfApi(endpoint=hub.url, token="hf_x"))
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, content in hub.files[REPO].items():
        (repository / name).write_bytes(content)
    program, command, *argv = shlex.split(block((repository / "README.md").read_text(), "bash"))
    assert (program, command) == ("pacs-trl", "train")
    monkeypatch.chdir(repository)
    monkeypatch.setattr(warm_start, "warm_start", lambda task: untrained)
    again = train.main(argv)
    weights = Path(again.args.output_dir) / "model.safetensors"
    assert weights.read_bytes() == (trained / "model.safetensors").read_bytes()


EXAMPLES = {
    "messages": {"prompt": [{"role": "user", "content": "3+4"}], "max_new_tokens": 4},
    "text": {
        "prompt": "3+4 is \"'`{{ }}\n```\n",
        "max_new_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "template": {
        "prompt": [{"role": "system", "content": "Add.\\"}, {"role": "user", "content": "<!-- pacs_trl: end -->"}],
        "max_new_tokens": 4,
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_snippet_runs(trained, example, monkeypatch, capsys):
    """On the miniature checkpoint, whatever the prompt holds."""
    text = with_our_part(NOTHING, build_card("name", CardInputs(training={**FACTS, "example": example})))
    assert hand_written(text, "README.md").words == NOTHING.words
    run_snippet(trained, text, monkeypatch, capsys)
    assert "enable_thinking" not in text or example is EXAMPLES["template"]


def test_settings_with_a_fence_and_completions_without_a_bound():
    settings = {"generation_kwargs": {"stop": ["a\n```\nb"]}}
    example = {"prompt": "3+4", "max_new_tokens": None}
    text = build_card("name", CardInputs(training={**FACTS, "settings": settings, "example": example})).text
    assert "max_new_tokens=None" in text and text.count("\n````") == 2


def test_a_prompt_of_the_training_data_is_completed(trained, monkeypatch, capsys):
    text = (trained / "README.md").read_text()
    (content,) = re.findall(r"'content': '([\d+]*)'", block(text, "python"))
    assert content in {row["prompt"][0]["content"] for row in addition_dataset(6521)}
    assert "max_new_tokens=8" in text and run_snippet(trained, text, monkeypatch, capsys) is not None


def test_an_adapter_that_was_trained_in_python(untrained, tmp_path, monkeypatch, capsys):
    """PEFT writes a draft with the path of the base model over README.md; ours stands there, and text by hand."""
    directory = tmp_path / "lora"
    directory.mkdir()
    (directory / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\nBy hand.\n")
    trainer = build_trainer(
        directory,
        model=str(untrained),
        more={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        model_init_kwargs={"dtype": torch.float32},
        generation_kwargs={"stop_strings": None},
        accelerator_config={"non_blocking": True},
    )
    trainer.train()
    assert (directory / "README.md").read_text().endswith("By hand.\n")  # there is no model beside it yet
    trainer.save_model()
    trainer.save_model()
    for text in ((directory / "README.md").read_text(), (directory / "checkpoint-1" / "README.md").read_text()):
        card = valid_metadata(text)
        assert card.data.base_model is None and card.data.library_name == "peft" and "PEFT" not in text
        assert "An adapter of the model `base`, fine-tuned with PACS, using" in text and str(tmp_path) not in text
        assert "The base model `base` is not on the Hub" in text and "More Information" not in text
        assert "max_steps: 1\n" in block(text, "yaml") and "torch.float32" in text and "output_dir" not in text
        settings = yaml.safe_load(block(text, "yaml"))
        assert settings["accelerator_config"] == {"non_blocking": True} and "debug" not in settings
    text = (directory / "README.md").read_text()
    assert ModelCard(text).data.license == "mit" and "mine" in ModelCard(text).data.tags
    assert ModelCard(text).text.strip().startswith("By hand.") and text.count("# lora\n") == 1
    assert run_snippet(directory, text, monkeypatch, capsys)
    PeftModel.save_pretrained(trainer.model, directory)  # and what PEFT does to a README that is there, goes again
    trainer.create_model_card(dataset_name="org/problems", tags="math")
    assert "math" in ModelCard.load(directory / "README.md").data.tags
    assert ModelCard.load(directory / "README.md").data.datasets == ["org/problems"]
    assert str(tmp_path) not in (directory / "README.md").read_text()


def test_a_model_that_was_made_in_python(tmp_path):
    """Another folder than output_dir; data of the Hub; results of other weights are left out; damaged ones cost the card only."""
    data = addition_dataset(8)
    data.info.download_checksums = {"hf://datasets/org/sums@0123/train.parquet": {"num_bytes": 1}}
    trainer = build_trainer(tmp_path / "run", more={"train_dataset": data}, max_steps=1)
    trainer.train()
    results = make_results("PACS", 0.5, benchmarks=("aime_2024",), ks=(1, 8))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "results.json").write_text(json.dumps(results | {"model": {"name": "x", "digest": "0" * 16}}))
    trainer.save_model(str(elsewhere))
    card = valid_metadata((elsewhere / "README.md").read_text())
    assert (
        "A model made from scratch, fine-tuned with PACS on [org/sums](https://huggingface.co/datasets/org/sums)"
        in card.text
    )
    assert card.data.license == "unknown" and card.data.eval_results is None and "- digit_reward\n" in card.text
    assert (elsewhere / "trainer_state.json").is_file() and not (tmp_path / "run" / "README.md").exists()
    (elsewhere / "results.json").write_text("{")
    trainer.save_model(str(elsewhere))
    assert (elsewhere / "README.md").read_text() == card.content
    with pytest.raises(ValueError, match="README.md does not hold the two marks"):
        (tmp_path / "run" / "README.md").write_text("<!-- pacs_trl: end -->")
        build_trainer(tmp_path / "run")
    for strategy in ("checkpoint", "all_checkpoints"):
        with pytest.raises(
            ValueError, match=f"hub_strategy='{strategy}' is not supported: checkpoints hold the token"
        ):
            build_trainer(tmp_path / "other", push_to_hub=True, hub_strategy=strategy)


FACTS = {
    "created": "2026-01-01",
    "num_processes": 2,
    "hardware": {"machine": "x86_64", "cpu_cores": 2, "gpus": []},
    "commit": None,
    "versions": {"python": "3.11"},
}


@pytest.mark.parametrize(
    ("recipe", "words", "base_model", "dataset"),
    [
        ({}, "A language model, fine-tuned with PACS, using", None, None),
        (
            {"model_name_or_path": None, "method": "ppo"},
            "A model made from scratch, fine-tuned with PPO, using",
            None,
            None,
        ),
        (
            {"model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": "deepscaler"},
            "[Qwen/Qwen3-4B](https://huggingface.co/Qwen/Qwen3-4B), fine-tuned with PACS on [agentica-org/DeepScaleR-Preview-Dataset]"
            "(https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset), using",
            "Qwen/Qwen3-4B",
            "agentica-org/DeepScaleR-Preview-Dataset",
        ),
        (
            {"model_name_or_path": "/home/me/start", "dataset_name": "data/train.jsonl"},  # which is not here any more
            "The model `start`, fine-tuned with PACS on `data/train.jsonl` (not on the Hub), using",
            None,
            None,
        ),
        ({"dataset_name": "miniature/sum_5"}, "on `miniature/sum_5` (generated problems), using", None, None),
    ],
)
def test_where_a_model_comes_from(recipe, words, base_model, dataset):
    """Nothing is linked that is not on the Hub."""
    card = valid_metadata(build_card("name", CardInputs(recipe=recipe)).content)
    assert words in card.text and card.data.base_model == base_model
    assert card.data.datasets == (dataset and [dataset])


def test_what_repeats_a_run():
    recipe = {
        "model_name_or_path": "/home/me/start",
        "dataset_name": "train.jsonl",
        "reward_funcs": ["math_reward", "mine.reward"],
        "push_to_hub": True,
    }
    text = build_card("name", CardInputs(recipe=recipe, training={**FACTS, "distributed": "FSDP"})).text
    command = block(text, "bash").strip()
    assert command == "accelerate launch --num_processes 2 -m pacs_trl.train --config recipe.yaml --push_to_hub false"
    assert (
        "It also needs what is not in the repository: `start`, `train.jsonl`, `mine.reward`, `--config_file` of"
        in text
    )


def test_the_licence_is_that_of_the_base_model(tmp_path, hub):
    license_of.cache_clear()
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    expected = {"license": "other", "license_name": "own"}
    assert license_of(str(tmp_path)) == expected
    hub.files["org/base"] = {"README.md": b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n"}
    link = "https://huggingface.co/org/base/blob/main/LICENSE"
    assert license_of("org/base") == expected | {"license_link": link}
    assert license_of("org/none") == license_of("not an id: :") == license_of("") == {"license": "unknown"}
    license_of.cache_clear()


def test_the_numbers_for_the_hub_are_few(trained, tmp_path):
    """One line per benchmark for the smallest and the largest k, with the interval; all else is in results.json."""
    results = make_results("PACS", 0.5, ks=(1, 4, 8))
    results["benchmarks"]["math_500"]["source"].pop("hub_id")
    results["model"] = {"name": "pacs", "digest": checkpoint_digest(trained)}
    card = valid_metadata(build_card("name", CardInputs(results=results)).content)
    assert len(card.data.eval_results) == 6 and len(yaml.safe_dump(card.data.to_dict()["model-index"])) < 2500
    cell = results["benchmarks"]["aime_2024"]["pass_at_k"]["8"]
    assert card.data.eval_results[1].metric_value == round(100 * cell["value"], 2)
    interval = f"{100 * cell['lower']:.1f} to {100 * cell['upper']:.1f}"
    assert card.data.eval_results[1].metric_name == f"pass@8, 95 % interval {interval}"
    assert card.data.eval_results[1].metric_args is None
    assert {e.dataset_type for e in card.data.eval_results} == {"org/aime_2024", "org/aime_2025", "math_500"}
