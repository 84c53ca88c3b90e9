"""Labels of `pacs_trl.verification` on real rows, against direct math-verify calls, and for bad input."""

import asyncio
import random
import re
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from support.seeds import shifted
from watching import box, read_jsonl

from pacs_trl.rewards import VerificationArguments, configure_verification, shared_arguments, shared_verifier
from pacs_trl.verification import Outcome, Verifier, default_num_workers, gold_texts, last_boxed


def numbers(answer):
    return sorted(re.findall(r"\d+", answer))


MATH = read_jsonl("math_500.jsonl")
MATH_GOLDS = [row["answer"] for row in MATH]
AIME_2024 = read_jsonl("aime_2024.jsonl")
AIME_2025 = read_jsonl("aime_2025.jsonl")
AMC = read_jsonl("amc23.jsonl")
GSM8K = read_jsonl("gsm8k_test_200.jsonl")
GSM8K_GOLDS = [row["answer"].rpartition("####")[2].strip() for row in GSM8K]


def wrong_pairs(golds, seed=0):
    """(completion, gold) of a permutation, without pairs that are the same text or the same numbers."""
    shuffled = list(golds)
    random.Random(seed).shuffle(shuffled)
    return [
        (box(other), gold)
        for other, gold in zip(shuffled, golds)
        if other != gold and (numbers(other) != numbers(gold) or not numbers(gold))
    ]


@pytest.fixture(scope="module")
def verifier():
    # A generous processor time: these tests are about labels, on a machine that may be slow and busy.
    with Verifier(num_workers=2, protocol="authors", cpu_seconds=10.0, timeout_seconds=60.0) as verifier:
        yield verifier


class TestRealRows:
    def test_gsm8k_answers_are_right_on_either_side(self, verifier):
        answers = [row["answer"] for row in GSM8K]
        assert verifier.grade([box(gold) for gold in GSM8K_GOLDS], answers) == [1.0] * 200
        assert verifier.grade(answers, GSM8K_GOLDS) == [1.0] * 200

    def test_no_gold_of_the_benchmarks_is_reported(self, verifier):
        rows = [row.get("answer", row.get("Answer")) for row in MATH + AIME_2024 + AIME_2025 + AMC + GSM8K]
        assert verifier.unreadable_golds(rows) == []

    def test_math_500_is_right_as_answer_and_as_solution_on_either_side(self, verifier):
        boxed, solutions = [box(gold) for gold in MATH_GOLDS], [row["solution"] for row in MATH]
        for completions, golds in ((boxed, MATH_GOLDS), (solutions, MATH_GOLDS), (boxed, solutions)):
            assert verifier.grade(completions, golds) == [1.0] * 500

    def test_math_500_permuted_answers_are_wrong(self, verifier):
        completions, golds = zip(*wrong_pairs(MATH_GOLDS))
        assert len(golds) > 480
        assert verifier.grade(completions, golds) == [0.0] * len(golds)

    @pytest.mark.parametrize(
        "golds",
        # those of AMC are floats, as on the Hub
        [
            *([row.get("answer", row.get("Answer")) for row in rows] for rows in (AIME_2024, AIME_2025, AMC)),
            GSM8K_GOLDS,
        ],
        ids=["aime_2024", "aime_2025", "amc23", "gsm8k"],
    )
    def test_competition_answers_are_right_and_changed_ones_wrong(self, verifier, golds):
        texts = [gold_texts(gold)[0] for gold in golds]
        assert verifier.grade([f"The answer is {box(text)}." for text in texts], golds) == [1.0] * len(golds)
        assert verifier.grade([f"The answer is {text}" for text in texts], golds) == [1.0] * len(golds)
        completions, wrong = zip(*wrong_pairs(texts))
        assert len(wrong) > 0.85 * len(golds)
        assert verifier.grade(completions, wrong) == [0.0] * len(wrong)

    @pytest.mark.slow
    def test_agreement_with_direct_calls(self, verifier):
        pairs = [(row["solution"], row["answer"]) for row in MATH]
        pairs += wrong_pairs(MATH_GOLDS, seed=1)
        pairs += [(row["Solution"], str(row["Answer"])) for row in AIME_2024]
        pairs += [(row["answer"], gold) for row, gold in zip(GSM8K, GSM8K_GOLDS)]
        pairs += [(f"so {gold}", row["answer"]) for row, gold in zip(AIME_2025, MATH_GOLDS)]
        ours = verifier.grade(*zip(*pairs))
        gold_config, configs = [LatexExtractionConfig()], [ExprExtractionConfig(), LatexExtractionConfig()]
        direct = [
            float(verify(parse(gold if "\\boxed" in gold else box(gold), gold_config), parse(completion, configs)))
            for completion, gold in pairs
        ]
        assert ours == direct
        assert 0.5 < sum(direct) / len(direct) < 0.7  # both labels are there


