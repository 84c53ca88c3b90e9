"""`pacs-trl evaluate` with tools and in environments: records, rewards, continued runs, and refusals."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.problems import held_out
from support.seeds import shifted

from experiments.miniature.model import build_model
from experiments.miniature.tasks import CALL
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.data import gym
from pacs_trl.evaluation.requests import Completion
from pacs_trl.evaluation.run import main
from pacs_trl.rewards import shared_code_verifier


PRODUCTS = "experiments.products:environment"
TOKENIZER = build_tokenizer(tools=True)


@pytest.fixture
def settings(tool_model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    sizes = {"n": 4, "k": "1,4", "max_problems": 3, "max_new_tokens": 60, "batch_size": 5}
    return {
        "model": tool_model_path,
        "output_dir": str(tmp_path),
        "engine": "transformers",
        "prompt_instruction": "",
    } | sizes


def records(directory):
    (path,) = Path(directory, "samples").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("benchmark", [PRODUCTS, held_out("products")])
def test_calls_of_a_scripted_model(run, settings, benchmark, play, confined):
    """Every second sample calls the tool and repeats its result, the others guess."""

    def complete(request):
        *_, turn = TOKENIZER.decode(request.prompt).split("<|im_start|>user\n")
        turn = turn.partition("<|im_end|>")[0].strip()
        said = rf"\boxed{{{turn}}}" if "*" not in turn else CALL.format(turn) if request.seed % 2 else "1"
        ids = TOKENIZER(said + "<|im_end|>")["input_ids"]
        return Completion(said, len(ids), "stop", ids)

    play(complete)
    tools = {"tools": ["run_python"]} if benchmark != PRODUCTS else {}
    results = run(settings, benchmarks=benchmark, **tools)
    shared_code_verifier().close()
    entry, samples = results["benchmarks"][benchmark.partition("=")[0]], records(settings["output_dir"])
    for record in samples:
        user, first, *rest = record["conversation"]
        calls = [call["function"] for call in first.get("tool_calls", [])]
        assert len(calls) == record["seed"] % 2 and ("reward" in record) == (benchmark == PRODUCTS)
        if calls:
            assert calls == [{"name": "run_python", "arguments": {"code": f"print({user['content']})"}}]
            (result, answer) = rest
            assert int(result["content"]) == eval(user["content"])
            assert record["completion"] == answer["content"] == rf"\boxed{{{result['content'].strip()}}}"
    right = [sum(r["seed"] % 2 for r in samples if r["problem"] == p["id"]) for p in entry["problems"]]
    assert [problem["c"] for problem in entry["problems"]] == right and 0 < sum(right) < 12
    assert entry["verification"]["correct"] == sum(right)
    asked = {record["problem"]: record["conversation"][0]["content"] for record in samples}
    assert len(set(asked.values())) == 3


def test_more_samples_in_an_environment_keep_the_first_ones(run, settings):
    """And more samples of the same problems later: the first are kept, and equal those of a new run."""
    results = run(settings, benchmarks=PRODUCTS)
    first = records(settings["output_dir"])
    assert results["protocol"]["prompt"]["max_tool_calling_iterations"] is None and len(first) == 12
    assert run(settings, benchmarks=PRODUCTS)["benchmarks"] == results["benchmarks"]
    path = next(Path(settings["output_dir"], "samples").glob("*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))  # within a batch
    run(settings, benchmarks=PRODUCTS)
    assert sorted(records(settings["output_dir"]), key=str) == sorted(first, key=str)
    assert {record["reward"] for record in first} <= {0.0, 1.0}
    seeds = range(gym.BENCHMARK_SEED, gym.BENCHMARK_SEED + 3)
    from experiments.products import Products

    asked = {record["conversation"][0]["content"] for record in first}
    assert asked == {Products().reset(seed=seed) for seed in seeds}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": "experiments.products:nothing"}, "benchmarks: .*nothing"),
        ({"benchmarks": "experiments.products:Products"}, "is no environment"),
        ({"benchmarks": PRODUCTS, "engine": "server"}, "need engine transformers or vllm"),
        ({"benchmarks": held_out("products"), "tools": ["run_pyton"]}, "run_pyton"),
        ({"benchmarks": held_out("products"), "max_tool_calling_iterations": 2}, "would be ignored"),
        ({"benchmarks": PRODUCTS, "model": "PLAIN"}, "renders no calls"),
        ({"benchmarks": "TEXT", "tools": ["run_python"]}, "text has prompts that are text"),
    ],
)
def test_errors_before_the_model_is_loaded(settings, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: pytest.fail("started"))
    if changes.get("model"):
        plain = shutil.copytree(settings["model"], tmp_path / "PLAIN")
        template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
        (plain / "chat_template.jinja").write_text(template)
        changes = changes | {"model": str(plain)}
    if changes["benchmarks"] == "TEXT":
        (tmp_path / "text.jsonl").write_text('{"prompt": "1 + 1 =", "solution": "2"}\n')
        changes = changes | {"benchmarks": str(tmp_path / "text.jsonl")}
    arguments = settings | changes
    arguments = {key: value if isinstance(value, list) else [value] for key, value in arguments.items()}
    argv = [part for key, values in arguments.items() for part in (f"--{key}", *values)]
    with pytest.raises(ValueError, match=message):
        main([str(part) for part in argv])


@pytest.mark.vllm
def test_conversations_with_vllm_are_complete(run, settings, confined, tmp_path):
    """Whatever the model says: conversations are complete, and a call would get its result."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    model = str(tmp_path / "model")
    # the heads of the tiny model are too small for vLLM
    build_model(TOKENIZER, seed=shifted(0)).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    changes = {
        "engine": "vllm",
        "max_model_len": 256,
        "enforce_eager": True,
        "dtype": "float32",
        "batch_size": 20,
        "model": model,
    }
    run(settings | changes, benchmarks=PRODUCTS)
    shared_code_verifier().close()
    samples = records(settings["output_dir"])
    assert len(samples) == 12 and all(1 <= record["num_tokens"] <= 60 for record in samples)
    assert {record["conversation"][1]["role"] for record in samples} == {"assistant"}


