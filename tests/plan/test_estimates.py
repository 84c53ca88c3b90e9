"""Lines of a plan, with the working beside them: the run, learning, memory."""

import pytest

from pacs_trl.plan.cost import GIB, mean_square_length, model_shape


PARAMETERS = model_shape("Qwen/Qwen3-4B").parameters
GRPO, PPO, GENAC, LORA = {"method": "grpo"}, {"method": "ppo"}, {"method": "genac"}, {"use_peft": True}
KL, TWICE = {"beta": 0.1}, {"num_iterations": 2}
SPLIT, SNAPSHOT, OFFLOADED = {"group_layout": "split"}, {"reference": "snapshot"}, {"reference_offload": True}
FEW = {"max_train_samples": 2048, "eval_split_size": 1000}  # the held-out problems are set apart first
WIDE, ALIGNED = {"gradient_accumulation_steps": 32}, {"gradient_accumulation_steps": 16}  # 16 make a generation
KEPT = ALIGNED | {"gradient_checkpointing": False}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 32}
CORRECTED = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}


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
    wide, single = (planned("all", **sizes) for sizes in (WIDE, ALIGNED | {"max_steps": 960}))
    assert float(wide.split()[0]) == float(single.split()[0]) > 0


def test_what_reuse_saves(planned):
    """480 updates on 30 generations, 16 on each: the generations that as many updates would take otherwise are three
    times 30 more."""
    settings = {"num_iterations": 4}
    learning = float(planned("learning", **settings).split("; ")[1].split()[0])
    generation = float(planned("generation  ", **settings).split()[0])
    words = planned("reuse", **settings).split()
    fresh, unit, *_, now, unit_now = words[-6:]
    assert unit == unit_now == "minutes" and [now, unit] == planned("all", **settings).split()[:2]
    # both numbers of seconds are rounded: by 0.5 and 4 x 0.5 seconds, 1.25 minutes in 30 generations
    assert float(fresh) == pytest.approx(30 * (learning + 4 * generation) / 60, abs=1.3)


def cases(table: dict[float, list[dict]]) -> list[tuple[float, dict]]:
    return [(number, settings) for number, several in table.items() for settings in several]


PASSES = {
    3: [KEPT | SPLIT, GRPO | KEPT],
    4: [GRPO | ALIGNED, GRPO | KEPT | KL, GRPO | KEPT | CORRECTED],
    4 + 3 / 4: [{}, {"max_tokens_per_micro_batch": 16192}],  # reference of three updates of four
    4 + 3 / 4 + 1: [KL],
    4 + 3 / 4 + 3 / 4: [SPLIT, HALVES, {"max_tokens_per_micro_batch": 9000}],  # 8 x (1024 + 1000) tokens may not fit
    4 + 1: [SNAPSHOT, GRPO],
    4 + 1 + 1: [SNAPSHOT | SPLIT, GRPO | KL],
    2 * 4 + 1: [TWICE],
    2 * 4 + 1 + 1: [GRPO | KL | TWICE, PPO],  # rollouts are scored once, whatever is learnt from them
    2 * 4 + 1 + 1 + 1: [PPO | KL],
    2 * (2 * 4) + 1 + 1 + 1: [PPO | KL | TWICE],
}


@pytest.mark.parametrize(("passes", "settings"), cases(PASSES))
def test_forward_passes(planned, passes, settings):
    assert float(planned("learning", **settings).split(": ")[1].split()[0]) == pytest.approx(passes)


BOUNDED, PADDED = {"max_tokens_per_micro_batch": 2256}, {"padding_free": "never"}
SHARED = [
    # 8 rows of one prompt, of which all but the last token is computed once: 1023 + 8 * 1001 tokens in memory
    ({}, 8, 9031),
    (HALVES, 4, 1023 + 4 * 1001),
    ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8, 2 * 9031),
    (BOUNDED, 4, 2256),  # (2256 - 256) // 500 completions of mean length
    (PADDED, 1, 8 * 2024),
    (PPO, 1, 8 * 2024),  # micro-batches are shuffled
]


@pytest.mark.parametrize(("settings", "sharing", "tokens"), SHARED)
def test_a_prompt_counts_once_in_a_micro_batch(planned, settings, sharing, tokens):
    assert f"micro-batch of {tokens} tokens" in planned("activations", **settings)
    learning = planned("learning", "--mean-length", "500", **settings)
    computed = 255 / sharing + 1 + 500
    attended = (256**2 / sharing + 2 * 256 * 500 + mean_square_length(500, 1000)) / computed
    flops = model_shape("Qwen/Qwen3-4B").forward_flops(8192 * computed, attended)
    passes = float(learning.split(": ")[1].split()[0])
    assert learning.startswith(f"{passes * flops:.1e} FLOP")
    assert (f"a prompt once for {sharing} completions" in learning) == (sharing > 1)


BYTES_PER_WEIGHT = {
    16: [{}, GRPO, SNAPSHOT | OFFLOADED],
    20: [KL, GRPO | KL, SNAPSHOT],
    32: [PPO, GENAC],
    36: [PPO | KL],
}


@pytest.mark.parametrize(("size", "settings"), cases(BYTES_PER_WEIGHT))
def test_training_state(planned, size, settings):
    """16 bytes per trained weight, 4 for a copy; 1 / 64 of them on each process."""
    line = planned("training state", **settings)
    assert float(line.split()[0]) == pytest.approx(size * PARAMETERS / 64 / GIB, abs=0.05)
    assert ("and the KL reference" in line) == ("beta" in settings) == ("KL" in line)


SMALL_CRITIC = {"critic_model_name_or_path": "Qwen/Qwen3-0.6B"}


def test_the_critic_has_a_size_of_its_own(planned):
    """Of PPO both judge and learn from 8192 rows of 256 + 350 tokens; of GenAC the critic's answers are the longer
    rows."""
    small = model_shape("Qwen/Qwen3-0.6B")
    for method in (PPO, GENAC):
        state = float(planned("training state", **method | SMALL_CRITIC).split()[0])
        assert state == pytest.approx(16 * (PARAMETERS + small.parameters) / 64 / GIB, abs=0.05)
    learning = planned("learning", **PPO | SMALL_CRITIC)
    attended = (256**2 + 2 * 256 * 350 + mean_square_length(350, 1000)) / 606
    of_policy, of_critic = (s.forward_flops(8192 * 606, attended) for s in (model_shape("Qwen/Qwen3-4B"), small))
    assert learning.startswith(f"{5 * of_policy + 5 * of_critic:.1e} FLOP")
    own, same = (float(planned("critic", **GENAC | more).split("; ")[1].split()[0]) for more in (SMALL_CRITIC, {}))
    assert 0 < own < same  # its cache is nearly as large
    assert "micro-batch of 26384 tokens of the critic" in planned("activations", **GENAC)  # 8 x (2024 + 250 + 1024)
    assert "micro-batch of 16192 tokens," in planned("activations", **GENAC | SMALL_CRITIC)


def test_with_lora_the_kl_reference_is_the_policy_without_adapter(planned):
    assert planned("training state", **LORA | KL) == planned("training state", **LORA)
    targets = [{"lora_r": 512, "lora_target_modules": [name]} for name in ("q_proj", "o_proj")]
    query, output, narrow = (planned("training state", **LORA | changes) for changes in (*targets, {"lora_r": 1}))
    assert query == output != narrow
