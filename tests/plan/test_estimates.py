"""Numbers of a plan, with the working beside them: the run, learning, memory."""

import pytest

from pacs_trl.plan.cost import GIB, H200, decoding_seconds, mean_square_length, model_shape


PARAMETERS = model_shape("Qwen/Qwen3-4B").parameters
GRPO, PPO, GENAC, LORA = {"method": "grpo"}, {"method": "ppo"}, {"method": "genac"}, {"use_peft": True}
KL, TWICE = {"beta": 0.1}, {"num_iterations": 2}
SPLIT, SNAPSHOT, OFFLOADED = {"group_layout": "split"}, {"reference": "snapshot"}, {"reference_offload": True}
FEW = {"max_train_samples": 2048, "eval_split_size": 1000}  # the held-out problems are set apart first
WIDE, ALIGNED = {"gradient_accumulation_steps": 32}, {"gradient_accumulation_steps": 16}  # 16 make a generation
KEPT = ALIGNED | {"gradient_checkpointing": False}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 32}
LATE, RECOMPUTED = {"use_vllm": True, "vllm_mode": "server", "rollout_lag": 1}, {"stale_logps": "recompute"}
CORRECTED = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}


RUN = [
    # 480 updates learn from 960 generations of 8192 rows
    (WIDE, 480, 960),
    # 40315 // 1024 = 39 generations an epoch, so 20 optimizer steps, the last of them over one generation
    (WIDE | {"max_steps": None, "num_train_epochs": 3}, 60, 120),
    (FEW | {"max_steps": None, "num_train_epochs": 2}, 16, 4),
]


@pytest.mark.parametrize(("settings", "optimizer_steps", "rollouts"), RUN)
def test_run(estimate_of, settings, optimizer_steps, rollouts):
    estimate = estimate_of(**settings)
    assert estimate.optimizer_steps() == optimizer_steps
    assert estimate.step.num_generation_batches(optimizer_steps) == rollouts


def test_the_number_of_problems_follows_limits_and_splits(estimate_of):
    for settings, number in (({"max_train_samples": 2048}, 2048), (FEW, 2048), ({"eval_split_size": 315}, 40_000)):
        assert estimate_of(**settings).num_problems == number


def test_an_update_over_two_generations_takes_as_long_as_two(estimate_of):
    wide, single = (estimate_of(**sizes).gpu_hours(350) for sizes in (WIDE, ALIGNED | {"max_steps": 960}))
    assert wide == pytest.approx(single) and wide > 0


def test_a_lag_takes_the_time_of_the_slower_side(estimate_of):
    """64 GPUs train and another node of 8 generates; four of these for training change both."""
    for settings, total in ((LATE, max), (LATE | {"rollout_lag": 0}, sum)):
        estimate = estimate_of(**settings, per_device_train_batch_size=1)
        sides = estimate.costs.update_flops_and_seconds(350)[1], estimate.costs.generation_seconds(350)
        assert estimate.costs.seconds(350) == pytest.approx(total(sides)) and min(sides) > 0
        other = sides[0] * 64 / 68, estimate.costs.generation_seconds(350, 4)
        assert estimate.costs.seconds(350, 4) == pytest.approx(total(other)) and other[1] > sides[1]
        assert estimate.gpu_hours(350) == pytest.approx(120 * estimate.costs.seconds(350) * 72 / 3600)
    printed = estimate_of(**LATE, per_device_train_batch_size=1).text(350)
    assert "on the server's 8 GPUs (simulated), beside the updates" in printed
    assert "on 72 GPUs, 64 for training" in printed and "not tested on a GPU" in printed


