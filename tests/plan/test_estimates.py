"""Lines of a plan, with the working beside them: the run, learning, memory."""

import pytest

from pacs_trl.plan.cost import GIB, model_shape


PARAMETERS = model_shape("Qwen/Qwen3-4B").parameters
WIDE = {"gradient_accumulation_steps": 32}  # 16 of which make a generation
FEW = {"max_train_samples": 2048, "eval_split_size": 1000}  # the held-out problems are set apart first
SPLIT, SNAPSHOT, KL, LORA = {"group_layout": "split"}, {"reference": "snapshot"}, {"beta": 0.1}, {"use_peft": True}


@pytest.fixture
def planned(plan):
    """The line behind a word, on 64 processes with FSDP2."""

    def line(word: str, *arguments: str, **changes) -> str:
        launch = ("--accelerate-config", "recipes/accelerate_configs/fsdp2_8x8.yaml")
        status, output = plan(*launch, *arguments, **changes)
        assert status == 0, output
        return output.split(f"  {word} ", 1)[1].split("\n", 1)[0].strip()

    return line


RUN = [
    # 480 updates learn from 960 generations of 8192 rows
    ("rollout steps", WIDE, "960 (24.4 epochs of 40315 problems)"),
    ("completions", WIDE, "7,864,320"),
    ("tokens generated", WIDE, "3,932.2 million at a mean of 500"),
    ("updates", WIDE, "one optimizer step per 2 generations"),
    # 40315 // 1024 = 39 generations an epoch, so 20 optimizer steps, the last of them over one generation
    ("optimizer steps", WIDE | {"max_steps": None, "num_train_epochs": 3}, "60"),
    ("rollout steps", {"max_train_samples": 2048}, "120 (60.0 epochs of 2048 problems)"),
    ("rollout steps", FEW, "120 (60.0 epochs of 2048 problems)"),
    ("rollout steps", {"eval_split_size": 315}, "120 (3.1 epochs of 40000 problems)"),
    ("optimizer steps", FEW | {"max_steps": None, "num_train_epochs": 2}, "16"),
]


@pytest.mark.parametrize(("word", "settings", "expected"), RUN)
def test_run(planned, word, settings, expected):
    line = planned(word, "--mean-length", "500", **settings)
    assert line == expected if word != "tokens generated" else line.startswith(expected)


def test_an_update_over_two_generations_takes_as_long_as_two(planned):
    wide, single = (planned("all", **sizes) for sizes in (WIDE, {"max_steps": 960, "gradient_accumulation_steps": 16}))
    assert float(wide.split()[0]) == float(single.split()[0]) > 0


PASSES = [
    ({}, 4 + 3 / 4),  # reference of three updates of four
    (SPLIT, 4 + 3 / 4 + 3 / 4),
    ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 32}, 5.5),
    (SNAPSHOT, 4 + 1),
    (SNAPSHOT | SPLIT, 4 + 1 + 1),
    ({"max_tokens_per_micro_batch": 9000}, 5.5),  # 8 x (1024 + 1000) tokens may not fit
    ({"max_tokens_per_micro_batch": 16192}, 4.75),
    (KL, 4.75 + 1),
    ({"num_iterations": 2}, 2 * 4 + 1),
    ({"method": "grpo"}, 4 + 1),
    ({"method": "grpo"} | KL, 4 + 1 + 1),
    ({"method": "grpo", "gradient_accumulation_steps": 16}, 4),
    ({"method": "ppo"} | KL, 2 * 4 + 1 + 1 + 1),
]


@pytest.mark.parametrize(("settings", "passes"), PASSES)
def test_forward_passes(planned, settings, passes):
    line = planned("learning", **settings)
    assert float(line.split(": ")[1].split()[0]) == pytest.approx(passes)


BYTES_PER_WEIGHT = [
    *(({"method": method}, 16 * (1 + (method == "ppo"))) for method in ("pacs", "grpo", "ppo")),
    *(({"method": method} | KL, 16 * (1 + (method == "ppo")) + 4) for method in ("pacs", "grpo", "ppo")),
    (SNAPSHOT, 20),
    (SNAPSHOT | {"reference_offload": True}, 16),
]


@pytest.mark.parametrize(("settings", "size"), BYTES_PER_WEIGHT)
def test_training_state(planned, settings, size):
    """16 bytes per trained weight, 4 for a copy; 1 / 64 of them on each process."""
    line = planned("training state", **settings)
    assert float(line.split()[0]) == pytest.approx(size * PARAMETERS / 64 / GIB, abs=0.05)
    assert ("and the KL reference" in line) == ("beta" in settings) == ("KL" in line)


def test_with_lora_the_kl_reference_is_the_policy_without_adapter(planned):
    assert planned("training state", **LORA | KL) == planned("training state", **LORA)
    one = [
        planned("training state", **LORA | {"lora_r": 512, "lora_target_modules": [n]}) for n in ("q_proj", "o_proj")
    ]
    assert one[0] == one[1] != planned("training state", **LORA | {"lora_r": 1})
