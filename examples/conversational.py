"""PACS on conversations: DeepMath from the Hub, or, without a network, a dataset of messages that is built here.

Run `python examples/conversational.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU). `prompt`
is a list of messages that ends with the user's turn; other columns are arguments of reward functions.
"""

from datasets import Dataset, load_dataset
from trl import TrlParser

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rewards import math_reward


def sum_then_product(a: int, b: int) -> dict:
    """Return a conversation whose last question depends on the turns before it."""
    prompt = [
        {"role": "system", "content": "Answer with the result in \\boxed{}."},
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": f"\\boxed{{{a + b}}}"},
        {"role": "user", "content": f"And times {a}?"},
    ]
    return {"prompt": prompt, "solution": str((a + b) * a)}


parser = TrlParser(PACSConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.set_defaults(output_dir="outputs/conversational", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4)
parser.set_defaults(max_completion_length=1024)
args, names = parser.parse_args_and_config()

try:
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
except OSError:  # no network, and not in the cache
    dataset = Dataset.from_list([sum_then_product(a, b) for a in range(2, 10) for b in range(11, 50)])
trainer = PACSTrainer(names.model, math_reward, args, dataset)
trainer.train()
trainer.save_model()
