"""Forward passes: the only place where prompts and completions go in and log-probs come out.

The rows of a micro-batch are packed into one long row without padding where the model allows it (see `packing.py`),
else padded on the right, behind prompt and completion, where nothing that is causal sees the padding. Either way TRL's
fused head computes log-probs in tiles and keeps one number per token: the logits of 64 rows of 8,192 tokens over
151,936 words would take 319 GB in float32. `startup_check.py` chooses the pass that gives the model's own log-probs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import FusedCausalLMOutput

from .context_length import length_with_fixed_positions
from .packing import PackedRows, packed_attention, packing_backend


class Scores(NamedTuple):
    """Values of the completion tokens of each row, float32 of shape `(C,)` in nats; no entropies if the head gives
    none."""

    logps: list[torch.Tensor]
    entropies: list[torch.Tensor]

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as tensors of shape `(B, T)`, 0 behind the end of a row."""
        return pad_sequence(self.logps, batch_first=True), pad_sequence(self.entropies, batch_first=True)


# Splits values of all completion tokens, `(1, M)` in the order of the rows, into those of each row.
OfCompletions = Callable[[torch.Tensor], list[torch.Tensor]]


class Scorer:
    """
    Makes forward passes with TRL's fused head, which TRL's trainers put on their models ([`fused_head`] on others), or
    with the model's own head where `self.fused` is `False`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model before it is wrapped for
            distributed training.
        device (`torch.device`): Where the passes run.
        pad_token_id (`int`): Fills the padding.
        padding_free (`str`): `"auto"` packs rows where the model allows it, `"always"` insists on it, `"never"` pads.
            `packing` holds the resolved backend.
        temperature (`float`): Divides the model's own logits; the fused head has its own.
        autocast (`Callable`, *optional*): Makes the context of a forward pass.

    Raises:
        `ValueError`: if `padding_free="always"` and the rows of this model cannot be packed.
    """

    def __init__(
        self,
        model,
        device: torch.device,
        *,
        pad_token_id: int = 0,
        padding_free: str = "auto",
        temperature: float = 1.0,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        prompt_learning = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.model = base
        self.config = base.config
        self.backbone = base.base_model  # all but the head
        self.fused = True
        self.max_length = length_with_fixed_positions(self.config)
        self.packing = packing_backend(base) if padding_free != "never" and not prompt_learning else None
        self.device = device
        self.pad_token_id = pad_token_id
        self.padding_free = padding_free
        self.temperature = temperature
        self.autocast = autocast
        if padding_free == "always" and self.packing is None:
            raise ValueError(
                "padding_free='always' needs a model with plain causal attention in all layers, loaded with "
                f"attn_implementation 'sdpa', 'flash_attention_2' or 'flash_attention_3'; this one is a "
                f"{type(base).__name__} with {self.config._attn_implementation!r}. Use padding_free='auto'."
            )

    def attention(self) -> AbstractContextManager:
        """Wrap a forward pass and its backward pass, in which gradient checkpointing runs the forward pass again."""
        return packed_attention(self.config, self.packing)

    def score(self, model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> Scores:
        """
        Compute log-probs of given completions, and the entropies of the distributions they were sampled from.

        Args:
            model: The model, wrapped or not.
            prompt_ids, completion_ids (sequences of `B` sequences of `int`): Tokens of each row without padding: at
                least one of the prompt, of the completion possibly none.

        Returns:
            [`Scores`], differentiable in the log-probs where gradients are enabled.
        """
        outputs, of_completions = self.forward(model, prompt_ids, completion_ids, fused_lm_head=True)
        entropies = [] if outputs.entropy is None else of_completions(outputs.entropy)
        return Scores(of_completions(outputs.log_probs), entropies)

    def score_in_batches(
        self, model, prompt_ids: Sequence, completion_ids: Sequence, batch_size: int, num_batches: int
    ) -> list[torch.Tensor]:
        """Compute log-probs in `num_batches` forward passes, which may be more than there are rows for. Returns one
        float32 `(C,)` per row on the CPU."""
        logps: list[torch.Tensor] = []
        for start in range(0, num_batches * batch_size, batch_size):
            prompts, completions = (ids[start : start + batch_size] or [[0]] for ids in (prompt_ids, completion_ids))
            logps += [values.cpu() for values in self.score(model, prompts, completions).logps]
        return logps[: len(prompt_ids)]

    def values(
        self, model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Compute the values of a model with one output per token, one position before each completion token, float32
        `(C,)` of each row. Arguments as in [`Scorer.score`]."""
        outputs, of_completions = self.forward(model, prompt_ids, completion_ids, use_cache=False)
        return of_completions(outputs.logits[..., 0].float())

    def forward(
        self, model, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], **inputs
    ) -> tuple[Any, OfCompletions]:
        """Return what the model returns for the completion tokens of rows, `(1, M, ...)` in their order, and a
        function that splits it into rows. `inputs` is what else the model is given; `fused_lm_head=True` asks for
        log-probs."""
        prompts, completions = ([np.asarray(ids, dtype=np.int64) for ids in of] for of in (prompt_ids, completion_ids))
        longest = max(map(sum, zip(map(len, prompts), map(len, completions), strict=True)))
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"A prompt and its completion have {longest} tokens. Beyond {self.max_length} this model's log-probs "
                "depend on the longest sequence of a batch (rope_parameters in its config.json). Lower "
                "max_completion_length, or leave out longer prompts (in a recipe: max_prompt_length)."
            )
        laid_out, places = (self._padded if self.packing is None else self._packed)(prompts, completions)
        own_head = "fused_lm_head" in inputs and not self.fused
        labels = torch.from_numpy(np.concatenate(completions))[None].to(self.device)
        if own_head:
            inputs = {name: value for name, value in inputs.items() if name != "fused_lm_head"} | {"use_cache": False}
        elif "fused_lm_head" in inputs:
            inputs["shift_labels"] = labels
        inputs |= {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in laid_out.items()}
        num_tokens, places = inputs["input_ids"].shape[1], torch.from_numpy(places).to(self.device)

        def of_predictions(states: torch.Tensor) -> torch.Tensor:
            states = states[:, -num_tokens:]  # not those of PEFT's virtual tokens
            return states.flatten(0, 1).index_select(0, places)[None]

        def behind_backbone(backbone, given, output):  # before the head, which TRL's lets see every token on a CPU
            output.last_hidden_state = of_predictions(output.last_hidden_state)

        def before_head(head, given):
            return of_predictions(given[0]), *given[1:]

        if own_head:  # looked up here, as FSDP and PEFT replace it
            hook = self.model.get_output_embeddings().register_forward_pre_hook(before_head)
        else:
            hook = self.backbone.register_forward_hook(behind_backbone)
        with self.autocast(), self.attention(), hook:
            outputs = model(**inputs)
        if own_head:
            outputs = self._from_logits(outputs, labels)
        return outputs, lambda values: list(values[0].split(list(map(len, completions))))

    def _from_logits(self, outputs, labels: torch.Tensor) -> FusedCausalLMOutput:
        logps = (outputs.logits.float() / self.temperature).log_softmax(dim=-1)
        values = logps.detach()
        return FusedCausalLMOutput(
            log_probs=logps.gather(2, labels[..., None])[..., 0],
            entropy=-(values.exp() * values).sum(dim=-1),
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    def _packed(self, prompts: list[np.ndarray], completions: list[np.ndarray]) -> tuple[dict, np.ndarray]:
        rows = PackedRows(prompts, completions)
        ids, positions = (torch.from_numpy(x)[None] for x in (rows.ids, rows.positions))
        inputs = {"input_ids": ids, "attention_mask": None, "position_ids": positions, **rows.kernel_inputs()}
        return inputs if self.packing == "flash" else inputs | {"packed": rows}, rows.places

    def _padded(self, prompts: list[np.ndarray], completions: list[np.ndarray]) -> tuple[dict, np.ndarray]:
        """Return inputs, and where completion tokens are predicted, counted over all rows."""
        ids, mask = pad_batch(
            [np.concatenate(row) for row in zip(prompts, completions, strict=True)], self.pad_token_id
        )
        starts = [row * ids.shape[1] + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        places = [np.arange(i, i + len(c)) for i, c in zip(starts, completions, strict=True)]
        return {"input_ids": ids, "attention_mask": mask}, np.concatenate(places)


def pad_batch(sequences: Sequence[np.ndarray], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad `B` sequences of token ids on the right. Returns ids and attention mask, int64 of shape `(B, longest)`."""
    ids = torch.full((len(sequences), max(map(len, sequences))), pad_token_id)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.from_numpy(sequence)
        mask[i, : len(sequence)] = 1
    return ids, mask
