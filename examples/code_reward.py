"""GRPO on programs: the reward of a completion is whether its program passes the tests of MBPP, run in the sandbox.

Run `python examples/code_reward.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU) under Linux,
which the sandbox needs.
"""

import re

from datasets import load_dataset
from trl import TrlParser

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.rewards import code_reward


def to_problem(example: dict) -> dict:
    """Return a prompt, and the tests as `solution`, which `code_reward` reads."""
    asserts = "\n".join(example["test_list"])
    (name,) = re.findall(r"def (\w+)\(", example["code"])[-1:]
    content = f"{example['text']}\nWrite a Python program that passes these tests:\n```python\n{asserts}\n```"
    tests = {"type": "asserts", "code": asserts, "entry_point": name, "prelude": example["test_setup_code"]}
    return {"prompt": [{"role": "user", "content": content}], "solution": tests}


parser = TrlParser(GRPOConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct")
parser.add_argument("--dataset", default="google-research-datasets/mbpp")
parser.set_defaults(output_dir="outputs/code_reward", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4)
parser.set_defaults(max_completion_length=512)
args, names = parser.parse_args_and_config()

dataset = load_dataset(names.dataset, split="train").map(to_problem)
trainer = GRPOTrainer(names.model, code_reward, args, dataset)
trainer.train()
trainer.save_model()
