"""Training through its command line, and a model whose turns are a script."""

from pathlib import Path

import torch
import yaml
from trl import GRPOTrainer

from experiments.miniature.tasks import CALL
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import train
from support.seeds import shifted


RECIPES = Path(__file__).parents[2] / "recipes" / "miniature"
TOKENIZER = build_tokenizer(tools=True)


def run_recipe(output_dir, model_path, *words: str, recipe="pacs.yaml", **settings):
    """Two steps of a miniature recipe at a small size; problems are found from any working directory."""
    files = yaml.safe_load((RECIPES / recipe).read_text())
    for key in ("dataset_name", "critic_prompt"):
        if key in files and f"--{key}" not in words:
            settings = {key: RECIPES.parents[1] / files[key]} | settings
    options = {"config": RECIPES / recipe, "model_name_or_path": model_path, "output_dir": output_dir, "max_steps": 2}
    options |= {"per_device_train_batch_size": 8, "num_generations": 4, "seed": shifted(42)} | settings
    return train.main([part for key, value in options.items() for part in (f"--{key}", str(value))] + list(words))


def play_products(monkeypatch) -> list[list[str]]:
    """Of a product the model asks the tool, or guesses 1, as the generator says; else it repeats what it was told.
    Returns what is asked at first, call by call."""
    asked = []

    def generate(self, prompt_ids, images, fields, num_generations, **kwargs):
        turns = [text.split("<|im_start|>user\n")[-1] for text in TOKENIZER.batch_decode(prompt_ids)]
        turns = [turn.partition("<|im_end|>")[0].strip() for turn in turns]
        asked.extend([turns] if num_generations > 1 else [])
        said = []
        for turn in turns:
            calls = "*" in turn and torch.rand(1) < 0.5
            said.append((CALL.format(turn) if calls else rf"\boxed{{{'1' if '*' in turn else turn}}}") + "<|im_end|>")
        return [TOKENIZER(text)["input_ids"] for text in said], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    return asked
