"""Tools that the model calls before it answers: TRL's loop with scripted turns, from the call to the gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from support.problems import held_out
from support.runs import build_trainer, spy_on
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from experiments.miniature.tasks import CALL, demonstrations
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import LoadedBenchmark, Problem
from pacs_trl.evaluation.conversations import ConversationEngine
from pacs_trl.evaluation.requests import Completion, Request
from pacs_trl.recipe import Recipe
from pacs_trl.rewards import math_reward, run_python, tool_function
from pacs_trl.verification import completion_text


TOKENIZER = build_tokenizer(tools=True)
END = "<|im_end|>"


def say(text: str) -> str:
    """
    Repeat a text.

    Args:
        text: What is said.

    Returns:
        The same.
    """
    if text == "fail":
        raise RuntimeError("no " * 1000)
    return "7" * 10**6 if text == "much" else text


def built(path, monkeypatch, turns, **settings):
    """A trainer whose completion `i` says `turns[i]`, one text after the other."""
    said = [0] * len(turns)

    def generate(self, prompt_ids, images, fields, num_generations, **kwargs):
        texts = TOKENIZER.batch_decode(prompt_ids)
        first = num_generations > 1
        rows = range(len(turns)) if first else [next(i for i in range(len(turns)) if turns[i][0] in t) for t in texts]
        for i in rows:
            said[i] = 0 if first else said[i] + 1
        return [TOKENIZER(turns[i][said[i]])["input_ids"] for i in rows], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    more = {"tools": [say], "processing_class": copy.deepcopy(TOKENIZER)}
    reward = settings.pop("reward", math_reward)
    settings = {"max_completion_length": 64, "num_generations": 4, "per_device_train_batch_size": 4} | settings
    trainer = build_trainer(path, reward=reward, more=more, max_steps=1, **settings)
    trainer.rows = []
    spy_on(trainer, "_generate_rollouts", lambda rows, batch: trainer.rows.extend(rows))
    return trainer


def test_benchmarks_use_the_tools_of_training(tmp_path, monkeypatch):
    """Before the first rollout, and in larger batches than those of training."""

    def generate(self, prompt_ids, *args, **kwargs):
        turns = ["so 5" if "@say" in text else "@say|text=5" for text in TOKENIZER.batch_decode(prompt_ids)]
        return [TOKENIZER(turn + END)["input_ids"] for turn in turns], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    more = {"tools": [say], "processing_class": copy.deepcopy(TOKENIZER)}
    settings = {"eval_benchmarks": [held_out()], "eval_max_problems": 3, "eval_num_samples": 4}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 12}
    trainer = build_trainer(
        tmp_path, reward=math_reward, more=more, max_steps=1, max_completion_length=64, num_generations=4, **settings
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_pass@1" in log]
    lengths = [log["eval_miniature/addition/mean_length"] for log in logs]
    assert len(logs) == 2 and min(lengths) > len(TOKENIZER("so 5" + END)["input_ids"])


TURNS = [
    ["@say|text=5" + END, "so " + END],
    ["@say|text=fail" + END, "8" + END],
    ["9" + END],
    ["@say|txt=5" + END, "@nothing" + END, "0" + END],
]


def digit(completions, **kwargs):
    return [float(completion[-1]["content"] in ("9", "0")) for completion in completions]


def test_what_a_tool_says_has_no_gradient(tmp_path, monkeypatch):
    trainer = built(tmp_path, monkeypatch, TURNS, reward=digit, max_completion_length=200)
    scored = []

    def note(scores, model, prompt_ids, completion_ids, images=None):
        if torch.is_grad_enabled():
            for ids, logps in zip(completion_ids, scores.logps, strict=True):
                logps.retain_grad()
                scored.append((ids, logps))

    spy_on(trainer.forward_pass, "compute_logps", note)
    trainer.train()
    written = [TOKENIZER.decode(row.completion_ids[row.loss_mask]) for row in trainer.rows]
    assert written == ["".join(turns) for turns in TURNS]
    assert TOKENIZER.decode(trainer.rows[0].completion_ids) == (
        f"@say|text=5{END}\n<|im_start|>user\n5{END}\n<|im_start|>assistant\nso {END}"
    )
    masks = {tuple(row.completion_ids): torch.from_numpy(row.loss_mask) for row in trainer.rows}
    assert len(scored) == 4
    for ids, logps in scored:
        assert torch.equal(logps.grad != 0, masks[tuple(ids)])
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    # four calls, of which one failed, one has a wrong argument and one an unknown name
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.75)


def test_a_result_that_leaves_no_room_ends_the_completion(tmp_path, monkeypatch):
    """To the token, longer than that, and in megabytes. What the tool said is no answer of the model's."""
    answer = r"\boxed{7}"
    asked, framing = f"@say|text={answer}{END}", f"\n<|im_start|>user\n{answer}{END}\n<|im_start|>assistant\n"
    full = len(TOKENIZER(asked + framing)["input_ids"])
    turns = [
        [asked, "x" + END],
        [f"@say|text=7{answer}{END}", "x" + END],
        [f"@say|text=much{END}", "x" + END],
        [answer + END],
    ]

    def reward(completions, **kwargs):
        return [float(completion_text(completion) == answer) for completion in completions]

    trainer = built(tmp_path, monkeypatch, turns, max_completion_length=full, reward=reward)
    trainer.train()
    written = [len(TOKENIZER(texts[0])["input_ids"]) for texts in turns]
    assert [len(row.completion_ids) for row in trainer.rows] == [full, *written[1:]]
    assert [int(row.loss_mask.sum()) for row in trainer.rows] == written
    assert [row.label for row in trainer.rows] == [0, 0, 0, 1]


