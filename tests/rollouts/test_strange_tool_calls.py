"""Strange calls and results of tools in training and in evaluation: the run goes on, and both have the same turns."""

import copy
from dataclasses import replace
from pathlib import Path

import pandas as pd
import trl
from support.models import tiny_model
from support.runs import build_trainer
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import LoadedBenchmark, Problem
from pacs_trl.evaluation.conversations import ConversationEngine
from pacs_trl.evaluation.requests import Completion, Request


END = "<|im_end|>"
TOKENIZER = build_tokenizer()
TOKENIZER.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()


class Mute:
    def __str__(self):
        raise TypeError("no text")


def say(text="nothing"):
    """
    Repeat a text.

    Args:
        text: What is said.
    """
    if text == "exit":
        raise SystemExit(0)
    return {"mute": Mute(), "half": "\ud83d", "much": "7" * 5_000_000}.get(str(text), text)


say.__annotations__ = {"text": str}


def call(arguments):
    return f'<tool_call>\n{{"name": "say", "arguments": {arguments}}}\n</tool_call>{END}'


EXIT = (
    "The tool 'say' called sys.exit(0), which would end the command. Raise an exception, or catch SystemExit where it "
    "comes from."
)
# The arguments of a call, and what the model reads; None if the call is text.
CALLS = [
    ('{"text": "a"}', "a"),
    ('{"text": 5}', "5"),
    ('{"text": [1, 2]}', "[1, 2]"),
    ("{}", "nothing"),
    ('{"text": "\\ud83d"}', None),
    ('{"text": ' + "[" * 40 + "]" * 40 + "}", None),
    ("[1]", None),
    ('"a"', None),
    ('{"text": "mute"}', "{'error': 'no text'}"),
    ('{"text": "half"}', "\ufffd"),
    ('{"text": "exit"}', str({"error": EXIT})),
    ('{"text": "much"}', None),  # it does not fit
]
FIRST = [call(arguments) for arguments, _ in CALLS]


def test_strange_calls_in_training_and_evaluation(tmp_path, monkeypatch):
    graded = []

    def generate(self, prompt_ids, images, fields, num_generations, **kwargs):
        texts = FIRST if num_generations > 1 else ["done" + END] * len(prompt_ids)
        return [TOKENIZER(text)["input_ids"] for text in texts], None

    def reward(completions, **kwargs):
        graded.extend(completions)
        return [float(i % 2) for i in range(len(completions))]

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    settings = {"num_generations": len(CALLS), "per_device_train_batch_size": len(CALLS), "max_completion_length": 600}
    more = {"tools": [say], "processing_class": copy.deepcopy(TOKENIZER)}
    model = tiny_model(max_position_embeddings=2048)  # the template is long
    trainer = build_trainer(
        tmp_path, model=model, reward=reward, more=more, max_steps=1, log_completions=True, **settings
    )
    trainer.train()
    results = [[message["content"] for message in completion if message["role"] == "tool"] for completion in graded]
    assert results == [[] if result is None else [result] for _, result in CALLS]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == len(CALLS)
    assert table["completion"][1][0]["tool_calls"][0]["function"]["arguments"] == '{"text": 5}'

    class Engine:
        context_length = trainer.model.config.max_position_embeddings

        def generate(self, requests, settings):
            for request in requests:
                text = FIRST[int(request.problem_id)] if request.sample == 0 else "done" + END
                yield request, Completion("", 0, "stop", TOKENIZER(text)["input_ids"])

    args = EvaluationArguments("m", "b", "o", tools=["say"], engine="transformers")
    benchmark = LoadedBenchmark("b", "b", [Problem(str(i), "", "") for i in range(len(CALLS))])
    tokenizer = add_response_schema(copy.deepcopy(TOKENIZER))
    engine = ConversationEngine(Engine(), tokenizer, [say], replace(args, batch_size=99), benchmark)
    prompt = [{"role": "user", "content": "?"}]
    requests = [Request(str(i), 0, i, prompt) for i in range(len(CALLS))]
    sampling = replace(args.sampling, max_new_tokens=600)
    conversations = [completion.more["conversation"][1:] for _, completion in engine.generate(requests, sampling)]
    read = [[message["content"] for message in turns if message["role"] == "tool"] for turns in conversations]
    assert read == results
