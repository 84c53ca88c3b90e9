"""Reuse of rollouts: the prediction against the loss itself, what is measured, drawing from a policy of the past."""

import json
import math

import pytest
import torch
from optional_packages import matplotlib  # noqa: F401 (skips without it)
from replay import TOKENIZER, Recorder, Replay, addition_dataset, build_trainer, stored_label, tiny_model
from seeds import shifted
from trl import GRPOConfig

from experiments import ranking, reuse, reuse_figures, reuse_tables
from experiments.paper.records import Run
from experiments.ranking import Candidate, calibration, choices
from experiments.reuse import Arm
from experiments.reuse_trainers import DelayedGRPO, DelayedPACS, MeasuredGRPO, MeasuredPACS, delayed, force, movement
from experiments.trust_region import (
    Cell,
    first_step,
    gap_of_flow,
    measured,
    predicted,
    residuals_left,
    table,
    way_of_flow,
    width,
)
from experiments.trust_region import force as predicted_force
from pacs_trl.objective import loss_from_proxies
from pacs_trl.plan.check import check_recipe
from pacs_trl.update.groups import Groups


def flow_of_the_loss(way, beta, size, right, *, weighted, steps=200):
    """Return the gap after following the gradient of the loss by the midpoint method, in float64 by autograd; `way` is
    in units of the first step."""
    labels = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    log_ratios, rate = torch.zeros(size, dtype=torch.float64, requires_grad=True), None
    kinds = {"num_generations": size, "class_weighting": "balanced" if weighted else "none"}

    def gradient_at(at):
        return torch.autograd.grad(loss_from_proxies(beta * at, labels, **kinds)[0], at)[0]

    for _ in range(steps):
        gradient = gradient_at(log_ratios)
        rate = rate or way / steps / (gradient[-1] - gradient[0]).item()
        halfway = (log_ratios - 0.5 * rate * gradient).detach().requires_grad_()
        log_ratios = (log_ratios - rate * gradient_at(halfway)).detach().requires_grad_()
    return (log_ratios[0] - log_ratios[-1]).item()


@pytest.mark.parametrize(("beta", "size"), [(1.0, 8), (10.0, 8), (3.0, 2)])
def test_the_closed_form_is_the_flow_of_the_loss(beta, size):
    found = flow_of_the_loss(2.0, beta, size, size // 2, weighted=True)
    assert gap_of_flow(2.0, beta, size) == pytest.approx(found, rel=1e-3)  # 200 midpoint steps
    # a narrow trust region grows with the logarithm of the way, a wide one is not felt
    assert gap_of_flow(1e-3, beta, size) == pytest.approx(1e-3, rel=0.02)
    assert gap_of_flow(20.0, beta, size) < 0.5 * 20.0


@pytest.mark.parametrize("weighted", [True, False])
def test_the_force_is_that_of_the_loss_in_uneven_groups(weighted):
    """One of eight is right: first steps by the loss as `first_step` says, and the force that is left."""
    size, right, beta, gap = 8, 1, 2.0, 0.7
    kinds = {"num_generations": size, "class_weighting": "balanced" if weighted else "none"}

    def step(right, gap):
        labels = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        proxies = (beta * gap * labels).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_from_proxies(proxies, labels, **kinds)[0], proxies)
        return (gradient[-1] - gradient[0]).item()

    assert step(right, gap) / step(right, 0.0) == pytest.approx(
        predicted_force(gap, beta, size, right, weighted=weighted)
    )
    assert step(right, 0.0) / step(size // 2, 0.0) == pytest.approx(first_step(size, right, weighted=weighted))
    assert predicted_force(width(beta, left=0.25), beta) == pytest.approx(0.25)
    assert residuals_left(gap, beta, size // 2, size) == pytest.approx(predicted_force(gap, beta, size))


def test_the_way_is_read_off_a_gap_and_predicts_another():
    """With beta 1 and 8 rows, y = 4 / 7 d: a gap of 7 / 4 is y = 1, y + e^y = 1 + e, way = 7 e / 8."""
    assert way_of_flow(7 / 4, 1.0) == pytest.approx(7 * math.e / 8)
    for beta, gap in ((0.3, 0.1), (3.0, 1.0), (30.0, 0.5)):
        assert gap_of_flow(way_of_flow(gap, beta), beta) == pytest.approx(gap)
    ten, marks = Arm("PACS", 8, 10.0), {0: 20.0, 1: 20.0, 2: 20.0}
    plain = Cell(ten._replace(beta=1.0), marks, {0: 1.5, 1: 2.0, 3: 9.0}, {})
    cells = [Cell(ten, marks, {0: 0.5, 1: 0.6, 2: 9.0}, {0: 0.3, 1: 0.2, 2: 0.9}), plain]
    cells += [Cell(Arm("GRPO", 8), marks, {0: 1.0}, {})]
    ((cell, way, gap),) = predicted(cells)  # of the seeds that both have, 0 and 1
    assert cell == (ten, {0: 20.0, 1: 20.0}, {0: 0.5, 1: 0.6}, {0: 0.3, 1: 0.2})
    assert way == pytest.approx(7 * math.e / 8) and gap == gap_of_flow(way, 10.0)
    # 2 (40 / 7) way + 1 = 28.2 = y + e^y: y = 3.22, a gap of 7 / 40 y; left are 2 / (1 + e^y), and for one right of
    # eight 1 / (1 + e^5.64) + 1 / (1 + e^(5.64 / 7))
    assert table(cells)[2:] == [f"| {ten.name} | 2 | 2.38 | 0.56 | 0.55 | 0.98 | 0.08 | 0.31 | 0.25 |"]


def test_movement_and_force_by_hand():
    # groups 0 (right 0.4, wrong -0.2 and 0), 1 (all wrong) and 2 (0 and 1)
    groups = Groups(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]), [0, 0, 0, 1, 1, 2, 2])
    log_ratios = torch.tensor([0.4, -0.2, 0.0, 5.0, -5.0, 0.1, 0.1])
    assert movement(log_ratios, groups) == pytest.approx({"reuse/gap": (0.5 + 0) / 2, "reuse/moved": 10.8 / 7})
    assert force(torch.zeros(7), groups, "balanced") == {"reuse/force": 1.0}
    far = torch.tensor(
        [30.0, -30.0, -30.0, 0.0, 0.0, 0.0, 0.0]
    )  # the first group has nothing left; weights 1.5, .75, .75, 1, 1
    assert force(far, groups, "balanced") == pytest.approx({"reuse/force": 2 / 5})
    assert force(far, Groups(torch.ones(7), [0] * 7), "balanced") == {}
    # one of eight is right, a gap of 0.6 nats with beta 10: scores 6 and -6 / 7
    eight, scores = Groups(torch.tensor([1.0] + [0.0] * 7), [0] * 8), torch.tensor([6.0] + [-6 / 7] * 7)
    for weighting in ("balanced", "none"):
        left = residuals_left(0.6, 10.0, 1, weighted=weighting == "balanced")
        assert force(scores, eight, weighting) == pytest.approx({"reuse/force": left})


