"""Pushing to a Hub on this machine: allow-list, secrets, failures, dry run, and READMEs written by hand."""

import json
import re
import shlex
from functools import partial

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from support.results_world import make_results
from support.runs import build_trainer

from pacs_trl.cli import run
from pacs_trl.errors import FailedRun, UserError
from pacs_trl.evaluation.provenance import checkpoint_digest, training_facts
from pacs_trl.hub import check_branch, push


main = partial(run, "push")


REPO = "user/pacs-mini"
RECIPE = {"method": "pacs", "model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "org/problems", "pacs_beta": 1.0}
UPLOADED = ["README.md", "config.json", "model.safetensors", "provenance.json", "recipe.yaml", "results.json"]
UPLOADED += ["tokenizer.json", "trainer_state.json"]


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint directory as training leaves it: 50 kB of weights, a log, an older checkpoint inside."""
    directory = tmp_path / "run"
    (directory / "checkpoint-20").mkdir(parents=True)
    (directory / "checkpoint-20" / "model.safetensors").write_bytes(b"old" * 10_000)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 200)
    (directory / "optimizer.pt").write_bytes(b"moments" * 10_000)
    (directory / "training_args.bin").write_bytes(b"pickle")
    (directory / "provenance.json").write_text(json.dumps(training_facts(num_processes=2) | {"commit": "fedcba"}))
    (directory / "samples").mkdir()
    (directory / "samples" / "aime_2024.jsonl").write_text("{}\n")
    history = [{"step": step, "reward": 0.1 * step, "entropy": 0.4, "step_time": 1.0} for step in range(1, 6)]
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    model = {"name": "run", "digest": checkpoint_digest(directory)}
    results = make_results("PACS", 0.5, benchmarks=("aime_2024", "math_500"), ks=(1, 8), model=model)
    (tmp_path / "results.json").write_text(json.dumps(results))
    return directory


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """huggingface_hub waits before it repeats a request."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def push_it(checkpoint, hub, **changes):
    extra = {"results": checkpoint.parent / "results.json", "recipe": checkpoint.parent / "recipe.yaml"}
    return push(checkpoint, REPO, api=HfApi(endpoint=hub.url, token="hf_x"), **{**extra, **changes})


def contents_of(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_everything_arrives_and_nothing_is_written_here(checkpoint, hub):
    before = contents_of(checkpoint)
    files = push_it(checkpoint, hub, private=True, revision="step-480")
    assert sorted(hub.files[REPO]) == UPLOADED == files and contents_of(checkpoint) == before
    for path in ("model.safetensors", "config.json", "tokenizer.json", "trainer_state.json"):
        assert hub.files[REPO][path] == (checkpoint / path).read_bytes()
    assert hub.private[REPO] and hub.commits[REPO] == ["Upload model, card, recipe and results"]
    assert hub.branches[REPO] == hub.created[REPO] == ["step-480"]
    push_it(checkpoint, hub)
    assert len(hub.commits[REPO]) == 1  # nothing has changed
    # the card has the numbers and their conditions
    results = json.loads(hub.files[REPO]["results.json"])
    cell = results["benchmarks"]["aime_2024"]["pass_at_k"]["8"]
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.base_model == "Qwen/Qwen3-8B" and card.data.datasets == ["org/problems"]
    (entry,) = [e for e in card.data.eval_results if e.dataset_name == "AIME 2024" and e.metric_type == "pass@8"]
    assert entry.metric_value == round(100 * cell["value"], 2) and entry.dataset_type == "org/aime_2024"
    assert f"{100 * cell['value']:.2f} [{100 * cell['lower']:.1f}, {100 * cell['upper']:.1f}]" in card.text
    conditions = ("prompt digest `pppppppppppppppp`", "math_verify 0.9.0 (authors protocol)", "at most 8192 tokens")
    for fact in (*conditions, "n = 128", "temperature 0.6", "recipe.yaml", "1 x NVIDIA H200", "with 2 processes on"):
        assert fact in card.text


@pytest.mark.parametrize(
    ("kind", "answer", "uploaded"),
    [
        ("create", 500, "Nothing was uploaded"),
        ("readme", 500, "Nothing was uploaded"),  # a README that cannot be read is not taken for none
        ("preupload", 403, "no commit is confirmed"),
        ("commit", 0, "no commit is confirmed"),
    ],
)
def test_a_failed_push_says_what_is_where_and_is_resumed_by_the_next(checkpoint, hub, kind, answer, uploaded):
    hub.fail_next[kind] = [answer]
    command = f"pacs-trl push --model .* --repo {REPO} --results .*results.json --recipe .*recipe.yaml"
    with pytest.raises(FailedRun, match=f"{uploaded}.*model is complete in .*{command}") as caught:
        push_it(checkpoint, hub)
    assert ("hf auth login" in str(caught.value)) == (answer == 403)  # the token may not write
    assert hub.files.get(REPO, {}) == {}
    push_it(checkpoint, hub)
    assert sorted(hub.files[REPO]) == UPLOADED


def test_the_command_after_a_failed_push_names_branch_and_message(checkpoint, hub, monkeypatch):
    hub.fail_next["commit"] = [500]
    with pytest.raises(FailedRun) as caught:
        push_it(checkpoint, hub, revision="step-480", commit_message="Step 480")
    (command,) = re.findall("`pacs-trl push (.*)`", str(caught.value))
    monkeypatch.setattr("pacs_trl.hub.HfApi", lambda: HfApi(endpoint=hub.url, token="hf_x"))
    assert main(shlex.split(command)) == 0
    assert hub.branches[REPO] == ["step-480"] and hub.commits[REPO] == ["Step 480"]
    assert sorted(hub.files[REPO]) == UPLOADED


def test_the_main_branch_and_references_are_not_created(checkpoint, hub):
    push_it(checkpoint, hub, revision="main")
    assert hub.created[REPO] == [] and hub.branches[REPO] == ["main"]
    hub.created[REPO] = ["refs%2Fpr%2F1"]
    push_it(checkpoint, hub, revision="refs/pr/1", commit_message="Again", results=None)
    assert hub.created[REPO] == ["refs%2Fpr%2F1"]


@pytest.mark.parametrize("repo", ["user/a b", "user/-a", "user/a..b"])
def test_a_name_that_the_hub_refuses_is_a_mistake_of_the_user(checkpoint, capsys, repo):
    assert main(["--model", str(checkpoint), "--repo", repo, "--dry_run"]) == 2
    assert "Set --repo." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "a b", "a..b", "a~1", "/a", "a/", "a.lock", "-a", "a/.b", "@", "a@{1}", "a."])
