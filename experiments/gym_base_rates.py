"""Measure how often a model gives the reference answer to problems of reasoning-gym, and nothing else.

`python -m experiments.gym_base_rates --output docs/results/pretrained/base_rates.json` (with the extra `gym`)

The probability of the reference answer and the end of the turn, at temperature 1, is that of a completion with the
full score, as far as the scorer accepts one answer. pass@8 is the mean of `1 - (1 - p)^8` over problems.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.studies import markdown
from pacs_trl.data.gym import BENCHMARK_SEED, INSTRUCTION, checked_dataset
from pacs_trl.data.prompts import build_prompt
from pacs_trl.evaluation.requests import tokenize_prompt


TASKS = {
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "chain_sum, two digits": {"max_terms": 2, "min_digits": 2, "max_digits": 2},
    "products": {"max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 20},
    "lcm": {"max_value": 10},
    "count_bits": {"max_n": 30},
    "count_primes": {"max_n": 20},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "simple_equations": {"max_terms": 2, "max_value": 10},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 3},
    "number_sequence": {},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
    "family_relationships": {},
    "calendar_arithmetic": {},
    "syllogism": {},
}
PROMPTS = {
    "default": {"instruction": INSTRUCTION},
    "examples": {
        "instruction": "",
        "system_prompt": "Question: What is 3 + 4?\nAnswer: 7\n\nQuestion: What is 9 - 5?\nAnswer: 4",
    },
}


@torch.no_grad()
def answer_probabilities(model, tokenizer, task: str, prompt: dict[str, str], number: int) -> list[float]:
    """Return the probability of the reference answer to each of the first problems of the benchmark."""
    entries, probabilities = checked_dataset(task.partition(",")[0], TASKS[task], BENCHMARK_SEED, number), []
    for i in range(number):
        prompt_ids = tokenize_prompt(tokenizer, build_prompt(entries[i]["question"], **prompt))
        answer = [*tokenizer(str(entries[i]["answer"]))["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([[*prompt_ids, *answer]]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        probabilities.append(logps.sum().exp().item())
    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="outputs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("outputs/base_rates.json"))
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, probabilities = [], {}
    for task in TASKS:
        probabilities[task] = {
            name: answer_probabilities(model, tokenizer, task, prompt, args.problems)
            for name, prompt in PROMPTS.items()
        }
        shares = [(mean(ps), mean(1 - (1 - p) ** 8 for p in ps)) for ps in probabilities[task].values()]
        rows.append([task, *(f"{100 * share:.2f}" for pair in shares for share in pair)])
        args.output.write_text(
            json.dumps(
                {
                    t: {n: [round(p, 7) for p in ps] for n, ps in by_prompt.items()}
                    for t, by_prompt in probabilities.items()
                }
            )
            + "\n"
        )
        print(
            "\n".join(
                markdown(["task", *(f"{name}: {metric}" for name in PROMPTS for metric in ("pass@1", "pass@8"))], rows)
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
