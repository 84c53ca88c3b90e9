"""Redaction of settings: hostile recipes, and ordinary ones with similar names."""

import json
import random
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from support.seeds import shifted

from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.methods import method_names
from pacs_trl.recipe import RunArguments, config_class, read_recipe, settings_classes
from pacs_trl.redaction import REMOVED, clean_url, is_secret, published, published_recipe, without_secrets


SECRET = "s3cr3tValue42"
DATA = yaml.safe_load((Path(__file__).parent / "data" / "secrets.yaml").read_text())
SECRET_NAMES, ORDINARY_NAMES, ORDINARY = DATA["secret_names"].split(), DATA["ordinary_names"].split(), DATA["ordinary"]
SECRET_TEXTS = [text.replace("SECRET", SECRET) for text in DATA["secret_texts"]]


def hostile(rng, depth=0):
    """A recipe with secrets in keys, values, lists, JSON texts and addresses, at any depth."""
    settings = {f"{depth}.{i}": rng.choice(SECRET_TEXTS) for i in range(2)}
    for name in rng.sample(SECRET_NAMES, 4):
        forms = [SECRET, [SECRET], {"value": SECRET}] + [4242424242] * (name != "tokens")  # so many tokens are a count
        settings[name] = rng.choice(forms)
    settings["env"] = {"ANY": SECRET, "PORT": 4242424242}
    settings[f"http://u:{SECRET}@host"] = 1
    if depth < 4:
        inner = hostile(rng, depth + 1)
        settings["inner"] = rng.choice((inner, [inner], (1, inner), json.dumps(inner)))
    return settings | ORDINARY


@pytest.mark.parametrize("seed", range(40))
def test_nothing_secret_is_left_of_a_hostile_recipe(seed):
    settings = hostile(random.Random(shifted(seed)))
    before = repr(settings)
    clean = published(settings)
    text = repr(clean)
    assert SECRET not in text and "4242424242" not in text and "env" not in clean
    assert {key: clean[key] for key in ORDINARY} == ORDINARY  # and what is ordinary is untouched
    assert published(clean) == clean and repr(settings) == before


def test_names_of_secrets_and_names_that_only_sound_like_them():
    for name in SECRET_NAMES:
        assert is_secret(name, SECRET) and is_secret(name, [SECRET])
        assert published({"model_init_kwargs": {name: SECRET}}) == {"model_init_kwargs": {}}
    for name in ORDINARY_NAMES:
        for value in ("<|endoftext|>", 7, None, True):
            assert published({"inner": [{name: value}]}) == {"inner": [{name: value}]}


def test_every_setting_but_the_token_stays():
    for part in (RunArguments, EvaluationArguments, *map(config_class, method_names())):
        names = {field.name for field in fields(part)}
        assert names - set(published(dict.fromkeys(names, 1))) <= {"hub_token"}
    assert (
        not is_secret("max_new_tokens", 512) and not is_secret("max_new_tokens", None) and is_secret("tokens", "a b")
    )


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("http://u:p@h:8000/v1", "http://h:8000/v1"),
        ("https://h/x?token=a&b=1#key=3", "https://h/x?b=1"),
        ("https://h/x@main?b=%20", "https://h/x@main?b=%20"),
        ("http://[::1", REMOVED),
        ("http://u:p/q@h/", REMOVED),
    ],
)
def test_secrets_are_removed_from_addresses(url, clean):
    assert clean_url(url) == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("X-Api-Key: SECRET", "X-Api-Key: <removed>"),
        ("{api_key: SECRET}", "{api_key: <removed>}"),
        ("{a: {api_key: SECRET, b: 1}, c: 2}", "{a: {api_key: <removed>, b: 1}, c: 2}"),
        ("{'api_key': 'SECRET,1', 'b': 1}", "{'api_key': <removed>, 'b': 1}"),
        ("{'api_key':'SECRET'}", "{'api_key':<removed>}"),
        ("Accept: json\nAuthorization: Token SECRET\nHost: h", "Accept: json\nAuthorization: <removed>\nHost: h"),
        ("{max_new_tokens: 512, pad_token: x}", "{max_new_tokens: 512, pad_token: x}"),
        ("mine.auth:reward", "mine.auth:reward"),
        ("curl -H 'X-Api-Key: SECRET' --model foo/bar", "curl -H 'X-Api-Key: <removed>' --model foo/bar"),
        ("-H 'Authorization: Bearer SECRET' --x y", "-H 'Authorization: <removed>' --x y"),
        ("Cookie: a=SECRET; b=SECRET and more", "Cookie: <removed> and more"),
        ("password: SECRET, port: 1", "password: <removed>, port: 1"),
        ("access_token: SECRET (old)", "access_token: <removed> (old)"),
        ("api_keys: [SECRET, SECRET], port: 1", "api_keys: <removed>, port: 1"),
        ("a: {api_key: {value: SECRET}, b: 1}", "a: {api_key: <removed>, b: 1}"),
        ("{a: 1, token: SECRET}", "{a: 1, token: <removed>}"),
        ("kwargs={'token': SECRET}", "kwargs={'token': <removed>}"),
        ("token: 'SECRET'", "token: <removed>"),
        ("-H 'Token: SECRET' --x y", "-H 'Token: <removed>' --x y"),
        ("api_keys:\n  - SECRET\nport: 1", "api_keys:\n  <removed>\nport: 1"),
        ('api_key: "SECRET', "api_key: <removed>"),
    ],
)
def test_secrets_after_a_colon_are_removed(text, clean):
    settings = {"generation_kwargs": text.replace("SECRET", SECRET)}
    assert published(settings) == {"generation_kwargs": clean} == published(published(settings))


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 512 per step",
        "The key: solve for x, then y",
        "Note: token: how many tokens",
        "Answer key: [A, B]",
        "max_new_tokens: 512 per completion",
    ],
)
def test_prose_with_a_key_or_a_token_before_a_colon_is_kept(text):
    assert published({"note": text}) == {"note": text}


