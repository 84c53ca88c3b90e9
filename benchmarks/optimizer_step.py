"""Time and memory of one optimizer step: PACSTrainer against TRL's GRPOTrainer on the same recorded rollouts.

    make bench                                  # CPU size, nine minutes on two cores
    python -m benchmarks.optimizer_step --size gpu        # Qwen3-1.7B architecture, random weights, bf16, one GPU

All variants run in one process, one step after another in turn, `--repeats` times after a first one that is not timed
(peak memory is measured in it); medians are reported. A step is everything between having the completions and having
updated the weights: rewards, padding, forward and backward passes, optimizer. Generation is replaced by the recorded
completions. Tokens per second count real tokens, no padding.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from trl import GRPOTrainer

from benchmarks.recorded import SMALL_MODELS, Runner, Size, labels_of, matmul_rate, recorded_rollouts
from pacs_trl import PACSTrainer
from pacs_trl.plan.cost import KNOWN_MODELS, ModelShape
from pacs_trl.update.policy_update import PolicyUpdate
from pacs_trl.update.scorer import Scorer
from pacs_trl.update.step import row_lengths


SIZES = {
    "tiny": Size(SMALL_MODELS["tiny"], 32, 8, 4, bf16=False),  # seconds, to see that everything runs
    "cpu": Size(ModelShape(6, 256, 768, 4, 2, 64, 512, tied=True, qk_norm=True), 576, 8, 4, bf16=False),
    "gpu": Size(KNOWN_MODELS["Qwen/Qwen3-1.7B"], 8192, 8, 4, bf16=True),
}


class Untrimmed(Scorer):
    """Pads every micro-batch to the longest prompt and completion of its optimizer step."""

    def __init__(self, base: Scorer):
        vars(self).update(vars(base))
        self.longest = (0, 0)

    def _padded(self, prompts, completions):
        inputs, places = super()._padded(prompts, completions)
        left = self.longest[0] - max(map(len, prompts))
        right = self.longest[1] - max(map(len, completions))
        width = inputs["input_ids"].shape[1]
        wider = {
            name: F.pad(inputs[name], (left, right), value=fill)
            for name, fill in (("input_ids", self.pad_token_id), ("attention_mask", 0))
        }
        return wider, places + left + places // width * (left + right)


class AblatedUpdate(PolicyUpdate):
    """PolicyUpdate with its savings switched off one by one; everything off is the arithmetic of TRL's own loop."""

    def __init__(self, base: PolicyUpdate, *, trim=False, sort=False, drop=False, skip_reference_pass=False):
        vars(self).update(vars(base))
        self.limits = self.limits._replace(padded=True)
        if not trim:
            self.scorer = Untrimmed(self.scorer)
        self.trim, self.sort, self.drop, self.skip_reference_pass = trim, sort, drop, skip_reference_pass

    def schedule(self, rollouts):
        step = super().schedule(rollouts)
        step.schedule, step.whole_groups = self._in_order(step, range(len(rollouts))), False
        return step

    def _in_order(self, step, rows):
        rows, size = list(rows), self.limits.max_rows
        if self.sort:
            rows.sort(key=lambda i: -len(step.rollouts[i].completion_ids))
        return [[rows[i : i + size] for i in range(0, len(rows), size)]]

    def _schedule_rows(self, step, rows):
        return self._in_order(step, rows if self.drop else range(len(step.rollouts)))

    def run(self, model, step, **how):
        if not self.trim:
            self.scorer.longest = tuple(map(max, row_lengths(step.rollouts)[:2]))
        if not self.skip_reference_pass:
            self.fill_in(model, step, "ref_logps")
        return super().run(model, step, **how)