class Scripted:
    """An engine whose completion `i` says `turns[i]`."""

    def __init__(self, turns, context_length):
        self.turns, self.said, self.context_length = turns, [0] * len(turns), context_length

    def generate(self, requests, settings):
        for request in reversed(requests):  # in any order
            text, first = TOKENIZER.decode(request.prompt), request.sample == 0
            i = int(request.problem_id) if first else next(i for i, t in enumerate(self.turns) if t[0] in text)
            self.said[i] += not first
            ids = TOKENIZER(self.turns[i][self.said[i]])["input_ids"]
            reason = "stop" if len(ids) <= settings.max_new_tokens else "length"
            yield request, Completion("", 0, reason, ids[: settings.max_new_tokens])


FULL = len(TOKENIZER(TURNS[0][0] + f"\n<|im_start|>user\n5{END}\n<|im_start|>assistant\n")["input_ids"])


@pytest.mark.parametrize(("limit", "rounds"), [(200, None), (200, 1), (200, 0), (FULL, None), (FULL + 1, None)])
def test_evaluation_has_the_turns_of_training(tmp_path, monkeypatch, limit, rounds):
    """Of failing, unknown, and wrong calls, of many rounds, and of results that leave no room: tokens and messages."""
    seen = []

    def reward(completions, truncated, **kwargs):
        seen.extend(zip(completions, truncated, strict=True))
        return [float(i % 2) for i in range(len(completions))]

    settings = {"max_completion_length": limit, "max_tool_calling_iterations": rounds}
    trainer = built(tmp_path, monkeypatch, TURNS, reward=reward, **settings)
    trainer.train()
    args = EvaluationArguments("m", "b", "o", tools=["say"], max_tool_calling_iterations=rounds, engine="transformers")
    benchmark = LoadedBenchmark("b", "b", [Problem(str(i), "", "") for i in range(4)])
    engine = Scripted(TURNS, trainer.model.config.max_position_embeddings)
    engine = ConversationEngine(engine, copy.deepcopy(TOKENIZER), [say], args, benchmark)
    prompt = [{"role": "user", "content": "?"}]
    sampling = replace(args.sampling, max_new_tokens=limit)
    answers = [answer for _, answer in engine.generate([Request(str(i), 0, i, prompt) for i in range(4)], sampling)]
    assert [list(answer.token_ids) for answer in answers] == [list(row.completion_ids) for row in trainer.rows]
    assert [answer.more["conversation"][1:] for answer in answers] == [completion for completion, _ in seen]
    assert [answer.num_tokens for answer in answers] == [int(row.loss_mask.sum()) for row in trainer.rows]
    assert [answer.finish_reason == "length" for answer in answers] == [truncated for _, truncated in seen]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL.format("4*5") + END, [("run_python", {"code": "print(4*5)"})], ""),
        ("think @run_python|code=a\nb|input=4" + END, [("run_python", {"code": "a\nb", "input": "4"})], "think"),
        ("@@|x=1|" + END, [], "@@|x=1|"),
        ("mail a@b.c" + END, [("b", {})], "mail a"),
        ("\udce9@" + END, [], None),
    ],
)
def test_calls_in_the_few_characters_of_the_miniature(text, calls, content):
    prefix = TOKENIZER.apply_chat_template([{"role": "user", "content": "4*5"}], add_generation_prompt=True)
    ids = TOKENIZER(text.encode(errors="replace").decode())["input_ids"]
    message = parse_response(TOKENIZER, ids, prefix=prefix["input_ids"], tools=[run_python])
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [(function["name"], function["arguments"]) for function in functions] == calls
    assert content is None or message["content"] == content


def test_demonstrations_are_written_as_calls_are_read():
    rows = [row for row in demonstrations("products", 40, seed=1) if isinstance(row["solution"], list)]
    assert 3 < len(rows) < 20
    for row in rows:
        messages = [{"role": "user", "content": row["problem"]}, *row["solution"]]
        encoded = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        written = TOKENIZER.decode([token for token, mask in pairs if mask])
        assert written == rf"{CALL.format(row['problem'])}{END}\boxed{{{row['answer']}}}{END}"


def test_names_of_tools():
    assert tool_function("run_python") is tool_function("pacs_trl.rewards.run_python") is run_python
    for name in ("run_pyton", "math.nothing"):
        with pytest.raises(ValueError, match=name):
            tool_function(name)


NAMED = {"model_name_or_path": "m", "dataset_name": "gsm8k", "output_dir": "o", "use_cpu": True, "bf16": False}
CALLS = {"max_tool_calling_iterations": 2}


SERVER = {"tools": ["run_python"], "use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"tools": []}, 1, "tools"),
        (CALLS, 1, "max_tool_calling_iterations"),
        (SERVER, 2, "tools with 2 processes"),
        (SERVER | {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, 4, "tools with 4 processes"),
    ],
)
def test_settings_of_tools_without_effect_and_several_processes_are_refused(settings, processes, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_settings(NAMED | settings, processes)
    Recipe.from_settings(NAMED | CALLS | SERVER | {"vllm_mode": "colocate"}, processes)
