from optional_packages import matplotlib  # noqa: F401 (skips without it)
from transformers import AutoModelForCausalLM

from experiments import quickstart
from experiments.quickstart import summary


def run_of(seed: int) -> dict:
    """A run in which the warm start is right in 1 of 8 completions of each of 100 problems, PACS in 4 and GRPO in
    3."""
    results = {}
    for method, right in {quickstart.MINIATURE.start: 1, "PACS": 4, "GRPO": 3}.items():
        problems = [{"id": str(i), "n": 8, "c": right, "ungraded": 0} for i in range(100)]
        shares = {str(k): {"value": right / 8} for k in quickstart.KS}
        entry = {"title": "addition", "problems": problems, "pass_at_k": shares}
        benchmarks = {quickstart.MINIATURE.benchmark: entry}
        results[method] = {"method": method, "k": list(quickstart.KS), "benchmarks": benchmarks}
    log = [{"step": i, "reward": 0.2, "entropy": 0.3, "loss": 0.69} for i in (1, 2)] + [{"step": 2, "train_loss": 0.7}]
    logs = dict.fromkeys(quickstart.METHODS, log)
    examples = {"1+2": ["`x` incorrect", "`y` correct", "`z` incorrect"]}
    run = {"seed": seed, "seconds": 61.4, "processor_seconds": 99.6}
    return run | {"results": results, "logs": logs, "examples": examples}


def test_summary_has_each_seed_and_method_and_shows_completions():
    lines = summary([run_of(7)]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:6]] == ["warm start", "PACS", "GRPO", "PACS - GRPO"]
    assert lines[3].startswith("| 7 | PACS | 50.0 [") and lines[3].endswith("| yes |")
    assert lines[4].startswith("| 7 | GRPO | 37.5 [") and lines[4].endswith("| yes |")
    assert lines[5] == "| 7 | PACS - GRPO | 12.5 [11.1, 13.9] | 0.0 [-3.7, 3.7] |  |"
    assert "| 7 | 61 | 100 |" in lines
    assert lines[-1] == "| 7 | `1+2` | `x` incorrect | `y` correct | `z` incorrect |"


def test_real_model_without_grpo(tmp_path, monkeypatch, capsys):
    """The order of the steps and the summary; a miniature replaces the model."""
    from replay import TOKENIZER, tiny_model

    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    monkeypatch.setattr(quickstart, "prepare_model", lambda: model)
    recipe = tmp_path / "sums.yaml"
    text = quickstart.SMOLLM2.recipes["PACS"].read_text()
    recipe.write_text(text.replace("miniature/questions", "miniature/addition"))
    changed = quickstart.SMOLLM2._replace(benchmark="miniature/addition", recipes={"PACS": recipe})
    monkeypatch.setattr(quickstart, "SMOLLM2", changed)
    monkeypatch.setattr(quickstart, "RECIPES", tmp_path / "recipes")

    out = tmp_path / "out"
    quickstart.main(["--max_steps", "1", "--max_problems", "2", "--output_dir", str(out)])

    printed = capsys.readouterr().out
    assert "step 1/1" in printed and f"--model_name_or_path {out}/seed-0/pacs " in printed
    assert "| 0 | before | " in printed and "| 0 | PACS | " in printed and "GRPO" not in printed
    assert (out / "quickstart.png").is_file() and not (out / "seed-0" / "grpo").exists()
    AutoModelForCausalLM.from_pretrained(out / "seed-0" / "pacs")
