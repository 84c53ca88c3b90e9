"""Guided completions on problems that the policy never solves alone.

`python -m experiments.guided --seeds 0 1 2`

A sum written backwards, `97#35` for `53+79`, is unknown to a warm start that has learned sums and to follow hints.
PACS then trains on sums and backward sums from the same warm start, with equal numbers of generations: without hints,
with guided completions whose hint is the sum, and with a lower weight on them. Measured is the share of held-out
backward sums that is solved without a hint, among those that the warm start solves in none of 64 samples.

`--measure` compares correct guided completions with correct unguided ones, by log-prob under the plain prompt and by
gradient norm, without training. Finished runs are not repeated.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import mean, quantiles

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from experiments.paper.runs import train_once
from experiments.studies import RECIPE, markdown, run_name, saved, words, write_json
from pacs_trl.data import build_prompt
from pacs_trl.data.tasks import demonstrations, problems
from pacs_trl.evaluation import pass_at_k
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.requests import SamplingSettings
from pacs_trl.evaluation.run import evaluate
from pacs_trl.evaluation.sampling import sample_completions
from pacs_trl.experimental.guidance import with_hint
from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tokenizer import build_tokenizer
from pacs_trl.rewards import shared_verifier


SIZE, NUM_TAUGHT, WARM_START_STEPS, BATCH, LENGTH = "tiny", 2000, 1500, 16, 32
NUM_TRAINED, NUM_HELD_OUT = 512, 64  # problems of each kind
FAR = 30
START = "warm start"
ARMS = {
    "plain": [],
    "guided": ["--method", "guidance"],
    "guided, weight 0.25": ["--method", "guidance", "--guided_weight", "0.25"],
}
SAVED = words({"max_completion_length": LENGTH, "max_steps": 720} | saved(40))


def backwards(text: str) -> str:
    """`53+79` as `97#35`."""
    return text[::-1].replace("+", "#")


def sums(seed: int) -> list[dict[str, str | None]]:
    """Return training problems with worked solutions: plain sums, then backward sums with the sum as hint."""
    rows = [row for row in demonstrations("addition", seed=seed) if _reads_otherwise(row)][: 2 * NUM_TRAINED]
    hard = [row | {"problem": backwards(row["problem"]), "hint": row["problem"]} for row in rows[NUM_TRAINED:]]
    return [*(row | {"hint": None} for row in rows[:NUM_TRAINED]), *hard]


def _reads_otherwise(row: dict[str, str]) -> bool:
    """Return whether the backward sum, read as a sum, has a value far from its own."""
    return abs(sum(map(int, backwards(row["problem"]).split("#"))) - int(row["answer"])) > FAR


def held_out() -> dict[str, list[dict[str, str]]]:
    rows = [row for row in problems("addition", "test", seed=0) if _reads_otherwise(row)][:NUM_HELD_OUT]
    return {"forward": rows, "backward": [row | {"problem": backwards(row["problem"])} for row in rows]}


def taught(seed: int) -> list[dict]:
    """Return demonstrations of sums, and of sums as the hint of an unrelated problem."""
    rows = demonstrations("addition", NUM_TAUGHT, seed=seed)
    others = random.Random(seed).sample(rows, len(rows))
    hinted = [
        row | {"problem": backwards(other["problem"]), "hint": row["problem"]}
        for row, other in zip(rows, others, strict=True)
    ]
    return [
        {"prompt": asked(row, helped=True), "completion": [{"role": "assistant", "content": row["solution"]}]}
        for row in [*(row | {"hint": None} for row in rows), *hinted]
    ]


def asked(row: dict, *, helped: bool) -> list[dict[str, str]]:
    prompt = build_prompt(row["problem"], instruction="")
    return with_hint(prompt, row["hint"]) if helped and row["hint"] else prompt


def warm_start(directory: Path, seed: int, max_steps: int) -> Path:
    """Train a model that solves sums, and backward sums only with their hints."""
    if (directory / "config.json").is_file():
        return directory
    tokenizer = build_tokenizer()
    trainer = SFTTrainer(
        model=build_model(tokenizer, SIZE, seed),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(taught(seed)).shuffle(seed=seed),
        args=SFTConfig(
            output_dir=str(directory),
            per_device_train_batch_size=BATCH,
            learning_rate=2e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            adam_beta2=0.98,
            max_steps=max_steps,
            max_length=None,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            seed=seed,
        ),
    )
    trainer.train()
    trainer.save_model()
    return directory


def attempt(model: Path, output_dir: Path, num_samples: int) -> dict[str, list[int]]:
    """Return the number of correct completions among `num_samples` without hints, per held-out problem of both
    kinds."""
    files = []
    for name, rows in held_out().items():
        files.append(output_dir.parent / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = EvaluationArguments(
        model=str(model),
        benchmarks=",".join(map(str, files)),
        output_dir=str(output_dir),
        engine="transformers",
        n=num_samples,
        k=f"1,{num_samples}",
        prompt_instruction="",
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=LENGTH,
        batch_size=512,
    )
    results = evaluate(arguments, shared_verifier(), progress=False)["benchmarks"]
    return {
        name: [problem["c"] for problem in entry["problems"]]
        for name, entry in zip(held_out(), results.values(), strict=True)
    }


def report(counts: dict[str, dict[str, dict[str, list[int]]]], num_samples: int) -> list[str]:
    """Return a row for each seed and arm: pass@k in percent of sums, of all backward sums, and of those that the warm
    start never solves."""
    ks = sorted({1, min(8, num_samples), num_samples})
    kinds = ["sums: pass@1", *(f"{kind}: pass@{k}" for kind in ("backward", "never solved before") for k in ks)]
    rows = []
    for seed, arms in counts.items():
        hard = [i for i, right in enumerate(arms[START]["backward"]) if right == 0]
        for arm, found in arms.items():
            never = [found["backward"][i] for i in hard]
            columns = [(found["forward"], 1), *((right, k) for right in (found["backward"], never) for k in ks)]
            shares = [mean(pass_at_k(num_samples, c, k) for c in right) if right else 0.0 for right, k in columns]
            rows.append([seed, arm, *(f"{100 * share:.1f}" for share in shares)])
    return markdown(["seed", "", *kinds], rows, 2)


def measure(start: Path, number: int) -> dict[str, dict[str, float]]:
    """Measure correct completions of backward sums with hints and of sums without, under the plain prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=LENGTH)
    found = {}
    both = sums(seed=1)
    for name, rows in (("alone", both[:number]), ("guided", both[-number:])):
        prompts = [asked(row, helped=True) for row in rows]
        drawn = sample_completions(model, tokenizer, prompts, n=4, settings=sampling, seed=0, batch_size=512)
        right = [
            (row, each.text)
            for row, completions in zip(rows, drawn, strict=True)
            for each in completions
            if each.text.endswith(rf"\boxed{{{row['answer']}}}")
        ]
        values = [_under_plain_prompt(model, tokenizer, row, text) for row, text in right[:number]]
        found[name] = {"right of all": len(right) / (4 * number)}
        if len(values) > 1:
            logps, norms = zip(*values, strict=True)
            quarters = quantiles(norms, n=4)
            found[name] |= {"logp per token": mean(logps), "gradient norm": mean(norms)}
            found[name] |= {"lower quartile": quarters[0], "upper quartile": quarters[2]}
    return found


