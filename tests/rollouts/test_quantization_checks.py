"""Quantized weights that would be copied, converted, or sent."""

from types import SimpleNamespace

import pytest
from support.models import tiny_model
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

from pacs_trl.rollouts.quantization_checks import check_quantization


def test_packed_weights_are_neither_copied_nor_converted_nor_sent():
    model = tiny_model()
    settings = {"generation_dtype": None, "has_engine_process": False, "asynchronous_setting": "rollout_lag"}
    settings |= {"trust_remote_code": False, "model_init_kwargs": None}
    settings |= {"rollout_schedule": "batch", "vllm_sync_adapter": False}
    changes = (("has_engine_process", True), ("generation_dtype", "bfloat16"), ("rollout_schedule", "continuous"))
    lag, dtype, continuous = ({**settings, key: value} for key, value in changes)
    adapter = {**continuous, "vllm_sync_adapter": True}
    four_bits, fp8 = BitsAndBytesConfig(load_in_4bit=True), FineGrainedFP8Config()
    refused = [(lag, four_bits, "rollout_lag"), (lag, fp8, "rollout_lag"), (dtype, fp8, "generation_dtype.*fp8")]
    refused += [(continuous, four_bits, "rollout_schedule: continuous would send .*bitsandbytes.*vllm_sync_adapter")]
    for args, quantization, words in refused:
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args), quantization)
        model.config.quantization_config = quantization.to_dict()  # of a checkpoint
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args))
        del model.config.quantization_config
    accepted = [(settings, fp8), (dtype, four_bits), (adapter, four_bits), (lag, None), (lag, {"dequantize": True})]
    for args, quantization in accepted:
        check_quantization(model, SimpleNamespace(**args), quantization)