def test_what_git_refuses_as_a_branch_is_refused_before_a_connection(checkpoint, hub, name):
    with pytest.raises(UserError, match="cannot be the name of a branch of git. Name another branch"):
        push_it(checkpoint, hub, revision=name)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["main", "step-480", "v1.0", "users/me/lr_1e-6", "refs/pr/1", "größer", "a@b"])
def test_names_of_branches_are_accepted(name):
    check_branch(name)


def test_a_commit_is_no_branch(checkpoint, hub):
    """The Hub would create a branch with the name of the commit."""
    with pytest.raises(UserError, match=f"revision {'c' * 40} is a commit.* Name a branch"):
        push_it(checkpoint, hub, revision="c" * 40)
    assert hub.calls == []


def test_a_failed_push_without_a_token_says_how_to_log_in(checkpoint, hub, monkeypatch):
    monkeypatch.setattr("pacs_trl.hub.get_token", lambda: None)
    hub.fail_next["create"] = [401]
    with pytest.raises(FailedRun, match="no token on this machine: run `hf auth login`, or set HF_TOKEN. Upload it"):
        push(checkpoint, REPO, api=HfApi(endpoint=hub.url))


@pytest.mark.parametrize(
    ("base", "adapter_base", "words"),
    [
        ("Qwen/Qwen3-8B", None, None),
        ("outputs/models/base", None, "'outputs/models/base' is a local directory, so the card names it without"),
        (
            "outputs/models/base",
            "/home/me/base",
            "'/home/me/base' is a local directory, so others cannot load",
        ),
        ("outputs/models/base", "Qwen/Qwen3-8B", None),
    ],
)
def test_a_base_model_that_only_this_machine_has_is_warned_of(checkpoint, hub, caplog, base, adapter_base, words):
    (checkpoint.parent / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"model_name_or_path": base}))
    if adapter_base is not None:
        (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": adapter_base}))
    push_it(checkpoint, hub, results=None)
    warnings = [record.message for record in caplog.records if record.name == "pacs_trl.hub"]
    assert [words in warning for warning in warnings] == [True] * (words is not None)
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.base_model == ("Qwen/Qwen3-8B" if words is None else None)


def measured_on(checkpoint, **model):
    """Write results of another model."""
    path = checkpoint.parent / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))


