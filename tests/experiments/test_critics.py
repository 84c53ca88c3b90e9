"""Three critics in one table: values at the same prefixes, their measures by hand, and arms whose settings are
legal."""

import copy
import itertools
import math
import random

import pytest
import torch
from optional_packages import needs
from replay import RELATIVE, TOKENIZER, tiny_model
from seeds import shifted
from transformers import AutoModelForTokenClassification

from experiments.genac import comparison as genac
from experiments.genac import critic_values as critics
from experiments.genac import taught_critics
from experiments.genac.critic_values import mean_ranking_accuracy, ranking_accuracy, value_scores
from experiments.genac.supervised_start import Trace
from experiments.paper.cells import RECIPES
from pacs_trl.experimental._critic_prompt import CriticPrompt, State
from pacs_trl.plan.check import check_recipe


@pytest.fixture
def policy(tmp_path):
    for name, seed in (("policy", 0), ("reference", 1)):
        tiny_model(seed).save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    return tmp_path / "policy"


def test_arms_are_legal_and_share_the_number_of_completions(tmp_path):
    steps, alone = {}, {}
    for name in genac.ARMS:
        cell = genac.cell_of(name, tmp_path)
        words = [tiny_critic(tmp_path) if "taught_tiny" in word else word for word in cell.words]
        recipe, errors = check_recipe(str(RECIPES / f"{cell.recipe}.yaml"), words, 1)
        assert errors == [], name
        steps[name] = (
            recipe.step.completions_per_generation,
            recipe.training.max_steps,
            recipe.model.model_name_or_path,
        )
        alone[name] = vars(recipe.training).get(
            "critic_warmup_steps", vars(recipe.training).get("critic_pretraining_steps")
        )
    assert len(set(steps.values())) == 1 and set(steps) == {
        *("PPO", "GenAC", "GenAC, not conditioned", "PACS", "GRPO")
    }
    assert {alone[name] for name in ("PPO", "GenAC", "GenAC, not conditioned")} == {genac.ALONE}


def tiny_critic(directory) -> str:
    """In the place of one that was taught."""
    tiny_model().save_pretrained(directory / "critic")
    return str(directory / "critic")


def test_measures_by_hand():
    """Two completions would be a group; here eight, of which the right one has the highest last value."""
    rows = [{"right": i == 3} for i in range(critics.GROUP)]
    values = [[math.nan] * 4 + [0.8 if row["right"] else 0.3] for row in rows]
    found = critics.measures(rows, values)
    assert found["top 1 of 2"] == found["top 1 of 8"] == 1.0
    assert found["unparsed"] == 0.8 and (found["prefixes"], found["right"]) == (40, 1)
    # read values are (0.8 - 1)^2 and seven times 0.3^2 off, the others 1 and 0
    assert found["brier"] == pytest.approx((0.04 + 7 * 0.09 + 4 * 1) / 40)


def test_values_of_all_critics_at_the_same_prefixes(tmp_path, policy):
    head = AutoModelForTokenClassification.from_pretrained(tmp_path / "policy", num_labels=1)
    head.save_pretrained(tmp_path / "head")
    TOKENIZER.save_pretrained(tmp_path / "head")
    rows = critics.held_out(tmp_path / "policy", "terms", 2, seed=shifted(0))
    assert [row["group"] for row in rows] == [0] * 8 + [1] * 8
    assert all(row["places"][0] == 0 and row["places"][-1] == len(row["ids"]) - 1 for row in rows)
    of_head = critics.values_of_head(tmp_path / "head", rows)
    of_score = critics.values_of_score(tmp_path / "policy", tmp_path / "reference", rows)
    in_words = critics.values_in_words(tmp_path / "policy", rows, "miniature")
    assert {len(row) for values in (of_head, of_score, in_words) for row in values} == {5}
    row = rows[3]  # by a pass of its own
    with torch.no_grad():
        ids = torch.tensor([row["prompt"] + row["ids"]])
        expected = head(input_ids=ids).logits[0, len(row["prompt"]) - 1 + torch.tensor(row["places"]), 0]
    torch.testing.assert_close(torch.tensor(of_head[3]), expected, rtol=1e-4, atol=1e-5)
    assert [values[0] for values in of_score] == [0.5] * 16  # nothing is known of the beginning
    assert all(math.isnan(value) for values in in_words for value in values)  # it was never taught the tags
    assert CriticPrompt("miniature").tags == ("<", ">")
    found = [
        {name: {task: critics.measures(rows, of_head) for task in genac.DOMAINS} for name in ("the mean", "head")}
    ]
    assert "| head |" in "\n".join(genac.table_of_values(found))


TRACES = [Trace(State(f"1+{i}", "1+", 2), 0.5, f"{'ny'[i % 3 > 0]}|{i}<{i}>") for i in range(8)]
RATES = [i / 10 for i in range(8)]