def _under_plain_prompt(model, tokenizer, row: dict, text: str) -> tuple[float, float]:
    """Return the mean log-prob of the tokens of a completion, and the norm of the gradient of their sum."""
    kinds = {"add_generation_prompt": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(asked(row, helped=False), **kinds)
    completion = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logps = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])
    model.zero_grad()
    logps.sum().backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    return logps.mean().item(), norm.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--measure", action="store_true", help="compare guided answers with others, and train nothing more"
    )
    parser.add_argument("--warm_start_steps", type=int, default=WARM_START_STEPS)
    parser.add_argument("--max_steps", type=int, help="optimizer steps of every arm, to try things out")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/guided"))
    args = parser.parse_args()
    counts: dict[str, dict] = {}
    for seed in args.seeds:
        work = args.output_dir / f"seed-{seed}"
        start = warm_start(work / "start", seed, args.warm_start_steps)
        if args.measure:
            print(f"seed {seed}", json.dumps(measure(start, args.samples)), flush=True)
            continue
        own = counts[str(seed)] = {START: attempt(start, work / "before", args.samples)}
        kept = [{name: row[name] for name in ("problem", "answer", "hint")} for row in sums(seed)]
        (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        for arm in args.arms:
            model = work / run_name(arm)
            given = ["--config", str(RECIPE), "--dataset_name", str(work / "train.jsonl"), *SAVED, *ARMS[arm]]
            given += [] if args.max_steps is None else ["--max_steps", str(args.max_steps)]
            train_once([*given, "--seed", str(seed)], start, model)
            own[arm] = attempt(model, model.with_name(f"{model.name}-after"), args.samples)
            write_json(args.output_dir / "counts.json", counts)
            print("\n".join(report(counts, args.samples)), flush=True)


if __name__ == "__main__":
    main()