def test_scores_of_other_weights_are_refused(checkpoint, hub):
    push_it(checkpoint, hub)
    (checkpoint / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 200)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="digest"):
            push_it(checkpoint, hub, dry_run=dry_run)
    assert len(hub.commits[REPO]) == 1


def test_scores_of_a_model_of_the_hub_are_refused(checkpoint, hub):
    measured_on(checkpoint, name="Qwen/Qwen3-8B", revision="c189")
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="measured on Qwen/Qwen3-8B of the Hub.*--model"):
            push_it(checkpoint, hub, dry_run=dry_run)
    assert hub.calls == []


def test_scores_of_a_server_are_uploaded_with_a_warning(checkpoint, hub, caplog):
    measured_on(checkpoint, name="mine", server="http://localhost:8000/v1")
    push_it(checkpoint, hub)
    assert "server, whose weights cannot be compared" in caplog.text and "results.json" in hub.files[REPO]


def test_a_trainer_pushes_what_the_command_line_pushes(tmp_path, hub, monkeypatch):
    """With the results and the recipe of its output directory."""
    directory = tmp_path / "trained"
    settings = {"push_to_hub": True, "hub_model_id": REPO, "hub_private_repo": True, "hub_token": "hf_x"}
    settings["hub_revision"] = "first"
    trainer = build_trainer(directory, max_steps=5, save_strategy="steps", save_steps=1, **settings)
    assert hub.private[REPO] and hub.created[REPO] == ["first"]  # before any work
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "is_world_process_zero", lambda: False)
        assert trainer.push_to_hub() is None  # only the first process pushes
    trainer.train()
    assert hub.commits[REPO] == []  # nothing before the end
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    model = {"name": "trained", "server": "http://localhost:8000/v1"}
    results = make_results("PACS", 0.5, benchmarks=("aime_2024",), ks=(1, 8), model=model)
    (directory / "results.json").write_text(json.dumps(results))
    files = trainer.push_to_hub(dataset_name="org/named", tags="sums")
    assert hub.commits[REPO] == ["End of training"]
    added = {"README.md", "recipe.yaml", "results.json", "provenance.json"}
    assert added <= set(files) == set(hub.files[REPO]) and "training_args.bin" not in files
    for content in hub.files[REPO].values():
        assert str(directory).encode() not in content and b"hf_x" not in content
    card = hub.files[REPO]["README.md"].decode()
    facts = ("pass@8", "n = 128", "with 1 process on", "base_model: Qwen/Qwen3-8B", "- org/named", "- sums")
    assert all(fact in card for fact in facts)
    # The command line finds nothing to add, and saving again pushes again, here from a thread.
    push(directory, REPO, api=HfApi(endpoint=hub.url, token="hf_x"))
    assert len(hub.commits[REPO]) == 1
    trainer.create_model_card(tags=["more"])
    trainer.save_model()
    trainer.push_to_hub("Again", blocking=False, tags=["again"]).result()
    assert hub.commits[REPO][1:] == ["Model save", "Again"] and set(hub.branches[REPO]) == {"first"}
    # A repository that this push makes, as transformers 5.23 has it.
    trainer.hub_model_id, trainer.args.hub_model_id, trainer.args.hub_private_repo = None, "org/other", False
    trainer.push_to_hub(private=True)
    assert hub.private["org/other"]


