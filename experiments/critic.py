"""Calibration of the implicit critic: sigmoid(psi) of a trained policy against the labels of graded completions.

Computes psi for the stored completions of an evaluation, writes one JSON line with psi and label per completion, and
draws the reliability diagram. Use completions of the reference, as in training, on held-out problems. Completions are
tokenized again from their text, with the end token if they had one.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.graded import read_graded
from experiments.logps import compute_logps
from experiments.reliability import reliability_figure
from pacs_trl.data import build_prompt, instruction_for
from pacs_trl.errors import exit_code
from pacs_trl.evaluation.benchmarks import load_benchmark, name_and_path
from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.requests import render_prompt
from pacs_trl.evaluation.results import read_results
from pacs_trl.objective import ScoreEstimator, group_scores
from pacs_trl.settings import Parser


LABELS = {"1": 1.0, "0": 0.0, "-": float("nan")}  # as `pacs-trl evaluate` writes grades


def sequence_logps(model, **rows) -> torch.Tensor:
    """Log-probability of each completion, float64 `(B,)`."""
    return torch.stack([logps.double().sum() for logps, _ in compute_logps(model, **rows)])


@torch.no_grad()
def critic_records(
    evaluation: Path,
    policy: str,
    reference: str,
    benchmark: str,
    *,
    pacs_beta: float = 1.0,
    score_estimator: ScoreEstimator = "rloo",
    batch_size: int = 64,
) -> list[dict]:
    """
    Return psi and label of every stored completion of one benchmark.

    Args:
        evaluation (`Path`): Output directory of `pacs-trl evaluate`.
        policy, reference (`str`): Checkpoints whose log-probs are compared.
        benchmark (`str`): As in the command `pacs-trl evaluate`.
        pacs_beta (`float`), score_estimator (`str`): As in training.
        batch_size (`int`): Completions per forward pass.

    Returns:
        `list[dict]`: `problem`, `sample`, `score` (psi) and `label` (0, 1, or `None` where there is no verdict).

    Raises:
        `ValueError`: if the evaluation has no such benchmark, or other problems than the benchmark has now.
    """
    results = read_results(evaluation)
    name, _ = name_and_path(benchmark)
    if name not in results["benchmarks"]:
        raise ValueError(f"{evaluation} has no benchmark {name!r}, only {', '.join(results['benchmarks'])}.")
    source, prompt_facts = results["benchmarks"][name]["source"], results["protocol"]["prompt"]
    columns = {key: source[key] for key in ("problem_column", "solution_column") if key in source}
    loaded = load_benchmark(benchmark, max_problems=source["num_problems"], columns=columns)
    if loaded.source["digest"] != source["digest"]:
        raise ValueError(
            f"The problems of {name} have changed since {evaluation} was made (digest {source['digest']}, now "
            f"{loaded.source['digest']}). Evaluate again."
        )
    grades, samples = read_graded(evaluation, name)
    engine = TransformersEngine.load(policy)
    tokenizer, prompts, completions, labels = engine.tokenizer, [], [], []
    for problem in loaded.problems:
        for sample, grade in enumerate(grades[problem.id]):
            record = samples[problem.id, sample]
            question, _ = problem.for_seed(record["seed"])
            if not isinstance(question, str):
                raise ValueError(f"Problem {problem.id} of {name} is a conversation. Use a benchmark of texts.")
            prompt = build_prompt(
                question,
                instruction=instruction_for(loaded, prompt_facts["instruction"]),
                system_prompt=prompt_facts["system_prompt"],
            )
            text = render_prompt(tokenizer, prompt, prompt_facts["chat_template_kwargs"])
            prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            end = [tokenizer.eos_token_id] if record["finish_reason"] == "stop" else []
            prompts.append(prompt_ids)
            completions.append(tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + end)
            labels.append(LABELS[grade])
    rows = {"prompt_ids": prompts, "completion_ids": completions, "batch_size": batch_size}
    proxies = pacs_beta * sequence_logps(engine.model, **rows).cpu()
    engine.close()  # one model in memory at a time
    proxies -= pacs_beta * sequence_logps(TransformersEngine.load(reference).model, **rows).cpu()
    scores = group_scores(proxies, torch.tensor(labels), num_generations=results["n"], score_estimator=score_estimator)
    places = [(problem.id, sample) for problem in loaded.problems for sample in range(results["n"])]
    return [
        {"problem": problem, "sample": sample, "score": round(score, 4), "label": None if label != label else label}
        for (problem, sample), score, label in zip(places, scores.tolist(), labels, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write psi and label of each completion, and the reliability diagram beside them."""
    parser = Parser("critic", __doc__.split("\n")[0], prog="python -m experiments.critic")
    parser.add_argument("evaluation", type=Path, help="output directory of `pacs-trl evaluate`")
    parser.add_argument("--benchmark", required=True, help="as in the command `pacs-trl evaluate`")
    parser.add_argument("--policy", required=True, help="trained checkpoint")
    parser.add_argument("--reference", required=True, help="checkpoint that training started from")
    parser.add_argument("--pacs_beta", type=float, default=1.0, help="as in training (default: 1)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; the figure has the same name")
    args = parser.parse_args(argv)
    records = critic_records(args.evaluation, args.policy, args.reference, args.benchmark, pacs_beta=args.pacs_beta)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    graded = [record for record in records if record["label"] is not None]
    psi, labels = ([record[key] for record in graded] for key in ("score", "label"))
    figure, _ = reliability_figure(psi, labels, args.output.with_suffix(""))
    print(f"{len(records)} completions: {args.output}, {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.critic", main, sys.argv[1:]))
