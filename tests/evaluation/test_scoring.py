"""Scores of given tokens: what the model is left like, and that no tensor of the size of the logits is ever made.

The numbers are compared with loops over single rows in test_critic.py, test_support.py and tests/test_analysis.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.gradient_variance import Batch, group_gradients
from pacs_trl.evaluation.critic import sequence_logps
from pacs_trl.evaluation.scoring import token_scores
from pacs_trl.evaluation.token_entropy import completion_entropies


NUM_ROWS, NUM_TOKENS, NUM_WORDS = 8, 40, 3_000


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives, views included, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.fixture
def wide_model(monkeypatch):
    """A model with more words than anything else, and tiles of the fused head in proportion."""
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 512)
    config = Qwen3Config(
        vocab_size=NUM_WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


def numbers(text, add_special_tokens):
    return {"input_ids": [int(word) for word in text.split()]}


ROWS = torch.randint(0, NUM_WORDS, (NUM_ROWS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
TEXTS = [" ".join(map(str, row)) for row in ROWS.tolist()]


def gradients(model):
    mask = torch.ones_like(ROWS)
    labels = torch.tensor([1.0, 0.0] * (NUM_ROWS // 2))
    return group_gradients(model, Batch(ROWS, mask, mask.index_fill(1, torch.tensor([0]), 0), labels), torch.zeros(8))


@pytest.mark.parametrize(
    "score",
    [
        lambda model: sequence_logps(model, [(row[:2], row[2:]) for row in ROWS.tolist()]),
        lambda model: completion_entropies(model, numbers, ["1 2"] * NUM_ROWS, TEXTS, batch_size=NUM_ROWS),
        gradients,
    ],
    ids=["critic", "token entropy", "gradient variance"],
)
def test_no_tensor_has_the_size_of_the_logits(wide_model, score):
    logits = NUM_ROWS * (NUM_TOKENS - 1) * NUM_WORDS
    with LargestTensor() as largest, torch.no_grad():
        wide_model(ROWS)
    assert largest.elements >= logits  # the counter sees them
    with LargestTensor() as largest:
        score(wide_model)
    # the weights of the head are the largest tensor of all but for the concatenated gradients of all weights
    assert 0 < largest.elements < 0.1 * logits


def test_the_model_is_left_as_it_was(boxing_model):
    model, _ = boxing_model
    input_ids = torch.tensor([[5, 6, 7]])
    logits = model(input_ids).logits
    expected = logits[0, :-1].double().log_softmax(-1)
    everything = torch.tensor([[False, True, True]])
    for _ in range(2):
        logps, entropies = token_scores(model, input_ids, torch.ones_like(input_ids), everything)
        torch.testing.assert_close(logps[0].double(), expected[[0, 1], [6, 7]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropies[0].double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model) and torch.equal(model(input_ids).logits, logits)

    model.forward = patched = model.forward  # as a trainer has patched it
    with pytest.raises(RuntimeError):
        token_scores(model, input_ids[:, :2], torch.ones_like(input_ids), everything[:, :2])
    assert vars(model)["forward"] is patched
    del model.forward