def compare(title: str, runners: dict[str, Runner], repeats: int, baseline: str) -> list[dict]:
    """`repeats` timed rounds in which every runner makes one step, printed as a table."""
    peaks = {name: runner.peak_memory() for name, runner in runners.items()}  # the steps that warm up
    seconds = {name: [] for name in runners}
    for number in range(1, repeats + 1):
        for name, runner in runners.items():
            seconds[name].append(runner.step())
        of_round = " + ".join(f"{values[-1]:.2f}" for values in seconds.values())
        print(f"{title}, round {number}/{repeats}: {of_round} s", file=sys.stderr, flush=True)
    print(f"\n### {title}\n")
    print("| variant | s / step (median) | range | real tokens / s | peak memory (MB) | times faster than TRL |")
    print("|---|---|---|---|---|---|")
    rows = []
    reference = statistics.median(seconds[baseline])
    for name, values in seconds.items():
        median = statistics.median(values)
        tokens = sum(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in runners[name].rollouts)
        prompts = {
            tuple(r["prompt_ids"]) for r in runners[name].rollouts
        }  # the same for all the completions of a prompt
        once = sum(map(len, prompts)) + sum(len(r["completion_ids"]) for r in runners[name].rollouts)
        row = {
            "title": title,
            "variant": name,
            "seconds": values,
            "tokens_per_second": tokens / runners[name].updates_per_generation / median,
            "texts_per_second": once / runners[name].updates_per_generation / median,
            "peak_memory": peaks[name],
            "ratio": reference / median,
        }
        rows.append(row)
        print(
            f"| {name} | {median:.3f} | {min(values):.3f} - {max(values):.3f} | {row['tokens_per_second']:.0f} | "
            f"{row['peak_memory'] / 1e6:.0f} | {row['ratio']:.2f} |"
        )
    return rows


def aligned(size: Size, device: str, repeats: int) -> list[dict]:
    rollouts = recorded_rollouts(size, size.num_groups)
    make = lambda trainer, fraction=0.0, **kw: Runner(  # noqa: E731
        trainer, size, rollouts, labels_of(size.num_groups, fraction), device, **kw
    )
    runners = {
        "TRL GRPO, default (gradient checkpointing)": make(GRPOTrainer, gradient_checkpointing=True),
        "TRL GRPO, best": make(GRPOTrainer),
        "PACS, authors' scheme (whole groups, padded, reference pass)": make(PACSTrainer, padding_free="never"),
        **{f"PACS, uniform fraction {f}": make(PACSTrainer, f) for f in (0.0, 0.25, 0.5, 0.75)},
    }
    authors = runners["PACS, authors' scheme (whole groups, padded, reference pass)"].trainer
    authors.update = AblatedUpdate(authors.update)
    return compare("One update per generation", runners, repeats, "TRL GRPO, best")


def ablation(size: Size, device: str, repeats: int) -> list[dict]:
    """Each saving alone, on the loop with none of them; one of two groups uniform."""
    rollouts, labels = recorded_rollouts(size, 2), labels_of(2, 0.5)
    switches = {
        "none of them": {},
        "trimming alone": dict(trim=True),
        "sorting (and trimming)": dict(trim=True, sort=True),
        "dropping zero rows alone": dict(drop=True),
        "no reference pass alone": dict(skip_reference_pass=True),
    }
    runners = {}
    for name, options in switches.items():
        runners[name] = Runner(PACSTrainer, size, rollouts, labels, device, padding_free="never")
        trainer = runners[name].trainer
        trainer.update = AblatedUpdate(trainer.update, **options)
    runners["packing, dropping, no reference pass (PACSTrainer)"] = Runner(PACSTrainer, size, rollouts, labels, device)
    return compare("Each saving alone (uniform fraction 0.5)", runners, repeats, "none of them")