def test_the_split_of_a_server_is_the_fastest_that_can_share_the_heads(estimate_of):
    """Of 72 GPUs 1, 2, 4, or 8 can serve: tensor parallelism divides 32 heads, on one node."""
    estimate = estimate_of(**LATE, per_device_train_batch_size=1)
    splits = estimate.costs.splits(350)
    assert list(splits) == ["in turn", "one batch late", "continuous"]
    for schedule, (training, seconds) in splits.items():
        possible = {72 - size: estimate.costs.seconds(350, size, schedule) for size in (1, 2, 4, 8)}
        assert seconds == possible[training] == min(possible.values())
    assert splits["one batch late"][1] < splits["in turn"][1]


def test_a_copy_of_the_weights_of_a_server_takes_memory(estimate_of):
    states = [estimate_of(**LATE | more).costs.state for more in ({}, RECOMPUTED)]
    assert states[1] - states[0] == pytest.approx(4 * PARAMETERS / 64)  # sharded


def test_tensor_parallelism_of_a_colocated_engine_divides_its_weights(estimate_of):
    """32.8e9 weights of 2 bytes leave little of 0.6 x 141e9 bytes for keys and values, a fourth of them 68e9 bytes."""
    settings = LORA | CORRECTED | {"model_name_or_path": "Qwen/Qwen3-32B", "vllm_gpu_memory_utilization": 0.6}
    one, four = (estimate_of(**settings, vllm_tensor_parallel_size=n).costs for n in (1, 4))
    assert one.engine == four.engine == 0.6 * 141e9
    weights, cache = 2 * one.shape.parameters, one.shape.kv_bytes_per_token * 2024  # of a prompt of 1,024 tokens
    assert one.engine_needed == weights + cache and four.engine_needed == weights / 4 + cache / 4
    assert one.generation_seconds(350) > four.generation_seconds(350)
    sixteen = estimate_of(**settings, vllm_tensor_parallel_size=16).costs
    assert sixteen.engine_needed == weights / 16 + cache / 8  # of eight heads of keys each GPU has at least one
    limited = estimate_of(**settings, vllm_max_model_length=4048).costs
    assert limited.engine_needed == weights + 2 * cache


def test_a_quantized_engine_has_more_room_for_keys_and_values(estimate_of):
    """Of 32.8e9 weights 31.2e9 in layers with 0.5625 bytes. A decoding step reads these, and writes and reads them in
    bfloat16; all other weights have two bytes."""
    settings = LORA | CORRECTED | {"model_name_or_path": "Qwen/Qwen3-32B", "vllm_gpu_memory_utilization": 0.6}
    costs = estimate_of(**settings, dtype="bfloat16", load_in_4bit=True).costs
    layers = costs.shape.num_layers * costs.shape.layer_parameters
    stored = 0.5625 * layers + 2 * (costs.shape.parameters - layers)
    assert costs.engine_needed == pytest.approx(stored + costs.shape.kv_bytes_per_token * 2024)
    seconds = decoding_seconds(
        *(costs.shape, 8192 / 64, 256, 350, 1000),
        weight_bytes=stored + 4 * layers,
        kv_cache_bytes=0.6 * 141e9 - stored,
        gpu=H200,
    )
    assert costs.generation_seconds(350) == pytest.approx(seconds)


def test_an_engine_process_has_copies_of_the_weights(estimate_of):
    """Of the trained weights one for each batch of lag."""
    engine_process = {"use_vllm": False, "rollout_lag": 2}
    assert estimate_of(**engine_process).costs.engine_process == 2 * 4 * PARAMETERS
    with_lora = estimate_of(**engine_process | LORA)
    assert with_lora.costs.engine_process == 4 * (PARAMETERS + 2 * with_lora.costs.trained_weights)
    assert "engine process" in with_lora.text(350)


def cases(table: dict[float, list[dict]]) -> list[tuple[float, dict]]:
    return [(number, settings) for number, several in table.items() for settings in several]


