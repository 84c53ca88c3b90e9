"""An environment for recipes/miniature/environment.yaml: the product of two numbers, with a program as tool."""

import random

from pacs_trl.rewards import run_python
from pacs_trl.verification import completion_text, last_boxed


class Products:
    """Ask for a product that follows from `seed`, which is the same for all completions of a group."""

    def reset(self, seed: int, **columns) -> str:
        numbers = random.Random(seed)
        self.factors = numbers.randint(10, 99), numbers.randint(10, 99)
        return "{}*{}".format(*self.factors)

    def run_python(self, code: str, input: str = "") -> str:
        """
        Run a Python program.

        Args:
            code: The program.
            input: What it reads from standard input.

        Returns:
            What it prints.
        """
        return run_python(code, input)


def product_reward(completions, environments, **columns) -> list[float]:
    """Return 1.0 for each completion whose last message has the product in a box, 0.0 otherwise."""
    answers = [str(environment.factors[0] * environment.factors[1]) for environment in environments]
    boxes = [last_boxed(completion_text(completion) or "") for completion in completions]
    return [float(box == answer) for box, answer in zip(boxes, answers, strict=True)]


class Environment:
    """Attributes that recipes read. There is no dataset: `reset` makes the examples."""

    train_dataset = None
    environment_factory = Products
    reward_funcs = [product_reward]


environment = Environment()
