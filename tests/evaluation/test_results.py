"""The results file: counts from graded samples, reading, and what may not be compared."""

import json

import pytest
from support.finished_runs import results_of

from pacs_trl.evaluation.results import (
    GradedSample,
    prompts_of,
    read_results,
    require_chosen_labels,
    require_same_protocol,
    summarize,
)


def samples(problem, outcomes, **changes):
    fields = {"num_tokens": 10, "finish_reason": "stop"} | changes
    return [GradedSample(problem=problem, outcome=outcome, **fields) for outcome in outcomes]


def test_summary_equals_that_worked_by_hand():
    graded = [
        *samples("a", [1.0, 0.0, 0.0, 1.0]),
        *samples("b", [0.0, 0.5, 0.0, 0.0], num_tokens=20, finish_reason="length"),
        *samples("c", [None, None, None, 1.0]),
    ]
    summary = summarize(["a", "b", "c"], graded, [1, 2])
    a, b, c = summary["problems"]
    assert summary["ungraded"] == 3
    assert (a["n"], a["c"], b["c"], c["c"], c["ungraded"]) == (4, 2, 0, 1, 3)  # an outcome of 0.5 is not correct
    # pass@1 = (2/4 + 0 + 1) / 3; over a and b pass@2 = (5/6 + 0) / 2.
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx(1 / 2)
    assert summary["pass_at_k"]["2"]["value"] == pytest.approx(5 / 12)
    assert summary["unscorable"] == [] and summary["excluded"] == {"2": 1}
    assert summary["mean_tokens"] == pytest.approx(40 / 3) and summary["truncated_share"] == pytest.approx(1 / 3)


def test_a_sample_without_a_grade_leaves_its_problem_in():
    """Otherwise hard problems, of which more samples have no grade, would leave, and pass@k would rise."""
    graded = [*samples("easy", [1.0] * 4), *samples("hard", [0.0, 0.0, 1.0, None]), *samples("gold", [None] * 4)]
    summary = summarize(["easy", "hard", "gold"], graded, [1, 3])
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx((1 + 1 / 3) / 2)
    assert summary["pass_at_k"]["3"]["value"] == pytest.approx(1)
    assert summary["unscorable"] == ["gold"] and summary["ungraded"] == 5
    assert summary["excluded"] == {"1": 1, "3": 1}


def test_a_problem_with_too_few_grades_for_a_k_counts_for_smaller_ones():
    graded = [*samples("easy", [1.0] * 4), *samples("hard", [0.0, 0.0, 1.0, None]), *samples("gold", [None] * 4)]
    summary = summarize(["easy", "hard", "gold"], graded, [1, 4])  # n is the largest k, as by default
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx((1 + 1 / 3) / 2)
    assert summary["pass_at_k"]["4"]["value"] == 1
    assert summary["unscorable"] == ["gold"] and summary["excluded"] == {"1": 1, "4": 2}
    whole = summarize(["easy"], graded[:4], [1, 4])
    assert whole["excluded"] == {} and whole["unscorable"] == []
    with pytest.raises(ValueError, match="No problem has 4 samples that could be graded.*k"):
        summarize(["hard"], graded[4:8], [1, 4])


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "results.json"), ("[]", "results.json"), (json.dumps({"schema_version": 0}), "schema is 0")],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="nowhere' does not exist .* Name results.json"):
        read_results(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="run' contains no results.json. Name results.json of `pacs-trl evaluate`"):
        read_results(tmp_path / "run")
    (tmp_path / "run" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="It is a training run: name it with --training METHOD=.*run"):
        read_results(tmp_path / "run")


def document(benchmark="aime_2024", temperature=0.6, verifier="0.9.0", **source):
    """Results on one problem of a benchmark."""
    results = results_of({benchmark: [1]}, sampling={"temperature": temperature}, verifier={"version": verifier})
    results["benchmarks"][benchmark]["source"] |= source
    return results


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"temperature": 1.0}, "protocol.sampling.temperature: 0.6 != 1.0"),
        ({"verifier": "0.8.0"}, "protocol.verifier.version: '0.9.0' != '0.8.0'"),
        ({"version": 2}, "aime_2024.version: 1 != 2"),
        ({"digest": "x"}, "aime_2024.digest: 'd' != 'x'"),
    ],
)
def test_mixed_protocols_are_refused_with_the_difference(changes, difference):
    """Files without a common benchmark are comparable, and named are the first two that differ."""
    files = [document("math_500", version=2, digest="e"), document(), document(**changes)]
    require_same_protocol(files[:2] * 2, ["a", "b", "c", "d"])
    first = "first.json" if "protocol" in difference else "second.json"
    with pytest.raises(ValueError) as error:
        require_same_protocol(files, ["first.json", "second.json", "third.json"])
    assert f"{first} and third.json" in str(error.value) and difference in str(error.value)