def four_updates(size: Size, device: str, repeats: int) -> list[dict]:
    num_groups = 4 * max(1, size.num_groups // 4)
    rollouts, labels = recorded_rollouts(size, num_groups), labels_of(num_groups, 0.0)
    runners = {
        "TRL GRPO, best": Runner(GRPOTrainer, size, rollouts, labels, device, updates_per_generation=4),
        "PACS, whole groups": Runner(
            PACSTrainer, size, rollouts, labels, device, updates_per_generation=4, group_layout="whole"
        ),
        "PACS, split groups": Runner(
            PACSTrainer, size, rollouts, labels, device, updates_per_generation=4, group_layout="split"
        ),
    }
    return compare("Four updates per generation", runners, repeats, "TRL GRPO, best")


def prompt_lengths(size: Size, device: str, repeats: int, tokens: list[int], group_sizes: list[int]) -> list[dict]:
    """Three prompts of one length, none or one of them uniform; completions around 0.3 times 448 tokens on a CPU."""
    size, rows = replace(size, completion_max=size.completion_max * 7 // 9, rows_per_forward=16), []
    for num_prompt_tokens in tokens:
        for num_generations in group_sizes:
            rollouts = recorded_rollouts(size, 3, 0, num_generations, (num_prompt_tokens, num_prompt_tokens))
            make = partial(Runner, size=size, rollouts=rollouts, device=device, num_generations=num_generations)
            runners = {"TRL GRPO, best": make(GRPOTrainer, labels=labels_of(3, 0.0, num_generations))}
            for uniform in (0, 1):
                name = f"PACS, {uniform} of 3 groups uniform"
                runners[name] = make(PACSTrainer, labels=labels_of(3, uniform / 3, num_generations))
            title = f"Prompts of {num_prompt_tokens} tokens, {num_generations} completions each"
            rows += compare(title, runners, repeats, "TRL GRPO, best")
    return rows


def group_memory(size: Size, device: str) -> list[dict]:
    print("\n### Peak memory against the number of completions per prompt (micro-batch fixed)\n")
    print("| num_generations | peak memory (MB) |\n|---|---|")
    rows = []
    lengths = recorded_rollouts(size, 4)
    for num_generations in (8, 16, 32):
        labels = labels_of(32 // num_generations, 0.0, num_generations)
        runner = Runner(PACSTrainer, size, lengths, labels, device, num_generations=num_generations)
        peak = runner.peak_memory()
        rows.append({"title": "group memory", "num_generations": num_generations, "peak_memory": peak})
        print(f"| {num_generations} | {peak / 1e6:.1f} |")
    return rows


def model_flop_utilization(rows: list[dict], size: Size, device: str) -> None:
    """Model FLOPs (6 per parameter and token of a text, attention left out) against the measured rate of a matrix
    product."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    rate, parameters = matmul_rate(device, n, dtype), size.shape.parameters
    print(f"\nMatrix product of {n}^3 in {dtype}: {rate / 1e12:.3g} TFLOP/s. Parameters: {parameters / 1e9:.3g}e9.\n")
    print("| part | variant | model FLOP utilization |\n|---|---|---|")
    for row in rows:
        if "uniform fraction 0.0" in row["variant"] or "PACS, 0 of 3" in row["variant"] or "TRL" in row["variant"]:
            utilization = 6 * parameters * row["texts_per_second"] / rate
            print(f"| {row['title']} | {row['variant']} | {utilization:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=["aligned", "prompts", "ablation", "updates", "memory"])
    parser.add_argument("--prompt_tokens", type=int, nargs="+", default=[120, 480], help="of the part `prompts`")
    parser.add_argument("--num_generations", type=int, nargs="+", default=[16], help="of the part `prompts`")
    parser.add_argument(
        "--processor_time", action="store_true", help="count it instead of the clock's, beside other work"
    )
    parser.add_argument("--output", type=Path, help="write the raw numbers to this JSON file")
    args = parser.parse_args()
    size, device = SIZES[args.size], "cuda" if args.size == "gpu" else "cpu"
    if args.processor_time:
        time.perf_counter = time.process_time
    threads = f", {torch.get_num_threads()} threads"
    print(f"{args.size} size on {platform.machine()}{threads}; torch {torch.__version__}; repeats {args.repeats}")
    rows = []
    if "aligned" in args.parts:
        rows += aligned(size, device, args.repeats)
    if "prompts" in args.parts:  # TRL's steps are long here
        repeats = min(args.repeats, 3)
        rows += prompt_lengths(size, device, repeats, args.prompt_tokens, args.num_generations)
    if "ablation" in args.parts:
        rows += ablation(size, device, args.repeats)
    if "updates" in args.parts:
        rows += four_updates(size, device, args.repeats)
    if "memory" in args.parts:
        rows += group_memory(size, device)
    model_flop_utilization([row for row in rows if "texts_per_second" in row], size, device)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
