"""GRPO on GSM8K with a reward function written here.

Run `python examples/reward_function.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU), or
`accelerate launch examples/reward_function.py` on several.
"""

import re

from datasets import load_dataset
from trl import TrlParser

from pacs_trl import GRPOConfig, GRPOTrainer


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))


def last_number_is_correct(completions, answer, **kwargs) -> list[float]:
    """Return 1 for a completion whose last number is the last number of the dataset's answer, else 0."""
    texts = [turns[0]["content"] for turns in completions]
    return [float(numbers(text)[-1:] == numbers(gold)[-1:]) for text, gold in zip(texts, answer, strict=True)]


def to_prompt(example: dict) -> dict:
    return {"prompt": [{"role": "user", "content": example["question"] + " End with the number alone."}]}


parser = TrlParser(GRPOConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--dataset", default="openai/gsm8k")
parser.set_defaults(output_dir="outputs/reward_function", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=32, gradient_accumulation_steps=4)
args, names = parser.parse_args_and_config()

dataset = load_dataset(names.dataset, "main", split="train").map(to_prompt)
trainer = GRPOTrainer(names.model, last_number_is_correct, args, dataset)
trainer.train()
trainer.save_model()
