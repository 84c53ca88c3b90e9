"""Traces of an oracle for the supervised start of a critic.

`python -m experiments.genac.oracle --help`.

The success rate of a prefix is estimated by many continuations of the policy. It follows a short worked reason: each
calculation of the prefix is repeated (`38y` or `38n`), then the unused terms of the problem are listed, with an `x` if
a used number is not a term: `38y45n|7<2>`. A model that learns this has to look at what causes the rate.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.genac.supervised_start import Trace, write_traces
from experiments.miniature.files import CRITIC_PROMPT, warm_start_of
from experiments.miniature.tasks import looks_right, problems
from experiments.miniature.warm_start import MAX_COMPLETION_LENGTH
from pacs_trl.errors import exit_code
from pacs_trl.evaluation.requests import SamplingSettings, sample_seed
from pacs_trl.evaluation.sampling import stop_token_ids
from pacs_trl.experimental._critic import CriticPrompt, State, generate_answers, question_ids
from pacs_trl.settings import Parser


_CALCULATION = re.compile(r"(\d+)([+\-*/])(\d+)=(?:\\boxed\{)?(-?\d+)(?=[,}])")
_RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a // max(b, 1)}


def worked_reason(problem: str, response: str) -> str:
    """Return the reason for a prefix: its calculations repeated, and of a sum the unused terms."""
    done = ""
    used: list[str] = []
    for a, sign, b, written in _CALCULATION.findall(response):
        result = _RESULT[sign](int(a), int(b))
        done += f"{result}{'y' if result == int(written) else 'n'}"
        used += [a, b] if not used else [b]
    terms, seen = Counter(re.findall(r"\d+", problem)), Counter(used)
    return f"{done}|{'+'.join((terms - seen).elements())}{'x' if seen - terms else ''}"


def oracle_traces(
    model,
    tokenizer,
    rows: Sequence[dict[str, str]],
    prompt: CriticPrompt,
    *,
    completions: int = 2,
    samples: int = 16,
    states: int = 3,
    seed: int = 0,
    batch_size: int = 512,
) -> list[Trace]:
    """
    States of a policy's completions, with their true success rates.

    Args:
        model, tokenizer: Of the policy.
        rows (sequence of `dict`): Problems, see [`~experiments.miniature.tasks.problems`].
        prompt ([`CriticPrompt`]): Whose tags the answers have.
        completions (`int`): Of each problem.
        samples (`int`): Continuations of each state.
        states (`int`): Of each completion besides the beginning, which counts once per problem: places drawn at
            random.
        seed (`int`): Of everything that is drawn.
    """
    questions = question_ids(tokenizer, [row["problem"] for row in rows])
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=MAX_COMPLETION_LENGTH)
    stop_ids = stop_token_ids(model, tokenizer)

    def draw(prompts: list[list[int]], stream: str) -> list[list[int]]:
        seeds = [sample_seed(seed, stream, i) for i in range(len(prompts))]
        answers = generate_answers(model, tokenizer, prompts, seeds, settings, batch_size=batch_size)
        return [answer.ids[:-1] if answer.ids[-1] in stop_ids else answer.ids for answer in answers]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    places = [i for i in range(len(rows)) for _ in range(completions)]
    first = draw([questions[i] for i in places], "completions")
    rate = sum(looks_right(rows[i], text(ids)) for i, ids in zip(places, first, strict=True)) / len(first)
    rng = random.Random(seed)
    asked: list[tuple[int, list[int]]] = [(i, []) for i in range(len(rows))]
    for i, ids in zip(places, first, strict=True):
        lengths = rng.sample(range(1, len(ids) + 1), min(states, len(ids)))
        asked += [(i, ids[:length]) for length in lengths]
    continued = draw([questions[i] + ids for i, ids in asked for _ in range(samples)], "continuations")
    traces = []
    for k, (i, ids) in enumerate(asked):
        right = [looks_right(rows[i], text(ids + more)) for more in continued[k * samples : (k + 1) * samples]]
        response = text(ids)
        score = f"{round(10 * sum(right) / samples)}".join(prompt.tags)
        answer = worked_reason(rows[i]["problem"], response) + score
        traces.append(Trace(State(rows[i]["problem"], response, len(ids)), rate, answer))
    return traces


def main(argv: Sequence[str] | None = None) -> int:
    """Write the traces of a policy and a task to a file."""
    parser = Parser("oracle", __doc__.split("\n")[0], prog="python -m experiments.genac.oracle")
    parser.add_argument("--model", required=True, help="policy: a checkpoint, or the path of a warm start in recipes")
    parser.add_argument("--task", required=True, help="miniature task with the training problems, such as terms")
    parser.add_argument("--output", type=Path, required=True, help="file of traces")
    parser.add_argument(
        "--critic_prompt", default=CRITIC_PROMPT, help=f"template of the answers (default: {CRITIC_PROMPT})"
    )
    parser.add_argument("--problems", type=int, default=300, help="problems (default: 300)")
    parser.add_argument("--completions", type=int, default=2, help="completions of each (default: 2)")
    parser.add_argument("--states", type=int, default=3, help="states of each completion besides the beginning")
    parser.add_argument("--samples", type=int, default=16, help="continuations of each state (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    args = parser.parse_args(argv)
    prompt = CriticPrompt(args.critic_prompt)
    rows = problems(args.task, "train", args.problems, seed=args.seed)
    path = warm_start_of(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path)
    how = {name: getattr(args, name) for name in ("completions", "states", "samples", "seed")}
    traces = oracle_traces(model, tokenizer, rows, prompt, **how)
    write_traces(args.output, traces)
    print(f"{len(traces)} traces of a policy that is right in {traces[0].success_rate:.1%}; written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.genac.oracle", main, sys.argv[1:]))
