"""Context length and attention windows of a model, in tokens."""

from typing import Any


def context_lengths(config: Any) -> dict[str, int | None]:
    """Return upper bounds on the sequence length in tokens (or `None`), by config key: the context length, RoPE
    scaling included, and the length up to which the RoPE frequencies of a sequence do not depend on the longest one in
    its batch; RoPE types `longrope` and `dynamic` switch frequencies beyond it."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    rope = getattr(config, "rope_parameters", None) or {}  # one dict for all layers, or one per layer type
    rope_settings = [settings for settings in (rope, *rope.values()) if isinstance(settings, dict)]
    longest = [limit] if limit else []
    fixed: list[int] = []  # lengths up to which frequencies do not depend on the batch
    for settings in rope_settings:
        original: int | None = settings.get("original_max_position_embeddings", limit)
        rope_type = settings.get("rope_type", "")
        if original is not None and limit and settings.get("factor"):
            longest.append(settings["factor"] * original)
        if original is not None and rope_type == "longrope":
            fixed.append(original)
        if "dynamic" in rope_type:
            fixed.append(config.max_position_embeddings)
    return {
        "max_position_embeddings": int(max(longest)) if longest else None,
        "original_max_position_embeddings": min(fixed, default=None),
    }


# Keys of configs that bound how far a layer attends to earlier tokens.
WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "window_size")


def attention_windows(config: Any) -> list[int]:
    """Return the different windows of a model's layers, in increasing order. It is empty if all layers attend to all
    earlier tokens."""
    config = config.get_text_config()
    layer_configs = config.per_layer_config if config.is_heterogeneous else [config]
    windows = set()
    for layer_config in layer_configs:
        layer_types = getattr(layer_config, "layer_types", None)
        if layer_types and set(layer_types) == {"full_attention"}:
            continue  # the window of such a config is not used
        for key in WINDOW_KEYS:
            window = getattr(layer_config, key, None)
            if isinstance(window, int) and window > 0:
                windows.add(window)
    return sorted(windows)
