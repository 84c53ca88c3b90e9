"""A model that answers any sum with a random digit in a box, from weights written by hand.

About one answer in ten is right, so counts, grades and pass@k have something to say.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from support.seeds import shifted

from experiments.miniature.model import build_model
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.verification import Verifier


@pytest.fixture(scope="session")
def boxing_model():
    """(model, tokenizer) of the digit guesser."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, "tiny", seed=shifted(0)).eval()
    opening, box, brace, end = (
        tokenizer(text, add_special_tokens=False)["input_ids"][-1]
        for text in ("<|im_start|>assistant\n", r"\boxed{", "}", "<|im_end|>")
    )
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    embeddings, layers = model.get_input_embeddings().weight, model.model.layers
    with torch.no_grad():
        embeddings.mul_(0.1)  # those of all other tokens stay small
        for axis, token in enumerate((opening, box, digits, brace, end)):
            embeddings[token] += 2.0 * torch.eye(64)[axis]
        embeddings[digits, 2] += 0.02 * torch.arange(10)  # 9 is four times as probable as 0
        for layer in layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        mlp = layers[0].mlp
        for axis in range(4):  # what stands on one axis adds the next one, four times as large
            mlp.gate_proj.weight[axis] = mlp.up_proj.weight[axis] = torch.eye(64)[axis]
            mlp.down_proj.weight[axis + 1, axis] = 1 / 8
    return model, tokenizer


@pytest.fixture(scope="session")
def checkpoint(boxing_model, tmp_path_factory):
    """Directory with the digit guesser."""
    directory = tmp_path_factory.mktemp("digit-guesser")
    for part in boxing_model:
        part.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """A benchmark file in the columns of MATH 500: 12 sums below ten."""
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    pairs = [(a, b) for a in range(5) for b in range(5) if a <= b][:12]
    rows = [{"problem": f"{a}+{b}", "answer": str(a + b), "unique_id": f"{a}+{b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def verifier():
    """One verifier for all evaluations."""
    with Verifier(num_workers=1) as verifier:
        yield verifier


@pytest.fixture
def run(verifier):
    """Evaluate with changed arguments."""
    from pacs_trl.evaluation.arguments import EvaluationArguments
    from pacs_trl.evaluation.run import evaluate

    def run(arguments, **changes):
        return evaluate(EvaluationArguments(**{**arguments, **changes}), verifier, progress=False)

    return run


@pytest.fixture
def play(monkeypatch):
    """Put an engine whose completions are those of a function of the request in place of a model."""

    def play(complete):
        def generate(requests, settings):
            return ((request, complete(request)) for request in requests)

        engine = SimpleNamespace(generate=generate, close=lambda: None, context_length=512)
        monkeypatch.setattr("pacs_trl.evaluation.run.start_engine", lambda args: engine)

    return play


@pytest.fixture
def arguments(checkpoint, sums, tmp_path):
    """Keyword arguments of a small transformers evaluation."""
    return {
        "model": str(checkpoint),
        "benchmarks": f"math_500={sums}",
        "output_dir": str(tmp_path / "out"),
        "n": 8,
        "k": "1,2,4,8",
        "engine": "transformers",
        "batch_size": 20,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 8,
        "prompt_instruction": "",
    }