PASSES = {
    3: [KEPT | SPLIT, GRPO | KEPT, GRPO | KEPT | CORRECTED],
    4: [GRPO | ALIGNED, GRPO | KEPT | KL, GRPO | LATE, LATE],  # the reference is the engine's
    # reference of three updates of four; 256 + 8 x 350 tokens of an average group fit
    4 + 3 / 4: [{}, GRPO, {"max_tokens_per_micro_batch": 3056}],
    4 + 3 / 4 + 1: [KL, GRPO | KL],
    4 + 3 / 4 + 3 / 4: [SPLIT, HALVES, {"max_tokens_per_micro_batch": 3055}],
    4 + 1: [SNAPSHOT, SNAPSHOT | LATE, LATE | SPLIT, LATE | RECOMPUTED, GRPO | LATE | RECOMPUTED],
    4 + 1 + 1: [SNAPSHOT | SPLIT],
    2 * 4 + 1: [TWICE],
    2 * 4 + 1 + 1: [PPO],
    2 * 4 + 1 + 1 + 1: [PPO | KL, GRPO | KL | TWICE],
    2 * (2 * 4) + 1 + 1 + 1: [PPO | KL | TWICE],
}


@pytest.mark.parametrize(("passes", "settings"), cases(PASSES))
def test_forward_passes(estimate_of, passes, settings):
    assert estimate_of(**settings).costs.forward_passes() == pytest.approx(passes)


SHARED = [
    # 8 rows of one prompt, of which all but the last token is computed once: 1023 + 8 * 1001 tokens in memory
    ({}, 8, 9031),
    (HALVES, 4, 1023 + 4 * 1001),
    ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8, 2 * 9031),
    ({"max_tokens_per_micro_batch": 2256}, 4, 2256),  # (2256 - 256) // 500 completions of mean length
    ({"packing": "never"}, 1, 8 * 2024),
    (PPO, 1, 8 * 2024),  # micro-batches are shuffled
    (GRPO | {"shuffle_minibatches": True}, 2, 4 * 1023 + 8 * 1001),  # two completions of a prompt per minibatch
]


@pytest.mark.parametrize(("settings", "sharing", "tokens"), SHARED)
def test_a_prompt_counts_once_in_a_micro_batch(estimate_of, settings, sharing, tokens):
    estimate = estimate_of(**settings)
    computed = 255 / sharing + 1 + 500
    attended = (256**2 / sharing + 2 * 256 * 500 + mean_square_length(500, 1000)) / computed
    flops = model_shape("Qwen/Qwen3-4B").forward_flops(8192 * computed, attended)
    without_head = 8192 * computed * 2 * (151_936 * 2560 - 2561)  # the critic of PPO has one output
    saved = 5 * without_head if estimate.costs.critic_weights else 0
    assert estimate.costs.micro_batch_tokens == tokens
    assert estimate.costs.update_flops_and_seconds(500)[0] == pytest.approx(
        estimate.costs.forward_passes() * flops - saved
    )


BYTES_PER_WEIGHT = {
    16: [{}, GRPO, SNAPSHOT | OFFLOADED],
    20: [KL, GRPO | KL, SNAPSHOT],
    32: [GENAC],  # with a critic that writes
}


@pytest.mark.parametrize(("size", "settings"), cases(BYTES_PER_WEIGHT))
def test_training_state_has_16_bytes_per_trained_weight_and_4_per_copy(estimate_of, size, settings):
    """16 bytes per trained weight, 4 for a copy; 1 / 64 of them on each process."""
    assert estimate_of(**settings).costs.state == pytest.approx(size * PARAMETERS / 64)


