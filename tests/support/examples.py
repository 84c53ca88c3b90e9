"""Examples run as scripts, in this process and an empty folder, with small settings."""

import json
import runpy
import sys
from pathlib import Path

import datasets


EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "bf16": "false",
    "use_cpu": "true",
    "disable_tqdm": "true",
    "report_to": "none",
    "max_steps": 1,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 8,
}
MESSAGES = [{"prompt": [{"role": "user", "content": f"{a} plus 1?"}], "solution": str(a + 1)} for a in range(8)]


def run_example(folder: Path, monkeypatch, name: str, rows: list[dict] | None = None, **options) -> dict:
    """Run `python examples/NAME.py --OPTION VALUE ...` in `folder`, with `rows` as its dataset; return its globals."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    if rows:
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        header = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
        (folder / "data/README.md").write_text(header)
        options = {"dataset": str(folder / "data"), **options}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def check_finished(script: dict, steps: int = 1) -> None:
    """Assert that a script has trained, logged rewards, and saved a model."""
    trainer = script["trainer"]
    assert trainer.state.global_step == steps
    assert any("reward" in log for log in trainer.state.log_history)
    assert list(Path(trainer.args.output_dir).glob("*.safetensors"))