def with_instruction(set_by_user, used=None, **facts):
    """Results with an instruction: as it was set, and, except in files of earlier versions, as it was used."""
    results = document()
    results["protocol"]["prompt"] = {"instruction": set_by_user}
    results["benchmarks"]["aime_2024"] |= {"instruction": used} if facts.get("is_stated", True) else {}
    return results


def test_instructions_are_compared_as_they_were_used():
    names = ["a", "b"]
    require_same_protocol([with_instruction("default", "own"), with_instruction("own", "own")], names)
    require_same_protocol([with_instruction("default"), with_instruction("")], names)  # whole prompts
    with pytest.raises(ValueError, match="aime_2024.instruction: 'own' != 'newer'"):
        require_same_protocol([with_instruction("default", "own"), with_instruction("default", "newer")], names)


def test_instructions_of_earlier_files_are_compared_as_they_were_set():
    earlier = with_instruction("default", is_stated=False)
    require_same_protocol([earlier, with_instruction("default", "own"), earlier], ["a", "b", "c"])
    with pytest.raises(ValueError, match="aime_2024.instruction: 'default' != 'other'"):
        require_same_protocol([earlier, with_instruction("other", "other")], ["a", "b"])
    assert prompts_of([earlier, with_instruction("x", None)]) == [(["aime_2024"], "default"), (["aime_2024"], None)]


def labelled(method, is_default=None, **model):
    """Results of a model under a label; `is_default` is absent from files of earlier versions."""
    facts = {} if is_default is None else {"method_is_default": is_default}
    return document() | {"method": method, "model": model} | facts


def test_a_label_that_nobody_chose_does_not_join_two_models():
    names = ["a/results.json", "b/results.json"]
    first = labelled("step", True, name="step", digest="1")
    for is_default in (True, False):
        second = labelled("step", is_default, name="step", digest="2")
        for files in ([first, second], [second, first]):
            with pytest.raises(ValueError, match="a/results.json and b/results.json have the label 'step'.*--method"):
                require_chosen_labels(files, names)
    same = labelled("step", True, name="copy", digest="1")
    require_chosen_labels([first, same], names)


def test_seeds_of_a_method_with_a_chosen_label_are_combined():
    seeds = [labelled("step", False, name="step", digest="1"), labelled("step", False, name="step", digest="2")]
    require_chosen_labels(seeds, ["a", "b"])
    require_chosen_labels([labelled("PACS", name="step", digest=digest) for digest in "12"], ["a", "b"])


def test_a_model_of_a_server_is_known_by_its_name_alone():
    """Its address is no part of it, and its weights are unknown."""
    first = labelled("model", True, name="org/model", server="http://a:8000/v1")
    second = labelled("model", True, name="org/model", server="http://b:8000/v1")
    of_hub = labelled("model", True, name="org/model", revision="0a")
    for files in ([first, second], [first, of_hub], [of_hub, second]):
        require_chosen_labels(files, ["a", "b"])
    other = labelled("model", True, name="other/model", server="http://a:8000/v1")
    with pytest.raises(ValueError, match="the label 'model'"):
        require_chosen_labels([first, other], ["a", "b"])


def test_a_label_of_an_earlier_version_that_equals_a_name_is_warned_of(caplog):
    """Files of earlier versions do not say who chose it."""
    earlier = [labelled("step", name="step", digest=digest) for digest in "12"]
    require_chosen_labels(earlier, ["a", "b"])
    assert "a and b have the label 'step'" in caplog.text and "--method" in caplog.text
    caplog.clear()
    require_chosen_labels([labelled("PACS", name="step", digest=digest) for digest in "12"], ["a", "b"])
    assert not caplog.records
