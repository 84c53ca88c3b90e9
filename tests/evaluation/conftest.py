"""A model that has learned one thing in half a second: to answer any sum with a random digit in a box.

About one answer in ten is right, so counts, grades and pass@k have something to say.
"""

import json

import pytest
import torch
from seeds import shifted

from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tokenizer import build_tokenizer
from pacs_trl.verification import Verifier


@pytest.fixture(scope="session")
def boxing_model():
    """(model, tokenizer) of the digit guesser."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, "tiny", seed=shifted(0))
    generator = torch.Generator().manual_seed(shifted(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        rows = []
        for a, b, digit in zip(*(torch.randint(0, high, (16,), generator=generator).tolist() for high in (5, 5, 10))):
            prompt = [{"role": "user", "content": f"{a}+{b}"}]
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            rows.append(tokenizer(text + rf"\boxed{{{digit}}}<|im_end|>", add_special_tokens=False)["input_ids"])
        input_ids = torch.tensor(rows)
        loss = model(input_ids, labels=input_ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), tokenizer


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