class TestProtocols:
    """Where the authors' grader and TRL's reward differ, and where they do not."""

    CASES = [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0, 1.0),
        (r"\boxed{7}", "8", 0.0, 0.0),
        ("The final answer is 42", "42", 1.0, 0.0),
        ("6*7 = 42", "42", 1.0, 0.0),
        (r"$x = 42$", "42", 1.0, 0.0),
        (r"\boxed{\frac13}", r"\frac{1}{3}", 1.0, 0.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0, None),
        (r"\boxed{p - q}", "p - q", 1.0, None),
    ]

    def test_both_and_that_of_trl_is_accuracy_reward(self, verifier):
        from trl.rewards import accuracy_reward

        cases, case_golds, authors, trl = map(list, zip(*self.CASES))
        assert verifier.grade(cases, case_golds) == authors
        completions = [row["solution"] for row in MATH[:60]] + [text for text, *_ in self.CASES]
        golds = [f"${row['answer']}$" for row in MATH[:60]] + [gold for _, gold, *_ in self.CASES]
        theirs = accuracy_reward([[{"role": "assistant", "content": text}] for text in completions], golds)
        with Verifier(num_workers=1, protocol="trl", cpu_seconds=10.0, timeout_seconds=60.0) as other:
            assert other.grade(completions, golds) == theirs
            assert other.grade(cases, case_golds) == trl


class TestBadInput:
    @pytest.mark.parametrize(
        ("completion", "gold", "outcome"),
        [
            (None, "1", Outcome.NO_ANSWER),
            (7, "7", Outcome.NO_ANSWER),
            (["1"], "1", Outcome.NO_ANSWER),
            ("", "1", Outcome.NO_ANSWER),
            ("no number here", "1", Outcome.NO_ANSWER),
            (r"\boxed{", "1", Outcome.NO_ANSWER),
            ("1", None, Outcome.GOLD_UNPARSEABLE),
            (None, None, Outcome.GOLD_UNPARSEABLE),
            ("2", ["1", 2], Outcome.CORRECT),
            ("3", ["1", 2], Outcome.WRONG),
            ("7", "$7$", Outcome.CORRECT),
            ("7", r"\boxed{7}", Outcome.CORRECT),
            ("x" * 200_001, "1", Outcome.TOO_LONG),
        ],
    )
    def test_every_completion_has_a_defined_outcome(self, verifier, completion, gold, outcome):
        assert verifier.grade_detailed([completion], [gold])[0].outcome is outcome

    def test_subclasses_of_text_are_graded_by_their_characters(self, verifier):
        """Their characters count: the pool, which has not imported this file, could not read an instance."""

        class Text(str):
            def __str__(self):
                return self

            def strip(self):
                return self

        assert verifier.grade([Text(box(1234)), Text(box(1235)), Text()], [Text(" 1234 ")] * 3) == [1.0, 0.0, 0.0]
        assert type(gold_texts(Text("7"))[0]) is str

    def test_lengths_must_agree(self, verifier):
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            verifier.grade(["1", "2"], ["1"])
        assert verifier.grade([], []) == []

    @pytest.mark.parametrize(
        ("settings", "key"),
        [({"num_workers": 0}, "num_workers"), ({"cpu_seconds": 6.0}, "cpu_seconds"), ({"protocol": "no"}, "protocol")],
    )
    def test_settings_out_of_range_are_refused(self, settings, key):
        with pytest.raises(ValueError, match=key):
            Verifier(**settings)


