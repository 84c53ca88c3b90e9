"""Coverage of 95 % intervals over problems: `python -m benchmarks.intervals`, a minute on one core.

Problem difficulties follow a beta distribution, with 128 completions per problem. The script samples 2,000 benchmarks
from this population and checks how often their intervals contain the population mean. Differences are to a second
model that is better by 0.5 in log-odds on average, with a standard deviation of 0.5 over problems.
"""

import argparse

import numpy as np

from experiments.bootstrap import bootstrap_interval, paired_bootstrap
from pacs_trl.evaluation import paired_interval, pass_interval


NUM_BENCHMARKS, NUM_SAMPLES = 2_000, 128
WORLDS = [(30, 0.024, 0.5), (10, 0.1, 1.0), (30, 0.3, 1.0), (500, 0.3, 1.0)]  # problems, pass@1, a + b


def draw(rng: np.random.Generator, mean: float, concentration: float, size) -> tuple[np.ndarray, np.ndarray]:
    """Sample the probabilities of a correct answer of the first and of the second model."""
    first = np.clip(rng.beta(mean * concentration, (1 - mean) * concentration, size), 1e-12, 1 - 1e-12)
    odds = first / (1 - first) * np.exp(0.5 + 0.5 * rng.standard_normal(size))
    return first, odds / (1 + odds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    for num_problems, mean, concentration in WORLDS:
        first, second = draw(rng, mean, concentration, 2_000_000)
        truth, difference = first.mean(), (second - first).mean()
        chances = draw(rng, mean, concentration, (num_problems, NUM_BENCHMARKS))
        first, second = (rng.binomial(NUM_SAMPLES, chance) / NUM_SAMPLES for chance in chances)
        intervals = {
            "Wilson": (pass_interval(first), truth),
            "bootstrap": (bootstrap_interval(first), truth),
            "difference": (paired_interval((first, second)), difference),
            "paired bootstrap of the difference": (paired_bootstrap(first, second), difference),
        }
        held = {name: np.mean((i.lower <= value) & (value <= i.upper)) for name, (i, value) in intervals.items()}
        print(f"{num_problems} problems at {mean:.1%}: " + ", ".join(f"{n} {s:.1%}" for n, s in held.items()))


if __name__ == "__main__":
    main()
