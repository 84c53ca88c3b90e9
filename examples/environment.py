"""PACS in an environment, whose methods are tools: find a number with at most seven guesses.

Run `python examples/environment.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU).
"""

import random

from datasets import Dataset
from trl import TrlParser

from pacs_trl import PACSConfig, PACSTrainer


class GuessTheNumber:
    def reset(self, seed: int, **columns) -> str:  # the seed is that of the group
        self.number, self.replies = random.Random(seed).randint(1, 100), []
        return "I think of a whole number from 1 to 100. Find it with at most seven guesses."

    def guess(self, number: int) -> str:
        """Guess the number, and learn whether it is larger, smaller, or found.

        Args:
            number: The guess.
        """
        self.replies.append("larger" if self.number > number else "smaller" if self.number < number else "found")
        return self.replies[-1]

    def get_reward(self) -> float:
        return float("found" in self.replies[:7])


parser = TrlParser(PACSConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")  # its chat template has tools
parser.set_defaults(output_dir="outputs/environment", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=64, max_completion_length=1024)
args, names = parser.parse_args_and_config()
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "Use the tool."}]}] * 1000)
trainer = PACSTrainer(names.model, args=args, train_dataset=dataset, environment_factory=GuessTheNumber)
trainer.train()
trainer.save_model()
