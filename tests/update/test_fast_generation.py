import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import LORA, TOKENIZER, tiny_model, trainable_weights
from support.runs import build_trainer
from support.seeds import shifted
from transformers import GenerationConfig

from pacs_trl.update.generation import faster_generation, rounded


GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=TOKENIZER.pad_token_id)


def prompts() -> dict[str, torch.Tensor]:
    """Two prompts, three and two times, one of them padded with an id that the other has as a token."""
    ids = torch.randint(3, len(TOKENIZER), (2, 9), generator=torch.Generator().manual_seed(shifted(0)))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[:, :4] = TOKENIZER.pad_token_id
    rows = torch.tensor([0, 0, 1, 0, 1])
    return {"input_ids": ids[rows], "attention_mask": mask[rows]}


@pytest.mark.parametrize("with_adapter", [False, True])
def test_completions_are_the_same_and_weights_come_back(with_adapter):
    torch.manual_seed(shifted(1))
    model = tiny_model(shifted(1))
    model = get_peft_model(model, LORA) if with_adapter else model
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with torch.no_grad():
        plain = model.generate(**prompts(), generation_config=GREEDY)
        passes = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda m, inputs, out: passes.append(inputs[0].numel())
        )
        with faster_generation(model, fast=True, dtype=None):
            fast = model.generate(**prompts(), generation_config=GREEDY)
        hook.remove()
    assert torch.equal(plain, fast)
    assert passes[:2] == [2 * 8, 5]  # both prompts without their last token, then one token of each row
    with pytest.raises(RuntimeError, match="interrupted"), faster_generation(model, fast=True, dtype=torch.bfloat16):
        assert model.generate(**prompts(), generation_config=GREEDY).shape[0] == 5
        assert model.dtype == torch.bfloat16
        raise RuntimeError("interrupted")
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])
    assert "generate" not in vars(model)
    with torch.no_grad():  # the adapters count again, and once
        assert torch.equal(model.generate(**prompts(), generation_config=GREEDY), plain)


def test_activated_lora_generates_as_without():
    """peft cannot merge it, and a cache of the base model would lack it."""
    inputs = prompts()
    inputs["input_ids"][:, 5:7] = torch.tensor([8, 9])
    config = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[8, 9], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        plain = model.generate(**inputs, generation_config=GREEDY)
        with faster_generation(model, fast=True, dtype=None):
            assert torch.equal(model.generate(**inputs, generation_config=GREEDY), plain)


ADAPTERS_OF_TIED_WEIGHTS = [
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [45, 46, 60]},
]


@pytest.mark.parametrize("settings", ADAPTERS_OF_TIED_WEIGHTS, ids=str)
def test_adapters_of_tied_weights_generate_with_the_trained_policy(settings):
    torch.manual_seed(shifted(1))
    model = get_peft_model(tiny_model(), LoraConfig(r=4, **settings)).eval()
    ids = torch.tensor([[45, 46, 60, 61, 62]])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
        expected = model(input_ids=ids).logits
        with faster_generation(model, fast=True, dtype=None):
            merged = [layer for layer in model.modules() if getattr(layer, "merged_adapters", None)]
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert len(merged) == 2  # the query projections
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_integers_are_not_rounded():
    """Quantized weights are packed into integers."""
    model = tiny_model()
    packed = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    model.model.norm.register_parameter("packed", packed)
    with faster_generation(model, fast=False, dtype=torch.bfloat16):
        assert packed.dtype == torch.uint8 and model.dtype == torch.bfloat16


def test_rounding_keeps_the_mean():
    """Between 1 and 2, bfloat16 has steps of 1/128: a quarter of them above 1, one weight of four is rounded up."""
    for sign in (1, -1):
        weights = torch.full((40_000,), sign * (1 + 0.25 / 128))
        result = rounded(weights, torch.bfloat16, 0)
        assert result.dtype == torch.bfloat16 and torch.equal(result, rounded(weights, torch.bfloat16, 0))
        up = result == sign * (1 + 1 / 128)
        assert (up | (result == sign)).all() and up.float().mean().item() == pytest.approx(0.25, abs=0.015)


def test_rounding_does_not_hide_a_small_update():
    loaded = torch.randn(200_000, generator=torch.Generator().manual_seed(shifted(0))).bfloat16()
    assert torch.equal(rounded(loaded.float(), torch.bfloat16, 1), loaded)
    updated = loaded.float() + 2e-5
    moved = [
        (x.float() - loaded.float()).mean().item() for x in (rounded(updated, torch.bfloat16, 1), updated.bfloat16())
    ]
    assert moved[0] == pytest.approx(2e-5, rel=0.2) and moved[1] < 1e-6
    assert rounded(loaded, torch.float16, 1).dtype == torch.float16


@pytest.mark.trains
@pytest.mark.parametrize("peft_config", [None, LORA])
def test_training_from_the_same_completions_does_not_change_by_a_bit(tmp_path, peft_config):
    weights = []
    for fast in (False, True):
        trainer = build_trainer(
            tmp_path / str(fast), fast_generation=fast, seed=shifted(42), more={"peft_config": peft_config}
        )
        torch.manual_seed(shifted(7))
        trainer.train()
        weights.append(trainable_weights(trainer.model))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
