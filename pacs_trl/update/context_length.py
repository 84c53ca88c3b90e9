"""Context length of a model, in tokens."""

from typing import Any


def _rope_kinds(config: Any) -> list[dict]:
    rope = getattr(config, "rope_parameters", None) or {}  # one for all layers, or one for each type of layer
    return [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]


def context_length(config: Any) -> int | None:
    """Return how many tokens a model has positions for (with scaled RoPE, the scaled number); `None` if unbounded."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    kinds = [kind for kind in _rope_kinds(config) if kind.get("factor")]
    scaled = [kind["factor"] * kind.get("original_max_position_embeddings", limit) for kind in kinds]
    return int(max([limit, *scaled]))


def length_with_fixed_positions(config: Any) -> int | None:
    """Return the tokens up to which a sequence's positions do not depend on the longest one of its batch; `None` if
    they never do. RoPE of the types `longrope` and `dynamic` changes its frequencies beyond that length."""
    config = config.get_text_config()
    kinds = {kind.get("rope_type", ""): kind for kind in _rope_kinds(config)}
    lengths = [kinds["longrope"]["original_max_position_embeddings"]] if "longrope" in kinds else []
    lengths += [config.max_position_embeddings for rope_type in kinds if "dynamic" in rope_type]
    return min(lengths, default=None)


def context_lengths(config: Any) -> dict[str, int | None]:
    """Return bounds on the tokens of a sequence, by the key of the configuration that each comes from."""
    fixed = length_with_fixed_positions(config)
    return {"max_position_embeddings": context_length(config), "original_max_position_embeddings": fixed}
