"""Forward passes that compute log-probs, entropies, and values of completions.

The rollouts of a micro-batch are packed into one sequence without padding if the model supports it (see `packing.py`).
Otherwise they are padded on the right, where causal attention never reads the padding. In both cases TRL's fused head
computes log-probs in tiles and keeps one number per token: float32 logits of 64 sequences of 8,192 tokens with a
vocabulary of 151,936 would take 319 GB. `startup_check.py` chooses a pass that reproduces the log-probs of the model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from ..errors import UserError
from .compiled_layers import CompiledLayers
from .context_length import context_lengths
from .packed_states import Segments, packed_states, state_modules
from .packing import (
    PackedRollouts,
    has_packed_layers,
    packed_attention,
    packing_backend,
    packs_images,
    warn_of_padding,
    warn_of_soft_cap,
)
from .packing_name import renamed_packing
from .peft_models import reads_whole_rows, without_peft
from .prompt_images import PromptImages, packed_image_inputs, padded_image_inputs
from .router_loss import RouterSums, router_sums


class CompletionLogps(NamedTuple):
    """Log-probs and entropies of the completion tokens of each rollout, float32 `(C,)` in nats. `entropies` is empty
    if the head does not compute them."""

    logps: list[torch.Tensor]
    entropies: list[torch.Tensor]

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as tensors of shape `(B, T)`, padded on the right with 0."""
        return pad_sequence(self.logps, batch_first=True), pad_sequence(self.entropies, batch_first=True)


class ModelInputs(NamedTuple):
    """
    Inputs of a forward pass, on the CPU: one row of `N` packed tokens, or `B` rows of `T` padded tokens.

    Attributes:
        inputs (`dict[str, Any]`): Keyword arguments of the model.
        language_model_inputs (`dict[str, Any]`): Keyword arguments of the language model inside a model that reads
            images: those of packed attention, which an encoder of images would read too.
        token_counts (int64 `np.ndarray` of shape `(1, N)` or `(B, T)`): Number of rollouts that each token belongs to;
            0 for padding.
        predicting_indices (int64 `np.ndarray`): Flat indices of the positions that predict the completion tokens, in
            the order of the rollouts.
        segment_lengths (`list[list[int]]`): [`PackedRollouts.blocks`]; of padded rollouts, their lengths without
            padding, one in each list.
    """

    inputs: dict[str, Any]
    language_model_inputs: dict[str, Any]
    token_counts: np.ndarray
    predicting_indices: np.ndarray
    segment_lengths: list[list[int]]

    @property
    def row_length(self) -> int:
        """Number of tokens of a row, `N` or `T`."""
        return self.token_counts.shape[1]


# Token ids of one prompt or completion, without padding.
TokenIds = Sequence[int] | np.ndarray

# Splits values of all completion tokens, `(1, M)`, into one tensor per rollout.
SplitByCompletion = Callable[[torch.Tensor], list[torch.Tensor]]