class TestBatches:
    def test_duplicates_and_repetitions_are_graded_once(self):
        with Verifier(num_workers=1) as verifier:
            asked = []
            run_jobs = verifier._run_jobs
            verifier._run_jobs = lambda jobs: asked.extend(jobs) or run_jobs(jobs)
            assert verifier.grade([box(5), box(6), box(5)], [5, 5, 5]) == [1.0, 0.0, 1.0]
            assert len(asked) == 2
            assert verifier.grade([box(6), box(5), box(5)], [5, 5, 6]) == [0.0, 1.0, 0.0]
            assert asked[2:] == [(box(5), ("6",))]  # the same completion against another gold is another question
            verifier.cache_size = 10
            verifier.grade([box(i) for i in range(25)], range(25))
            assert len(verifier._cache) == 10

    def test_two_and_three_workers_give_the_same_labels(self):
        golds = [str(i % 200) for i in range(1_350)] + [MATH_GOLDS[i] for i in range(150)]
        answers = [gold if i % 3 else str(int(gold) + 1) for i, gold in enumerate(golds[:1_350])]
        answers += [MATH_GOLDS[i + i % 2] for i in range(150)]
        completions = [f"Attempt {i}: the answer is {box(answer)}" for i, answer in enumerate(answers)]
        hostile = ["".join(text * count for text, count in row["parts"]) for row in read_jsonl("hostile.jsonl")[:4]]
        for place, text in enumerate(hostile):
            completions[place * 330 + 3] = text
        labels = []
        for num_workers in (2, 3):  # other chunks, other neighbours
            with Verifier(num_workers=num_workers) as verifier:
                labels.append(verifier.grade(completions, golds))
        assert labels[0] == labels[1]
        assert len(labels[0]) == 1_500 and 900 < sum(labels[0]) < 1_050


class TestCallers:
    def test_threads_and_event_loops_get_their_grades(self, verifier):
        """Off the main thread signals do not work and asyncio runs: neither may matter."""
        results = {}

        def work(name):
            results[name] = verifier.grade([box(i) for i in range(40)], [str(i + name % 2) for i in range(40)])

        async def loop():
            tasks = (asyncio.to_thread(work, name) for name in range(4, 8))
            await asyncio.gather(*tasks)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        asyncio.run(loop())
        for thread in threads:
            thread.join(60)
        assert results == {name: [1.0 - name % 2] * 40 for name in range(8)}

    @pytest.mark.parametrize(("ranks", "workers"), [(1, 16), (8, 6), (64, 1)])
    def test_default_workers_share_the_node_between_ranks(self, monkeypatch, ranks, workers):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(48)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_num_workers() == workers

    def test_shared_verifier_is_one_and_can_be_configured(self):
        configure_verification(VerificationArguments(verification_protocol="trl", verification_max_failure_share=0.25))
        first, pool = shared_verifier(), shared_verifier()._pool
        assert first is shared_verifier() and first.protocol == "trl"
        assert shared_arguments().verification_max_failure_share == 0.25
        configure_verification(VerificationArguments())
        second = shared_verifier()
        assert second is not first and second.protocol == "robust"
        assert first._pool is None and not pool.end.alive
        configure_verification(VerificationArguments())
        assert shared_verifier() is second and second._pool.end.alive
        with pytest.raises(ValueError, match="verification_max_failure_share"):
            VerificationArguments(verification_max_failure_share=2.0)