SECRET = "s3cr3tValue42"
STAYS = """
    .env .netrc train.log events.out.tfevents.1 run_id wandb/run.json runs/x/events.out notes.txt
    completions/completions_00001.parquet src/modeling_x.py optimizer.bin scheduler.pt settings.json wandb.yaml
    grades/x.json pacs_state_0.pt token .eval_results/x.json model.safetensors.tmp
""".split()
BELONGS = """
    generation_config.json chat_template.jinja merges.txt LICENSE model-00001-of-00002.safetensors
    model.safetensors.index.json additional_chat_templates/tools.jinja
""".split()


def test_no_secret_and_nothing_but_the_model_is_published(checkpoint, hub):
    """Settings, addresses and paths in every file that goes up, and files that do not."""
    home = f"/home/{SECRET}/models/base"
    hostile = {
        **RECIPE,
        "model_name_or_path": home,
        "env": {"HF_TOKEN": SECRET},
        "hub_token": SECRET,
        "model_init_kwargs": {"token": SECRET, "attn_implementation": "sdpa"},
        "vllm_server_base_url": f"http://user:{SECRET}@host:8000",
        "output_dir": f"/home/{SECRET}/run",
    }
    (checkpoint / "recipe.yaml").write_text(f"# {SECRET}\n" + yaml.safe_dump(hostile))
    results = json.loads((checkpoint.parent / "results.json").read_text())
    results["model"] = {"name": "run", "server": f"http://user:{SECRET}@host:8000/v1"}
    (checkpoint.parent / "results.json").write_text(json.dumps(results))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state |= {"best_model_checkpoint": f"{home}/checkpoint-20"}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    # keys of any depth whose names end like those of paths; nothing else is changed
    kept = {"lstrip": False, "content": "/no/path", "target_modules": "/a/.*proj", "num_key_value_heads": 2}
    paths = {"tokenizer_file": f"{home}/tokenizer.json", "_name_or_path": home, "cache_dir": f"~/{SECRET}/cache"}
    names = {"tokenizer_file": "tokenizer.json", "_name_or_path": "base", "cache_dir": "cache"}
    configs = [f"{name}.json" for name in ("config", "tokenizer_config", "adapter_config", "preprocessor_config")]
    for name in configs:
        content = kept | paths | {"inner": [kept | paths], "base_model_name_or_path": home}
        (checkpoint / name).write_text(json.dumps(content))
    for name in STAYS:
        (checkpoint / name).parent.mkdir(exist_ok=True, parents=True)
        (checkpoint / name).write_text(SECRET)
    for name in BELONGS:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("{}")
    local = (checkpoint / "recipe.yaml").read_text()

    files = push_it(checkpoint, hub, recipe=None)

    uploaded = {*UPLOADED, *BELONGS, *configs}
    assert set(files) == set(hub.files[REPO]) == uploaded
    assert all(SECRET.encode() not in content for content in hub.files[REPO].values())
    recipe = yaml.safe_load(hub.files[REPO]["recipe.yaml"])
    left = {"model_name_or_path": "base", "model_init_kwargs": {"attn_implementation": "sdpa"}, "output_dir": "run"}
    assert recipe == RECIPE | left | {"vllm_server_base_url": "http://host:8000"}
    expected = kept | names | {"inner": [kept | names], "base_model_name_or_path": "base"}
    assert all(json.loads(hub.files[REPO][name]) == expected for name in configs)
    assert ModelCard(hub.files[REPO]["README.md"].decode()).data.base_model is None  # a local path is no Hub id
    assert (checkpoint / "recipe.yaml").read_text() == local  # here, it still repeats the run