def grpo(tmp_path, trainer_class, replay, **settings):
    given = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "learning_rate": 0.05,
    }
    given |= {"optim": "sgd", "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    given |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "lr_scheduler_type": "constant"}
    given |= {"seed": shifted(42)}
    return trainer_class(
        tiny_model(),
        stored_label,
        args=GRPOConfig(str(tmp_path), **(given | settings)),
        train_dataset=addition_dataset(),
        processing_class=TOKENIZER,
        rollout_func=replay,
    )


def logged(trainer, key):
    trainer.train()
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.trains
@pytest.mark.parametrize("method", ["pacs", "grpo"])
def test_updates_log_how_far_they_find_the_log_ratios(tmp_path, method):
    # steps so small that each moves the log-ratios on in the same direction
    settings = {"num_iterations": 3, "steps_per_generation": 1, "max_steps": 6, "learning_rate": 1e-4}
    if method == "pacs":
        trainer = build_trainer(tmp_path, trainer_class=MeasuredPACS, replay=Replay(uniform_groups=0), **settings)
    else:
        trainer = grpo(tmp_path, MeasuredGRPO, Replay(uniform_groups=0), **settings)
    gaps = logged(trainer, "reuse/gap")
    assert gaps[0] == gaps[3] == 0 and 0 < gaps[1] < gaps[2] and 0 < gaps[4] < gaps[5]
    if method == "pacs":
        left = [log["reuse/force"] for log in trainer.state.log_history if "reuse/force" in log]
        assert left[0] == 1.0 and left[2] < left[1] < 1.0


@pytest.mark.trains
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("method", ["pacs", "grpo"])
def test_rollouts_of_the_past(tmp_path, method, correct):
    """Drawn with the weights of two updates ago; learnt with those of now; the ratio knows of it, or does not."""
    replay, recorder = Replay(uniform_groups=0), Recorder()
    settings = {"steps_per_generation": 1, "max_steps": 4}
    if method == "pacs":
        late = delayed(DelayedPACS, 2, correct=correct)
        trainer = build_trainer(tmp_path, trainer_class=late, replay=replay, **settings)
    else:
        trainer = grpo(tmp_path, delayed(DelayedGRPO, 2, correct=correct), replay, **settings)
    trainer.add_callback(recorder)
    moved = logged(trainer, "reuse/moved")
    for drawn, update in zip(replay.weights, (0, 0, 0, 1), strict=True):
        for name, value in recorder.weights[update].items():
            torch.testing.assert_close(drawn[name], value, rtol=0, atol=0)
    assert not torch.equal(*(recorder.weights[i]["model.embed_tokens.weight"] for i in (2, 3)))
    assert moved[0] == pytest.approx(0, abs=1e-5)
    assert [value > 1e-3 for value in moved[1:]] == [correct] * 3


def test_a_run_is_kept_by_rollouts_and_places():
    def log(step, reward, gap):
        times = {
            "time/log_probs": 0.5,
            "time/update": 1.0,
            "time/optimizer": 0.5,
            "time/total": 5.0 if reward else 2.0,
        }
        own = {"step": step, "entropy": 0.25, "reuse/moved": gap, "reuse/force": 1 - gap, "clip": 0.0} | times
        return own | ({"reward": reward} if reward else {}) | ({} if gap is None else {"reuse/gap": gap})

    # two updates on each of four rollouts; places are means over the last three
    history = [log(2 * r + k + 1, (1 - k) * (r + 1) / 10, k * r / 10) for r in range(4) for k in range(2)]
    kept = reuse.summary([*history, {"step": 8, "train_runtime": 1.0}], 2, "clip")
    curves = {key: [entry[key] for entry in kept["log_history"] if key in entry] for key in kept["curves"]}
    assert curves["reward"] == [0.1, 0.2, 0.3, 0.4] and curves["gap"] == [0.0, 0.2] and curves["force"] == [1.0, 0.8]
    assert curves["drawing"] == [3.0, 6.0, 9.0, 12.0] and curves["learning"] == [4.0, 8.0, 12.0, 16.0]


def test_arms_are_legal_and_have_names_of_their_own():
    arms = {arm for stage in reuse.STAGES.values() for arm in stage}
    assert len({arm.name for arm in arms}) == len(arms)
    for arm in {arm._replace(rate=1e-4, beta=1.0, task="addition") for arm in arms}:
        recipe, conflicts = check_recipe(f"recipes/{arm.cell.recipe}.yaml", arm.cell.words, 1)
        assert conflicts == [] and recipe.step.completions_per_generation == arm.completions
        assert recipe.step.rollouts(recipe.training.max_steps) == arm.rollouts


def test_choices_by_hand():
    # "7" is right and has two votes, "8" has two as well, of which one completion is graded right; no box has no vote
    right, wrong, none = Candidate(2.0, 1.0, "7"), Candidate(3.0, 0.0, "8"), Candidate(3.0, 0.0, None)
    half = pytest.approx(2 / 3)
    votes = {"majority vote": 1.0, "weighted vote": 1.0}  # 2 sigmoid(2) > sigmoid(3)
    assert choices([right, right, wrong]) == {"mean": half, "highest score": 0.0} | votes
    single = {"mean": 0.5, "majority vote": 0.5, "highest score": 0.0, "weighted vote": 0.0}
    assert choices([right, wrong]) == single
    assert choices([right, none, none])["majority vote"] == choices([right, none, none])["weighted vote"] == 1.0
    assert set(choices([none, none]).values()) == {0.0}
    # sigmoid(0) = 1/2 of a coin: as good as the base rate, and calibrated
    assert calibration([0.0, 0.0], [1.0, 0.0]) == {"Brier": 0.25, "base rate": 0.25, "calibration error": 0.0}


def test_the_figure_is_of_the_cells_that_decide(tmp_path):
    arms = [reuse_figures.arm_of(method, k) for method in ("PACS", "GRPO") for k in reuse_figures.DASHES]
    assert set(arms) == set(reuse.STAGES["large"])
    logs = [{"step": i, key: 0.1 * i} for key in ("reward", "drawing", "learning") for i in range(60)]
    results = {"benchmarks": {"x": {"problems": [{"n": 16, "c": 4}]}}}
    run = Run(0, results, {}, {"log_history": logs})
    found = {(arm.method, arm.updates): [run] for arm in arms}
    reuse_figures.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_the_page_has_the_tables_of_the_records():
    """As the scripts print them, under their headings."""
    page = (reuse.RESULTS / "README.md").read_text()
    critic = [json.loads(line) for line in (reuse.RESULTS / "critic.jsonl").read_text().splitlines()]
    tables = reuse_tables.sections(reuse.RESULTS) | {"The implicit critic": ranking.table(critic)}
    for heading, lines in (tables | {"Predicted and measured gaps": table(measured(reuse.RESULTS))}).items():
        section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert [line for line in section.splitlines() if line.startswith("|")] == lines, heading
