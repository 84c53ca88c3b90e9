"""What a second draw costs, by its tokens: `python -m benchmarks.second_stage`, a minute on one core.

Every answer of the model, whose weights are random, is wrong, so adaptive rollouts draw as many completions again as
there were at first (the budget). Both draws are timed whole, from the prompts to the rows: generation, grading and all
that the trainer does in between. Seconds are of the processor, so that other work on the machine does not count.
"""

import argparse
import tempfile
import time

from datasets import Dataset

from pacs_trl.data.tasks import problems
from pacs_trl.experimental.dars import DARSConfig, DARSTrainer
from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tokenizer import build_tokenizer


class Timed(DARSTrainer):
    """Notes seconds, completions and tokens of every draw."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn: list[tuple[str, float, int, int]] = []

    def _generate_and_score_completions(self, inputs):
        started = time.process_time()
        batch = super()._generate_and_score_completions(inputs)
        seconds, tokens = time.process_time() - started, int(batch["completion_mask"].sum())
        self.drawn.append((self.draw_name, seconds, len(inputs), tokens))
        return batch


def wrong(completions, **kwargs) -> list[float]:
    return [0.0 for _ in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    tokenizer, rows = build_tokenizer(), 8 * args.prompts
    data = [
        {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["answer"]}
        for row in problems("addition", "train", 256)
    ]
    with tempfile.TemporaryDirectory() as directory:
        settings = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        trainer = Timed(
            build_model(tokenizer, "tiny"),
            wrong,
            args=DARSConfig(
                directory,
                **settings,
                per_device_train_batch_size=rows,
                num_generations=8,
                max_completion_length=32,
                max_steps=args.generations + 1,
                adaptive_rollouts="hardness_weighted",
                max_generations=64,
                adaptive_rollouts_budget=rows,
                dataloader_pin_memory=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
        )
        trainer.train()
    print(
        "| draw | completions | tokens | seconds of the processor | per 1,000 tokens |\n| --- | ---: | ---: | ---: | "
        "---: |"
    )
    for name in ("first", "adaptive"):
        own = [entry for entry in trainer.drawn if entry[0] == name][
            1:
        ]  # without the first generation, which warms up
        _, seconds, completions, tokens = (
            sum(values) if i else name for i, values in enumerate(zip(*own, strict=True))
        )
        print(f"| {name} | {completions:,} | {tokens:,} | {seconds:.2f} | {1000 * seconds / tokens:.4f} |")


if __name__ == "__main__":
    main()