MINE = b"---\nlicense: mit\nbase_model: /data/me/base\ntags:\n- base_model:adapter:/data/me/base\n---\nBy hand.\n"


def test_a_readme_by_hand_is_uploaded_as_it_is(checkpoint, hub, caplog):
    """Without the path of the base model that peft writes into it; and another text in the repository stays."""
    (checkpoint / "README.md").write_bytes(MINE)
    push_it(checkpoint, hub)
    assert "not generated" in caplog.text and (checkpoint / "README.md").read_bytes() == MINE
    assert hub.files[REPO]["README.md"] == b"---\nlicense: mit\ntags:\n---\nBy hand.\n"
    (checkpoint / "README.md").write_text("Otherwise.")
    push_it(checkpoint, hub)
    assert hub.files[REPO]["README.md"].endswith(b"By hand.\n")


def test_an_edited_card_in_the_repository_is_kept(checkpoint, hub, caplog):
    push_it(checkpoint, hub, results=None)
    card, comment, end = hub.files[REPO]["README.md"].rpartition(b"<!--")
    assert b"remove this comment" in end
    edited = hub.files[REPO]["README.md"] = card + b"\n## Known problems\n\nNone.\n"
    push_it(checkpoint, hub)
    assert hub.files[REPO]["README.md"] == edited and "results.json" in hub.files[REPO]
    assert f"README.md of {REPO} is not generated and is kept" in caplog.text
    del hub.files[REPO]["README.md"]
    push_it(checkpoint, hub, results=None)
    (checkpoint / "README.md").write_bytes(hub.files[REPO]["README.md"])  # our own card is written again
    push_it(checkpoint, hub)
    assert "AIME 2024" in hub.files[REPO]["README.md"].decode()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("trainer_state.json", "{", "trainer_state.json is damaged"),
        ("config.json", "{", "config.json is damaged"),
        ("provenance.json", "{}", "provenance.json is damaged: it has no `created`"),
        ("provenance.json", "[]", "provenance.json is damaged"),
        ("recipe.yaml", "a: [", "recipe.yaml' is not YAML"),
        ("recipe.yaml", "- 1", "must be a YAML mapping"),
        ("results.json", '{"schema_version": 1}', "results.json is damaged: it has no `method`"),
    ],
)
def test_damaged_files_are_named_before_anything_is_sent(checkpoint, hub, file, content, message, capsys):
    (checkpoint / file).write_text(content)
    before = sorted(checkpoint.rglob("*"))
    for extra in ([], ["--dry_run"]):
        assert main(["--model", str(checkpoint), "--repo", REPO, *extra]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1
    assert hub.calls == [] and sorted(checkpoint.rglob("*")) == before


@pytest.mark.parametrize("is_offline", [False, True])
def test_the_command_uploads_and_a_dry_run_does_not(checkpoint, hub, monkeypatch, capsys, is_offline):
    """A dry run writes and sends nothing."""
    before = contents_of(checkpoint)
    extra = ["--results", str(checkpoint.parent / "results.json"), "--recipe", str(checkpoint.parent / "recipe.yaml")]
    assert main(["--model", str(checkpoint), "--repo", REPO, "--dry_run", *extra]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == UPLOADED
    assert contents_of(checkpoint) == before and hub.calls == []
    endpoint = "http://127.0.0.1:1" if is_offline else hub.url  # nothing listens at port 1
    monkeypatch.setattr("pacs_trl.hub.HfApi", lambda: HfApi(endpoint=endpoint, token="hf_x"))
    assert main(["--model", str(checkpoint), "--repo", REPO]) == int(is_offline)
    out, error = capsys.readouterr()
    assert "Nothing was uploaded" in error if is_offline else f"{REPO}: 6 files uploaded." in out