@pytest.mark.trains
def test_a_value_head_learns_the_rates_of_its_traces(policy):
    """The first update moves every weight by the learning rate, against the gradient of the mean squared error in
    float64."""
    rate = 1e-4
    start, moved = (
        taught_critics.taught_head(policy, TRACES, RATES, epochs=n, learning_rate=rate, seed=shifted(0))
        for n in (0, 1)
    )
    critic = copy.deepcopy(start).double()
    prompts, ids = taught_critics.states_of(TRACES, TOKENIZER)
    values = [
        critic(input_ids=torch.tensor([prompt + own[:-1]])).logits[0, -1, 0] for prompt, own in zip(prompts, ids)
    ]
    said = taught_critics.said_by_head(start, policy, TRACES)
    assert said == pytest.approx([value.item() for value in values], rel=1e-4, abs=1e-5)
    (torch.stack(values) - torch.tensor(RATES).double()).square().mean().backward()
    norm = torch.stack([p.grad.norm() for p in critic.parameters()]).norm()
    for (name, before), after in zip(start.named_parameters(), moved.parameters()):
        gradient = critic.get_parameter(name).grad
        sure = gradient.abs() > 100 * RELATIVE * norm  # what rounding cannot turn around
        change = (after - before).double()[sure] / rate
        # Adam's first step is the sign of the gradient; 0.01 is its weight decay, times a weight below 1
        torch.testing.assert_close(change, -gradient[sure].sign(), rtol=0.0, atol=0.02, msg=name)


def test_tables_of_critics_that_were_taught(policy):
    """What writes nothing but `x` cannot be read, also behind the oracle's reason."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight[:, 0] = 2.0
        model.get_input_embeddings().weight[TOKENIZER.convert_tokens_to_ids("x"), 0] = 20.0
    model.save_pretrained(policy)
    found = taught_critics.judge_taught(policy, TRACES)
    assert found["unread"] == [1.0] * 3 and {*found["most probable"], *found["drawn"], *found["behind"]} == {0.0}
    ladder = {"tiny": found | {"drawn": [0.1] * 8, "head": RATES, "parameters": 100_000}}
    text = "\n".join(taught_critics.table_of_ladder(ladder, TRACES, TRACES, 16))
    # rates 0 to 0.7: the mean is 52.5 thousandths off, 0.1 is 52.5 + 1000 * 0.25^2, the head nothing; only `n` and `x`
    # are mistakes
    assert "| the mean | 52.5 | +0.0 (+0.0 to +0.0) | - | 0.350 | 0.350 |" in text
    assert (
        "| tiny, 0.1M: mean of 8 answers | 115.0 | +62.5 (" in text
        and "| tiny, 0.1M: value head | 0.0 | -52.5 (" in text
    )


@needs("matplotlib")
def test_arms_are_compared_at_the_seconds_of_the_slowest_without_a_writing_critic(tmp_path):
    def run(seconds, rewards, right):
        ends = [seconds * (i + 1) for i in range(len(rewards))]
        return {"counts": {"b": (right, 10)}, "problems": [right / 10], "ends": ends, "rewards": rewards}

    found = {
        "PPO": {s: run(2, [0.1, 0.2, 0.3], 3 + s) for s in (0, 1)},
        "PACS": {0: run(1, [0.1, 0.2, 0.4], 4)},
        "GenAC": {s: run(5, [0.2, 0.4, 0.6], 5 + s) for s in (0, 1)},
    }
    text = "\n".join(genac.table_of_arms(found))
    assert (
        "| GenAC | 0 | 5 / 10 | 15 | 0.400 | 0.200 |" in text
    )  # PPO ends after 6 seconds, GenAC's first generation after 5
    assert "| PPO | 1 | 4 / 10 | 6 | 0.200 | 0.200 |" in text
    assert "| GenAC | 55.0 | +20.0 ± 0.0 | 2.5 |" in text


def test_scores_by_hand():
    found = value_scores(torch.tensor([0.8, math.nan, 0.2, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    # rewards 0.96, 0, 0.96, 0.75; squared errors 0.04, 1, 0.04, 0.25; residuals 0.2, 1, -0.2, -0.5 have variance
    # 0.316875
    expected = {"reward": 0.6675, "brier": 0.3325, "explained_variance": 1 - 0.316875 / 0.25, "unparsed": 0.25}
    assert found == pytest.approx(expected)
    assert all(math.isnan(value) for value in value_scores(torch.tensor([]), torch.tensor([])).values())
    assert math.isnan(value_scores(torch.tensor([0.3]), torch.tensor([1.0]))["explained_variance"])


class TestRanking:
    def test_by_hand(self):
        # pairs with one right and one wrong: (0.9, 0.4) and (0.4, 0.4), of which the tie counts half
        assert ranking_accuracy([0.9, 0.4, 0.4], [True, False, True], 2) == 0.75
        assert ranking_accuracy([0.1, 0.9], [True, False], 2) == 0.0
        assert math.isnan(ranking_accuracy([0.1, 0.9], [True, True], 2))
        assert math.isnan(ranking_accuracy([0.1, 0.9], [True, False], 4))
        assert mean_ranking_accuracy([([0.1, 0.9], [True, False]), ([1, 0], [True, False]), ([1], [True])], 2) == 0.5

    @pytest.mark.parametrize("candidates", [2, 4, 8])
    def test_equals_going_through_all_choices(self, candidates):
        rng = random.Random(candidates)
        for _ in range(20):
            values = [rng.randrange(4) / 4 for _ in range(8)]
            right = [rng.random() < 0.4 for _ in range(8)]
            hits = []
            for chosen in itertools.combinations(range(8), candidates):
                if len({right[i] for i in chosen}) == 2:
                    best = [i for i in chosen if values[i] == max(values[j] for j in chosen)]
                    hits.append(sum(right[i] for i in best) / len(best))
            expected = sum(hits) / len(hits) if hits else math.nan
            assert ranking_accuracy(values, right, candidates) == pytest.approx(expected, nan_ok=True)
