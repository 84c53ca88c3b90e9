"""An environment of your own, for a recipe: its public methods are tools, and it grades what they did.

pacs-trl train --config recipes/miniature/environment.yaml --environment examples.extend_environment:safe
"""

import random


class Safe:
    """A lock with a number from 1 to 9, which opens after at most five attempts."""

    def reset(self, seed: int, **columns) -> str:  # the same seed for all completions of a group
        self.number, self.attempts, self.is_open = random.Random(seed).randint(1, 9), 0, False
        return "Open the safe. Its number is from 1 to 9."

    def turn(self, number: int) -> str:
        """
        Turn the dial to a number.

        Args:
            number: From 1 to 9.
        """
        self.attempts += 1
        self.is_open = self.is_open or number == self.number and self.attempts <= 5
        return "open" if self.is_open else "higher" if number < self.number else "lower"


def opened(completions, environments, **columns) -> list[float]:
    """Reward function: 1 for each open safe."""
    return [float(environment.is_open) for environment in environments]


class safe:
    """What a recipe reads: without a dataset, `reset` makes the examples from seeds."""

    train_dataset, environment_factory, reward_funcs = None, Safe, [opened]
