"""Named sets in their Hub column layout, files, prompts, filters and splits of `pacs_trl.data`."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from support.problems import training_data

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.data import (
    PROMPT_INSTRUCTION,
    TRAINING_SETS,
    DataArguments,
    build_prompt,
    check_chat_template_kwargs,
    load_training_data,
)
from pacs_trl.data.sets import ProblemSet, load_rows
from pacs_trl.errors import UserError
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.verification.cases import read_tests


DATA = Path(__file__).parent
TOKENIZER = build_tokenizer()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, **kwargs):
    return load_training_data(DataArguments(dataset_name=name, **kwargs), TOKENIZER)


def test_prompts_have_instruction_and_system_prompt():
    asked = "What is 1+1? Please reason step by step, and put your final answer within \\boxed{}."
    assert build_prompt(" What is 1+1?\n") == [{"role": "user", "content": asked}]
    system, user = build_prompt("2+2?", instruction="", system_prompt="Be brief.")
    assert system == {"role": "system", "content": "Be brief."} and user == {"role": "user", "content": "2+2?"}


class TestNamedSets:
    def test_gsm8k_and_math_rows_get_prompts_and_solutions(self):
        train, evaluation = load("gsm8k", dataset_path=str(DATA / "gsm8k_test_200.jsonl"))
        assert evaluation is None and len(train) == 200
        row = next(row for row in train if row["question"].startswith("Janet"))
        assert row["solution"] == "18"
        assert row["prompt"] == [{"role": "user", "content": f"{row['question']} {PROMPT_INSTRUCTION}"}]
        # the last box
        train, _ = load("math", dataset_path=str(DATA / "math_500.jsonl"))
        assert len(train) == 500
        assert set(train.column_names) >= {"prompt", "solution", "problem", "subject", "unique_id"}
        gold = {row["unique_id"]: row["answer"] for row in train}
        same = sum(gold[row["unique_id"]].replace(" ", "") == row["solution"].replace(" ", "") for row in train)
        assert same >= 490  # the rest differ by spelling only, which grading sees through

    @pytest.mark.parametrize("name", list(TRAINING_SETS))
    def test_hub_is_asked_for_the_pinned_rows(self, name, monkeypatch):
        asked = {}

        def load_dataset(hub_id, config, *, split, revision):
            asked[hub_id] = (config, split, revision)
            return Dataset.from_list([{row.problem_column: "1+1", row.solution_column: cell}])

        row = TRAINING_SETS[name]
        # the commits of the sets of programs and of RLPR's are not known
        assert len(row.revision or "") == (0 if name in ("verifiable_coding", "rlpr") else 40)
        tests = {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}
        cell = tests if row.answer_in == "tests" else "so #### \\boxed{2}"
        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        assert len(load(name)[0]) == 1
        assert asked == {row.hub_id: (row.config, "train", row.revision)}
        load(name, dataset_split="test", dataset_revision="main", dataset_config="other")
        assert asked == {row.hub_id: ("other", "test", "main")}

    def test_free_text_answers_in_verls_layout_are_read(self, tmp_path):
        turns = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Why is the sky blue?"}]
        rows = [{"prompt": turns, "reward_model": {"ground_truth": "Rayleigh scattering"}, "ability": "physics"}]
        train, _ = load("rlpr", dataset_path=write_jsonl(tmp_path / "r.jsonl", rows))
        system, user = train[0]["prompt"]
        assert system == {"role": "system", "content": "Think."}  # that of the data
        assert user["content"].startswith("Why is the sky blue? Please reason") and "<answer>" in user["content"]
        assert train[0]["solution"] == "Rayleigh scattering"
        settings = {"dataset_path": str(tmp_path / "r.jsonl"), "prompt_instruction": ""}
        train, _ = load("rlpr", **settings, system_prompt="Reason in tags.")
        assert [turn["content"] for turn in train[0]["prompt"]] == ["Reason in tags.", "Why is the sky blue?"]
        write_jsonl(tmp_path / "r.jsonl", [row | {"prompt": turns[1:]} for row in rows])
        assert [turn["role"] for turn in load("rlpr", **settings)[0][0]["prompt"]] == ["user"]

    def test_programs_are_read_with_their_tests(self, caplog):
        path = str(DATA / "verifiable_coding.jsonl")
        train, _ = load("verifiable_coding", dataset_path=path)
        assert sorted(train["problem_id"]) == ["half", "slow", "sum", "wrong_test"]
        assert "Dropped 1 of 5 rows" in caplog.text
        row = next(row for row in train if row["problem_id"] == "sum")
        assert read_tests(row["solution"]).cases == (("1 2\n", "3\n"), ("10 -4\n", "6\n"))
        assert row["prompt"][0]["content"].endswith(f"their sum. {TRAINING_SETS['verifiable_coding'].instruction}")
        rows, _ = load("verifiable_coding", dataset_path=path, prompt_instruction="Write Python.")
        assert rows[0]["prompt"][0]["content"].endswith(" Write Python.")

    def test_tests_of_a_users_file_are_read_and_those_of_other_languages_refused(self, tmp_path):
        def load_tests(cell):
            file = write_jsonl(tmp_path / "own.jsonl", [{"problem": "Add 1.", "tests": cell}] * 2)
            return load(file, solution_column="tests")[0]["solution"][0]

        function = {"type": "function", "name": "f", "cases": [{"input": [1], "output": 2}]}
        asserts = {"type": "asserts", "code": "assert f((1,)) == {2}", "entry_point": "f"}
        for tests, cell in ((function, function), (asserts, asserts), (asserts, json.dumps(asserts))):
            assert read_tests(load_tests(cell)) == read_tests(tests)
        bad = json.dumps(asserts).replace("{2}", "{2")
        for cell, words in (
            (bad, "not parse"),
            (json.loads(bad), "not parse"),
            (function | {"language": "cpp"}, "cpp"),
        ):
            with pytest.raises(ValueError, match=f"Row 0 of .*{words}"):
                load_tests(cell)


def test_mappings_that_are_no_tests_are_dropped_with_the_reason(tmp_path, caplog):
    rows = [{"question": "1+1", "answer": {"value": "2"}}, {"question": "", "answer": {}}, {"question": "1+2"}]
    load(write_jsonl(tmp_path / "rows.jsonl", [*rows, {"question": "2+2", "answer": "4"}]))
    assert "Dropped 3 of 4 rows" in caplog.text
    assert "In 1 of them `answer` is a mapping" in caplog.text and "tests of a program" in caplog.text


@pytest.mark.parametrize("name", ["rows.JSONL", "rows.Json", "rows.PARQUET"])
def test_the_case_of_a_file_suffix_does_not_matter(tmp_path, name):
    path, rows = tmp_path / name, [{"question": "1+1", "answer": "2"}]
    if name == "rows.PARQUET":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows if name == "rows.Json" else rows[0]))
    assert load(str(path))[0]["solution"] == ["2"] and load_benchmark(str(path)).problems[0].solution == "2"


IGNORED = [
    ({"dataset_name": "rows.jsonl", "dataset_split": "test"}, "dataset_split is for datasets on the Hub"),
    ({"dataset_name": "mine:rows", "dataset_split": "test"}, "dataset_split is for datasets on the Hub"),
    ({"dataset_name": "rows.jsonl", "dataset_path": "other.jsonl"}, "dataset_path is for the named sets deepscaler, "),
    ({"dataset_name": "gsm8k", "dataset_size": 7}, "dataset_size is for dataset_name: reasoning_gym"),
]


@pytest.mark.parametrize(("settings", "remedy"), IGNORED)
def test_a_setting_that_would_be_ignored_is_refused_with_what_it_is_for(settings, remedy):
    with pytest.raises(UserError, match=f"would be ignored with .* Remove it: {remedy}") as refused:
        DataArguments(**settings)
    assert "None" not in str(refused.value)


def test_a_file_is_split_into_training_and_evaluation():
    problems = training_data()
    train, evaluation = load(problems.pop("dataset_name"), max_train_samples=30, eval_split_size=10, **problems)
    assert (len(train), len(evaluation)) == (30, 10)
    assert train[0]["prompt"] == [{"role": "user", "content": train[0]["problem"]}]
    assert train[0]["solution"] == train[0]["answer"]


def test_named_columns_extra_columns_and_alternatives(tmp_path):
    rows = [{"q": "1+1", "a": 2, "tag": "x"}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    train, _ = load(path, problem_column="q", solution_column="a", system_prompt="S", prompt_instruction="")
    prompt = build_prompt("1+1", instruction="", system_prompt="S")
    assert train.to_list() == [rows[0] | {"a": "2", "prompt": prompt, "solution": "2"}]
    rows = [{"problem": "a", "answer": ["1", "2"]}, {"problem": "b", "answer": ["3"]}]
    train, _ = load(write_jsonl(tmp_path / "d.jsonl", rows))
    assert sorted(train["solution"][:]) == [["1", "2"], ["3"]]


def turn(role, content):
    return {"role": role, "content": content}


SYSTEM, USER, REPLY = turn("system", "Be brief."), turn("user", "1+1"), turn("assistant", "It is \\boxed{2}.")
AGAIN = turn("user", "2+2")
ASKED, OTHER = build_prompt("1+1"), turn("system", "S")
NAMED, COLUMNS = {"problem_column": "problem"}, {"problem_column": "chat", "solution_column": "gold"}
FORMS = {  # rows, settings; prompt and solution
    "text prompt": ({"prompt": "1+1=", "solution": "2"}, {}, "1+1=", "2"),
    "messages as prompt": ({"prompt": [SYSTEM, USER], "solution": "2"}, {}, [SYSTEM, USER], "2"),
    "prompt and answer": ({"prompt": [USER], "answer": 2}, {}, [USER], "2"),
    "prompt wins": ({"prompt": [USER], "problem": "3+3", "solution": "2", "answer": "6"}, {}, [USER], "2"),
    "unless it is named": ({"prompt": [USER], "problem": "1+1", "answer": "2"}, NAMED, ASKED, "2"),
    "a problem named prompt": ({"prompt": "1+1", "solution": "2"}, {"problem_column": "prompt"}, ASKED, "2"),
    "another system turn": ({"prompt": [SYSTEM, USER], "solution": "2"}, {"system_prompt": "S"}, [OTHER, USER], "2"),
    "question": ({"question": "1+1", "answer": "1 + 1 = 2\n#### 2"}, {}, ASKED, "2"),
    "question and solution": ({"question": "1+1", "solution": "2"}, {}, ASKED, "2"),
    "answer wins": ({"problem": "1+1", "answer": "2", "solution": "Add."}, {}, ASKED, "2"),
    "messages": ({"messages": [SYSTEM, USER, REPLY]}, {}, [SYSTEM, USER], "2"),
    "reply without a box": ({"messages": [USER, turn("assistant", "2")]}, {}, [USER], "2"),
    "several turns": ({"messages": [USER, REPLY, AGAIN, turn("assistant", "#### 4")]}, {}, [USER, REPLY, AGAIN], "4"),
    "messages that end with the user": ({"messages": [SYSTEM, USER], "answer": "2"}, {}, [SYSTEM, USER], "2"),
    "messages and a solution": ({"messages": [USER, REPLY], "solution": "2.0"}, {}, [USER], "2.0"),
    "problem wins over messages": ({"problem": "1+1", "answer": "2", "messages": [AGAIN, REPLY]}, {}, ASKED, "2"),
    "messages in another column": ({"chat": [USER, REPLY], "gold": "2"}, COLUMNS, [USER], "2"),
}


class TestFormsOfTRL:
    @pytest.mark.parametrize(
        ("form", "kind"),
        [
            *((form, "jsonl") for form in FORMS),
            *(("messages", kind) for kind in ("parquet", "folder")),
            ("text prompt", "parquet"),
        ],
    )
    def test_every_form_of_row_gives_the_same_prompt_in_training_and_evaluation(self, tmp_path, caplog, form, kind):
        row, settings, prompt, solution = FORMS[form]
        path = tmp_path / "data"
        if kind == "jsonl":
            path = Path(write_jsonl(tmp_path / "d.jsonl", [row]))
        elif kind == "parquet":
            path = tmp_path / "d.parquet"
            Dataset.from_list([row]).to_parquet(path)
        else:
            path.mkdir()
            Dataset.from_list([row]).to_parquet(path / "train-00000-of-00001.parquet")
        train, _ = load(str(path), **settings, max_prompt_length=400)
        assert (train[0]["prompt"], train[0]["solution"]) == (prompt, solution)
        assert ("Set problem_column" in caplog.text) == (form == "prompt wins")  # the unused column is named
        if kind == "jsonl" and "system_prompt" not in settings:  # evaluation asks the same
            benchmark = load_benchmark(str(path), columns=settings)
            (problem,) = benchmark.problems
            arguments = EvaluationArguments(model="m", benchmarks="b", output_dir=str(tmp_path))
            assert (arguments.prompt_of(problem.problem, benchmark), problem.solution) == (prompt, solution)

    @pytest.mark.parametrize(
        ("row", "settings", "key"),
        [
            ({"prompt": "1+1", "solution": "2"}, {"prompt_instruction": "Say."}, "prompt_instruction.*'Say.'"),
            ({"messages": [USER, REPLY]}, {"prompt_instruction": "Say."}, "prompt_instruction.*'Say.'"),
            ({"prompt": "1+1", "solution": "2"}, {"system_prompt": "S"}, "system_prompt.*text"),
            ({"prompt": "1+1", "target": "2"}, {}, "solution_column"),
            ({"task": "1+1", "gold": "2"}, {}, "problem_column"),
            ({"task": "1+1", "gold": "2"}, {"problem_column": "task"}, "solution_column"),
            ({"problem": "1+1", "answer": ""}, {}, "No row of .* has a problem and a gold answer"),
            ({"problem": "1+1", "answer": "2"}, {"eval_split_size": 1}, "eval_split_size"),
            ({"problem": [{"content": "1+1"}], "answer": "2"}, {}, "Row 0 .*problem_column"),
            ({"problem": ["1+1"], "answer": "2"}, {}, "Row 0 .*problem_column"),
            ({"problem": 7, "answer": "2"}, {}, "Row 0 .*problem_column"),
            ({"problem": {"role": "user"}, "answer": "2"}, {}, "Row 0 .*problem_column"),
        ],
    )
    def test_rows_and_settings_that_cannot_be_used(self, tmp_path, row, settings, key):
        with pytest.raises(ValueError, match=key):
            load(write_jsonl(tmp_path / "d.jsonl", [row]), **settings)

    @pytest.mark.parametrize(
        ("row", "prompt"),
        [
            ({"prompt": "1+1=", "level": 3}, "1+1="),
            ({"prompt": [USER], "answer": None}, [USER]),
            ({"problem": "1+1", "answer": {"least": 2}}, ASKED),
            ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ],
    )
    def test_rows_without_gold_answers_are_used_if_no_reward_function_needs_them(self, tmp_path, row, prompt):
        path = write_jsonl(tmp_path / "d.jsonl", [row])
        train, _ = load_training_data(DataArguments(dataset_name=path), TOKENIZER, needs_solution=False)
        assert train.to_list() == [row | {"prompt": prompt}]

    def test_gold_answers_that_no_reward_function_needs_are_kept_and_rows_without_are_dropped(self, tmp_path, caplog):
        rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": None}]
        path = write_jsonl(tmp_path / "d.jsonl", rows)
        train, _ = load_training_data(DataArguments(dataset_name=path), TOKENIZER, needs_solution=False)
        assert train.to_list() == [{"prompt": "1+1=", "answer": "2", "solution": "2"}]
        assert "Dropped 1 of 2 rows" in caplog.text
        with pytest.raises(ValueError, match="`solution_column` 'gold' is not a column"):
            arguments = DataArguments(dataset_name=path, solution_column="gold")
            load_training_data(arguments, TOKENIZER, needs_solution=False)


class TestLengthSplitAndShuffle:
    @pytest.fixture
    def path(self, tmp_path):
        rows = [{"problem": " ".join(["w"] * (i + 1)), "answer": str(i)} for i in range(20)]
        return write_jsonl(tmp_path / "d.jsonl", rows)

    def test_overlong_prompts_are_dropped_and_counted(self, path, caplog):
        # 2 i + 1 characters, two headers, end, line break: 2 i + 5 tokens
        arguments = DataArguments(dataset_name=path, max_prompt_length=27, prompt_instruction="")
        train, _ = load_training_data(arguments, TOKENIZER)
        assert sorted(map(int, train["solution"])) == list(range(12))
        assert "Dropped 8 of 20 prompts" in caplog.text and "longest: 43" in caplog.text
        tokenizer = build_tokenizer()
        tokenizer.chat_template += "{{ 'x' * num_extra }}"
        assert len(load_training_data(arguments, tokenizer, {"num_extra": 3})[0]) == 10

    def test_a_key_that_the_template_would_ignore_is_refused(self, path, tmp_path):
        tokenizer = build_tokenizer()
        for known in ("messages", "tools", None):  # in the template, a parameter, none
            check_chat_template_kwargs(tokenizer, known and {known: []})
        with pytest.raises(ValueError, match="enable_thinkng"):
            load_training_data(DataArguments(dataset_name=path), tokenizer, {"enable_thinkng": False})
        text = write_jsonl(tmp_path / "text.jsonl", [{"prompt": "1+1", "solution": "2"}] * 2)  # without a template
        load_training_data(DataArguments(dataset_name=text), tokenizer, {"enable_thinkng": False})
        tokenizer.chat_template = "{{ messages }}{% if enable_thinkng is defined %}x{% endif %}"
        load_training_data(DataArguments(dataset_name=path), tokenizer, {"enable_thinkng": False})

    def test_same_seed_same_rows_and_disjoint_splits(self, path):
        train, evaluation = load(path, eval_split_size=5)
        again = load(path, eval_split_size=5)
        assert [part["solution"][:] for part in again] == [train["solution"][:], evaluation["solution"][:]]
        assert sorted([*train["solution"], *evaluation["solution"]], key=int) == [str(i) for i in range(20)]
        other, _ = load(path, eval_split_size=5, dataset_seed=7)
        assert train["solution"][:] != other["solution"][:]
        few, same = load(path, eval_split_size=5, max_train_samples=3)
        assert len(few) == 3 and same["solution"][:] == evaluation["solution"][:]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"problem": "1+1", "answer": "2"}\n\n{"problem": 1\n'),
        ("a.jsonl", '{"problem": "1+1", "answer": "2"}\n\n{"problem": 1'),
        ("b.jsonl", "3\n"),
        ("c.jsonl", ""),
        ("c.jsonl", "\n"),
        ("d.json", "[{]"),
        ("e.json", '{"problem": "1+1", "answer": 2}\n{"problem": "1+2", "answer": 3}\n'),
        ("e.parquet", "PAR1 no more"),
        ("f.txt", ""),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}.*{'line 3' if name[0] == 'a' else ''}") as caught:
        load_rows("", ProblemSet(""), tmp_path / name)
    assert ("must end in .jsonl" in str(caught.value)) == name.endswith(".json")


def test_other_formats_and_unknown_datasets_are_answered_with_what_is_read(tmp_path):
    (tmp_path / "rows.csv").write_text("problem,answer\n1+1,2\n")
    with pytest.raises(ValueError, match=r"\.jsonl, \.json, \.parquet\. Convert it: .*from_csv"):
        load(str(tmp_path / "rows.csv"))
    with pytest.raises(ValueError, match="'absent.csv' does not exist"):
        load("absent.csv")
    with pytest.raises(ValueError, match="Did you mean `openai/gsm8k`"):
        load("nobody/gsm8k_main")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_a_dataset_is_refused(name):
    with pytest.raises(UserError, match="dataset_name is empty"):
        DataArguments(dataset_name=name)


FOLDERS = {
    "files with other columns": ({"a.jsonl": '{"question": "1", "answer": "1"}', "b.jsonl": '{"q": [1]}'}, {}),
    "a damaged file": ({"a.jsonl": '{"question": "1",'}, {}),
    "no such split": ({"a.jsonl": '{"question": "1", "answer": "1"}'}, {"dataset_split": "test"}),
    "a split without a name": ({"a.jsonl": '{"question": "1", "answer": "1"}'}, {"dataset_split": ""}),
    "no such configuration": ({"a.jsonl": '{"question": "1", "answer": "1"}'}, {"dataset_config": "main"}),
}


@pytest.mark.parametrize(("files", "settings"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_cannot_be_loaded_is_named_with_the_reason(tmp_path, files, settings):
    for name, line in files.items():
        (tmp_path / name).write_text(line + "\n")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.* could not be loaded: .*dataset_split"):
        load(str(tmp_path), **settings)


def test_training_and_evaluation_read_a_file_alike(tmp_path):
    rows = [{"problem": f"1+{i}\u2028", "answer": [f"{i + 1}.0", i + 1.0], "note": None} for i in range(3)]
    path = str(tmp_path / "rows.jsonl")
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows), encoding="utf-8")
    problems = load_benchmark(path).problems
    rows[1]["level"] = 7  # a column that the first row does not have
    write_jsonl(tmp_path / "rows.jsonl", rows)
    train, _ = load(path)
    assert {row["problem"]: row["solution"] for row in train} == {p.problem: p.solution for p in problems}
    assert sorted(train["level"], key=str) == [7, None, None]
    write_jsonl(tmp_path / "rows.jsonl", rows[:2] + [rows[2] | {"level": "hard"}])
    with pytest.raises(ValueError, match="column `level` .* mixed types"):
        load(path)


@pytest.mark.parametrize(
    ("answers", "solutions"),
    [
        ([8, 9, 0.5], ["8", "9", "0.5"]),
        ([[8, 9], [7, 6], [1, 2]], [["8", "9"], ["7", "6"], ["1", "2"]]),
        ([1, "x+1", 2.5], ["1", "x+1", "2.5"]),
        ([["1", "2"], "3", 4], [["1", "2"], ["3"], ["4"]]),
        ([[1, "one"], ["2", 2]], [["1", "one"], ["2", "2"]]),
    ],
)
def test_answers_of_several_types_are_read_as_text(tmp_path, answers, solutions):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": f"q{i}", "answer": a} for i, a in enumerate(answers)])
    train, _ = load(path)
    by_problem = {row["problem"]: row for row in train}
    for i, solution in enumerate(solutions):
        assert by_problem[f"q{i}"]["solution"] == by_problem[f"q{i}"]["answer"] == solution


def test_empty_image_columns_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "1+1", "answer": "2", "image": None}] * 3)
    train, _ = load(path)
    assert train.column_names == ["problem", "answer", "prompt", "solution"]


def test_the_name_of_a_file_may_have_a_slash(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "1+1", "answer": "2"}])
    assert load_benchmark(f"sums/addition={path}").problems == load_benchmark(path).problems
