"""Traces of the oracle: worked reasons by hand, a file of traces, and a critic that is fine-tuned on them."""

import re

import pytest
import torch
from support.models import TOKENIZER, tiny_model
from support.problems import CRITIC_PROMPT
from transformers import AutoModelForCausalLM

from experiments.genac.oracle import oracle_traces, worked_reason
from experiments.genac.supervised_start import Trace, main, read_traces, write_traces
from experiments.miniature.tasks import problems
from pacs_trl.experimental._critic import CriticPrompt, State


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
def test_reasons_equal_those_worked_by_hand(problem, response, reason):
    assert worked_reason(problem, response) == reason


@pytest.mark.slow
def test_traces_are_repeated_written_and_read(tmp_path):
    model, prompt = tiny_model(), CriticPrompt(CRITIC_PROMPT)
    rows = problems("terms", "train", 3)
    how = {"completions": 2, "samples": 2, "states": 2, "batch_size": 7}
    traces = oracle_traces(model, TOKENIZER, rows, prompt, **how)
    assert traces == oracle_traces(model, TOKENIZER, rows, prompt, **how)
    assert [t.state.problem for t in traces[:3]] == [row["problem"] for row in rows]
    assert all(t.state.tokens_used == 0 and t.state.response == "" for t in traces[:3]) and len(traces) <= 15
    assert all(t.answer.endswith("<0>") and t.success_rate == 0.0 for t in traces)  # an untrained model is never right
    write_traces(tmp_path / "traces.jsonl", traces)
    assert read_traces(tmp_path / "traces.jsonl") == traces


def test_a_critic_is_fine_tuned_on_traces(tmp_path, model_path, capsys):
    traces = [Trace(State(f"1+{i}", "", 0), 0.5, f"fine<{i}>") for i in range(8)]
    write_traces(tmp_path / "traces.jsonl", traces)
    words = ["--model", model_path, "--traces", str(tmp_path / "traces.jsonl"), "--output", str(tmp_path / "critic")]
    words += ["--epochs", "10", "--learning_rate", "1e-2", "--token_limit", "16", "--critic_prompt", CRITIC_PROMPT]
    main(words)
    first, last = map(float, re.search(r"from ([\d.]+) to ([\d.]+);", capsys.readouterr().out).groups())
    assert last < first / 2
    start, critic = (AutoModelForCausalLM.from_pretrained(path) for path in (model_path, tmp_path / "critic"))
    assert any(not torch.equal(p, critic.get_parameter(name)) for name, p in start.named_parameters())
    with pytest.raises(ValueError, match="fine<0>"):
        main([*words, "--critic_prompt", "genac"])  # other tags