class ForwardPass:
    """
    Run forward passes with TRL's fused head, or with the head of the model if `self.fused` is `False`. TRL's trainers
    patch the fused head onto their models; use [`fused_head`] for other models.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model before it is wrapped for
            distributed training.
        device (`torch.device`): Device of the inputs.
        pad_token_id (`int`): Token id of the padding.
        packing (`str`): `"auto"` packs rollouts if the model supports it, `"never"` pads. `self.packing` holds the
            resolved backend, `None` for padding. `padding_free` is the former name, until version 0.3.
        temperature (`float`): Divisor of the logits of the model's head; the fused head divides by another one.
        autocast (`Callable`, *optional*): Returns the autocast context of a forward pass.
        reads_images (`bool`): Whether prompts may have images.

    Attributes:
        entropies_have_gradient (`bool`): Whether entropies are differentiable with the model's head, too, where
            that stores the probabilities of all tokens. The fused head computes their gradient in tiles.
        compiled_layers ([`CompiledLayers`], *optional*): Layers that are compiled in the passes; `None`: none.
        reads_routers (`bool`): Whether passes sum the outputs of the routers in a mixture of experts.
        router_sums ([`RouterSums`], *optional*): Those of the last pass of [`compute_logps`], differentiable.
        image_filler (token ids and [`PromptImages`], *optional*): Prompt that is added, with weight zero, to passes
            without images: with sharded weights all processes must run the encoder of images together.
        on_pass (`Callable`, *optional*): Called before each pass with [`PackedRollouts.blocks`] (of padded rollouts
            their lengths without padding) and the number of completion tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        device: torch.device,
        *,
        pad_token_id: int = 0,
        packing: str = "auto",
        temperature: float = 1.0,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        padding_free: str | None = None,
        reads_images: bool = False,
    ):
        if padding_free is not None:
            packing = renamed_packing(padding_free, stacklevel=3)
        self.model = without_peft(model)
        self.config: PreTrainedConfig = self.model.config
        self.backbone = self.model.base_model  # the model without its head
        # TRL's fused head multiplies by the weight that LoRA leaves unchanged.
        self.fused = not isinstance(self.model.get_output_embeddings(), BaseTunerLayer | TrainableTokensWrapper)
        self.max_length = context_lengths(self.config)["original_max_position_embeddings"]
        self.state_modules = state_modules(self.model)
        self.reads_images = reads_images
        self.packing = None if packing == "never" else self._packing_backend(reads_whole_rows(model))
        text_config = self.config.get_text_config()
        softcap = getattr(text_config, "attn_logit_softcapping", None)
        if softcap is not None and text_config._attn_implementation == "sdpa":
            warn_of_soft_cap(text_config.model_type, softcap)
        self.device = device
        self.pad_token_id = pad_token_id
        self.temperature = temperature
        self.autocast = autocast
        self.entropies_have_gradient = False
        self.compiled_layers: CompiledLayers | None = None
        self.reads_routers = False
        self.router_sums: RouterSums | None = None
        self.image_filler: tuple[list[int], PromptImages | None] | None = None
        self.on_pass: Callable[[list[list[int]], int], None] | None = None

    def _packing_backend(self, adapter_reads_rows: bool) -> str | None:
        """Return the backend that packs rollouts, `None` if they must be padded. Warns if another adapter or another
        attention implementation would be packed."""
        backend = None if adapter_reads_rows else packing_backend(self.model)
        if backend is None and has_packed_layers(self.model):
            implementation = self.config.get_text_config()._attn_implementation
            other_adapter = "The adapter reads each of them as a row of its own: use plain LoRA instead."
            other_attention = f"Set attn_implementation to sdpa, not {implementation}."
            warn_of_padding(other_adapter if adapter_reads_rows else other_attention)
        if self.reads_images and not packs_images(self.config):
            return None
        return backend

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Enable packed attention and compiled layers inside the context. It must include the backward pass too,
        because gradient checkpointing repeats the forward pass there."""
        compiled = nullcontext() if self.compiled_layers is None else self.compiled_layers.enabled()
        states = nullcontext() if self.packing is None else packed_states(self.state_modules)
        with packed_attention(self.config, self.packing), states, compiled:
            yield

    def compute_logps(
        self,
        model,
        prompt_ids: Sequence[TokenIds],
        completion_ids: Sequence[TokenIds],
        images: Sequence[PromptImages | None] | None = None,
    ) -> CompletionLogps:
        """
        Compute the log-probs of completion tokens, and the entropies of the model's distributions at these tokens.

        Args:
            model: The model, wrapped or not.
            prompt_ids, completion_ids (sequences of `B` sequences of `int`): Token ids without padding. Prompts need
                at least one token; completions may be empty.
            images (sequence of `B` [`PromptImages`] or `None`, *optional*): Images of the prompts.

        Returns:
            [`CompletionLogps`]; differentiable if gradients are enabled (entropies: see `entropies_have_gradient`).
        """
        outputs, split = self.forward(model, prompt_ids, completion_ids, images, logps=True)
        entropies = [] if outputs.entropy is None else split(outputs.entropy)
        return CompletionLogps(split(outputs.log_probs), entropies)

    def values(self, model, prompt_ids: Sequence[TokenIds], completion_ids: Sequence[TokenIds]) -> list[torch.Tensor]:
        """Compute the values of a model with one output per token, read at the position before each completion token.
        Returns one float32 tensor `(C,)` per completion. Arguments are those of [`ForwardPass.compute_logps`]."""
        outputs, split = self.forward(model, prompt_ids, completion_ids)
        return split(outputs.logits[..., 0].float())

    def forward(
        self,
        model,
        prompt_ids: Sequence[TokenIds],
        completion_ids: Sequence[TokenIds],
        images: Sequence[PromptImages | None] | None = None,
        logps: bool = False,
    ) -> tuple[Any, SplitByCompletion]:
        """Run the model, and return its outputs (with `logps` log-probs and entropies) at all completion tokens, `(1,
        M, ...)`, and a function that splits them into one tensor per rollout. Raises a `ValueError` if a rollout is so
        long that RoPE frequencies would depend on its batch."""
        has_images = images is not None and any(images)
        if has_images or self.image_filler is None:
            return self._run(model, prompt_ids, completion_ids, images, logps)
        filler_ids, filler_images = self.image_filler
        images = [*[None] * len(prompt_ids), filler_images]
        prompt_ids = [*prompt_ids, filler_ids]
        completion_ids = [*completion_ids, [self.pad_token_id]]
        outputs, split = self._run(model, prompt_ids, completion_ids, images, logps, has_filler=True)
        return outputs, lambda values: _without_filler(split(values))

    def _run(
        self,
        model,
        prompt_ids: Sequence[TokenIds],
        completion_ids: Sequence[TokenIds],
        images: Sequence[PromptImages | None] | None,
        logps: bool,
        has_filler: bool = False,
    ) -> tuple[Any, SplitByCompletion]:
        """Run the model, as [`ForwardPass.forward`] says; with `has_filler` the last prompt is the filler."""
        prompts = [np.asarray(ids, dtype=np.int64) for ids in prompt_ids]
        completions = [np.asarray(ids, dtype=np.int64) for ids in completion_ids]
        self._check_lengths(prompts, completions)
        model_inputs = self._lay_out(prompts, completions, images)
        if self.on_pass is not None:
            self.on_pass(model_inputs.segment_lengths, len(model_inputs.predicting_indices))

        # The fused head computes log-probs in place of logits.
        uses_fused_head = logps and self.fused
        uses_model_head = logps and not self.fused
        labels = torch.from_numpy(np.concatenate(completions))[None].to(self.device)
        inputs = self._on_device(model_inputs.inputs)
        if uses_fused_head:
            inputs |= {"fused_lm_head": True, "shift_labels": labels}
        else:
            inputs["use_cache"] = False

        # Hooks in the model.
        head: AbstractContextManager[None]
        if uses_model_head:
            head = self._model_head_at_predictions(model_inputs)
        else:
            head = self._backbone_at_predictions(model_inputs, gathers_head=logps)
        routers: AbstractContextManager[None] = nullcontext()
        self.router_sums = None
        if logps and self.reads_routers:
            token_counts = model_inputs.token_counts
            if has_filler:
                token_counts = self._without_filler_tokens(token_counts, len(prompts[-1]) + len(completions[-1]))
            routers = self._reading_routers(token_counts)
        language_model = self._with_language_model_inputs(self._on_device(model_inputs.language_model_inputs))

        with self.autocast(), self.attention(), routers, head, language_model:
            outputs = model(**inputs)
        if uses_model_head:
            outputs = self._with_logps(outputs.logits, labels)
        completion_lengths = [len(completion) for completion in completions]
        return outputs, lambda values: list(values[0].split(completion_lengths))

    def _check_lengths(self, prompts: list[np.ndarray], completions: list[np.ndarray]) -> None:
        """Raise a `ValueError` if a rollout is longer than `max_length`."""
        longest = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
        if self.max_length is not None and longest > self.max_length:
            raise UserError(
                f"A prompt and its completion have {longest} tokens. Beyond {self.max_length} this model's log-probs "
                "depend on the longest sequence of a batch (rope_parameters in its config.json). Lower "
                "max_completion_length, or leave out longer prompts (in a recipe: max_prompt_length)."
            )

    def _with_logps(self, logits: torch.Tensor, labels: torch.Tensor) -> FusedCausalLMOutput:
        """Return what the fused head would return, from the logits of the model's head at the positions before `M`
        completion tokens, `(1, M, V)`, and these tokens, `(1, M)`."""
        vocabulary_logps = (logits.float() / self.temperature).log_softmax(dim=-1)
        token_logps = vocabulary_logps.gather(2, labels[..., None])[..., 0]
        entropy_logps = vocabulary_logps if self.entropies_have_gradient else vocabulary_logps.detach()
        entropies = -(entropy_logps.exp() * entropy_logps).sum(dim=-1)
        return FusedCausalLMOutput(log_probs=token_logps, entropy=entropies)

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(self.device) if torch.is_tensor(value) else value for name, value in inputs.items()}

    # Hooks ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _backbone_at_predictions(self, model_inputs: ModelInputs, *, gathers_head: bool) -> Iterator[None]:
        """Let the backbone return only the hidden states that predict completion tokens, `(1, M, H)`, inside the
        context. TRL's fused head reads its output, and would run on all tokens on a CPU. With `gathers_head` its
        weights are gathered."""
        at_predictions = self._selection_of_predictions(model_inputs)
        gathered_head = ExitStack()

        def after_backbone(backbone, arguments, output):
            output.last_hidden_state = at_predictions(output.last_hidden_state)
            if gathers_head:
                gathered_head.enter_context(whole_head(self.model.get_output_embeddings()))

        with self.backbone.register_forward_hook(after_backbone), gathered_head:
            yield

    @contextmanager
    def _model_head_at_predictions(self, model_inputs: ModelInputs) -> Iterator[None]:
        """Let the head of the model read only the hidden states that predict completion tokens, `(1, M, H)`, inside
        the context."""
        at_predictions = self._selection_of_predictions(model_inputs)

        def before_head(head, arguments):
            states, *others = arguments
            return at_predictions(states), *others

        head = self.model.get_output_embeddings()  # in each pass, because FSDP and PEFT replace it
        with head.register_forward_pre_hook(before_head):
            yield

    def _selection_of_predictions(self, model_inputs: ModelInputs) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that selects, of hidden states `(1, N, H)` or `(B, T, H)`, those that predict completion
        tokens."""
        predicting = torch.from_numpy(model_inputs.predicting_indices).to(self.device)

        def at_predictions(states: torch.Tensor) -> torch.Tensor:
            states_of_tokens = states[:, -model_inputs.row_length :]  # without PEFT's virtual tokens
            return states_of_tokens.flatten(0, 1).index_select(0, predicting)[None]

        return at_predictions

    @contextmanager
    def _reading_routers(self, token_counts: np.ndarray) -> Iterator[None]:
        """Let the backbone return the logits of its routers, and store their sums. `token_counts` are those of
        [`ModelInputs`]."""
        config, (num_rows, row_length) = self.config.get_text_config(), token_counts.shape
        counts = torch.from_numpy(token_counts).flatten()

        def before_backbone(backbone, arguments, keywords):  # TRL's head would compute a loss of this pass alone
            return arguments, keywords | {"output_router_logits": True}

        def after_backbone(backbone, arguments, output):
            layers = [
                # without PEFT's virtual tokens
                logits.reshape(num_rows, -1, logits.shape[-1])[:, -row_length:].flatten(0, 1)
                for logits in output.router_logits
            ]
            self.router_sums = router_sums(layers, counts.to(self.device), config.num_experts_per_tok)

        with (
            self.backbone.register_forward_pre_hook(before_backbone, with_kwargs=True),
            self.backbone.register_forward_hook(after_backbone),
        ):
            yield

    def _without_filler_tokens(self, token_counts: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return how often each token counts, with 0 for those of the filler: the last row if rollouts are padded, and
        the last tokens if they are packed, because no other rollout has its prompt."""
        counts = token_counts.copy()
        if self.packing is None:
            counts[-1] = 0
        else:
            counts[0, -num_tokens:] = 0
        return counts

    @contextmanager
    def _with_language_model_inputs(self, language_model_inputs: dict[str, Any]) -> Iterator[None]:
        """Pass more inputs to the language model inside the model, see [`ModelInputs`]."""
        if not language_model_inputs:
            yield
            return

        def before_language_model(language_model, arguments, keywords):
            return arguments, keywords | language_model_inputs

        with self.model.get_decoder().register_forward_pre_hook(before_language_model, with_kwargs=True):
            yield

    # Inputs ---------------------------------------------------------------------------------------------------------

    def _lay_out(
        self, prompts: list[np.ndarray], completions: list[np.ndarray], images: Sequence[PromptImages | None] | None
    ) -> ModelInputs:
        """Return the inputs of a forward pass over some rollouts, packed or padded."""
        if images is not None and any(images):
            completions = [self._without_placeholders(ids) for ids in completions]
        else:
            images = None
        if self.packing is None:
            return self._padded_inputs(prompts, completions, images)
        return self._packed_inputs(prompts, completions, images)

    def _without_placeholders(self, completion: np.ndarray) -> np.ndarray:
        """Return a completion with padding in place of placeholders of images, which it has no images for."""
        tokens = [getattr(self.config, name, None) for name in ("image_token_id", "image_token_index")]
        is_placeholder = np.isin(completion, [token for token in tokens if token is not None])
        return np.where(is_placeholder, self.pad_token_id, completion)

    def _packed_inputs(
        self, prompts: list[np.ndarray], completions: list[np.ndarray], images: Sequence[PromptImages | None] | None
    ) -> ModelInputs:
        prompt_positions = None
        if images is not None:
            prompt_positions = [
                self._prompt_positions(prompt, prompt_images)
                for prompt, prompt_images in zip(prompts, images, strict=True)
            ]
        packed = PackedRollouts(
            prompts,
            completions,
            images=images,
            prompt_positions=prompt_positions,
            keeps_last_tokens=self.reads_routers,
        )
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(packed.ids)[None],
            "attention_mask": None,
            "position_ids": torch.from_numpy(packed.positions).unsqueeze(-2),
        }
        language_model_inputs: dict[str, Any] = {}
        kernel_inputs = packed.kernel_inputs()
        if self.state_modules:
            kernel_inputs["seq_idx"] = Segments(packed.groups, self.device)
        if images is None:
            inputs |= kernel_inputs
        else:
            inputs |= packed_image_inputs(packed.images, len(packed.ids), packed.starts)
            language_model_inputs = kernel_inputs
        return ModelInputs(
            inputs,
            language_model_inputs,
            token_counts=packed.multiplicities[None],
            predicting_indices=packed.flat_indices,
            segment_lengths=packed.blocks,
        )

    def _prompt_positions(self, prompt: np.ndarray, images: PromptImages | None) -> np.ndarray:
        """Return the position ids of a prompt: `(P,)`, or `(3, P)` if those of images have a time and a place."""
        get_rope_index: Callable | None = getattr(self.backbone, "get_rope_index", None)
        if get_rope_index is None:
            return np.arange(len(prompt))
        if images is None:
            return np.broadcast_to(np.arange(len(prompt)), (3, len(prompt)))
        ids = torch.from_numpy(prompt)[None]
        inputs = images.inputs | {name: torch.from_numpy(types)[None] for name, types in images.token_types.items()}
        parameters = inspect.signature(get_rope_index).parameters
        inputs = {name: value for name, value in inputs.items() if name in parameters}
        positions, _ = get_rope_index(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
        return positions[:, 0].numpy()

    def _padded_inputs(
        self, prompts: list[np.ndarray], completions: list[np.ndarray], images: Sequence[PromptImages | None] | None
    ) -> ModelInputs:
        sequences = [
            torch.from_numpy(np.concatenate([prompt, completion]))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        ids = pad_sequence(sequences, batch_first=True, padding_value=self.pad_token_id)
        mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
        inputs = {"input_ids": ids, "attention_mask": mask}
        row_length = ids.shape[1]
        if images is not None:
            inputs |= padded_image_inputs(images, row_length)
        # A token is predicted one position earlier, the first one of a completion at the end of its prompt.
        predicting: list[np.ndarray] = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            end_of_prompt = row * row_length + len(prompt) - 1
            predicting.append(np.arange(end_of_prompt, end_of_prompt + len(completion)))
        return ModelInputs(
            inputs,
            language_model_inputs={},
            token_counts=mask.numpy(),
            predicting_indices=np.concatenate(predicting),
            segment_lengths=[[len(sequence)] for sequence in sequences],
        )


@contextmanager
def whole_head(head: torch.nn.Module) -> Iterator[None]:
    """
    Gather the weights of a head that FSDP2 shards alone, for TRL's fused head, which reads them without calling it.

    Accelerate shards it together with the last norm of a text model, which gathers both, but alone in a checkpoint
    that also reads images. TRL would gather it without summing its gradient over processes.
    """
    if not isinstance(head, FSDPModule) or not isinstance(head.weight, DTensor):
        yield
        return
    head.unshard()
    try:
        yield
    finally:
        if not torch.is_grad_enabled():  # otherwise the backward pass does
            head.reshard()


def _without_filler(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of all completions but the last one, the filler.

    Its values are added, times 0, to those of the first completion: with sharded weights all processes must also run
    the backward pass of the encoder of images together, which a dropped output would not have.
    """
    first, *others, filler = values
    return [first + 0.0 * filler.sum(), *others]


@contextmanager
def fused_head(model, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False) -> Iterator[None]:
    """Patch TRL's fused head onto `model` inside the context, so that a [`ForwardPass`] can compute its log-probs, and
    restore its `forward` on exit. Models of TRL's trainers already have the fused head."""
    patched = model.__dict__.get("forward")  # e.g. patched by a trainer
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        del model.forward
        if patched is not None:
            model.forward = patched


def logps_in_batches(
    compute: Callable,
    prompt_ids: Sequence,
    completion_ids: Sequence,
    batch_size: int,
    images: Sequence[PromptImages | None] | None = None,
) -> list[torch.Tensor]:
    """Call `compute(prompt_ids, completion_ids, images)`, which returns [`CompletionLogps`], for batches of
    completions. All processes make equally many calls, if need be on a filler. Returns one float32 `(C,)` per
    completion on the CPU."""
    logps: list[torch.Tensor] = []
    most_completions = max(gather_object([len(prompt_ids)]))  # of a process
    for start in range(0, most_completions, batch_size):
        part = slice(start, start + batch_size)
        images_of_part = None if images is None else images[part]
        if prompt_ids[part]:
            outputs = compute(prompt_ids[part], completion_ids[part], images_of_part)
        else:
            outputs = compute([[0, 0]], [[0, 0]], None)  # a filler
        logps += [values.cpu() for values in outputs.logps]
    return logps[: len(prompt_ids)]  # without those of a filler
