"""Quantized weights that would be copied or converted."""

from types import SimpleNamespace

import pytest
from support.models import tiny_model
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

from pacs_trl.rollouts.quantization_checks import check_quantization


def test_packed_weights_are_neither_copied_nor_converted():
    model = tiny_model()
    settings = {"generation_dtype": None, "has_engine_process": False, "asynchronous_setting": "rollout_lag"}
    settings |= {"trust_remote_code": False, "model_init_kwargs": None}
    changes = (("has_engine_process", True), ("generation_dtype", "bfloat16"))
    lag, dtype = ({**settings, key: value} for key, value in changes)
    four_bits, fp8 = BitsAndBytesConfig(load_in_4bit=True), FineGrainedFP8Config()
    refused = [(lag, four_bits, "rollout_lag"), (lag, fp8, "rollout_lag"), (dtype, fp8, "generation_dtype.*fp8")]
    for args, quantization, words in refused:
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args), quantization)
        model.config.quantization_config = quantization.to_dict()  # of a checkpoint
        with pytest.raises(ValueError, match=words):
            check_quantization(model, SimpleNamespace(**args))
        del model.config.quantization_config
    for args, quantization in ((settings, fp8), (dtype, four_bits), (lag, None), (lag, {"dequantize": True})):
        check_quantization(model, SimpleNamespace(**args), quantization)
