"""Rows without padding: nothing is lost on the way from TRL's tensors to a micro-batch and to a checkpoint."""

import math

import numpy as np
import pytest
import torch

from pacs_trl.update.packing import PackedRows
from pacs_trl.update.rows import (
    Rollout,
    from_state,
    labels_from_rewards,
    to_state,
    unpad_rollouts,
)
from pacs_trl.update.scorer import pad_batch
from pacs_trl.update.step import FILLER, collate, row_lengths


def scored_batch(**more):
    return {
        "prompt_ids": torch.tensor([[0, 0, 5], [6, 7, 8]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[20, 21, 0], [30, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "labels": torch.tensor([1.0, float("nan")]),
        "groups": torch.tensor([7, 8]),
        **more,
    }


def test_padding_is_removed_on_both_sides():
    first, second = unpad_rollouts(scored_batch())
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([5], [20, 21])
    assert (second.prompt_ids.tolist(), second.completion_ids.tolist()) == ([6, 7, 8], [30])
    assert first.label == 1.0 and math.isnan(second.label)
    assert (first.group, second.group) == (7, 8)
    assert first.loss_mask.tolist() == [True, True] and first.loss_mask.dtype == bool
    assert first.prompt_ids.dtype == first.completion_ids.dtype == np.int32
    assert first.old_logps is None and first.ref_logps is None
    assert row_lengths([first, second, first], 0.5) == ([1, 3, 1], [2, 1, 2], [0, 1, 0], 0.5)


def test_tool_results_stay_in_the_row_but_not_in_the_loss():
    first, _ = unpad_rollouts(scored_batch(tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])))
    assert first.completion_ids.tolist() == [20, 21] and first.loss_mask.tolist() == [True, False]


def test_completion_that_was_cut_off_and_masked_loses_its_label():
    first, _ = unpad_rollouts(scored_batch(completion_mask=torch.tensor([[0, 0, 0], [1, 0, 0]])))
    assert math.isnan(first.label) and len(first.completion_ids) == 0


def test_log_probabilities_of_the_engine():
    rows = unpad_rollouts(scored_batch(sampling_per_token_logps=torch.tensor([[-0.5, -2.0, 9.0], [-3.0, 9.0, 9.0]])))
    assert [row.sampling_logps.tolist() for row in rows] == [[-0.5, -2.0], [-3.0]]
    assert collate(rows, torch.device("cpu")).sampling_logps[0].tolist() == [-0.5, -2.0]
    (without,) = collate(unpad_rollouts(scored_batch())[:1], torch.device("cpu")).sampling_logps.tolist()
    assert all(map(math.isnan, without))


def row(prompt, completion, **more):
    return Rollout(
        np.array(prompt, dtype=np.int32),
        np.array(completion, dtype=np.int32),
        np.ones(len(completion), dtype=bool),
        1.0,
        **more,
    )


def test_micro_batch_is_trimmed_to_its_own_rows():
    first = row([5], [20, 21], ref_logps=np.array([-1.0, -2.0], dtype=np.float32))
    second = row([6, 7, 8], [30], old_logps=np.array([-0.5], dtype=np.float32))
    batch = collate([first, second], torch.device("cpu"))
    assert batch.rollouts == [first, second]
    assert batch.loss_mask.tolist() == [[True, True], [True, False]]
    assert batch.ref_logps.tolist() == [[-1.0, -2.0], [0.0, 0.0]]
    assert batch.old_logps.tolist() == [[0.0, 0.0], [-0.5, 0.0]]
    assert batch.loss_mask.dtype == torch.bool and batch.ref_logps.dtype == torch.float32


def test_collating_undoes_unpadding():
    batch = scored_batch(tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    micro_batch = collate(unpad_rollouts(batch), torch.device("cpu"))
    width = micro_batch.loss_mask.shape[1]
    for i, row in enumerate(micro_batch.rollouts):
        for part, ids in (("prompt", row.prompt_ids), ("completion", row.completion_ids)):
            assert ids.tolist() == batch[f"{part}_ids"][i][batch[f"{part}_mask"][i].bool()].tolist()
    assert torch.equal(micro_batch.loss_mask, (batch["completion_mask"] * batch["tool_mask"])[:, :width].bool())


def test_filler_is_a_forward_pass_that_counts_for_nothing():
    batch = collate([FILLER], torch.device("cpu"))
    assert (
        pad_batch([np.concatenate([FILLER.prompt_ids, FILLER.completion_ids])], 0)[0].shape == (1, 2)
        and not batch.loss_mask.any()
        and math.isnan(FILLER.label)
    )


def test_state_survives_saving(tmp_path):
    original = row([1, 2], [3], group=5, old_logps=np.array([-0.25], dtype=np.float32))
    torch.save(to_state(original), tmp_path / "row.pt")
    again = from_state(torch.load(tmp_path / "row.pt", weights_only=True))
    for name, value in vars(original).items():
        found = getattr(again, name)
        if isinstance(value, np.ndarray):
            assert np.array_equal(found, value) and found.dtype == value.dtype, name
        else:
            assert found == value, name


def test_labels_from_rewards():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [nan, 1.0], [nan, nan]])
    # 0.75 + 0; 0.75 + 0.25; a function without a verdict adds nothing; no verdict at all
    labels = labels_from_rewards(rewards, torch.tensor([0.75, 0.25]), ["right", "format"])
    assert labels[:3].tolist() == [0.75, 1.0, 0.25] and labels[3].isnan()


def test_labels_outside_of_their_range():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match=r"completion 1 .* has 1.5: right=1 \(weight 1\), format=1 \(weight 0.5\)"):
        labels_from_rewards(rewards, torch.tensor([1.0, 0.5]), ["right", "format"])


def test_rows_of_a_prompt_share_it_however_they_were_drawn():
    """Plain, guided, and of several turns with tool results in between."""
    ids = lambda *numbers: np.array(numbers, dtype=np.int32)  # noqa: E731
    drawn = [(ids(5, 6), {}), (ids(5, 6), {"weight": 0.5}), (ids(5, 6), {"group": 1}), (ids(5, 7), {})]
    masks = [[True, True], [True, True], [True, False], [True, True]]
    rows = [Rollout(p, ids(8, 9), np.array(m), 1.0, **more) for (p, more), m in zip(drawn, masks, strict=True)]
    assert row_lengths(rows).texts == [0, 0, 0, 1]
    packed = PackedRows([r.prompt_ids for r in rows], [r.completion_ids for r in rows])
    assert packed.texts == [[1, 3, 3, 3], [4]]
