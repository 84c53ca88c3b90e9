"""Prompts of evaluations have the tokens of training."""

import math

import pytest
from support.models import TOKENIZER, tiny_model
from support.rollouts import addition_dataset
from support.runs import build_trainer
from tokenizers.processors import TemplateProcessing
from transformers import BloomConfig, BloomForCausalLM

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings, tokenize_prompt


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=["text", "messages"])
def test_prompts_of_a_tokenizer_that_adds_a_first_token(tmp_path, prompt):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokens = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", tokenizer.bos_token_id)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**tokens)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    trainer = build_trainer(tmp_path, model=model, more={"processing_class": tokenizer})
    (training_ids,) = trainer._tokenize_prompts([prompt])[0]
    assert list(tokenize_prompt(tokenizer, prompt)) == list(training_ids)
    assert (training_ids[0] == tokenizer.bos_token_id) == isinstance(prompt, str)


def test_a_model_without_a_context_length_generates():
    special = {"eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
    config = BloomConfig(vocab_size=len(TOKENIZER), hidden_size=32, n_layer=1, n_head=2, **special)
    engine = TransformersEngine(BloomForCausalLM(config), TOKENIZER)
    requests = [Request("p", 0, 0, addition_dataset()["prompt"][0])]
    ((_, completion),) = engine.generate(requests, SamplingSettings(max_new_tokens=4))
    assert 0 < completion.num_tokens <= 4 and engine.context_length == math.inf
