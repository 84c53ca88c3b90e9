"""The startup check chooses for every causal language model of transformers what docs/compatibility.md says, and then
a micro-batch has the log-probs and gradients of its sequences one at a time."""

import re
from pathlib import Path

import pytest
import torch
from support.architectures import build
from support.seeds import shifted
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

from pacs_trl.update.forward_pass import ForwardPass
from pacs_trl.update.startup_check import choose_forward_pass


PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
LENGTHS = ((20, 30), (20, 5), (7, 19))  # of prompts and completions; beyond every window


def documented() -> set[tuple[str, str]]:
    """Model types and what the table of the page says of them: of some two things, by the version of transformers."""
    rows = re.findall(r"^\| (.+?) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {(model_type, outcome) for outcome, types in rows for model_type in types.split("`, `")}


def gradient(model) -> torch.Tensor:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([g.flatten() for g in gradients])


def outcome(model_type: str, rows, weights) -> str:
    """How completions of this type are scored, and that it is exact."""
    try:
        model = build(model_type)
    except Exception:
        return "not built small"
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, torch.device("cpu"))
    try:
        choose_forward_pass(forward_pass, model)
    except ValueError:
        return "rejected"
    with forward_pass.attention():
        completion_logps = forward_pass.compute_logps(model, *rows).logps
        torch.dot(torch.cat(completion_logps), torch.cat(weights)).backward()
    actual_gradient = gradient(model)
    for logps, prompt, completion, weight in zip(completion_logps, *rows, weights, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
        torch.dot(expected, weight).backward()
    expected_gradient = gradient(model)
    assert (actual_gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm()  # not where one is NaN
    return ("packed" if forward_pass.packing else "padded") + ("" if forward_pass.fused else ", own head")


@pytest.mark.slow
def test_every_causal_language_model_is_packed_or_padded_as_documented():
    generator = torch.Generator().manual_seed(shifted(1))
    draw = lambda n: torch.randint(5, 100, (n,), generator=generator).tolist()  # noqa: E731
    shared, other = draw(20), draw(7)
    rows = [shared, shared, other], [draw(n) for _, n in LENGTHS]
    weights = [torch.randn(n, generator=generator) for _, n in LENGTHS]
    outcomes, failed = {}, {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            outcomes[model_type] = outcome(model_type, rows, weights)
        except AssertionError as error:
            failed[model_type] = str(error)
    assert not failed
    assert not outcomes.items() - documented() and len(outcomes) > 150
