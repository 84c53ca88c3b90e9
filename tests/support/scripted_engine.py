"""An engine process without a process and without a model, for continuous rollouts that repeat.

vLLM's engine is scripted: it decodes a token of each request per step, as far as it has slots, and a completion ends
at a length that a test chooses. Tokens follow from the seeds of requests. The log-prob of a token tells the weights
that sampled it: it is their [`fingerprint`].
"""

import copy
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch

from pacs_trl.rollouts import late_batches
from pacs_trl.rollouts.stepped_engine import decode
from support.models import trainable_weights
from support.vllm_server import play_installed


def fingerprint(weights: Mapping[str, torch.Tensor]) -> float:
    """A number between -6 and -5 that differs between weights."""
    return -5 - sum(float(weight.double().abs().sum()) for weight in weights.values()) % 1


class SteppedVLLM:
    """`length(position, index)` is the number of tokens of a completion, `max_num_seqs` that of slots."""

    def __init__(self, length: Callable[[int, int], int], logp: float = -5.5, max_num_seqs: int = 1000):
        self.length, self.logp, self.max_num_seqs = length, logp, max_num_seqs
        self.requests: dict[str, SimpleNamespace] = {}  # in the order of arrival
        self.num_steps = 0

    def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
        length = self.length(*map(int, name.split("/"))) - params.num_tokens
        assert length > 0
        self.requests[name] = SimpleNamespace(left=length, random=random.Random(params.seed), prompt=prompt)

    def step(self) -> list[SimpleNamespace]:
        self.num_steps += 1
        outputs = []
        for name, request in list(self.requests.items())[: self.max_num_seqs]:
            token = request.random.randrange(256)
            request.left -= 1
            part = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=self.logp)}])
            outputs.append(SimpleNamespace(request_id=name, outputs=[part], finished=request.left == 0))
            if request.left == 0:
                del self.requests[name]
        return outputs[::-1]  # vLLM promises no order

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]


def params_of(seed: int, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, num_tokens=num_tokens)


class ScriptedEngine:
    """In place of `EngineProcess`, with the same methods. `before_decoding(number)` gets the number of a call, from 1,
    in its thread."""

    length = staticmethod(lambda position, index: 1 + (7 * position + 3 * index) % 11)
    before_decoding = staticmethod(lambda number: None)
    calls: list[SimpleNamespace] = []  # of all engines of a test

    def __init__(self, trainer, num_weight_copies: int):
        assert num_weight_copies == 1
        self.model, self.weights = trainer.accelerator.unwrap_model(trainer.model_wrapped), {}

    def write_weights(self, weight_copy: int, weights: Mapping[str, torch.Tensor] | None) -> None:
        self.weights = trainable_weights(self.model) if weights is None else weights

    def weights_of(self, weight_copy: int) -> Mapping[str, torch.Tensor]:
        return self.weights

    def decode(self, weight_copy, groups, num_groups, version, stream):
        groups = copy.deepcopy(groups)
        self.calls.append(SimpleNamespace(positions=[group.position for group in groups], version=version))
        type(self).before_decoding(len(self.calls))
        engine = SteppedVLLM(type(self).length, fingerprint(self.weights), max_num_seqs=16)
        finished = decode(engine, groups, num_groups, version, stream, params_of)
        assert not engine.requests
        return finished, [group for group in groups if group not in finished]

    def close(self) -> None:
        pass


def play_engine(patch: Callable) -> type[ScriptedEngine]:
    """As if vLLM for CPUs were installed, and its engine were scripted. Returns the class of the engines."""
    engine = type("Scripted", (ScriptedEngine,), {"calls": []})
    patch(late_batches, "EngineProcess", engine)
    play_installed(patch)
    return engine