def test_each_example_names_its_environment_and_gets_the_tools_of_that_one(run, settings, tmp_path, monkeypatch):
    """Each example names its own; prompts have the tools of that one alone. Some completions have no reward."""
    (tmp_path / "kinds.py").write_text(
        "from datasets import Dataset\n"
        "class A:\n    def reset(self, word, **columns):\n        return word + '?'\n"
        "    def look(self) -> str:\n        '''Look.'''\n    async def get_reward(self):\n        return 1\n"
        "class B(A):\n    def reset(self, word, seed, prompt):\n        return word + str(seed)\n"
        "    def get_reward(self):\n        return None\n"
        "class Spec:\n    environment_factory = {'a': A, 'b': B}\n"
        "    train_dataset = Dataset.from_dict({'environment': list('abab'), 'word': list('wxyz'),\n"
        "        'prompt': [[{'role': 'user', 'content': 'so '}]] * 4})\n"
        "spec = Spec()\n"
    )
    monkeypatch.chdir(tmp_path)
    results = run(settings, benchmarks="kinds:spec", max_problems=4, n=2, k="1")
    entry = results["benchmarks"]["kinds:spec"]
    assert entry["unscorable"] == ["1", "3"] and entry["pass_at_k"]["1"]["value"] == 1
    asked = {record["problem"]: record["conversation"][0]["content"] for record in records(settings["output_dir"])}
    assert asked == {"0": "so w?", "1": "so x1", "2": "so y?", "3": "so z3"}


def test_observations_follow_prompts_of_content_blocks(run, settings, tmp_path, monkeypatch):
    """Also those that are blocks. An image, which would not reach the model, is refused before it is loaded."""
    (tmp_path / "blocks.py").write_text(
        "from datasets import Dataset\n"
        "class Text:\n    def reset(self, word, **columns):\n        return word\n"
        "    def get_reward(self):\n        return 1\n"
        "class Blocks(Text):\n    def reset(self, word, **columns):\n"
        "        return [{'type': 'text', 'text': word}, {'type': 'text', 'text': '!'}]\n"
        "class Nothing(Text):\n    def reset(self, **columns):\n        pass\n"
        "class Image(Text):\n    def reset(self, word, **columns):\n"
        "        return word if word == 'x' else [{'type': 'image', 'image': None}]\n"
        "class Spec:\n    def __init__(self, factory, words='xy'):\n        self.environment_factory = factory\n"
        "        content = [{'type': 'text', 'text': 'so '}]\n"
        "        prompts = [[{'role': 'user', 'content': content}]] * 2\n"
        "        self.train_dataset = Dataset.from_dict({'prompt': prompts, 'word': list(words)})\n"
        "text, blocks, nothing, image = Spec(Text), Spec(Blocks), Spec(Nothing), Spec(Image, 'ix')\n"
        "late_image = Spec(Image)\n"
    )
    monkeypatch.chdir(tmp_path)
    few = {"max_problems": 2, "n": 1, "k": "1"}
    for name, end in (("text", "{}"), ("blocks", "{}!"), ("nothing", "")):
        run(settings | {"output_dir": str(tmp_path / name)}, benchmarks=f"blocks:{name}", **few)
        asked = {record["problem"]: record["conversation"][0]["content"] for record in records(tmp_path / name)}
        assert asked == {"0": "so " + end.format("x"), "1": "so " + end.format("y")}
    with pytest.raises(ValueError, match="`reset` of the environment Image returned an image"):
        run(settings | {"output_dir": str(tmp_path / "late")}, benchmarks="blocks:late_image", **few)
    monkeypatch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: pytest.fail("started"))
    with pytest.raises(ValueError, match="`reset` of the environment Image returned an image"):
        run(settings | {"output_dir": str(tmp_path / "first")}, benchmarks="blocks:image", **few)


def test_starts_that_are_not_known_to_be_equal_are_warned_of_once(run, settings, tmp_path, monkeypatch, caplog):
    """Of an environment whose state may be outside of this process, unless `reset` gets a seed."""
    (tmp_path / "outside.py").write_text(
        "import os\n"
        "from datasets import Dataset\n"
        "class Outside:\n    def reset(self, **columns):\n        os.getpid()\n"
        "    def get_reward(self):\n        return 1\n"
        "class Seeded(Outside):\n    def reset(self, seed, **columns):\n        os.getpid()\n"
        "class Spec:\n    environment_factory = Outside\n"
        "    train_dataset = Dataset.from_dict({'prompt': [[{'role': 'user', 'content': 'so'}]] * 2})\n"
        "class SeededSpec(Spec):\n    environment_factory = Seeded\n"
        "spec, seeded = Spec(), SeededSpec()\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "It is not known whether the completions of problem 0 start from one state"
    for name, expected in (("seeded", 0), ("spec", 1)):
        caplog.clear()
        run(settings | {"output_dir": str(tmp_path / name)}, benchmarks=f"outside:{name}", max_problems=2, n=2, k="1")
        assert sum(words in message for message in caplog.messages) == expected