def test_with_fsdp_2_the_kl_reference_is_gathered_whole_and_twice(estimate_of):
    """Two bytes of each weight, and of the policy's output head, 151936 x 2560. PPO and RLOO compute it before there
    is a gradient, of which 4 bytes per weight are collected."""
    head = 151_936 * 2560
    costs = estimate_of(**KL).costs
    assert costs.collected == 4 * PARAMETERS and costs.gathered == 2 * (2 * PARAMETERS + head)
    assert costs.room + costs.gathered == pytest.approx(
        estimate_of().costs.room + estimate_of().costs.gathered - 4 * PARAMETERS / 64
    )
    assert "two copies of the KL reference, and the output head" in estimate_of(**KL).text(350)
    for method in (PPO, {"method": "rloo"}):
        without, before = (estimate_of(**method, beta=beta).costs for beta in (0, 0.1))
        assert before.gathered == max(without.gathered, 2 * head)
    single = KL | {"method": "rloo", "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
    costs = estimate_of(**single, steps_per_generation=4).costs
    assert costs.collected == 0 and costs.gathered == 2 * (2 * PARAMETERS + head)


def test_the_critic_of_ppo_has_one_output_per_token_and_the_optimizer_of_the_policy(estimate_of):
    """16 bytes per weight, or 10 with 8-bit moments; the embedding of the policy keeps those of 32 bits."""
    shape = model_shape("Qwen/Qwen3-8B")  # whose head is no copy of the embedding
    embedding, outputs = shape.vocabulary * shape.hidden, shape.hidden + 1
    settings = {"model_name_or_path": "Qwen/Qwen3-8B"}
    costs = estimate_of(**PPO, **settings).costs
    critic = shape.parameters - embedding + outputs
    assert costs.critic_weights == critic
    assert costs.state == pytest.approx(16 * (shape.parameters + critic) / 64)
    assert estimate_of(**PPO | KL, **settings).costs.state == pytest.approx(costs.state + 4 * shape.parameters / 64)
    in_8_bits = estimate_of(**PPO, **settings, optim="adamw_bnb_8bit").costs.state
    assert in_8_bits == pytest.approx((10 * (shape.parameters + critic) + 6 * embedding) / 64)
    assert estimate_of(**PPO).costs.critic_weights == PARAMETERS + 2560 + 1  # the head is the embedding
    assert estimate_of(**GENAC, **settings).costs.critic_weights == shape.parameters


def test_checkpoint_size_is_printed(estimate_of):
    """12 bytes x 4.02e9 = 45.0 GiB with float32 weights, another 4 for a snapshot or a reference that follows."""
    followed = KL | {"sync_ref_model": True}
    for settings, size in (({}, 12), (SNAPSHOT, 16), (KL, 12), (followed, 16), (GENAC, 24)):
        assert f"{size * PARAMETERS / GIB:.1f} GiB   on disk" in estimate_of(**settings).text(350)


def test_the_critic_has_a_size_of_its_own(estimate_of):
    """Of PPO both compute log-probs or values of 8192 rows of 256 + 350 tokens, and learn from them."""
    small, policy = model_shape("Qwen/Qwen3-0.6B"), model_shape("Qwen/Qwen3-4B")
    estimate = estimate_of(**PPO | {"critic_model_name_or_path": "Qwen/Qwen3-0.6B"})
    assert estimate.costs.state == pytest.approx(16 * (PARAMETERS + small.parameters + small.hidden + 1) / 64)
    attended = (256**2 + 2 * 256 * 350 + mean_square_length(350, 1000)) / 606
    flops = sum(5 * shape.forward_flops(8192 * 606, attended) for shape in (policy, small))
    flops -= 5 * 8192 * 606 * 2 * (small.vocabulary * small.hidden - (small.hidden + 1))
    assert estimate.costs.update_flops_and_seconds(350)[0] == pytest.approx(flops)


def test_with_lora_the_kl_reference_is_the_policy_without_adapter(estimate_of):
    assert estimate_of(**LORA | KL).costs.state == estimate_of(**LORA).costs.state
    assert estimate_of(**LORA | {"lora_r": 512}).costs.state > estimate_of(**LORA | {"lora_r": 1}).costs.state


def test_the_shape_of_a_model_with_its_own_code_is_read_where_its_code_is_trusted(
    estimate_of, model_path, checkpoint_with_code
):
    plain = estimate_of(model_name_or_path=model_path)
    with_code = estimate_of(model_name_or_path=checkpoint_with_code(model_path), trust_remote_code=True)
    assert with_code.model.num_parameters() == plain.model.num_parameters()
