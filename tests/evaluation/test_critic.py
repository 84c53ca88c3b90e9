"""Scores of the implicit critic on stored completions, against one row at a time without padding."""

import json

import numpy as np
import pytest
import torch
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.critic import critic_records, main
from experiments.reliability import reliability_bins


@pytest.fixture(scope="module")
def policy(checkpoint, boxing_model, tmp_path_factory):
    """The digit guesser with its last layer turned up: surer of what it says."""
    directory = tmp_path_factory.mktemp("policy")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.norm.weight *= 1.3
    model.save_pretrained(directory)
    boxing_model[1].save_pretrained(directory)
    return directory


def logp_alone(model, prompt, completion):
    logps = model.double()(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return sum(logps[len(prompt) - 1 + t, token].item() for t, token in enumerate(completion))


def test_scores_of_an_evaluation_are_those_of_the_critic(run, arguments, checkpoint, policy, sums, tmp_path, capsys):
    results = run(arguments)
    output = tmp_path / "critic.jsonl"
    argv = [arguments["output_dir"], "--benchmark", f"math_500={sums}", "--policy", str(policy), "--reference"]
    assert main([*argv, str(checkpoint), "--pacs_beta", "2", "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert (tmp_path / "critic.png").is_file()
    problems = results["benchmarks"]["math_500"]["problems"]
    assert len(records) == 8 * len(problems)
    for problem in problems:
        group = [record for record in records if record["problem"] == problem["id"]]
        assert sum(record["label"] for record in group) == problem["c"]
        assert sum(record["score"] for record in group) == pytest.approx(0, abs=1e-3)

    # one group by hand: beta times the log-ratio, minus the mean of the others
    engine = [AutoModelForCausalLM.from_pretrained(path) for path in (policy, checkpoint)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = (tmp_path / "out" / "samples" / "math_500.jsonl").read_text().splitlines()[1:]
    samples = {(r["problem"], r["sample"]): r for r in map(json.loads, lines)}
    first = problems[0]["id"]
    question = [{"role": "user", "content": first}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    proxies = []
    for i in range(8):
        record = samples[first, i]
        tokens = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        tokens = tokens + [tokenizer.eos_token_id] * (record["finish_reason"] == "stop")
        proxies.append(2 * (logp_alone(engine[0], prompt, tokens) - logp_alone(engine[1], prompt, tokens)))
    scores = [r - (sum(proxies) - r) / 7 for r in proxies]
    recorded_scores = [record["score"] for record in records if record["problem"] == first]
    assert recorded_scores == pytest.approx(scores, abs=1e-3) and max(map(abs, scores)) > 0.01

    same = critic_records(tmp_path / "out", str(checkpoint), str(checkpoint), f"math_500={sums}")
    assert all(record["score"] == 0 for record in same)
    with pytest.raises(ValueError, match="miniature/addition"):
        critic_records(tmp_path / "out", str(checkpoint), str(checkpoint), "miniature/addition")
    sums_now = tmp_path / "sums.jsonl"
    sums_now.write_text(sums.read_text().replace('"answer": "0"', '"answer": "1"'))
    with pytest.raises(ValueError, match="math_500"):
        critic_records(tmp_path / "out", str(checkpoint), str(checkpoint), f"math_500={sums_now}")


def test_reliability_bins_equal_those_worked_by_hand():
    # sigmoid(0) = 0.5, sigmoid(ln 3) = 0.75, sigmoid(-ln 3) = 0.25, in four bins of width 0.25 (0.25 opens the
    # second).
    scores = [0.0, 0.0, np.log(3) + 1e-9, -np.log(3) + 1e-9, -100.0, 100.0]
    bins = reliability_bins(scores, [1, 0, 1, 0, 0, 1], num_bins=4)
    assert bins["count"].tolist() == [1, 1, 2, 2]
    np.testing.assert_allclose(bins["probability"], [0.0, 0.25, 0.5, 0.875], atol=1e-8)
    np.testing.assert_allclose(bins["label"], [0, 0, 0.5, 1])
    assert bins["calibration_error"] == pytest.approx((0.0 + 0.25 + 2 * 0.0 + 2 * 0.125) / 6, abs=1e-8)
