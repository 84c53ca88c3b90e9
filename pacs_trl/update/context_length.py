"""Context length of a model, in tokens."""

from typing import Any


def _rope_kinds(config: Any) -> list[dict]:
    rope = getattr(config, "rope_parameters", None) or {}  # one dict for all layers, or one per layer type
    return [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]


def context_length(config: Any) -> int | None:
    """Return the context length of a model in tokens, RoPE scaling included; `None` if it is unbounded."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    kinds = [kind for kind in _rope_kinds(config) if kind.get("factor")]
    scaled = [kind["factor"] * kind.get("original_max_position_embeddings", limit) for kind in kinds]
    return int(max([limit, *scaled]))


def length_with_fixed_positions(config: Any) -> int | None:
    """Return the length up to which the RoPE frequencies of a sequence do not depend on the longest sequence in its
    batch, in tokens; `None` if they never do. RoPE types `longrope` and `dynamic` switch frequencies beyond it."""
    config = config.get_text_config()
    kinds = {kind.get("rope_type", ""): kind for kind in _rope_kinds(config)}
    lengths = [kinds["longrope"]["original_max_position_embeddings"]] if "longrope" in kinds else []
    lengths += [config.max_position_embeddings for rope_type in kinds if "dynamic" in rope_type]
    return min(lengths, default=None)


def context_lengths(config: Any) -> dict[str, int | None]:
    """Return upper bounds on the sequence length in tokens, keyed by the config key that each comes from."""
    fixed = length_with_fixed_positions(config)
    return {"max_position_embeddings": context_length(config), "original_max_position_embeddings": fixed}
