"""Completions of a checkpoint, merged from the parts of all processes."""

import numpy as np
import pytest

from pacs_trl.rollouts.waiting_rollouts import merge_rollouts, rollouts_to_save
from pacs_trl.update.rollout import Rollout


def rollout(group: int, **logps) -> Rollout:
    return Rollout(
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.array([2, 3], np.int32),
        loss_mask=np.array([True, True]),
        label=1.0,
        group=group,
        **logps,
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_log_probs_that_one_process_has_survive_those_that_all_have(reverse):
    """With a lag every process has `ref_logps`, and only the process that trains on a completion its `old_logps`."""
    ref_logps = np.array([-1.0, -2.0], np.float32)
    old_logps = np.array([-3.0, -4.0], np.float32)
    parts = []
    for process in range(2):
        rollouts = [
            rollout(i, ref_logps=ref_logps, old_logps=old_logps if i % 2 == process else None) for i in range(4)
        ]
        parts.append(rollouts_to_save([rollouts[:2], rollouts[2:]], process, 2))
    minibatches = merge_rollouts(parts[::-1] if reverse else parts, num_minibatches=3)
    assert [len(minibatch) for minibatch in minibatches] == [2, 2, 0]
    for merged in minibatches[0] + minibatches[1]:
        assert merged.ref_logps.tolist() == ref_logps.tolist() and merged.old_logps.tolist() == old_logps.tolist()


def test_nothing_saved_is_nothing_waiting():
    assert merge_rollouts([{}, {}], num_minibatches=2) == []
