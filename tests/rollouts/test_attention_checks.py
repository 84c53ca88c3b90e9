"""Attention implementations that are not installed, or cannot train."""

from types import SimpleNamespace

import pytest
import torch
from support.architectures import build
from support.runs import build_trainer

from pacs_trl.rollouts import attention_checks
from pacs_trl.rollouts.attention_checks import (
    flash_attention_4_error,
    missing_attention,
    unknown_attention,
    unsupported_attention,
)


@pytest.mark.parametrize(
    "implementation, dtype, bf16, capability, words",
    [
        ("flash_attention_4", "float32", False, 9, "half precision"),
        ("flash_attention_4", None, False, 9, "half precision"),
        ("flash_attention_4", "bfloat16", False, 8, "a GPU of compute capability 8"),
        ("flash_attention_4", "float32", True, 0, "no GPU"),
        ("flash_attention_4", "float32", True, 9, None),
        ("flash_attention_4", torch.bfloat16, False, 10, None),
        ("sdpa", "float32", False, 0, None),
    ],
)
def test_flash_attention_4_is_refused_where_it_cannot_train(implementation, dtype, bf16, capability, words):
    args = SimpleNamespace(bf16=bf16, fp16=False)
    error = flash_attention_4_error(args, {"attn_implementation": implementation, "dtype": dtype}, capability)
    assert error is None if words is None else words in error and "attn_implementation: sdpa" in error


def test_an_attention_that_is_not_installed_is_refused_before_loading(tmp_path, model_path, monkeypatch):
    installed = {"flash_attn"}
    monkeypatch.setattr(attention_checks, "find_spec", lambda name: True if name in installed else None)
    assert missing_attention("flash_attention_2") is None and missing_attention("sdpa") is None
    assert "flash_attn_interface" in missing_attention("flash_attention_3")
    installed.clear()
    with pytest.raises(ValueError, match="flash_attention_2 needs the package flash_attn.*sdpa"):
        build_trainer(tmp_path, model=model_path, model_init_kwargs={"attn_implementation": "flash_attention_2"})
    installed.add("kernels")  # transformers downloads a kernel in its place
    assert missing_attention("flash_attention_2") is None


def test_an_attention_that_does_not_exist_is_refused_before_loading(tmp_path, model_path):
    for name in (None, "eager", "sdpa", "paged|sdpa", "flash_attention_2", "kernels-community/flash-attn2"):
        assert unknown_attention(name) is None
    with pytest.raises(ValueError, match="'flash_attention_9' does not exist. Did you mean .*Choose from eager"):
        build_trainer(tmp_path, model=model_path, model_init_kwargs={"attn_implementation": "flash_attention_9"})


def test_an_attention_that_the_layers_do_not_have_is_refused_before_loading(tmp_path):
    """gpt-oss has attention sinks, which torch's attention has not; configurations made from scratch name no class."""
    model = build("gpt_oss")
    for name in ("eager", "sdpa", None):
        assert unsupported_attention(name, model.config) is None
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="'gpt_oss' models have no sdpa. Set eager"):
        build_trainer(tmp_path, model=str(tmp_path / "model"), model_init_kwargs={"attn_implementation": "sdpa"})
