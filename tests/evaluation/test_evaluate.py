"""The whole path from a checkpoint to results.json, resumed, extended, replicated and refused."""

import copy
import dataclasses
import json
import resource
import shutil
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import trl
from peft import LoraConfig, get_peft_model
from support.problems import held_out
from transformers import AutoModelForCausalLM

from pacs_trl.cli import run as command
from pacs_trl.data import PROMPT_INSTRUCTION
from pacs_trl.evaluation import pass_at_k
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.engines import TransformersEngine, identify_model
from pacs_trl.evaluation.requests import Completion, render_prompt
from pacs_trl.evaluation.results import GradedSample, read_results, summarize
from pacs_trl.evaluation.run import default_label, evaluate, load_benchmarks, requests_to_generate
from pacs_trl.verification import Verifier
from pacs_trl.verification.code import CodeVerifier


main = partial(command, "evaluate")


def store_path(arguments):
    return Path(arguments["output_dir"]) / "samples" / "math_500.jsonl"


def test_results_agree_with_the_samples(run, arguments, sums):
    results = run(arguments, method="guesser")
    entry = results["benchmarks"]["math_500"]
    answers = {row["unique_id"]: row["answer"] for row in map(json.loads, sums.read_text().splitlines())}
    records = [json.loads(line) for line in store_path(arguments).read_text().splitlines()[1:]]
    assert len(records) == 12 * 8
    for problem in entry["problems"]:
        mine = [r for r in records if r["problem"] == problem["id"]]
        # Recomputed without the verifier: one digit in a box.
        correct = [
            r["completion"] == rf"\boxed{{{answers[problem['id']]}}}" for r in sorted(mine, key=lambda r: r["sample"])
        ]
        assert (problem["n"], problem["c"]) == (8, sum(correct))
        assert problem["mean_tokens"] == sum(r["num_tokens"] for r in mine) / 8
        grades = json.loads((Path(arguments["output_dir"]) / "grades" / "math_500.json").read_text())
        assert grades[problem["id"]] == "".join("01"[c] for c in correct)
    assert 0 < sum(p["c"] for p in entry["problems"]) < 96
    for k in (1, 2, 4, 8):
        mean = sum(pass_at_k(8, p["c"], k) for p in entry["problems"]) / 12
        cell = entry["pass_at_k"][str(k)]
        assert cell["value"] == pytest.approx(mean, abs=1e-12) and cell["lower"] <= mean <= cell["upper"]
    assert results["method"] == "guesser" and not results["method_is_default"]
    assert results["protocol"]["sampling"]["temperature"] == 1.0
    assert results == read_results(arguments["output_dir"])


def test_results_of_benchmarks_that_are_not_named_again_are_kept(run, arguments, sums, tmp_path, monkeypatch):
    first = run(arguments)
    other = shutil.copy(sums, tmp_path / "other.jsonl")
    both = f"{arguments['benchmarks']},other={other}"
    with monkeypatch.context() as patch:
        patch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: pytest.fail("the model is loaded"))
        with pytest.raises(ValueError, match="has results of math_500, which would be overwritten. Name all"):
            run(arguments, benchmarks=f"other={other}")
    assert read_results(arguments["output_dir"]) == first
    assert [*run(arguments, benchmarks=both)["benchmarks"]] == ["math_500", "other"]


def test_messages_without_text_are_refused_before_the_model_is_loaded(run, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: pytest.fail("the model is loaded"))
    file = tmp_path / "own.jsonl"
    turns = [{"role": "system", "content": None}, {"role": "user", "content": "1+1"}]
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in ([turns[1]], turns)))
    with pytest.raises(ValueError, match="Problem 1 of own .*'system' without content"):
        run(arguments, benchmarks=str(file))


def without_template(checkpoint, directory):
    """A copy of a checkpoint, like a base model, that has no chat template."""
    model = shutil.copytree(checkpoint, directory)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}
    file.write_text(json.dumps(settings))
    return str(model)


