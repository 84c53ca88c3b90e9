"""Packed rows: the rows of a micro-batch as one long row without padding, and attention in which each sees only itself.

Rows with the same prompt compute it once. Without its last token it lies in front of them, and each of them begins with that
token, which predicts the first token of its completion:

    [prompt without its last token] [last prompt token, completion 1] [last prompt token, completion 2] ...

Positions go on from the prompt in each of these branches; a branch attends to the prompt and to itself.

FlashAttention's variable-length kernels do that if the model was loaded with them. Models loaded with
`attn_implementation="sdpa"` use PyTorch's attention, once per piece, on any device. Everything else (eager, flex, sliding
windows, soft-capped logits, models with state) is not packed: see [`packing_backend`].
"""

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel


PACKED = "pacs_packed_"  # in front of the name of the attention that the model was loaded with

# Causal models whose layers build a further mask from the data; packing would leave it out.
_MASKED_BY_THEIR_LAYERS = ("doge",)


class Piece(NamedTuple):
    """
    Tokens of a packed row that stand in a row in one text: a shared prompt, a branch behind one, or a prompt with its completion.

    Attributes:
        start, length (`int`):
            Where it lies in the packed row.
        prefix_start, prefix_length (`int`):
            Where the shared prompt lies that it continues; 0 tokens if there is none.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class PackedRows:
    """
    Rows of a micro-batch as one row.

    Args:
        prompts, completions (sequences of `B` int64 `np.ndarray`):
            Tokens of each row: at least one of the prompt, of the completion possibly none.

    Attributes:
        ids, positions, labels (int64 `np.ndarray` of shape `(N,)`):
            Token ids, positions in their text, and the ids of completion tokens, -100 elsewhere.
        pieces (`list[Piece]`):
            What the packed row is made of, in its order.
        completions (list of `B` `slice`):
            Where the completion of each row lies.
    """

    def __init__(self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]):
        self.pieces: list[Piece] = []
        self.completions: list[slice] = [slice(0)] * len(prompts)
        self._masks: dict = {}
        ids, positions, end = [], [], 0

        def add(tokens: np.ndarray, prefix: Piece | None) -> Piece:
            nonlocal end
            behind = (prefix.start, prefix.length) if prefix else (0, 0)
            self.pieces.append(Piece(end, len(tokens), *behind))
            ids.append(tokens)
            positions.append(np.arange(len(tokens)) + behind[1])
            end += len(tokens)
            return self.pieces[-1]

        for rows in rows_by_prompt(prompts):
            prompt, prefix = prompts[rows[0]], None
            if len(rows) > 1 and len(prompt) > 1:
                prefix, prompt = add(prompt[:-1], None), prompt[-1:]
            for i in rows:
                add(np.concatenate([prompt, completions[i]]), prefix)
                self.completions[i] = slice(end - len(completions[i]), end)
        self.ids, self.positions = np.concatenate(ids), np.concatenate(positions)
        self.labels = np.full_like(self.ids, -100)
        for where in self.completions:
            self.labels[where] = self.ids[where]

    @property
    def lengths(self) -> list[int]:
        return [piece.length for piece in self.pieces]

    def of_completions(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Of values of shape `(N,)`, those of the completion tokens of each row."""
        in_order = sorted(range(len(self.completions)), key=lambda i: self.completions[i].start)
        ends = [
            0,
            *(end for i in in_order for end in (self.completions[i].start, self.completions[i].stop)),
            len(values),
        ]
        split = values.split(np.diff(ends).tolist())[1::2]
        return [part for _, part in sorted(zip(in_order, split, strict=True), key=lambda pair: pair[0])]

    def mask(self, piece: Piece, device: torch.device) -> torch.Tensor:
        """Which tokens of prompt and branch each token of a branch sees, bool of shape `(C, P + C)`; a view of one for all."""
        if device not in self._masks:
            longest, prefix = max(self.lengths), max(piece.prefix_length for piece in self.pieces)
            self._masks[device] = torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(prefix)
        mask = self._masks[device]
        prefix = mask.shape[1] - mask.shape[0]
        return mask[: piece.length, prefix - piece.prefix_length : prefix + piece.length]

    def flash_inputs(self) -> dict[str, Any]:
        """What FlashAttention's kernels want to know, as transformers passes it on; `key_places` is ours."""
        seen = [piece.prefix_length + piece.length for piece in self.pieces]
        bounds = [torch.tensor(np.cumsum([0, *n]), dtype=torch.int32) for n in (self.lengths, seen)]
        inputs = {"cu_seq_lens_q": bounds[0], "cu_seq_lens_k": bounds[1]}
        inputs |= {"max_length_q": max(self.lengths), "max_length_k": max(seen)}
        if seen != self.lengths:
            places = [
                np.arange(start, start + n)
                for p in self.pieces
                for start, n in ((p.prefix_start, p.prefix_length), p[:2])
            ]
            inputs["key_places"] = torch.from_numpy(np.concatenate(places))
        return inputs


