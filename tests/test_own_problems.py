"""A user's own file of 50 problems through the commands of docs/your_own_problems.md: train, evaluate, report."""

import json
import random
import re
import shlex
from pathlib import Path

from optional_packages import needs
from seeds import shifted

from pacs_trl import cli


ROOT = Path(__file__).parents[1]
# What keeps the commands short here: a model that is there already, and fewer steps and samples.
SHORTER = {
    "train": ["--max_steps", "2", "--max_completion_length", "8", "--disable_tqdm", "true"],
    "evaluate": ["--n", "4", "--k", "1,2,4", "--max_new_tokens", "8"],
    "report": [],
}


def commands() -> list[list[str]]:
    page = (ROOT / "docs/your_own_problems.md").read_text()
    block = re.search(r"```bash\n(.*?)```", page, flags=re.DOTALL)[1]
    return [shlex.split(line) for line in block.splitlines()]


@needs("matplotlib")
def test_train_evaluate_report(tmp_path, monkeypatch, capsys, model_path):
    rng = random.Random(shifted(0))
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(50)]
    lines = [json.dumps({"problem": f"{a}+{b}", "answer": str(a + b), "level": a % 3}) + "\n" for a, b in pairs]
    (tmp_path / "train.jsonl").write_text("".join(lines[:40]))
    (tmp_path / "test.jsonl").write_text("".join(lines[40:]))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    names = []
    for program, name, *arguments in commands():
        assert program == "pacs-trl"
        named = ["--model_name_or_path", model_path] if name == "train" else []
        arguments = [model_path if word == "miniature/addition" else word for word in arguments]
        monkeypatch.setattr("sys.argv", [program, name, *arguments, *named, *SHORTER[name]])
        assert cli.main() == 0, capsys.readouterr().err
        names.append(name)
    assert names == ["evaluate", "train", "evaluate", "report"]
    results = json.loads((tmp_path / "outputs/mine/evaluation/results.json").read_text())
    assert len(results["benchmarks"]["test"]["problems"]) == 10
    assert results["benchmarks"]["test"]["verification"].keys() <= {"correct", "wrong", "no_answer"}
    table = (tmp_path / "outputs/mine/report/tables.md").read_text()
    assert "<summary>test</summary>" in table and "k=4" in table
    assert (tmp_path / "outputs/mine/report/pass_at_k.png").is_file()
