"""Fine-tune a critic on traces before GenAC.

`python -m experiments.genac.supervised_start --help`.

The trained model is then `critic_model_name_or_path` of a recipe. Traces are lines of JSON: `problem`, `response`,
`tokens_used`, `success_rate` of the policy (or null), and `answer`, the reasoning that ends with a score in the tags
of the template. One file serves templates with and without conditioning.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from experiments.miniature.files import warm_start_of
from pacs_trl.errors import exit_code
from pacs_trl.experimental._critic import Actor, CriticPrompt, State, question_ids
from pacs_trl.settings import Parser


_KEPT = ("problem", "response", "tokens_used")  # of a state


class Trace(NamedTuple):
    """A state, the success rate of the policy, and the answer to learn."""

    state: State
    success_rate: float | None
    answer: str


def read_traces(file: str | Path) -> list[Trace]:
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [Trace(State(*(row[name] for name in _KEPT)), row["success_rate"], row["answer"]) for row in rows]


def write_traces(file: str | Path, traces: Sequence[Trace]) -> None:
    states = [dict(zip(_KEPT, trace.state, strict=False)) for trace in traces]
    rows = [s | {"success_rate": t.success_rate, "answer": t.answer} for s, t in zip(states, traces, strict=True)]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def teach(
    start: Path, traces: Sequence[Trace], output: Path, *, template: str, actor: Actor, **settings: Any
) -> list[float]:
    """
    Fine-tune the critic `start` on traces, and save it to `output`.

    Args:
        template (`str`): `critic_prompt` of the later run.
        actor ([`Actor`]): The policy; each trace has a success rate.
        settings: Fields of [`~trl.SFTConfig`].

    Returns:
        `list[float]`: loss of each optimizer step, nats per token.
    """
    prompt, tokenizer = CriticPrompt(template), AutoTokenizer.from_pretrained(start, padding_side="left")
    if unread := [trace.answer for trace in traces if prompt.parse(trace.answer) is None]:
        raise ValueError(f"{unread[0]!r} has no score in the tags {prompt.tags}. Use the template of the traces.")
    texts = [prompt.render(trace.state, actor._replace(success_rate=trace.success_rate)) for trace in traces]
    answers = tokenizer([trace.answer for trace in traces], add_special_tokens=False)["input_ids"]
    rows = [
        {"input_ids": question + answer, "completion_mask": [0] * len(question) + [1] * len(answer)}
        for question, answer in zip(question_ids(tokenizer, texts), answers, strict=True)
    ]
    defaults: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    defaults |= {"bf16": torch.cuda.is_available(), "use_cpu": not torch.cuda.is_available()}
    args = SFTConfig(str(output), completion_only_loss=True, max_length=None, **(defaults | settings))
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(output))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(argv: Sequence[str] | None = None) -> int:
    """Train a critic on a file of traces."""
    parser = Parser("supervised_start", __doc__.split("\n")[0], prog="python -m experiments.genac.supervised_start")
    parser.add_argument("--model", required=True, help="a checkpoint, or the path of a warm start in recipes")
    parser.add_argument("--traces", type=Path, required=True, help="see experiments.genac.oracle")
    parser.add_argument("--output", type=Path, required=True, help="directory of the critic")
    parser.add_argument("--critic_prompt", default="genac", help="as in the recipe (default: genac)")
    parser.add_argument("--actor", default="", help="name and size of the policy, for the template genac")
    parser.add_argument("--token_limit", type=int, default=8192, help="max_completion_length of the recipe")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the traces (default: 1)")
    parser.add_argument("--learning_rate", type=float, default=1e-5, help="constant (default: 1e-5)")
    parser.add_argument("--batch_size", type=int, default=8, help="traces of an optimizer step and process")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the traces (default: 0)")
    args = parser.parse_args(argv)
    losses = teach(
        warm_start_of(args.model, seed=args.seed),
        read_traces(args.traces),
        args.output,
        template=args.critic_prompt,
        actor=Actor(args.actor, args.token_limit, None),
        num_train_epochs=args.epochs,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch_size,
        seed=args.seed,
    )
    print(f"{len(losses)} steps, nats per token from {losses[0]:.3f} to {losses[-1]:.3f}; written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.genac.supervised_start", main, sys.argv[1:]))
