"""Coefficients that a subclass of an update changes: completions are scheduled by the shaped ones."""

import pytest
import torch
from support.models import RELATIVE, load_weights, logps_and_entropies, relative_error, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.update.group_loss_update import GroupLossUpdate
from pacs_trl.update.ratio_update import RatioUpdate


class OneForAll:
    """Replaces every coefficient by 0.1, those of uniform groups too."""

    shapes_coefficients = True

    def shape_coefficients(self, model, minibatch, coefficients):
        return torch.full_like(coefficients, 0.1), {"shaped": 1.0}


class ShapedGroups(OneForAll, GroupLossUpdate):
    pass


class ShapedRatios(OneForAll, RatioUpdate):
    pass


class ShapedPACS(PACSTrainer):
    update_class = ShapedGroups


class ShapedGRPO(GRPOTrainer):
    update_class = ShapedRatios


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("trainer_class", [ShapedPACS, ShapedGRPO])
def test_uniform_groups_are_trained_with_shaped_coefficients(tmp_path, trainer_class, updates):
    """All groups are uniform, and some completions have no label, so without shaping nothing has a gradient. A ratio
    of 1 leaves the gradient of 0.1 times the summed log-probs; on the second update the weights are the same, because
    the learning rate is 0."""
    replay, recorder = Replay(uniform_groups=2, unverifiable=0.5), Recorder()
    settings = {"num_iterations": updates, "max_steps": updates, "learning_rate": 0.0}
    trainer = build_trainer(
        tmp_path, replay=replay, trainer_class=trainer_class, more={"callbacks": [recorder]}, **settings
    )
    trainer.train()
    model = tiny_model()
    load_weights(model, recorder.weights[0])
    _, rows = rows_of_update(replay, trainer.args, 0)
    sum(0.1 * logps_and_entropies(model, row)[0].sum() for row in rows).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(recorder.gradients[updates - 1], expected) < RELATIVE
    assert trainer.state.log_history[updates - 1]["shaped"] == 1.0
    assert trainer.state.log_history[updates - 1]["update/forwarded_fraction"] == 1.0
