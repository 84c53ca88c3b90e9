"""The loss of the routers in a mixture of experts: by hand, for any micro-batch, and with TRL's weights in one."""

from unittest.mock import patch

import pytest
import torch
from support import architectures
from support.experts import tiny_experts
from support.models import RELATIVE, TOKENIZER, relative_error
from support.rollouts import Replay
from support.runs import Recorder, build_trainer
from support.trls_update import EIGHT, OWN, TRLS, difference, run
from test_objectives import SPLITS
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pacs_trl import GRPOTrainer, PACSTrainer, PPOTrainer, RLOOTrainer
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.router_loss import ExpertLoads, RouterSums, router_sums
from pacs_trl.update.startup_check import choose_forward_pass


def test_sums_by_hand():
    """Two layers, three tokens of which the second counts twice and the third, padding, not at all; two experts."""
    logits = [torch.tensor([[0.0, 1.0], [1.0, 0.0], [5.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 9.0]])]
    sums = router_sums(logits, torch.tensor([1, 2, 0]), top_k=1)
    p, q = 1 / (1 + torch.e), 1 / (1 + torch.e**-2)  # of the first expert
    # the first token selects expert 1, then 0; the second one expert 0, then either
    assert sums.num_rows == 6 and sums.selections.sum() == 6 and 3 <= sums.selections[0] <= 5
    assert sums.probabilities.tolist() == pytest.approx([p + 2 * (1 - p) + q + 1, (1 - p) + 2 * p + (1 - q) + 1])


