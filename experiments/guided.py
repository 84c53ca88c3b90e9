"""Guided completions on problems that the policy never solves alone, with equal numbers of completions.

`python -m experiments.guided --seeds 0 1 2`

A sum written backwards, `97#35` for `53+79`, is unknown to a warm start that has learned sums and to follow hints.
PACS trains on sums and backward sums from the same warm start: without hints, with guided completions whose hint is
the sum, and with a lower weight on them. Every arm ends after the generation batch with which it has generated
`COMPLETIONS`, guided attempts included. Measured on held-out sums without hints; finished runs are not repeated.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import mean

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from experiments.miniature.model import build_model
from experiments.miniature.tasks import demonstrations, problems
from experiments.miniature.tokenizer import build_tokenizer
from experiments.paper.runs import train_once
from experiments.studies import markdown, mean_difference, run_name
from pacs_trl.data.prompts import build_prompt
from pacs_trl.evaluation import pass_at_k
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.run import evaluate
from pacs_trl.experimental.guidance import HINT, GuidanceTrainer
from pacs_trl.rewards import VerificationArguments


RECIPE = Path(__file__).parents[1] / "recipes/miniature/sums-0.1m/pacs.yaml"
WARM_START_STEPS, LENGTH, NUM_TRAINED, NUM_HELD_OUT, FAR = 1500, 32, 512, 64, 30
UPDATES, BATCH = 4, 256  # updates and first completions of a generation batch
GENERATIONS = 180  # batches of the plain arm
COMPLETIONS = GENERATIONS * BATCH
START = "warm start"
ARMS = {
    "plain": [],
    "guided": ["--method", "guidance"],
    "guided, weight 0.25": ["--method", "guidance", "--guided_weight", "0.25"],
}
KS = (1, 8, 64)


class BudgetTrainer(GuidanceTrainer):
    """[`GuidanceTrainer`] that stops after `COMPLETIONS`; they are counted for one uninterrupted run."""

    num_completions = 0

    def extend(self, num_steps: int) -> None:
        super().extend(num_steps)
        self.num_completions += BATCH + int(self._metrics["train"]["guidance/attempted"][-1])
        if self.num_completions >= COMPLETIONS:
            self.state.max_steps = self.state.global_step + UPDATES


def backwards(text: str) -> str:
    """`53+79` as `97#35`."""
    return text[::-1].replace("+", "#")


def sums(seed: int) -> list[dict[str, str | None]]:
    """Return training problems: plain sums, then backward sums with the sum as hint."""
    rows = [(row["problem"], row["answer"]) for row in demonstrations("addition", seed=seed) if _reads_otherwise(row)]
    examples = [(problem, answer, None) for problem, answer in rows[:NUM_TRAINED]]
    examples += [(backwards(problem), answer, problem) for problem, answer in rows[NUM_TRAINED : 2 * NUM_TRAINED]]
    return [dict(zip(("problem", "answer", "hint"), each, strict=True)) for each in examples]


def _reads_otherwise(row: dict[str, str]) -> bool:
    """Return whether the backward sum, read as a sum, has a value far from the backward sum."""
    return abs(sum(map(int, backwards(row["problem"]).split("#"))) - int(row["answer"])) > FAR


def held_out() -> dict[str, list[dict[str, str]]]:
    rows = [row for row in problems("addition", "test", seed=0) if _reads_otherwise(row)][:NUM_HELD_OUT]
    return {"sums": rows, "backward": [row | {"problem": backwards(row["problem"])} for row in rows]}


def taught(seed: int) -> list[dict]:
    """Return demonstrations of sums, and of sums as the hint of an unrelated problem."""
    rows = demonstrations("addition", 2000, seed=seed)
    others, examples = random.Random(seed).sample(rows, len(rows)), []
    for row, other in zip(rows, others, strict=True):
        for text in (row["problem"], backwards(other["problem"]) + HINT.format(hint=row["problem"])):
            solution = [{"role": "assistant", "content": row["solution"]}]
            examples.append({"prompt": build_prompt(text, instruction=""), "completion": solution})
    return examples


def warm_start(directory: Path, seed: int) -> Path:
    """Train a model that solves sums, and backward sums only with their hints."""
    if (directory / "config.json").is_file():
        return directory
    tokenizer = build_tokenizer()
    settings = SFTConfig(
        output_dir=str(directory),
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        adam_beta2=0.98,
        max_steps=WARM_START_STEPS,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    rows, model = Dataset.from_list(taught(seed)).shuffle(seed=seed), build_model(tokenizer, "tiny", seed)
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=settings)
    trainer.train()
    trainer.save_model()
    return directory


def measured(model: Path, output_dir: Path) -> dict[str, list[int]]:
    """Return the number of correct completions among 64 without hints, per held-out problem of both kinds."""
    files = {name: output_dir.parent / f"{name}.jsonl" for name in held_out()}
    for name, rows in held_out().items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = EvaluationArguments(
        model=str(model),
        benchmarks=",".join(map(str, files.values())),
        output_dir=str(output_dir),
        engine="transformers",
        n=max(KS),
        prompt_instruction="",
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=LENGTH,
        batch_size=512,
    )
    with VerificationArguments(verification_protocol="authors").build() as verifier:  # as in training
        results = evaluate(arguments, verifier, progress=False)["benchmarks"]
    return {name: [p["c"] for p in result["problems"]] for name, result in zip(files, results.values(), strict=True)}


def report(counts: dict[str, dict[str, dict]]) -> list[str]:
    """Return a row for each seed and arm, pass@k in percent of sums, of backward sums, and of those that the warm
    start never solves, and rows with the guided arms' differences to the plain one by seed."""
    rows, shares = [], {}
    for seed, arms in counts.items():
        hard = [i for i, count in enumerate(arms[START]["backward"]) if count == 0]
        for arm, num_correct in arms.items():
            columns = [(num_correct["sums"], 1), *((num_correct["backward"], k) for k in KS)]
            columns += [([num_correct["backward"][i] for i in hard], k) for k in KS]
            percentages = shares[seed, arm] = [
                100 * mean(pass_at_k(max(KS), c, k) for c in column) for column, k in columns
            ]
            rows.append([seed, arm, num_correct.get("completions", ""), *(f"{share:.1f}" for share in percentages)])
    for arm in list(ARMS)[1:]:
        pairs = [(shares[seed, arm], shares[seed, "plain"]) for seed in counts if (seed, arm) in shares]
        differences = zip(*([a - b for a, b in zip(*pair, strict=True)] for pair in pairs), strict=True)
        rows.append(["", f"{arm}, minus plain", "", *map(mean_difference, differences)])
    kinds = ["sums: pass@1", *(f"{kind}: pass@{k}" for kind in ("backward", "never solved before") for k in KS)]
    return markdown(["seed", "", "completions", *kinds], rows, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/guided"))
    args = parser.parse_args()
    counts: dict[str, dict] = {}
    for seed in args.seeds:
        work = args.output_dir / f"seed-{seed}"
        start = warm_start(work / "start", seed)
        seed_counts = counts[str(seed)] = {START: measured(start, work / "before")}
        (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(seed)))
        for arm, words in ARMS.items():
            model = work / run_name(arm)
            arguments = [
                "--config",
                str(RECIPE),
                "--dataset_name",
                str(work / "train.jsonl"),
                *words,
                "--seed",
                str(seed),
            ]
            arguments += ["--max_completion_length", str(LENGTH), "--max_steps", str(UPDATES * GENERATIONS)]
            log = train_once([*arguments, "--save_strategy", "no"], start, model, BudgetTrainer if words else None)
            log = [entry for entry in log if "entropy" in entry]
            attempts = sum(entry.get("guidance/attempted", 0) for entry in log)
            seed_counts[arm] = measured(model, model.with_name(f"{model.name}-after"))
            seed_counts[arm]["completions"] = int(len(log) // UPDATES * BATCH + attempts)
            (args.output_dir / "counts.json").write_text(json.dumps(counts, separators=(",", ":")) + "\n")
        print("\n".join(report(counts)), flush=True)


if __name__ == "__main__":
    main()
