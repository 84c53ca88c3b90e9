"""Traces of the oracle: worked reasons by hand, and a file that a supervised start can read."""

from pathlib import Path

import pytest
from replay import TOKENIZER, tiny_model

from pacs_trl.baselines.critic_prompt import CriticPrompt, State
from pacs_trl.baselines.critic_traces import Trace, read_traces, write_traces
from pacs_trl.data.tasks import problems
from pacs_trl.miniature.oracle import main, oracle_traces, worked_reason


@pytest.mark.parametrize(
    ("problem", "response", "reason"),
    [
        ("7+30+8", "", "|7+30+8"),
        ("7+30+8", "30+8=3", "|7+30+8"),  # the result may go on
        ("7+30+8", "30+8=38,38+", "38y|7"),
        ("7+30+8", r"30+8=39,39+7=\boxed{46}", "38n46y|"),
        ("7+30+8", "30+9=39,", "39y|7+8x"),
        ("7+7", "7+7=14,", "14y|"),
        ("3+4*12", "4*12=48,", "48y|3"),
    ],
)
def test_reasons_by_hand(problem, response, reason):
    assert worked_reason(problem, response) == reason


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "0"], "--samples=0 must be at least 1"),
        (["--states", "-1"], "--states=-1 must be at least 0"),
        (["--output", "."], "--output=. is a directory"),
        (["--task", "sums"], "There is no miniature task 'sums'"),
        (["--problems", "100000"], "100000"),
        (["--critic_prompt", "no"], "critic_prompt='no' is neither"),
    ],
)
def test_refused_before_anything_is_loaded(tmp_path, words, message):
    needed = ["--model", str(tmp_path / "none"), "--task", "terms", "--output", str(tmp_path / "traces.jsonl")]
    with pytest.raises(ValueError, match=message):
        main([*needed, *words])


def test_traces_are_repeated_written_and_read(tmp_path):
    model, prompt = tiny_model(), CriticPrompt.read("miniature")
    rows = problems("terms", "train", 3)
    how = {"completions": 2, "samples": 2, "states": 2, "batch_size": 7}
    traces = oracle_traces(model, TOKENIZER, rows, prompt, **how)
    assert traces == oracle_traces(model, TOKENIZER, rows, prompt, **how)
    assert [t.state.problem for t in traces[:3]] == [row["problem"] for row in rows]
    assert all(t.state.tokens_used == 0 and t.state.response == "" for t in traces[:3]) and len(traces) <= 15
    assert all(t.answer.endswith("<0>") and t.success_rate == 0.0 for t in traces)  # an untrained model is never right
    write_traces(tmp_path / "traces.jsonl", traces)
    assert read_traces(tmp_path / "traces.jsonl", prompt) == traces


def test_a_file_of_traces_is_whole_or_that_of_before(tmp_path, monkeypatch):
    path, whole = tmp_path / "traces.jsonl", Path.write_text
    write_traces(path, [])

    def interrupted(self, text, **kwargs):
        whole(self, text[:10], **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_traces(path, [Trace(State("1+1", "", 0), 0.5, "<5>")])
    assert path.read_text() == ""
