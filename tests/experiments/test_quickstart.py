from pathlib import Path

from support.optional_packages import matplotlib  # noqa: F401 (skips without it)
from transformers import AutoModelForCausalLM

from experiments import quickstart


def test_the_quickstart_without_grpo_trains_and_summarizes_pacs_alone(model_path, tmp_path, monkeypatch, capsys):
    """The order of the steps and the summary; a miniature replaces the model."""
    monkeypatch.setattr(quickstart, "prepare_model", lambda: Path(model_path))
    recipe = tmp_path / "sums.yaml"
    text = quickstart.SMOLLM2.recipes["PACS"].read_text()
    recipe.write_text(text.replace("questions_train", "addition_train"))
    changed = quickstart.SMOLLM2._replace(task="addition", recipes={"PACS": recipe})
    monkeypatch.setattr(quickstart, "SMOLLM2", changed)
    monkeypatch.setattr(quickstart, "RECIPES", tmp_path / "recipes")

    out = tmp_path / "out"
    quickstart.main(["--max_steps", "1", "--max_problems", "2", "--output_dir", str(out)])

    printed = capsys.readouterr().out
    assert "contains no checkpoint" not in printed  # a first run has nothing to continue
    assert "step 1/1" in printed and f"--model_name_or_path {out}/seed-0/pacs " in printed
    assert "| 0 | before | " in printed and "| 0 | PACS | " in printed and "GRPO" not in printed
    assert (out / "quickstart.png").is_file() and not (out / "seed-0" / "grpo").exists()
    AutoModelForCausalLM.from_pretrained(out / "seed-0" / "pacs")