class TestText:
    def test_the_last_box_is_that_of_a_search_from_every_opening(self):
        def search(text):
            for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
                depth = 1
                for end in range(start, len(text)):
                    depth += {"{": 1, "}": -1}.get(text[end], 0)
                    if depth == 0:
                        return text[start:end].strip()
            return None

        pieces, chance = [r"\boxed{", r"\fboxed {", "{", "}", "a", " ", r"\boxed", "\\"], random.Random(shifted(0))
        texts = ["".join(chance.choices(pieces, k=chance.randrange(14))) for _ in range(5_000)]
        assert [last_boxed(text) for text in texts] == [search(text) for text in texts]
        assert sum(last_boxed(text) is not None for text in texts) > 500

    def test_hostile_texts_take_linear_time(self):
        """Quadratic ones would take minutes, which the kernel ends after seconds of CPU time."""
        code = (
            "import resource; resource.setrlimit(resource.RLIMIT_CPU, (15, 15))\n"
            "from pacs_trl.verification import MAX_CHARACTERS, last_boxed\n"
            r"for piece in (r'\boxed{', r'\boxed', r'\boxed ', '{', '}', r'\boxed{}{', ' '):" + "\n"
            "    last_boxed((piece * MAX_CHARACTERS)[:MAX_CHARACTERS]); last_boxed(r'\\boxed' + piece * 100_000)\n"
            "half = 12_000; print(last_boxed(r'\\boxed{' * half + '7' + '}' * half))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr

    @pytest.mark.parametrize(
        ("text", "label", "label_if_graded"),
        [
            ("We can ignore the 9 that comes first. The number of", 0.0, 1.0),
            (r"It is \boxed{9}, as 3 + 6 shows, and 12", 1.0, 1.0),
            (r"It is \boxed{9}. The final answer is $12$, since", 1.0, 0.0),  # only the closed box counts
            (r"\boxed{12} is too much. It is \boxed{9}, not \boxed{1", 1.0, 1.0),
            (r"It is 9, so \boxed{9", 0.0, 1.0),
            (r"\boxed{12} or rather 9", 0.0, 0.0),
        ],
    )
    def test_only_a_closed_box_of_a_truncated_completion_counts(self, verifier, text, label, label_if_graded):
        assert verifier.grade([text, text], ["9", "9"], truncated=[True, False]) == [label, label_if_graded]
        verifier.grade_truncated = True
        try:
            assert verifier.grade([text], ["9"], truncated=[True]) == [label_if_graded]
        finally:
            verifier.grade_truncated = False

    def test_unreadable_golds_are_listed(self, verifier):
        golds = ["7", "So the answer is 26.", r"\frac{1}{", None, ["so be it.", "8"], "7", 3.5, r"\boxed{}"]
        assert verifier.unreadable_golds(golds) == [1, 2, 3, 7]

    @pytest.mark.parametrize(
        ("gold", "texts"),
        [
            (" 7 ", ("7",)),
            (27.0, ("27",)),
            (0.5, ("0.5",)),
            (12, ("12",)),
            (["7", 8.0, None], ("7", "8")),
            (None, ()),
            (" ", ()),
            (float("nan"), ()),
            ([], ()),
            ({"a": 7}, ()),  # no answer would equal these texts
            ("48/2 = <<48/2=24>>24 clips\n48+24 = 72\n#### 72", ("72",)),
            ("She has $1,200 left. #### 1,200", ("1200",)),
            ("#### 26", ("26",)),
            ("####-1,234,567.5 ", ("-1234567.5",)),
            (["#### 7", "seven"], ("7", "seven")),
            ("#### 1, 2", ("1, 2",)),  # a list, and no thousands separator
            ("#### Step 1\nAdd.\n#### \\frac{1}{2}", ("\\frac{1}{2}",)),
            ("#### Step 1\nAdd 1.", ("#### Step 1\nAdd 1.",)),  # a heading, not an answer
            ('{"cases": [{"input": "#### 5"}]}', ('{"cases": [{"input": "#### 5"}]}',)),  # tests of a program
            ([b"7", object()], ()),
            (1e-05, ("0.00001",)),
            (2.5e-05, ("0.000025",)),
            (-1e-07, ("-0.0000001",)),
            (1e15, ("1000000000000000",)),
            (6.02e23, ("602000000000000000000000", r"6.02 \times 10^{23}")),
            (float("inf"), ("inf",)),
            (True, ("True",)),
            (Fraction(1, 3), ("1/3",)),
            (Decimal("1e-3"), ("0.001",)),
            (Decimal("1e999999999"), ("1E+999999999",)),
            (np.float64(1e-05), ("0.00001",)),
            (np.float32(2.5), ("2.5",)),
        ],
    )
    def test_golds_become_texts(self, gold, texts):
        assert gold_texts(gold) == texts


def test_boxes_in_other_spellings_are_read():
    boxes = {
        r"so $\fbox{9}$.": "9",
        r"so $\boxed 9$.": "9",
        r"so $\boxed9$": "9",
        r"\framebox{204} minutes": "204",
        r"\boxed -1.5.": "-1.5",
        r"\boxed\frac{1}{2}": r"\frac{1}{2}",
        r"option \boxed B": "B",
        r"\boxed{3} or \boxed 4": "4",
        r"\boxed{3} or \boxed{4": "3",
        r"\boxed in": None,
    }
    assert {text: last_boxed(text) for text in boxes} == boxes
    assert last_boxed(r"\boxed{3} or \boxed 4", with_braces=True) == "3"


@pytest.mark.parametrize("protocol", ["authors", "number"])
def test_golds_that_are_small_or_large_floats(protocol):
    cases = [
        (1e-05, r"\boxed{0.00001}", 1.0),
        (2.5e-05, r"\boxed{2.5 \times 10^{-5}}", 1.0),
        (6.02e23, r"\boxed{6.02\cdot 10^{23}}", 1.0),
        (1e-05, "The answer is -5.", 0.0),
        (1e-05, "The answer is 5.", 0.0),
    ]
    with Verifier(num_workers=1, protocol=protocol) as verifier:
        labels = verifier.grade([text for _, text, _ in cases], [gold for gold, *_ in cases])
    assert labels == [label for *_, label in cases]


NUMBERS = [
    ("1234", "The answer is 1,234.", 1.0),
    ("200", "It costs $1,200.", 0.0),
    ("1,234", "The answer is 1234.", 1.0),
    ("1,234", "The answer is 234.", 0.0),
    ("In all.\n#### 1,200", "It costs $1,200.", 1.0),
    ("5", "The answer is \u22125.", 0.0),
    ("-5", "The answer is \u22125.", 1.0),
    ("-5", "You lose -$5.", 1.0),
    ("3", "That is 10-3", 1.0),
    ("0.5", "The answer is .5", 1.0),
    ("1/2", "The answer is 2.", 0.0),
    ("1/2", r"The answer is $\frac{1}{2}$.", 1.0),
    ("2.5", r"The answer is 2\frac12", 1.0),
    ("2.5", "The answer is 2 1/2", 1.0),
    ("3", "12/4 =", 0.0),
    ("1000000", "It is 1 000 000.", 1.0),
    ("1000000", r"It is 1\,000{,}000.", 1.0),
    ("1234567", "It is 1.234.567", 1.0),
    ("1234.5", "1.234,5", 1.0),
    ("1e5", "The answer is 5", 0.0),
    ("1e5", "The answer is 100,000", 1.0),
    ("300000000", r"The answer is 3 \times 10^8.", 1.0),
    ("20", "That is 20%.", 1.0),
    ("2020", "On 3/4/2020", 1.0),
    ("12", "\uff11\uff12", 1.0),
    ("34", "\u0663\u0664", 1.0),
    ("7", "1e999999999", 0.0),
    ("0", "5/0", 1.0),
]


def test_protocol_number_reads_numbers_as_people_write_them():
    with Verifier(num_workers=1, protocol="number") as verifier:
        labels = verifier.grade([text for _, text, _ in NUMBERS], [gold for gold, *_ in NUMBERS])
    assert [(*case[:2], label) for case, label in zip(NUMBERS, labels)] == NUMBERS


def test_protocol_number_reads_the_last_number_and_evaluates_nothing():
    texts = {"57": 1.0, "54 + 3 = 57.": 1.0, "57.0": 1.0, "54 + 3 =": 0.0, "54 + 3": 0.0, "57 or 58": 0.0, "": 0.0}
    with Verifier(num_workers=1, protocol="number") as verifier:
        assert dict(zip(texts, verifier.grade([*texts], ["57"] * len(texts)))) == texts
