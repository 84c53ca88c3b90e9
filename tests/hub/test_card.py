"""The model card: the same after training and after pushing, with a snippet and a command that run."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig
from support.results_world import make_results
from support.runs import build_trainer

from experiments.miniature.files import data_file, write_data
from experiments.miniature.warm_start import CARD
from pacs_trl import train
from pacs_trl.evaluation.provenance import training_facts
from pacs_trl.hub import push
from pacs_trl.methods import method_names
from pacs_trl.model_card import build_card, kept_readme, license_of
from pacs_trl.recipe import trainer_of_method


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
def trained(model_path, tmp_path_factory):
    """The folder of a run from a shipped recipe, with a checkpoint inside."""
    directory = tmp_path_factory.mktemp("runs") / "pacs"
    sizes = "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 8 --max_steps 5 --disable_tqdm true"  # noqa: E501
    saves = "--save_strategy steps --save_steps 5 --save_total_limit 1"
    start = directory.parent / "outputs/miniature/models/addition-small"
    shutil.copytree(model_path, start)
    (start / "README.md").write_text(CARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory.parent)  # the recipe names files relative to the working directory
        write_data()
        train.main(["--config", str(RECIPE), "--output_dir", str(directory), *sizes.split(), *saves.split()])
    return directory


def test_the_card_of_a_trained_model_is_valid_and_names_no_local_path(trained):
    card = valid_metadata((trained / "README.md").read_text())
    assert card.data.base_model is None and card.data.datasets is None and card.data.license == "apache-2.0"
    for words in (
        "max_new_tokens=8,",
        "`addition_train.jsonl`",
        "pacs-trl train --config recipe.yaml\n",
        "@article{li2025",
    ):
        assert words in card.text
    assert str(trained.parent) not in card.content and kept_readme(trained) is None
    checkpoint_readme = (trained / "checkpoint-5" / "README.md").read_text()
    assert block(checkpoint_readme, "python") == block(card.text, "python") and valid_metadata(checkpoint_readme).text


def test_it_is_the_same_after_pushing_and_its_snippet_and_command_run(
    trained, model_path, hub, tmp_path, monkeypatch, capsys
):
    here = (trained / "README.md").read_text()
    assert run_snippet(trained, here, monkeypatch, capsys)
    push(shutil.copytree(trained, tmp_path / "pacs"), REPO, api=HfApi(endpoint=hub.url, token="hf_x"))
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, content in hub.files[REPO].items():
        (repository / name).write_bytes(content)
    pushed = (repository / "README.md").read_text()
    named = here.replace("# pacs\n", "# pacs-mini\n").replace("model_name: pacs\n", "model_name: pacs-mini\n")
    named = named.replace('model=".")', f'model="{REPO}")')
    assert pushed == named
    program, command, *argv = shlex.split(block(pushed, "bash"))
    assert (program, command) == ("pacs-trl", "train")
    monkeypatch.chdir(repository)
    (repository / "addition-small").symlink_to(model_path)
    (repository / "addition_train.jsonl").symlink_to(trained.parent / data_file("addition", "train"))
    pushing = "--push_to_hub true --hub_model_id user/again --hub_token hf_x".split()
    again = train.main([*argv, *pushing])
    weights = Path(again.args.output_dir) / "model.safetensors"
    assert weights.read_bytes() == (trained / "model.safetensors").read_bytes()
    files = hub.files["user/again"]  # the recipe pushes, too
    assert len(hub.commits["user/again"]) == 1
    assert {"model.safetensors", "README.md", "recipe.yaml", "provenance.json"} <= set(files)
    recipe, card = yaml.safe_load(files["recipe.yaml"]), files["README.md"].decode()
    assert recipe["hub_model_id"] == "user/again" and "hub_token" not in recipe
    assert "fine-tuned with PACS" in card and "Trained with 1 process on" in card


def test_names_break_neither_tables_nor_fences():
    results = make_results("PACS", 0.5, benchmarks=("aime_2024",), ks=(1, 8))
    results["benchmarks"]["aime_2024"]["title"] = "AIME\n\n# 2024 | a"
    results["protocol"] = results["protocol"] | {"prompt": {"instruction": "a\n```\nb\n````", "system_prompt": None}}
    text = build_card("a\nb", results=results, recipe={"dataset_name": "x`\n# y", "method": "p\nq"})
    fenced = "\n`````text\n<problem> a\n```\nb\n````\n`````\n"
    for words in ("\n# a b\n", "**AIME # 2024 | a**", "`x' # y`", "P Q", fenced):
        assert words in text
    settings = {"generation_kwargs": {"stop": ["a\n```\nb"]}}
    facts = training_facts(2) | {"commit": None, "settings": settings}  # of an installed wheel
    assert build_card("name", training=facts).count("\n````") == 2


def test_the_card_has_the_instruction_of_each_benchmark():
    results = make_results("PACS", 0.5, ks=(1, 8))
    one = build_card("name", results=results)
    assert "with this prompt" in one and "\n\n```text\n<problem> Box it.\n```\n\nSampling" in one
    for name, instruction in (("aime_2024", "Say A."), ("aime_2025", None)):
        results["benchmarks"][name]["instruction"] = instruction
    text = build_card("name", results=results)
    for words in ("AIME 2024:\n\n```text\n<problem> Say A.\n```\n", "\n\nAIME 2025:\n\nthe prompts of the data\n\n"):
        assert words in text
    assert "MATH 500:\n\n```text\n<problem> Box it.\n```\n\nSampling" in text


def test_the_use_of_a_model_is_shown_with_a_prompt_of_its_task():
    question = [{"role": "user", "content": 'Write "9" as a Roman numeral.'}]
    facts = training_facts(1) | {"example": {"prompt": question, "max_new_tokens": 16}}
    code = block(build_card("name", training=facts), "python")
    assert "prompt = [{'role': 'user', 'content': 'Write \"9\" as a Roman numeral.'}]\n" in code
    assert "generator(prompt, max_new_tokens=16," in code
    facts["example"]["prompt"] = "IX + I ="
    assert "prompt = 'IX + I ='\n" in block(build_card("name", training=facts), "python")
    assert "max_new_tokens=1024" in block(build_card("name"), "python")


def test_the_prompt_of_a_card_is_a_python_literal():
    prompt = [{"role": "user", "content": "π\n"}, {"role": "assistant", "content": None, "prefix": True}]
    facts = training_facts(1) | {"example": {"prompt": prompt, "max_new_tokens": 16}}
    (line,) = re.findall(r"^prompt = (.*)$", build_card("name", training=facts), re.MULTILINE)
    assert ast.literal_eval(line) == prompt


@pytest.mark.parametrize(
    ("recipe", "is_shown"),
    [
        (None, False),
        ({"dataset_name": "problems.jsonl"}, False),
        ({"dataset_name": "org/problems"}, False),
        ({"dataset_name": "deepscaler", "dataset_path": "problems.jsonl"}, False),
        ({"dataset_name": "deepscaler"}, True),
        ({"dataset_name": "reasoning_gym"}, True),
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_a_prompt_of_data_that_may_be_private_is_not_published(tmp_path, recipe, is_shown, is_text):
    private = "Patient Jo: dose?"
    rows = [{"prompt": private if is_text else [{"role": "user", "content": private}], "solution": "1"}] * 8
    trainer = build_trainer(tmp_path, more={"train_dataset": Dataset.from_list(rows)}, max_completion_length=8)
    trainer.recipe = recipe
    trainer.save_model()
    code = block((tmp_path / "README.md").read_text(), "python")
    for content in (code, (tmp_path / "provenance.json").read_text()):
        assert (private in content) == is_shown
    shown = private if is_shown else "What is 37 + 5?"
    (line,) = re.findall(r"^prompt = (.*)$", code, re.MULTILINE)
    assert ast.literal_eval(line) == (shown if is_text else [{"role": "user", "content": shown}])
    assert "max_new_tokens=8," in code


def test_a_model_of_vllm_is_used_in_the_dtype_of_its_rollouts():
    """Rounding to nearest hides updates, so the float32 weights may be far worse."""
    vllm = {"use_vllm": True}
    assert 'dtype="bfloat16"' in build_card("name", recipe=vllm)
    for recipe in ({}, vllm | {"bf16": False}, vllm | {"fp16": True}):
        assert "dtype=" not in build_card("name", recipe=recipe)


def test_an_adapter_that_was_trained_in_python(model_path, tmp_path, monkeypatch, capsys):
    """PEFT writes a draft with the path of the base model over README.md; ours stands there, or text by hand."""
    directory = tmp_path / "lora"
    trainer = build_trainer(
        directory,
        model=model_path,
        more={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        model_init_kwargs={"dtype": torch.float32},
        generation_kwargs={"stop_strings": None},
        accelerator_config={"non_blocking": True},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_model()
    for text in ((directory / "README.md").read_text(), (directory / "checkpoint-1" / "README.md").read_text()):
        card = valid_metadata(text)
        assert card.data.base_model is None and card.data.library_name == "peft" and "PEFT" not in text
        assert "`model`" in text and str(tmp_path) not in text
        settings = yaml.safe_load(block(text, "yaml"))
        assert settings["max_steps"] == 1 and settings["model_init_kwargs"] == {"dtype": "float32"}
        assert "output_dir" not in text and "AcceleratorConfig" not in text
    assert run_snippet(directory, text, monkeypatch, capsys)
    trainer.create_model_card(dataset_name="org/problems", tags="math")
    card = ModelCard.load(directory / "README.md")
    assert "math" in card.data.tags and card.data.datasets == ["org/problems"]
    (directory / "README.md").write_text("---\nlicense: mit\n---\nBy hand.\n")
    trainer.save_model()
    assert (directory / "README.md").read_text() == "---\nlicense: mit\n---\nBy hand.\n"


def test_a_method_has_the_paper_and_tags_of_its_authors_alone():
    trainers = [trainer_of_method(name) for name in method_names()]
    papers = {trainer._name: trainer._paper.get("id") for trainer in trainers}
    assert [name for name, paper in papers.items() if paper is None] == ["process_labels"]  # of this package
    assert len(set(papers.values())) == len(papers)
    assert all(trainer._tag_names == ["trl", trainer._name.lower()] for trainer in trainers)

    class OtherTrainer(trainer_of_method("rlpr")):
        """The same method with changes."""

    assert OtherTrainer._paper == trainer_of_method("rlpr")._paper and OtherTrainer._tag_names == ["trl", "rlpr"]


QWEN = {"model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": "deepscaler"}
LOCAL = ["/data/org/model", "~/models/base", "./base", "../x/base", "outputs/mine/model", "base", "outputs/model"]
GONE = {"model_name_or_path": "/home/me/start", "dataset_name": "data/train.jsonl"}  # not here any more
PATHS = [{"model_name_or_path": path, "dataset_name": path} for path in LOCAL]


@pytest.mark.parametrize("recipe", [{}, {"model_name_or_path": None, "method": "ppo"}, QWEN, GONE, *PATHS])
def test_where_a_model_comes_from(recipe, tmp_path, monkeypatch):
    """Nothing is linked that is not on the Hub, and no local path is taken for an id."""
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card = valid_metadata(build_card("name", recipe=recipe))
    known = ("Qwen/Qwen3-4B", ["agentica-org/DeepScaleR-Preview-Dataset"]) if recipe is QWEN else (None, None)
    assert (card.data.base_model, card.data.datasets) == known
    said = card.text.partition("# name\n")[2].partition("using `pacs_trl`")[0]
    assert recipe not in PATHS or said.count("`") == 4 and "/" not in said


def test_the_command_names_the_processes_and_does_not_push():
    command = block(build_card("name", recipe={"push_to_hub": True}, training=training_facts(2)), "bash").strip()
    assert command == "accelerate launch --num_processes 2 -m pacs_trl.train --config recipe.yaml --push_to_hub false"


def test_the_licence_is_that_of_the_base_model(tmp_path, hub):
    license_of.cache_clear()
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    assert license_of(str(tmp_path)) == {"license": "other", "license_name": "own"}  # no local path
    hub.files["org/base"] = {"README.md": b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n"}
    link = "https://huggingface.co/org/base/blob/main/LICENSE"
    assert license_of("org/base") == {"license": "other", "license_name": "own", "license_link": link}
    assert license_of("org/none") == license_of("not an id: :") == license_of("") == {"license": "unknown"}
    license_of.cache_clear()


def test_the_numbers_for_the_hub_are_few():
    """One line per benchmark for the smallest and the largest k, with the interval; all else is in results.json."""
    results = make_results("PACS", 0.5, ks=(1, 4, 8))
    results["benchmarks"]["math_500"]["source"].pop("hub_id")
    card = valid_metadata(build_card("name", results=results))
    assert len(card.data.eval_results) == 6 and len(yaml.safe_dump(card.data.to_dict()["model-index"])) < 2500
    cell, entry = results["benchmarks"]["aime_2024"]["pass_at_k"]["8"], card.data.eval_results[1]
    interval = f"{100 * cell['lower']:.1f} to {100 * cell['upper']:.1f}"
    assert entry.metric_name == f"pass@8, 95 % interval {interval}" and entry.metric_args is None
    assert {e.dataset_type for e in card.data.eval_results} == {"org/aime_2024", "org/aime_2025", "math_500"}
