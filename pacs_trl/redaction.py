"""Removal of secrets and local paths from settings, for the recipe on the Hub, the model card, and the trackers.

Of a recipe only declared settings are uploaded ([`published_recipe`]). Inside them, in results, and in logs, secrets
are detected by the name of a setting, by their form, or as part of a URL; local paths become names. Settings with
similar names (`pad_token`, `max_new_tokens`, `num_key_value_heads`) stay. A secret without a known form inside a
declared setting of another name is not detected, so secrets belong in environment variables.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from .methods import settings_to_publish
from .settings.names import looks_like_path


logger = logging.getLogger(__name__)


REMOVED = "<removed>"

# Anywhere in a name, without separators of words: HF_PASSWORD, dbPassword, client-secret-2.
_SECRET_NAME = re.compile(
    r"passw|passphrase|secret|credential|authori[sz]ation|bearer|cookie|"
    r"(api|access|private|ssh|signing|encryption)key|"
    r"(hf|hub|api|access|auth|refresh|session|id|github|wandb)token(?!s?id|s?count|ize)"
)
_SECRET_WORDS = {"auth", "pwd", "netrc"}
# Names that end in "token" or "key" are secret too, except after these words of vocabularies and tables.
_VOCABULARY = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "stop", "start", "begin", "end", "think"}
_VOCABULARY |= {"image", "video", "audio", "vision", "boi", "eoi", "fake", "decoder", "placeholder"}
_VOCABULARY |= {"sort", "group", "cache", "column", "label", "problem", "answer", "solution"}
_VOCABULARY |= {"prompt", "text", "metric"}

# Credentials with a known form: of the Hub, model and code hosts, and clouds; JSON web tokens; private keys.
_SECRET_TEXT = re.compile(
    r"\b(?:hf_|api_org_|sk-|[sr]k_live_|gh[opsur]_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|wandb_v1_)[\w-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\b(?i:bearer|basic)\s+(?=\S*[\d=+/_])[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_ASSIGNED = re.compile(
    r"(?P<name>(?:--)?[A-Za-z][\w.-]*)(?P<sign>\s*=\s*|(?<=\w)\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
)
# A header (`X-Api-Key: value`) or YAML (`{api_key: value}`); without a space it may be `module:function`.
_STATED = re.compile(r"(?P<quote>[\"']?)(?P<name>[A-Za-z][\w.-]*)[\"']?\s*:(?:\s+|(?=[\"']))")
# A quoted text, a list or a mapping, or one word: after a scheme or the sign of a YAML entry, and with more cookies.
_STATED_VALUE = re.compile(
    r"\"[^\"]*\"?|'[^']*'?|\[[^\]\n]*\]?|\{[^{}\n]*\}?"
    r"|(?:(?i:bearer|basic|token|digest|negotiate|apikey)[ \t]+|[-|>]\s+)?"
    r"[^\s'\",{}]*[^\s'\",{}\])](?:(?<=;)[ \t]+[\w-]+=[^\s'\",{}]+)*"
)
_BARE_NAMES = {"key", "keys", "token", "tokens"}  # as in "The key: solve for x"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_USER_AT_HOST = re.compile(r"^[^\s/@:]+:(?!//)\S*@(?=[\w\[])")

# Texts for a model, which contain no assignments and are no paths.
_TEXTS = {"prompt_instruction", "instruction", "system_prompt", "chat_template", "prompt", "content"}
_LOCAL = re.compile(r"^(/[^/]+/|~[\w.-]*([/\\]|$)|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\|file://)")
_IN_HOME = re.compile(
    r"(?<![\w.])(?:(?:/home|/Users|/root)(?:/[^\s'\",;:/]+)+|~/[^\s'\",;:]+|[A-Za-z]:\\Users(?:\\[^\s'\",;:\\]+)+)/?"
)
_NAME_OF_A_PATH = re.compile(
    r"(^|_)(path|dir|folder|file|files|checkpoint|deepspeed|fsdp_config|dataset_name|critic_prompt)$"
)


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested plain data (a recipe, results, the arguments of a trainer) without `env` and settings that are
    named like secrets, without credentials in URLs and strings, and with the last part of local paths, so that they do
    not look like Hub ids."""
    return _cleaned(settings, "", lambda name, text: _without_paths(name, _without_credentials(name, text)))


