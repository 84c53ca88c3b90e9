"""The warning of weights in half precision that would lose updates."""

import logging
from types import SimpleNamespace

import torch
from support.models import LORA, tiny_model

from pacs_trl.rollouts.half_precision import warn_of_rounded_updates


def test_updates_that_half_precision_rounds_away_are_named(caplog):
    """2^-9 of a weight of 0.02 is 3.9e-5. An adapter has its own precision, and FSDP trains copies in float32."""
    args = SimpleNamespace(
        learning_rate=1e-6, model_init_kwargs=None, bf16=True, fp16=False, process_index=0, fsdp="", deepspeed=None
    )
    half = tiny_model().bfloat16()

    def warnings(model, peft_config=None, **settings):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_rounded_updates(model, SimpleNamespace(**vars(args) | settings), peft_config)
        return caplog.text

    expected = "dtype=bfloat16 with learning_rate=1e-06: half precision rounds away updates below about 4e-05"
    assert expected in warnings(half)
    assert expected in warnings("a/model", model_init_kwargs={"dtype": "bfloat16"})
    assert "Set dtype: float32 and bf16: true" in warnings("a/model", model_init_kwargs={"dtype": torch.bfloat16})
    assert warnings(half, learning_rate=4e-5) == warnings(half, LORA) == warnings(tiny_model()) == ""
    assert warnings("a/model") == warnings(half, fsdp="full_shard") == ""
