"""The README that people and this package write: what is whose, and that names cannot break a card."""

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from results_world import make_results
from trl.trainer.utils import generate_model_card

from pacs_trl.hub.model_card import CardInputs, build_card
from pacs_trl.hub.readme import BEGIN, END, NOTHING, HandWritten, hand_written, the_one_to_keep, with_our_part


def card(**changes):
    recipe = {"method": "pacs", "model_name_or_path": "org/base", "dataset_name": "org/problems"}
    return build_card("name", CardInputs(recipe=recipe | changes))


@pytest.mark.parametrize(
    "text",
    [
        "Only text.",
        "---\nlicense: mit\n---\n",
        "---\r\nlicense: mit\r\n---\r\n\r\n# Title\r\n\r\n---\r\nnot: metadata\r\n---\r\n",
        "---\nlicense: mit\ntags: [a, trl]\ndatasets: mine/own\n---\n# Title\n\n```yaml\n---\na: b\n---\n```",
        f"before\n\n{BEGIN}\nold\n{END}\n\nafter",
        f"---\nlicense: mit\nlanguage: en\n---\n{BEGIN}\nold | table\n{END}\nafter",
    ],
)
def test_what_is_kept_is_kept_for_ever(text):
    once = with_our_part(hand_written(text, "README.md"), card())
    assert with_our_part(hand_written(once, "README.md"), card()) == once
    kept, again = hand_written(text, "README.md"), hand_written(once, "README.md")
    assert again.words == kept.words and "old" not in once and once.count(BEGIN) == once.count(END) == 1
    loaded = ModelCard(once)
    assert loaded.data.base_model == "org/base" and {"pacs", "trl"} <= set(loaded.data.tags)
    assert "org/problems" in loaded.data.datasets and ("mine/own" not in text or "mine/own" in loaded.data.datasets)


def test_our_numbers_replace_ours_and_leave_those_of_others():
    results = make_results("PACS", 0.5, benchmarks=("aime_2024",), ks=(1,))
    theirs = "---\nmodel-index:\n- name: other\n  results: []\n---\ntext"
    first = with_our_part(hand_written(theirs, "x"), build_card("name", CardInputs(results=results)))
    assert [entry["name"] for entry in _head(first)["model-index"]] == ["other", "name"]
    second = with_our_part(hand_written(first, "x"), build_card("name", CardInputs()))
    assert [entry["name"] for entry in _head(second)["model-index"]] == ["other"]
    renamed = with_our_part(hand_written(first, "x"), build_card("user/new", CardInputs(results=results)))
    assert [entry["name"] for entry in _head(renamed)["model-index"]] == ["other", "new"]


def _head(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_draft_of_trl_is_replaced_unless_somebody_wrote_into_it():
    facts = {"base_model": "org/base", "model_name": "m", "hub_model_id": "u/m", "dataset_name": "d", "tags": ["trl"]}
    draft = generate_model_card(
        **facts, wandb_url=None, trackio_url=None, trainer_name="PACS", trainer_citation="@x{}"
    ).content
    assert hand_written(draft, "README.md") == NOTHING
    for changed in (draft + "\n## Mine\n\nText.\n", draft.replace("## Quick start", "## How I use it")):
        assert hand_written(changed, "README.md").before == changed.split("---\n", 2)[2].strip()


def test_the_draft_of_peft_is_replaced_unless_somebody_wrote_into_it():
    draft = ModelCard.from_template(ModelCardData())
    draft.data.base_model, draft.data.library_name = "/home/me/base", "peft"
    draft.text += "\n### Framework versions\n\n- PEFT 0.21.0"
    assert hand_written(draft.content, "README.md") == NOTHING
    kept = hand_written(draft.content.replace("## Uses", "## Uses\n\nFor sums."), "README.md")
    assert "For sums." in kept.before and "base_model" not in kept.metadata
    card = with_our_part(NOTHING, build_card("name", CardInputs(is_adapter=True)))
    head = "---\nbase_model: /home/me/base\ntags:\n- base_model:adapter:/home/me/base\n"
    marked = hand_written(card.replace("---\n", head, 1), "README.md")  # what PEFT does to ours
    assert marked.words == NOTHING.words and "/home" not in str(marked)


def test_a_licence_is_ours_until_somebody_writes_another():
    ours = with_our_part(NOTHING, build_card("name", CardInputs(recipe={"model_name_or_path": "miniature/addition"})))
    assert _head(ours)["license"] == "apache-2.0" and hand_written(ours, "x").words == NOTHING.words
    theirs = ours.replace("license: apache-2.0\n", "license: mit\n", 1)
    for text in (ours, theirs):
        again = with_our_part(hand_written(text, "x"), card(license="ignored"))
        assert _head(again)["license"] == ("unknown" if text is ours else "mit")
        assert with_our_part(hand_written(again, "x"), card()) == again


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}", f"{BEGIN}{BEGIN}{END}"])
def test_marks_that_are_no_pair(text):
    with pytest.raises(ValueError, match="README.md does not hold the two marks of our part once each and in order"):
        hand_written(text, "README.md")


def test_whose_text_is_kept():
    mine, other = HandWritten({"license": "mit"}, "a", ""), HandWritten({}, "b", "")
    tagged = HandWritten({"tags": ["x"]}, "", "")
    for local, remote, kept in (
        (mine, NOTHING, mine),
        (NOTHING, mine, mine),
        (mine, mine, mine),
        (NOTHING, NOTHING, NOTHING),
    ):
        assert the_one_to_keep(local, remote, "here", "u/n") == kept
    assert the_one_to_keep(NOTHING, tagged, "here", "u/n") == tagged == the_one_to_keep(tagged, NOTHING, "here", "u/n")
    with pytest.raises(ValueError, match="here and the README.md of u/n both hold text .* one of them would be lost"):
        the_one_to_keep(mine, other, "here", "u/n")


@pytest.mark.parametrize(
    "path", ["/data/org/model", "~/models/base", "./base", "../x/base", "outputs/mine/model", "base"]
)
def test_a_local_path_is_no_hub_id(path, tmp_path, monkeypatch):
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given in (path, "outputs/model", "miniature/tiny"):
        text = card(model_name_or_path=given, dataset_name=given)
        assert text.data.base_model is None and text.data.datasets is None
        said = text.text.partition("# name\n")[2].partition("using `pacs_trl`")[0]
        assert said.count("`") == 4 and (given.startswith("miniature") or "/" not in said)


def test_names_break_neither_tables_nor_fences():
    results = make_results("PACS", 0.5, benchmarks=("aime_2024",), ks=(1, 8))
    results["benchmarks"]["aime_2024"]["title"] = "AIME\n\n# 2024 | a"
    results["protocol"] = results["protocol"] | {"prompt": {"instruction": "a\n```\nb\n````", "system_prompt": None}}
    text = build_card("a\nb", CardInputs(results=results, recipe={"dataset_name": "x`\n# y", "method": "p\nq"})).text
    assert (
        text.strip().startswith("# a b\n") and "**AIME # 2024 | a**" in text and "`x' # y`" in text and "P Q" in text
    )
    assert "\n`````text\n<problem> a\n```\nb\n````\n`````\n" in text