def test_text_prompts_need_no_chat_template(run, arguments, checkpoint, tmp_path, monkeypatch):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "solution": str(i + 1)}) + "\n" for i in range(3)))
    text_arguments = arguments | {"benchmarks": str(file), "model": without_template(checkpoint, tmp_path / "base")}
    results = run(text_arguments, n=2, k="1")
    assert results["benchmarks"]["own"]["instruction"] is None
    assert results == read_results(text_arguments["output_dir"])
    monkeypatch.setattr(TransformersEngine, "load", lambda *a, **k: pytest.fail("generated again"))
    assert run(text_arguments, n=2, k="1")["prompt_digest"] == results["prompt_digest"]


def test_template_arguments_are_for_messages_only(run, arguments, tmp_path):
    """As in training: text prompts are not rendered."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "solution": str(i + 1)}) + "\n" for i in range(3)))
    text_arguments = arguments | {"benchmarks": str(file), "chat_template_kwargs": {"enable_thinking": False}}
    assert run(text_arguments, n=2, k="1")["benchmarks"]["own"]["instruction"] is None
    with pytest.raises(ValueError, match="enable_thinking"):
        run(text_arguments | {"benchmarks": arguments["benchmarks"]}, n=2, k="1")


def test_template_arguments_are_those_of_the_template_of_a_processor(run, arguments, checkpoint, tmp_path):
    """Models that read images have it in chat_template.json, and generation uses it."""
    model = Path(without_template(checkpoint, tmp_path / "base"))
    template = "{% if shout %}LOUD {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    run(arguments, model=str(model), chat_template_kwargs={"shout": True}, n=2, k="1")
    with pytest.raises(ValueError, match="would ignore shuot"):
        run(arguments, model=str(model), chat_template_kwargs={"shuot": True}, n=2, k="1")


def test_messages_need_a_chat_template_before_the_model_is_loaded(run, arguments, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: pytest.fail("the model is loaded"))
    with pytest.raises(ValueError, match="math_500 has messages.* no chat template. Evaluate .*`prompt`"):
        run(arguments, model=without_template(checkpoint, tmp_path / "base"))
    assert not Path(arguments["output_dir"]).exists()


def test_samples_of_another_day_have_the_date_of_the_first_ones(run, arguments, checkpoint, tmp_path, monkeypatch):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    template = Path(trl.__file__).parent / "chat_templates" / "llama3_2.jinja"
    (model / "chat_template.jinja").write_text(template.read_text())
    rendered = []
    generate = TransformersEngine.generate

    def noted(self, requests, settings):
        rendered.append(render_prompt(self.tokenizer, requests[0].prompt, self.chat_template_kwargs))
        return generate(self, requests, settings)

    monkeypatch.setattr(TransformersEngine, "generate", noted)
    first = run(arguments, model=str(model), n=1, k="1")
    date = tmp_path / "out" / "prompt_date"
    assert date.read_text()[:10] == datetime.now().isoformat()[:10]
    date.write_text("2024-02-29T12:00:00")
    second = run(arguments, model=str(model), n=2, k="1")
    assert "29 Feb 2024" in rendered[1] and rendered[0] != rendered[1]
    third = run(arguments, model=str(model), n=3, k="1")
    assert rendered[2] == rendered[1]
    assert first["prompt_digest"] != second["prompt_digest"] == third["prompt_digest"]


def test_truncated_samples_are_graded_as_in_training(run, arguments, play):
    def complete(request):
        first, second = map(int, request.prompt[-1]["content"].split("+"))
        form, reason = [("{} of", "length"), (r"\boxed{{{}}} of", "length"), ("{}", "stop")][request.sample]
        return Completion(form.format(first + second), 3, reason)

    play(complete)
    results = run(arguments, benchmarks=held_out(), max_problems=2, n=3, k="1")
    assert [problem["c"] for problem in results["benchmarks"]["miniature/addition"]["problems"]] == [2, 2]
    assert results["protocol"]["verifier"]["grade_truncated"] is False


def test_results_state_the_settings_that_a_server_rejected(run, arguments, play):
    def complete(request):
        more = {"settings_not_sent": ["top_k", "min_p"]} if request.sample == 1 else {}
        return Completion("1", 3, "stop", more=more)

    play(complete)
    changes = {"benchmarks": held_out(), "max_problems": 2, "k": "1"}
    assert "settings_not_sent" not in run(arguments, n=1, **changes)["engine"]
    for _ in range(2):  # the second run generates nothing
        assert run(arguments, n=2, **changes)["engine"]["settings_not_sent"] == ["min_p", "top_k"]


def test_the_command_prints_how_many_problems_each_k_excludes(arguments, monkeypatch, capsys):
    """The first problem has two graded samples, the second has one, the third has none."""
    graded = {("0", 0): 1.0, ("0", 1): 1.0, ("1", 0): 0.0, ("1", 1): None, ("2", 0): None, ("2", 1): None}
    samples = [GradedSample(problem, outcome, 3, "stop") for (problem, _), outcome in graded.items()]
    summary = summarize(["0", "1", "2"], samples, [1, 2])
    results = {"benchmarks": {"own": {"title": "own"} | summary}}
    monkeypatch.setattr("pacs_trl.evaluation.run.evaluate", lambda *args, **kwargs: results)
    assert main(command_line(arguments)) == 0
    printed = capsys.readouterr().out
    assert "3 samples could not be graded" in printed
    assert "fewer than k graded samples" in printed and "1 for k=1, 2 for k=2" in printed


def test_programs_run_in_the_sandbox(arguments, verifier, play):
    """Every second sample is the program that solves its problem; the level stands in the results."""

    def complete(request):
        first, second = (int(v.partition(":")[2]) for v in request.prompt[-1]["content"].split(","))
        source = f"print(int(input())*{second - first}+{first + request.sample % 2})"
        return Completion(f"```python\n{source}\n```", 9, "stop")

    play(complete)
    changes = {"benchmarks": held_out("programs"), "max_problems": 3, "n": 4, "k": "1,2"}
    args = EvaluationArguments(**{**arguments, **changes})
    with CodeVerifier(num_workers=1, isolation="rlimits") as programs:
        results = evaluate(args, verifier, programs, progress=False)
    entry = results["benchmarks"]["miniature/programs"]
    assert [problem["c"] for problem in entry["problems"]] == [2, 2, 2]
    assert entry["verification"] == {"correct": 6, "wrong": 6}
    assert "rlimits" in programs.level
    assert entry["programs"]["confinement"] == programs.level and entry["programs"]["cpu_seconds"] == 2.0


def test_equal_samples_of_greedy_decoding_are_warned_of(run, arguments, play, caplog):
    play(lambda request: Completion("1", 1, "stop"))
    run(arguments, temperature=0, n=1, k="1")
    assert not caplog.records
    run(arguments, temperature=0, n=4, k="1,4")
    (record,) = caplog.records
    assert record.message.startswith("temperature=0 generates 4 equal completions for each problem of MATH 500, so")


def test_each_sample_of_gpqa_has_an_order_of_options_of_its_own(run, arguments, play):
    """Each answer names the first option that is shown; orders survive a resumed run."""
    asked = {}

    def complete(request):
        text = request.prompt[-1]["content"].partition(" \n\nPlease")[0]
        key = request.problem_id, request.sample
        asked[key] = [*asked.get(key, []), tuple(line.split(") ")[1] for line in text.splitlines()[-4:])]
        return Completion("\\boxed{A}", 3, "stop")

    play(complete)
    path = Path(__file__).parents[1] / "data" / "gpqa_diamond.jsonl"
    changes = {"benchmarks": f"gpqa_diamond={path}", "prompt_instruction": PROMPT_INSTRUCTION, "engine": "server"}
    changes |= {"k": "1", "batch_size": 64}
    for n in (3, 8):  # the second run adds samples to those of the first
        results = run(arguments | changes, n=n)
    assert "the letter of the right option" in results["benchmarks"]["gpqa_diamond"]["instruction"]
    assert len(asked) == 3 * 8 and {len(orders) for orders in asked.values()} == {1}
    for problem, right in zip(results["benchmarks"]["gpqa_diamond"]["problems"], ("neutron", "23", "argon")):
        orders = [asked[problem["id"], sample][0] for sample in range(8)]
        assert len(set(orders)) > 3 and problem["c"] == sum(order[0] == right for order in orders)
    with pytest.raises(ValueError, match="seed: 0 != 1"):
        run(arguments | changes, seed=1)


def test_a_group_with_a_hole_is_generated_again_as_a_whole(arguments):
    args = EvaluationArguments(**arguments)
    (benchmark,) = load_benchmarks(args)
    everything = requests_to_generate(args, benchmark, set())
    assert len({request.seed for request in everything}) == len(everything) == 96
    keys = [(request.problem_id, request.sample) for request in everything]
    # 96 requests in groups of 20; the holes are in the second and in the last, which has 16.
    missing = requests_to_generate(args, benchmark, set(keys) - {keys[25], keys[95]})
    assert missing == everything[20:40] + everything[80:]
    server = dataclasses.replace(args, engine="server", batch_size=64)
    assert requests_to_generate(server, benchmark, set(keys) - {keys[25], keys[95]}) == [
        everything[25],
        everything[95],
    ]


def command_line(arguments, **changes):
    changes = {"verification_num_workers": 1} | changes
    return [f"--{key}={value}" for key, value in {**arguments, **changes}.items()]


def test_the_command_prints_truncation_before_pass_at_1_of_each_benchmark(arguments, sums, capsys):
    """No bar goes into a pipe, and the share of truncated completions is printed before pass@1."""
    benchmarks = f"math_500={sums},{held_out()}"
    changes = {"max_problems": 3, "n": 4, "k": 1, "max_new_tokens": 2}
    assert main(command_line(arguments, benchmarks=benchmarks, **changes)) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert second.startswith("miniature/addition: truncated ") and last.startswith("results: ")
    results = read_results(arguments["output_dir"])["benchmarks"]
    assert list(results) == ["math_500", "miniature/addition"]
    records = [json.loads(line) for line in store_path(arguments).read_text().splitlines()[1:]]
    cut = sum(record["finish_reason"] == "length" for record in records)
    assert len(records) == 12 and cut > 0 and results["math_500"]["truncated_share"] == cut / 12
    assert first.startswith(f"MATH 500: truncated {100 * cut / 12:.1f} %  pass@1 ")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"k": "one"}, "k must"),
        ({"engine": "magic"}, "engine"),
        ({"dtype": "float23"}, "dtype"),
        ({"base_url": "http://x/v1"}, "base_url"),
        ({"chat_template_kwargs": {"enable_thinkng": False}}, "enable_thinkng"),
        ({"model": "./nothing", "benchmarks": "math_500"}, "./nothing"),
        ({"model": "ADAPTER"}, "'/no/base'"),
        ({"model": "SHARDS"}, "accelerate merge-weights"),
        ({"model": "ADAPTER", "engine": "vllm", "batch_size": 64}, "ADAPTER"),
        ({"benchmarks": "chess"}, "chess"),
        ({"benchmarks": "math_500=/nowhere/rows.jsonl"}, "/nowhere/rows.jsonl"),
        ({"benchmarks": f"{held_out()},{held_out()}"}, "benchmarks"),
        ({"problem_column": "question"}, "problem_column"),
        ({"top_p": 0}, "top_p"),
        ({"gpu_memory_utilization": "nan"}, "gpu_memory_utilization"),
    ],
)
def test_refused_before_any_work(arguments, tmp_path, monkeypatch, changes, key, capsys):
    monkeypatch.setattr(TransformersEngine, "load", lambda *a, **k: pytest.fail("the engine was loaded"))
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("the Hub was searched"))
    monkeypatch.chdir(tmp_path)
    for directory in ("ADAPTER", "SHARDS/pytorch_model_fsdp_0"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "ADAPTER" / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/base"}')
    assert main(command_line(arguments, **changes)) == 2
    assert key in capsys.readouterr().err


def test_the_default_k_go_as_far_as_n():
    for n, ks in ((1, [1]), (2, [1]), (4, [1, 4]), (31, [1, 4, 8, 16]), (128, [1, 4, 8, 16, 32, 64])):
        arguments = EvaluationArguments(model="m", benchmarks="b", output_dir="o", n=n)
        assert arguments.ks == ks and dataclasses.replace(arguments, method="x").ks == ks


def test_a_checkpoint_is_its_content(run, arguments, checkpoint, boxing_model, tmp_path, monkeypatch):
    first = run(arguments)
    for name in ("copy", "other-template", "other-weights"):
        shutil.copytree(checkpoint, tmp_path / name)
    template = tmp_path / "other-template" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    other = copy.deepcopy(boxing_model[0])
    other.model.norm.weight.data.mul_(1.001)
    other.save_pretrained(tmp_path / "other-weights")
    monkeypatch.setattr(TransformersEngine, "load", lambda *a, **k: pytest.fail("generated again"))
    changing = dict.fromkeys(("created", "commit", "engine"))
    assert run(arguments) | changing == first | changing
    again = run(arguments, model=str(tmp_path / "copy"))
    assert again["benchmarks"] == first["benchmarks"] and again["model"] == first["model"] | {"name": "copy"}
    for name, digest in (("other-template", "text_digest"), ("other-weights", "digest")):
        with pytest.raises(ValueError, match=rf"model.{digest}: '\w{{16}}' != '\w{{16}}'"):
            run(arguments, model=str(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("outputs/pacs", "pacs"),
        ("outputs/pacs/checkpoint-100", "pacs/checkpoint-100"),
        ("outputs/pacs/seed-0/checkpoint-100", "pacs/seed-0/checkpoint-100"),
        ("outputs/grpo/final_model", "grpo/final_model"),
        ("models--org--base/snapshots/" + "0a" * 20, "models--org--base/snapshots/" + "0a" * 20),
        ("model", "model"),
    ],
)
def test_the_label_of_a_directory_tells_runs_apart(tmp_path, monkeypatch, path, label):
    (tmp_path / path).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for spelling in (path, f"./{path}/", str(tmp_path / path)):
        assert default_label(spelling) == label


def test_the_label_of_a_directory_has_no_names_around_the_working_directory(tmp_path, monkeypatch):
    work = tmp_path / "alice" / "work"
    for path in (work / "model", tmp_path / "alice" / "model", tmp_path / "alice" / "pacs" / "checkpoint-1"):
        path.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert default_label(str(work / "model")) == "model"
    assert default_label(str(tmp_path / "alice" / "model")) == "model"
    assert default_label(str(tmp_path / "alice" / "pacs" / "checkpoint-1")) == "checkpoint-1"
    assert default_label("../model") == "model"
    assert default_label("../pacs/checkpoint-1") == "pacs/checkpoint-1"  # as it was given
    monkeypatch.chdir("model")
    assert default_label(".") == "model"


def test_the_label_of_a_hub_id_is_its_name():
    assert default_label("org/model") == "model"


def test_an_adapter_is_its_content_and_that_of_its_base(run, arguments, checkpoint, boxing_model, tmp_path):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    boxing_model[1].save_pretrained(tmp_path / "adapter")
    adapter_arguments = arguments | {"model": str(tmp_path / "adapter"), "n": 1, "k": "1"}
    first = run(adapter_arguments)
    store = store_path(adapter_arguments)
    before, (header, *lines) = store.read_text(), store.read_text().splitlines()
    other = copy.deepcopy(boxing_model[0])
    other.model.norm.weight.data.mul_(1.001)
    other.save_pretrained(base)
    with pytest.raises(ValueError, match=r"model.base_digest: '\w{16}' != '\w{16}'"):
        run(adapter_arguments)
    header = json.loads(header)
    assert header["settings"]["model"].pop("base_digest") == first["model"]["base_digest"]
    store.write_text("\n".join([json.dumps(header), *lines]) + "\n")  # of an earlier version
    with pytest.raises(ValueError, match=r"(?s)model.base_digest: None != '\w{16}'.*use another output directory"):
        run(adapter_arguments)
    assert len(before.splitlines()) == len(store.read_text().splitlines()) == 13


def test_a_checkpoint_with_its_own_code_is_evaluated(run, arguments, checkpoint, checkpoint_with_code, tmp_path):
    """Its completions are those of the same weights in transformers, and the setting keeps stored samples."""
    plain = arguments | {"output_dir": str(tmp_path / "plain")}
    expected = run(plain)
    with_code = arguments | {"model": checkpoint_with_code(checkpoint)}
    with pytest.raises(ValueError, match="trust_remote_code"):
        run(with_code)
    results = run(with_code, trust_remote_code=True)
    assert results["benchmarks"] == expected["benchmarks"]
    assert run(plain, trust_remote_code=True)["benchmarks"] == expected["benchmarks"]
    (code,) = Path(with_code["model"]).glob("*.py")
    code.write_text(code.read_text() + "# changed\n")
    with pytest.raises(ValueError, match=r"model.code_digest: '\w{16}' != '\w{16}'"):
        run(with_code, trust_remote_code=True)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("server", {"trust_remote_code": True, "revision": "v1", "dtype": "float32", "max_model_len": 100}),
        ("transformers", {"max_model_len": 100, "base_url": "http://x/v1"}),
        ("vllm", {"base_url": "http://x/v1"}),
    ],
)
def test_settings_of_another_engine_are_refused(engine, settings):
    whole = {"model": "m", "benchmarks": "b", "output_dir": "o", "engine": engine}
    for name, value in settings.items():
        with pytest.raises(ValueError, match=rf"^{name}={value!r} would be ignored with engine '{engine}'.*remove"):
            EvaluationArguments(**whole, **{name: value})


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("server", {"batch_size": 8, "tensor_parallel_size": 2, "enforce_eager": True}),
        ("transformers", {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "concurrency": 2}),
        ("vllm", {"concurrency": 2, "batch_size": 8}),
    ],
)
def test_settings_of_another_engine_that_change_no_result_are_warned_of(verifier, caplog, engine, settings):
    whole = {"model": "org/none", "benchmarks": "none", "output_dir": "o", "engine": engine}
    args = EvaluationArguments(**whole, **settings)
    with pytest.raises(ValueError, match="benchmark"):
        evaluate(args, verifier)  # warns first
    (warning,) = (record.message for record in caplog.records)
    assert all(name in warning for name in settings) and repr(engine) in warning
    caplog.clear()
    with pytest.raises(ValueError, match="benchmark"):
        evaluate(EvaluationArguments(**whole), verifier)
    assert not caplog.records


def test_settings_that_the_engine_reads_or_that_have_their_default_are_kept():
    whole = {"model": "m", "benchmarks": "b", "output_dir": "o"}
    EvaluationArguments(**whole, engine="server", tensor_parallel_size=1, revision=None, batch_size=64, concurrency=2)
    EvaluationArguments(**whole, engine="vllm", tools=["say"], batch_size=8)  # conversations at a time


def test_a_full_disk_keeps_what_was_generated(run, arguments, tmp_path, capsys):
    undisturbed = run({**arguments, "output_dir": str(tmp_path / "undisturbed")})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # a file cannot grow any further
    try:
        assert main(command_line(arguments)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in capsys.readouterr().err.splitlines()[-1]
    assert 10 < len(store_path(arguments).read_bytes().splitlines()) < 97
    assert run(arguments)["benchmarks"] == undisturbed["benchmarks"]


def test_the_address_of_a_server_is_kept_without_its_password(arguments):
    arguments = {
        **arguments,
        "engine": "server",
        "batch_size": 64,
        "base_url": "http://user:s3cr3t@host:8000/v1?token=s3cr3t&a=1",
    }
    assert identify_model(EvaluationArguments(**arguments))["server"] == "http://host:8000/v1?a=1"


def test_too_many_failures_are_refused(arguments, monkeypatch):
    monkeypatch.setattr(Verifier, "max_characters", 3)
    with Verifier(num_workers=1) as verifier:
        with pytest.raises(ValueError, match="too_long"):
            evaluate(EvaluationArguments(**arguments), verifier, progress=False)
        results = evaluate(EvaluationArguments(**arguments), verifier, max_failure_share=1.0, progress=False)
    assert results["benchmarks"]["math_500"]["verification"]["too_long"] > 90
