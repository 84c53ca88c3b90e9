"""Methods by name, and a check of the keys of their recipes that imports no library."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from .errors import UserError
from .settings import did_you_mean, known_settings
from .settings.declared_names import Declaration, declared_names


class Method(NamedTuple):
    """Configuration and trainer of a method, as `module.class` in this package."""

    config: str
    trainer: str


# Every other method is a module of `pacs_trl.experimental`.
METHODS = {
    "pacs": Method("pacs_config.PACSConfig", "pacs_trainer.PACSTrainer"),
    "grpo": Method("baselines.grpo_config.GRPOConfig", "baselines.grpo_trainer.GRPOTrainer"),
    "rloo": Method("baselines.grpo_config.RLOOConfig", "baselines.rloo_trainer.RLOOTrainer"),
    "maxrl": Method("baselines.grpo_config.MaxRLConfig", "baselines.maxrl_trainer.MaxRLTrainer"),
    "real": Method("baselines.grpo_config.REALConfig", "baselines.real_trainer.REALTrainer"),
    "ppo": Method("baselines.ppo_config.PPOConfig", "baselines.ppo_trainer.PPOTrainer"),
}
DEFAULT_METHOD = "pacs"
_NEVER_PUBLISHED = {"env", "hub_token"}

# Dataclasses of every recipe, beside the configuration of its method; and those of an evaluation.
_EVERY_RECIPE = (
    Declaration(f"{__package__}.recipe", "RunArguments"),
    Declaration(f"{__package__}.data", "DataArguments"),
    Declaration("trl", "ModelConfig"),
    Declaration(f"{__package__}.rewards", "VerificationArguments"),
)
_EVALUATION = (
    Declaration(f"{__package__}.evaluation.arguments", "EvaluationArguments"),
    Declaration(f"{__package__}.rewards", "VerificationArguments"),
)


def method_names() -> list[str]:
    """Return the names of all methods: those of `METHODS` and the modules of `pacs_trl.experimental`."""
    folder = import_module(f"{__package__}.experimental").__path__
    return [*METHODS, *sorted(module.name for module in iter_modules(folder) if not module.name.startswith("_"))]


def check_method(method: Any) -> None:
    """Raise a `ValueError` if there is no such method. The class of a user, `package.module:Class`, is checked when it
    is imported."""
    if method not in method_names() and not is_of_user(method):
        near = did_you_mean(str(method).lower(), method_names())
        raise UserError(
            f"`method` must be one of {', '.join(method_names())}, or package.module:Class; got {method!r}.{near}"
        )


def is_of_user(method: Any) -> bool:
    """Whether a method is the class of a user, `package.module:Class`."""
    return isinstance(method, str) and ":" in method


def check_recipe_keys(settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names unknown keys of a recipe. Keys are not checked if the source of a configuration
    cannot be found; reading the recipe checks them again."""
    method = settings.get("method", DEFAULT_METHOD)
    check_method(method)
    if is_of_user(method):  # whose configuration is not known before it is imported
        return
    known = _names(*_EVERY_RECIPE, _config(method))
    if known is not None:
        if errors := keys_of_other_methods(method, settings.keys() - known):
            raise UserError(" ".join(errors))
        known_settings(settings, known, f"method {method}")


def check_evaluation_keys(settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names unknown keys of an evaluation, as [`check_recipe_keys`] does."""
    if (known := _names(*_EVALUATION)) is not None:
        known_settings(settings, known, "pacs-trl evaluate")


def keys_of_other_methods(method: str, unknown: Set[str]) -> list[str]:
    """Return one message per unknown key that is a setting of other methods of `METHODS`."""
    methods_of: dict[str, list[str]] = {}
    for other in METHODS if unknown else ():
        for name in unknown & (_names(_config(other)) or set()):
            methods_of.setdefault(name, []).append(other)
    return [
        f"`{name}` is a setting of method {' and '.join(methods_of[name])}, not of {method}. Remove the key, or "
        "change `method`."
        for name in sorted(methods_of)
    ]


def settings_to_publish(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split the settings of a recipe into those that may be uploaded, which are the declared settings of its method
    but `env` and `hub_token`, and the names of the others. The settings that a user's method adds are among the
    others."""
    method = settings.get("method", DEFAULT_METHOD)
    configs = [_config(method)] if method in method_names() else [_config(name) for name in METHODS]
    allowed = _names(*_EVERY_RECIPE, *configs)
    if allowed is None:  # a library has moved its source
        from .recipe import settings_classes

        classes = settings_classes(method if method in method_names() else DEFAULT_METHOD)
        allowed = {declared.name for part in classes for declared in fields(part)}
    kept = {name: value for name, value in settings.items() if name in allowed - _NEVER_PUBLISHED}
    return kept, sorted(settings.keys() - kept.keys())


def _config(method: str) -> Declaration:
    """Return where the configuration of a method is declared."""
    if method not in METHODS:
        return Declaration(f"{__package__}.experimental.{method}", "")
    module, _, name = METHODS[method].config.rpartition(".")
    return Declaration(f"{__package__}.{module}", name)


def _names(*declarations: Declaration) -> set[str] | None:
    """Return the names of all settings of some dataclasses, `None` if one of them cannot be read."""
    names: Iterable[set[str] | None] = [declared_names(declaration) for declaration in declarations]
    return None if any(part is None for part in names) else set().union(*names)  # type: ignore[arg-type]