def test_shares_add_up_to_the_loss_of_transformers():
    """Of two micro-batches, in float64; and so do the gradients."""
    torch.manual_seed(0)
    layers = [torch.randn(7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = load_balancing_loss_func(tuple(layers), num_experts=4, top_k=2)
    gradients = torch.autograd.grad(expected, layers)
    parts = [
        router_sums([layer[rows] for layer in layers], torch.ones(n), 2)
        for rows, n in ((slice(5), 5), (slice(5, 7), 2))
    ]
    fractions = sum(part.selections for part in parts) / 21
    loads = ExpertLoads(fractions, 21.0, 0.0)
    loss = sum(loads.share_of(part) for part in parts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for gradient, other in zip(torch.autograd.grad(loss, layers), gradients, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-5, atol=1e-9)


PROMPTS, COMPLETIONS = [[3, 5, 7], [3, 5, 7], [4], [9, 1]], [[1, 2, 3], [6], [8, 9], []]


@pytest.mark.parametrize("packing", ["sdpa", None])
@pytest.mark.parametrize(("fused", "has_filler"), [(True, False), (False, False), (True, True)])
def test_a_pass_counts_every_token_of_every_completion_with_its_prompt(packing, fused, has_filler):
    """Also last tokens, a prompt once per completion that shares it, and that of an empty completion; but no token of
    the filler with which sharded weights run the encoder of images."""
    model = tiny_experts()
    model.config.output_router_logits = False
    forward_pass = ForwardPass(model, torch.device("cpu"))
    forward_pass.packing, forward_pass.fused, forward_pass.reads_routers = packing, fused, True
    if has_filler:
        forward_pass.image_filler = [2, 4, 6, 8, 10], None
    with fused_head(model):
        forward_pass.compute_logps(model, PROMPTS, COMPLETIONS)
    sums = forward_pass.router_sums
    rows = [torch.tensor([p + c]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    with torch.no_grad():
        logits = [model.model(row, output_router_logits=True).router_logits for row in rows]
    alone = [router_sums(layers, torch.ones(len(layers[0])), 2) for layers in logits]
    expected = RouterSums(*(sum(parts) for parts in zip(*alone, strict=True)))
    assert sums.num_rows == expected.num_rows == 2 * sum(row.numel() for row in rows)
    assert sums.selections.tolist() == expected.selections.tolist()
    assert sums.probabilities.tolist() == pytest.approx(expected.probabilities.tolist(), rel=1e-5)
    assert sums.probabilities.requires_grad and not sums.selections.requires_grad


# All that return the logits of their routers, and whose loss TRL can compute.
FAMILIES = [
    *("afmoe", "ernie4_5_moe", "flex_olmo", "gpt_oss", "hy_v3", "jamba", "laguna", "mellum", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    "qwen4_exp_text",
]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_loss_of_every_family_is_that_of_trl(model_type):
    """Of packed completions if the family allows it, against TRL's padded batch."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    model = architectures.build(model_type)
    rows = [torch.tensor(p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with fused_head(model), torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True, output_router_logits=True)
        model.config.get_text_config().output_router_logits = False
        forward_pass = ForwardPass(model, torch.device("cpu"))
        forward_pass.reads_routers = True
        choose_forward_pass(forward_pass, model)
        forward_pass.compute_logps(model, PROMPTS, COMPLETIONS)
    sums = forward_pass.router_sums
    loads = ExpertLoads(sums.selections / sums.num_rows, sums.num_rows.item(), 0.0)
    assert loads.share_of(sums).item() == pytest.approx(outputs.aux_loss.item(), rel=1e-5)


COEFFICIENT = {"router_aux_loss_coef": 1.0}
CASES = {
    "grpo": ("grpo", {}, {"uniform_groups": 2}),
    "all groups uniform": ("grpo", {"num_iterations": 2}, {"uniform_groups": 4}),
    "tools": ("grpo", {"loss_type": "bnpo"}, {"tools": True}),
    "truncated and masked": ("grpo", {"mask_truncated_completions": True}, {"truncated": 0.4}),
    "entropy bonus": ("grpo", {"entropy_coef": 0.3}, {}),
    "rloo": ("rloo", {"beta": 0.0}, {}),
}


@pytest.mark.trains
@pytest.mark.parametrize(("method", "settings", "replay"), CASES.values(), ids=CASES)
def test_weights_and_logs_are_those_of_trl_in_one_micro_batch(tmp_path, method, settings, replay):
    settings = EIGHT | COEFFICIENT | {"max_steps": 4, "learning_rate": 0.02} | settings
    settings |= {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 16}
    with patch("support.trls_update.tiny_model", tiny_experts):
        before, trls, expected = run(tmp_path / "trl", TRLS, method, Replay(**replay), **settings)
        _, ours, logs = run(tmp_path / "ours", OWN, method, Replay(**replay), **settings)
    assert difference(ours, trls, before) < 1e-4
    for ours_logged, other in zip(logs, expected, strict=True):
        names = ("eval_loss", "eval_aux_loss") if "eval_loss" in other else ("loss", "aux_loss", "grad_norm")
        for name in names:
            assert ours_logged[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.trains
@pytest.mark.parametrize(
    "trainer_class", [pytest.param(c, marks=pytest.mark.slow) for c in (GRPOTrainer, RLOOTrainer)] + [PACSTrainer]
)
def test_any_micro_batch_gives_the_same_gradient(tmp_path, trainer_class):
    """Also one completion per micro-batch, of which some are masked, and padded ones."""
    recorded = []
    for i, split in enumerate([*SPLITS, SPLITS[1] | {"gradient_checkpointing": True}]):
        recorder = Recorder()
        settings = {**split, **COEFFICIENT, "mask_truncated_completions": True, "num_iterations": 2, "beta": 0.0}
        trainer = build_trainer(
            tmp_path / str(i),
            model=tiny_experts(),
            replay=Replay(truncated=0.3, uniform_groups=2, unverifiable=0.2),
            trainer_class=trainer_class,
            more={"callbacks": [recorder]},
            learning_rate=0.001,
            **settings,
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert all(log["update/forwarded_fraction"] == 1 for log in logs)
        recorded.append((recorder.gradients, [log["aux_loss"] for log in logs]))
    gradients, losses = recorded[0]
    for other_gradients, other_losses in recorded[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-5)
        for actual, expected in zip(other_gradients, gradients, strict=True):
            assert relative_error(actual, expected) < 10 * RELATIVE


@pytest.mark.trains
def test_the_coefficient_of_the_model_is_the_default_and_a_callback_may_change_it(tmp_path):
    trainers = []
    for coefficient in (None, 0.5):
        trainer = build_trainer(
            tmp_path, model=tiny_experts(), replay=Replay(), trainer_class=GRPOTrainer, learning_rate=0.0, max_steps=1
        )
        assert trainer.router_aux_loss_coef == 0.001
        trainer.router_aux_loss_coef = coefficient or trainer.router_aux_loss_coef
        trainer.train()
        trainers.append(trainer)
    first, second = ([log for log in t.state.log_history if "loss" in log][0] for t in trainers)
    assert first["aux_loss"] == second["aux_loss"]
    assert second["loss"] - first["loss"] == pytest.approx(0.499 * first["aux_loss"], rel=1e-4)


@pytest.mark.trains
def test_a_coefficient_set_by_a_callback_is_kept_after_a_resume(tmp_path):
    def build(steps):
        model, settings = tiny_experts(), {"save_strategy": "steps", "save_steps": 1, "max_steps": steps}
        return build_trainer(tmp_path, model=model, replay=Replay(), trainer_class=GRPOTrainer, **settings)

    first = build(1)
    first.router_aux_loss_coef = 0.5
    first.train()
    resumed = build(2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2 and resumed.router_aux_loss_coef == resumed.update.router_coef == 0.5


def test_checkpointing_that_would_cut_the_gradient_is_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant: false, or router_aux_loss_coef"):
        build_trainer(tmp_path, model=tiny_experts(), trainer_class=GRPOTrainer, **settings)
    build_trainer(tmp_path, model=tiny_experts(), trainer_class=GRPOTrainer, router_aux_loss_coef=0.0, **settings)


def test_a_process_without_completions_adds_nothing_to_the_loads(tmp_path):
    trainer = build_trainer(tmp_path, model=tiny_experts(), replay=Replay(), trainer_class=GRPOTrainer)
    driver = trainer.update.driver
    with patch.object(driver, "schedule_some", lambda minibatch, indices: [[]]):
        loads = driver.measure_expert_loads(trainer.model, trainer.update.schedule_minibatch([]))
    assert loads.fractions.sum() == loads.loss == 0


@pytest.mark.trains
def test_models_that_do_not_return_the_logits_of_their_routers_train_without_the_loss_and_say_so(tmp_path):
    def build(**settings):
        return build_trainer(
            tmp_path,
            model=architectures.build("granitemoe", vocab_size=len(TOKENIZER)).float(),
            trainer_class=GRPOTrainer,
            max_steps=1,
            **settings,
        )

    with pytest.warns(UserWarning, match="GraniteMoeForCausalLM does not return the logits of its routers"):
        trainer = build()
    trainer.train()
    assert not trainer.aux_loss_enabled and "aux_loss" not in trainer.state.log_history[0]
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.1"):
        build(router_aux_loss_coef=0.1)


@pytest.mark.trains
def test_methods_with_another_update_train_without_the_loss_and_say_so(tmp_path):
    model, how = str(tmp_path / "model"), {"trainer_class": PPOTrainer, "replay": Replay(), "steps_per_generation": 2}
    tiny_experts().save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    with pytest.warns(UserWarning, match="without the loss of its routers.* is 0.001"):
        trainer = build_trainer(tmp_path / "run", model=model, **how)
    trainer.train()
    assert "aux_loss" not in trainer.state.log_history[0]
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.1"):
        build_trainer(tmp_path / "refused", model=model, router_aux_loss_coef=0.1, **how)