def rows_by_prompt(prompts: Sequence[np.ndarray]) -> list[list[int]]:
    """Rows with equal prompts, in the order in which prompts first appear."""
    found: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        found.setdefault(prompt.tobytes(), []).append(i)
    return list(found.values())


def takes_masks(device: torch.device) -> bool:
    """Whether attention with a mask is as fast there as causal attention, and keeps no larger copy of it."""
    return device.type == "cpu"


def _packed_sdpa(
    module,
    query: torch.Tensor,  # (1, H, N, D), N tokens of all rows
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedRows | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    grouped_query = query.shape[1] != key.shape[1]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=grouped_query)
    queries, keys, values = (x.split(packed.lengths, dim=2) for x in (query, key, value))
    place = {piece.start: i for i, piece in enumerate(packed.pieces)}
    outputs = []
    for piece, q, k, v in zip(packed.pieces, queries, keys, values, strict=True):
        if not piece.prefix_length:
            outputs.append(attend(q, k, v, is_causal=True))
            continue
        i = place[piece.prefix_start]
        k, v = torch.cat([keys[i], k], dim=2), torch.cat([values[i], v], dim=2)
        if takes_masks(query.device):
            outputs.append(attend(q, k, v, attn_mask=packed.mask(piece, query.device)))
        else:  # the queries of the prompt once more
            whole = attend(torch.cat([queries[i], q], dim=2), k, v, is_causal=True)
            outputs.append(whole[:, :, piece.prefix_length :])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _packed_flash(
    module, query, key, value, attention_mask, *, implementation: str, key_places: torch.Tensor | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """The kernels align a causal mask at the last query and key, as a branch behind its prompt needs it."""
    if key_places is not None:
        key, value = key.index_select(2, key_places), value.index_select(2, key_places)
    config = module.config
    packed_implementation = config._attn_implementation
    config._attn_implementation = implementation  # the kernels are chosen by it
    try:
        return AttentionInterface()[implementation](module, query, key, value, None, **kwargs)
    finally:
        config._attn_implementation = packed_implementation


# Registered without a mask function on purpose: transformers then builds no mask, which for N packed tokens would be a
# dense (N, N) matrix.
AttentionInterface.register(f"{PACKED}sdpa", _packed_sdpa)
for _implementation in ("flash_attention_2", "flash_attention_3"):
    AttentionInterface.register(f"{PACKED}{_implementation}", partial(_packed_flash, implementation=_implementation))


def packing_backend(model: PreTrainedModel) -> str | None:
    """How rows of a model, unwrapped (no PEFT, DDP or FSDP), can be packed: `"flash"` for models loaded with
    FlashAttention, `"sdpa"` for models whose attention is plain causal attention run by SDPA, `None` if the rows have
    to be padded."""
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    full_attention = (
        set(layer_types) == {"full_attention"} if layer_types else getattr(config, "sliding_window", None) is None
    )
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if not full_attention or soft_capped or config.model_type in _MASKED_BY_THEIR_LAYERS:
        return None
    if not model._supports_attention_backend:
        return None
    implementation = config._attn_implementation
    if implementation in ("flash_attention_2", "flash_attention_3"):
        return "flash"
    return "sdpa" if implementation == "sdpa" else None


@contextmanager
def packed_attention(config: PreTrainedConfig, backend: str | None):
    """Let `config`'s model attend to packed rows inside the context. Wrap the backward pass too: gradient
    checkpointing runs the forward again there."""
    previous = config._attn_implementation
    if backend is None or previous.startswith(PACKED):
        yield
        return
    config._attn_implementation = PACKED + previous
    try:
        yield
    finally:
        config._attn_implementation = previous