def test_paths_are_shortened_to_names(tmp_path, monkeypatch):
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = {
        "model_name_or_path": "outputs/model",  # there is such a folder, so this is no Hub id
        "critic_model_name_or_path": "outputs/mine/critic/",
        "critic_prompt": "genac",
        "output_dir": "outputs/run",
        "dataset_name": "/data/sets/train.jsonl",
        "dataset_path": "./x.parquet",
        "resume_from_checkpoint": "last",
        "problems": [{"id": "test/algebra/1.json"}],
        "base_model_name_or_path": "/base",  # on another machine than this
        "chat_template_path": "outputs/elsewhere",
    }
    assert published(settings) == settings | {
        "model_name_or_path": "model",
        "critic_model_name_or_path": "critic",
        "output_dir": "run",
        "dataset_name": "train.jsonl",
        "dataset_path": "x.parquet",
        "base_model_name_or_path": "base",
        "chat_template_path": "elsewhere",
    }
    assert without_secrets(settings | {"token": SECRET, "env": {}}) == settings  # on this machine, paths stay
    assert published({"model_name_or_path": "x" * 5000, "dataset_name": "a\0b"}) is not None


@pytest.mark.parametrize("method", method_names())
def test_trackers_get_what_others_may_see(method, tmp_path):
    argv = f"--method {method} --model_name_or_path m --dataset_name org/addition --use_cpu true".split()
    argv += ["--output_dir", f"/home/{SECRET}/run", "--hub_token", SECRET, "--bf16", "false", "--num_generations", "4"]
    argv += ["--model_init_kwargs", json.dumps({"token": SECRET, "attn_implementation": "sdpa"})]
    argv += ["--vllm_server_base_url", f"http://user:{SECRET}@host:8000", "--per_device_train_batch_size", "4"]
    argv += ["--refill_uniform_groups", "true"] * (method == "dars")
    args = read_recipe(argv).training
    # of wandb and trackio, of TensorBoard, and its hparams
    shown = [args.to_dict(), args.to_json_string(), args.to_sanitized_dict()]
    assert SECRET not in repr(shown) and shown[0]["output_dir"] == "run"
    assert shown[0]["vllm_server_base_url"] == "http://host:8000"
    assert shown[0]["model_init_kwargs"]["attn_implementation"] == "sdpa"


def test_only_declared_settings_of_a_recipe_are_uploaded(caplog):
    """Whatever the names of the others, and whatever they hold."""
    recipe = {"method": "grpo", "epsilon": 0.2, "dataset_name": "org/sums", "model_name_or_path": "org/model"}
    private = {"hub_token": SECRET, "env": {"A": SECRET}, "note": SECRET, "pacs_beta": 4242424242}
    assert published_recipe(recipe | private) == recipe
    assert "note, pacs_beta of the recipe will not be uploaded" in caplog.text and SECRET not in caplog.text
    assert "declares them. Write" in caplog.text
    caplog.clear()
    published_recipe({"note": "text"})
    assert "note of the recipe will not be uploaded" in caplog.text and "declares it. Write" in caplog.text
    mine = recipe | {"method": "mine.methods:Trainer", "pacs_beta": 1.0}
    assert published_recipe(mine | {"mine": SECRET}) == mine  # settings of the core methods are declared


@pytest.mark.parametrize("method", method_names())
def test_every_setting_of_a_method_is_uploaded_but_the_token_and_the_environment(method):
    names = {field.name for part in settings_classes(method) for field in fields(part)}
    recipe = dict.fromkeys(names, 1) | {"method": method}
    assert names - published_recipe(recipe).keys() == names & {"hub_token", "env"}
