"""Late batches of a checkpoint, divided among another number of processes."""

from pacs_trl.rollouts.process_count import divide_batches, remove_parts_of_missing_processes


def batch(first: int, num_rows: int) -> dict:
    """A late batch of one process, with its completions `first`, `first + 1`, ..."""
    rows = range(first, first + num_rows)
    output = {"prompt_ids": [[i] for i in rows], "completion_ids": [[i, i] for i in rows], "logprobs": None}
    output |= {"column": [f"row {i}" for i in rows], "shared": "text"}
    rewards = {0: {"rewards": [1.0] * num_rows, "logged": []}}
    times = {"step": 5, "seconds": 1.0, "idle": 0.0}
    return times | {"prompts": [f"prompt {i}" for i in rows], "output": output, "rewards": rewards}


def test_completions_keep_their_order():
    parts = [{7: batch(0, 4)}, {7: batch(4, 4)}]
    divided = [divide_batches(parts, process, 4)[7] for process in range(4)]
    assert [share["prompts"] for share in divided] == [[f"prompt {2 * p}", f"prompt {2 * p + 1}"] for p in range(4)]
    assert divided[3]["output"]["completion_ids"] == [[6, 6], [7, 7]]
    assert divided[3]["output"]["column"] == ["row 6", "row 7"]
    assert divided[3]["output"]["shared"] == "text" and divided[3]["output"]["logprobs"] is None
    assert divided[3]["step"] == 5 and divided[3]["rewards"] == {}, "reward functions are called when it is taken"
    together = divide_batches(parts, 0, 1)[7]
    assert together["output"]["prompt_ids"] == [[i] for i in range(8)]


def test_a_batch_that_did_not_arrive_everywhere_is_generated_again_with_its_weights():
    stopped = {"step": 5, "weights": {"w": 1}}
    assert divide_batches([{7: batch(0, 4)}, {7: stopped}], 0, 1) == {7: stopped}
    assert divide_batches([{7: batch(0, 4)}, {}], 0, 1) == {}, "a server keeps no weights"


def test_an_overwritten_checkpoint_keeps_no_part_of_more_processes(tmp_path):
    kept = {"pacs_state_0.pt", "pacs_state_1.pt", "rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"}
    for name in (*kept, "pacs_state_2.pt", "rng_state_7.pth", "pacs_reference_3.pt", "kl_reference_2.pt"):
        (tmp_path / name).touch()
    remove_parts_of_missing_processes(tmp_path, 2)
    assert {file.name for file in tmp_path.iterdir()} == kept