def published_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared settings of a recipe, [`published`]; a warning names those that are left out. Keys that no
    class declares may hold anything, so they are not uploaded, whatever their name."""
    kept, left_out = settings_to_publish(settings)
    if unknown := [name for name in left_out if name not in ("env", "hub_token")]:
        them = "them" if len(unknown) > 1 else "it"
        logger.warning(
            f"{', '.join(unknown)} of the recipe will not be uploaded: no class of this package declares {them}. "
            "Write what others may read into README.md by hand."
        )
    return published(kept)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return [`published`] settings with local paths, for a file on this machine that repeats the run."""
    return _cleaned(settings, "", _without_credentials)


def clean_url(url: str) -> str:
    """Return a URL without user, password, and secrets in its query; `<removed>` if it cannot be parsed."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None  # a ValueError: the "port" is a password with a slash
    except ValueError:
        return REMOVED
    if "@" not in parts.netloc and has_port and "@" in url:
        return REMOVED
    query, fragment = (_clean_query(text) for text in (parts.query, parts.fragment))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, fragment))


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether the name of a setting is that of a secret: `hub_token`, `OPENAI_API_KEY`, `dbPassword`; not
    `pad_token`, nor plurals with a number or null (`max_new_tokens: 512`)."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if _SECRET_NAME.search("".join(words)) or _SECRET_WORDS & set(words):
        return True
    if not words or not (words[-1] in ("key", "keys") or words[-1].endswith(("token", "tokens"))):
        return False
    is_count = words[-1].endswith("s") and isinstance(value, int | float | None)  # None: no limit
    return not is_count and not _VOCABULARY & set(words[:-1])


def _cleaned(value: Any, name: str, clean: Callable[[str, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {
            clean("", key) if isinstance(key, str) else key: _cleaned(inner, str(key), clean)
            for key, inner in value.items()
            if str(key) != "env" and not is_secret(str(key), inner)
        }
    if isinstance(value, list | tuple):
        items = [_cleaned(inner, name, clean) for inner in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("{", "[")) and name not in _TEXTS:  # JSON, the form of mappings on the command line
        try:
            return json.dumps(_cleaned(json.loads(value), name, clean))
        except ValueError:
            pass
    return clean(name, value)


def _without_credentials(name: str, text: str) -> str:
    text = _URL.sub(lambda match: clean_url(match[0]), text)
    text = _SECRET_TEXT.sub(REMOVED, _USER_AT_HOST.sub("", text))
    return text if name in _TEXTS else _ASSIGNED.sub(_clean_assignment, _without_stated(text))


def _without_stated(text: str) -> str:
    """Remove the values after the names of secrets and a colon. Prose has such names, too: a key or a token with no
    other word in its name counts only in quotes, before them, or in a mapping."""
    is_mapping = text.lstrip().startswith("{")
    parts, end = [], 0
    for stated in _STATED.finditer(text):
        value = _STATED_VALUE.match(text, stated.end())
        if value is None or stated.start() < end:
            continue
        is_quoted = stated["quote"] or value[0].startswith(("'", '"'))
        if stated["name"].lower() in _BARE_NAMES and not is_quoted and not is_mapping:
            continue
        if is_secret(stated["name"], int(value[0]) if value[0].isdecimal() else value[0]):
            parts += [text[end : stated.end()], REMOVED]
            end = value.end()
    return "".join(parts) + text[end:]


def _clean_assignment(match: re.Match[str]) -> str:
    is_option = match["name"].startswith("--")  # a space separates name and value of options only
    if ("=" in match["sign"] or is_option) and is_secret(match["name"]):
        return f"{match['name']}{match['sign']}{REMOVED}"
    return match[0]


def _clean_query(text: str) -> str:
    pairs = parse_qsl(text, keep_blank_values=True)
    kept = [(name, value) for name, value in pairs if not is_secret(name) and name.lower() not in ("sig", "signature")]
    return text if len(kept) == len(pairs) else urlencode(kept)


def _without_paths(name: str, text: str) -> str:
    if name not in _TEXTS and (_LOCAL.match(text) or _NAME_OF_A_PATH.search(name) and _is_path(name, text)):
        return _last_part(text)
    return _IN_HOME.sub(lambda match: _last_part(match[0]), text)


def _is_path(name: str, text: str) -> bool:
    """Return whether a setting is a path, not a Hub id or a URL."""
    looks = looks_like_path(text) or "\\" in text or name.endswith("dir") or os.path.exists(text)
    return looks and "://" not in text


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
