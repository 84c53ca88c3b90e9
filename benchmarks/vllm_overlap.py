"""Where the time of a step with vLLM goes when verification waits for generation, and when it overlaps with it.

    make env-vllm
    OMP_NUM_THREADS=1 python -m benchmarks.vllm_overlap      # two CPU cores, about three minutes

Both runs draw the same completions from the same engine, in turns; the first round is not counted. vLLM and the
trainer share one core, the verifier's only worker has the other. The model is the larger one of the miniature tables
after its warm start, the data are sums; 256 completions a generation, four updates each.
"""

import argparse
import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared_engine import share_engine
from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.data.tasks import problems
from pacs_trl.miniature.warm_start import warm_start
from pacs_trl.rewards import math_reward
from pacs_trl.rollouts.timing import PARTS
from pacs_trl.verification import VerificationArguments, configure_verification


def train(start: Path, directory: Path, overlap: bool) -> tuple[dict[str, float], list[float], str]:
    """Seconds of each part per optimizer step, the loss of each, and the table that training prints."""
    configure_verification(VerificationArguments(verification_num_workers=1))  # with an empty cache
    args = PACSConfig(
        str(directory),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        vllm_gpu_memory_utilization=0.3,
        num_generations=8,
        per_device_train_batch_size=64,
        steps_per_generation=4,
        max_completion_length=72,
        learning_rate=1e-4,
        max_steps=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"prompt": row["problem"], "solution": row["answer"]} for row in problems("terms", "train", 256)]
    trainer = PACSTrainer(
        AutoModelForCausalLM.from_pretrained(start),
        math_reward,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    if not overlap:
        trainer.vllm_generation.llm._early_grading = trainer._early_grading = None
    with redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    seconds = {part: sum(entry[f"time/{part}"] for entry in steps) / len(steps) for part in (*PARTS, "total")}
    table = printed.getvalue()
    return seconds, [entry["loss"] for entry in steps], table[table.index("Where the time") :].rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="the first one is not counted")
    parser.add_argument("--json", type=Path, help="also write the numbers of every round here")
    args = parser.parse_args()
    start = warm_start("arithmetic/small")
    share_engine("cpu", "float32")
    rounds = {False: [], True: []}
    losses = []
    for _ in range(args.rounds):
        for overlap, kept in rounds.items():
            with tempfile.TemporaryDirectory() as directory:
                seconds, loss, table = train(start, Path(directory), overlap)
            kept.append(seconds)
            losses.append(loss)
    assert all(loss == losses[0] for loss in losses), "the runs have not learnt from the same completions"
    print(f"What the last run printed:\n\n{table}\n")
    print("| part | before, s per step | after, s per step | after / before, each round |")
    print("| --- | ---: | ---: | --- |")
    for part in (*PARTS, "total"):
        before, after = ([seconds[part] for seconds in rounds[overlap][1:]] for overlap in (False, True))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(after, before) if b)
        print(f"| {part} | {sum(before) / len(before):.4f} | {sum(after) / len(after):.4f} | {ratios} |")
    if args.json:
        args.json.write_text(json.dumps({"before": rounds[False], "after": rounds[True]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
