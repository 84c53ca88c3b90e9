"""Three critics in one table: values at the same prefixes, their measures by hand, and arms whose settings are legal."""

import math

import pytest
import torch
from replay import TOKENIZER, tiny_model
from transformers import AutoModelForTokenClassification

from experiments import genac
from pacs_trl.baselines.critic_prompt import CriticPrompt, State
from pacs_trl.baselines.critic_traces import Trace, write_traces
from pacs_trl.plan.check import check_recipe
from pacs_trl.reproduce.cells import RECIPES


def test_arms_are_legal_and_share_the_number_of_completions(tmp_path):
    write_traces(tmp_path / "traces.jsonl", [Trace(State("1+1", "", 0), 0.5, "<5>")])
    steps = {}
    for name, cell in genac.arms(tmp_path / "traces.jsonl").items():
        recipe, errors = check_recipe(str(RECIPES / f"{cell.recipe}.yaml"), cell.words, 1)
        assert errors == [], name
        steps[name] = recipe.step.rows_per_generation, recipe.training.max_steps, recipe.model.model_name_or_path
    assert len(set(steps.values())) == 1 and set(steps) == {
        *("PPO", "GenAC", "GenAC, not conditioned", "PACS", "GRPO")
    }


def test_measures_by_hand():
    """Two completions would be a group; here eight, of which the right one has the highest last value."""
    rows = [{"right": i == 3} for i in range(genac.GROUP)]
    values = [[math.nan] * 4 + [0.8 if row["right"] else 0.3] for row in rows]
    found = genac.measures(rows, values)
    assert found["top 1 of 2"] == found["top 1 of 8"] == 1.0
    assert found["unparsed"] == 0.8 and (found["prefixes"], found["right"]) == (40, 1)
    # read values are (0.8 - 1)^2 and seven times 0.3^2 off, the others 1 and 0
    assert found["brier"] == pytest.approx((0.04 + 7 * 0.09 + 4 * 1) / 40)


def test_values_of_all_critics_at_the_same_prefixes(tmp_path):
    for name, seed in (("policy", 0), ("reference", 1)):
        tiny_model(seed).save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    head = AutoModelForTokenClassification.from_pretrained(tmp_path / "policy", num_labels=1)
    head.save_pretrained(tmp_path / "head")
    TOKENIZER.save_pretrained(tmp_path / "head")
    rows = genac.held_out(tmp_path / "policy", "terms", 2, seed=0)
    assert [row["group"] for row in rows] == [0] * 8 + [1] * 8
    assert all(row["places"][0] == 0 and row["places"][-1] == len(row["ids"]) - 1 for row in rows)
    of_head = genac.values_of_head(tmp_path / "head", rows)
    of_score = genac.values_of_score(tmp_path / "policy", tmp_path / "reference", rows)
    in_words = genac.values_in_words(tmp_path / "policy", rows, "miniature")
    assert {len(row) for values in (of_head, of_score, in_words) for row in values} == {5}
    row = rows[3]  # by a pass of its own
    with torch.no_grad():
        ids = torch.tensor([row["prompt"] + row["ids"]])
        expected = head(input_ids=ids).logits[0, len(row["prompt"]) - 1 + torch.tensor(row["places"]), 0]
    torch.testing.assert_close(torch.tensor(of_head[3]), expected, rtol=1e-4, atol=1e-5)
    assert [values[0] for values in of_score] == [0.5] * 16  # nothing is known of the beginning
    assert all(math.isnan(value) for values in in_words for value in values)  # it was never taught the tags
    assert CriticPrompt.read("miniature").tags == ("<", ">")
    found = [{name: {task: genac.measures(rows, of_head) for task in genac.DOMAINS} for name in ("the mean", "head")}]
    assert "| head |" in "\n".join(genac.table_of_values(found))
