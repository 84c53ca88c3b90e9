"""The sample store: what survives a crash, what is refused."""

import pandas as pd
import pytest

from experiments.graded import read_graded
from pacs_trl.evaluation.requests import Completion, Request
from pacs_trl.evaluation.store import SampleStore, evaluation_file, read_samples


SETTINGS = {"model": {"name": "m"}, "sampling": {"temperature": 0.6, "top_p": 0.95}}


def append(store, problem, sample, seed, text, num_tokens):
    store.append(Request(problem, sample, seed, ""), Completion(text, num_tokens, "stop"))


def fill(path, count=3):
    with SampleStore(path, SETTINGS) as store:
        for i in range(count):
            append(store, f"p{i}", i, 1000 + i, f"text {i} \u00e9 \u2028 line\nbreak", 5 + i)
    return path


def test_samples_are_read_as_they_were_written(tmp_path):
    path = fill(tmp_path / "a" / "s.jsonl")
    with SampleStore(path, SETTINGS) as store:
        assert store.keys == {("p0", 0), ("p1", 1), ("p2", 2)}
    records = list(read_samples(path))
    assert records[1] == {
        "problem": "p1",
        "sample": 1,
        "seed": 1001,
        "settings": store.settings_digest,
        "num_tokens": 6,
        "finish_reason": "stop",
        "completion": "text 1 \u00e9 \u2028 line\nbreak",
    }
    pd.DataFrame(records).to_parquet(tmp_path / "s.parquet")
    assert pd.read_parquet(tmp_path / "s.parquet").to_dict("records") == records


def test_other_settings_are_refused_with_the_difference(tmp_path):
    path = fill(tmp_path / "s.jsonl")
    other = {"model": {"name": "m", "digest": "x"}, "sampling": {"temperature": 1.0, "top_p": 0.95}}
    with pytest.raises(ValueError) as error:
        SampleStore(path, other)
    assert "model.digest: None != 'x'\n  settings.sampling.temperature: 0.6 != 1.0" in str(error.value)
    assert "top_p" not in str(error.value)


def test_settings_of_a_store_without_samples_are_replaced(tmp_path):
    """A run that did not start, for example without its engine, does not decide for the next one."""
    path = fill(tmp_path / "s.jsonl", count=0)
    with SampleStore(path, SETTINGS | {"engine": "other"}) as store:
        append(store, "p0", 0, 1000, "text", 5)
    with pytest.raises(ValueError, match="engine: 'other' != None"):
        SampleStore(path, SETTINGS)
    assert len(list(read_samples(path))) == 1


def test_every_cut_of_a_line_is_repaired(tmp_path, caplog):
    """Of the last completion, which is removed, and of the settings, which are written again; but the beginning of
    other settings is not repaired."""
    path = fill(tmp_path / "s.jsonl")
    whole = path.read_bytes()
    header, last = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with SampleStore(path, SETTINGS) as store:
            assert store.keys == {("p0", 0), ("p1", 1)}
            append(store, "p2", 2, 1002, "text 2 \u00e9 \u2028 line\nbreak", 7)
        assert path.read_bytes() == whole
    assert len(caplog.messages) == len(whole) - last - 1 and "incomplete last line" in caplog.messages[0]
    for cut in range(header):
        path.write_bytes(whole[:cut])
        with SampleStore(path, SETTINGS):
            pass
        assert path.read_bytes() == whole[:header]
    path.write_bytes(whole[: header - 9])
    with pytest.raises(ValueError, match="another output directory"):
        SampleStore(path, {"other": 1})
    assert path.read_bytes() == whole[: header - 9]


@pytest.mark.parametrize("garbage", [b"\x00" * 40, b"{}\n", b"[1]\n", b'"x"\n', b"\xff\xfe\n", b"\n"])
def test_garbage_at_the_end_is_repaired(tmp_path, garbage):
    whole = fill(tmp_path / "s.jsonl").read_bytes()
    (tmp_path / "s.jsonl").write_bytes(whole + garbage)
    with SampleStore(tmp_path / "s.jsonl", SETTINGS) as store:
        assert len(store.keys) == 3
    assert store.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], lines[1][:20] + b"\n", *lines[2:]], "line 2"),
        *((lambda _, text=text: [text], "another output directory") for text in (b"hello", b"hello\n", b"[]\n")),
        (lambda lines: [lines[0].replace(b"1", b"99", 1), *lines[1:]], "format: 99 != 1"),
    ],
)
def test_damage_is_refused(tmp_path, change, message):
    path = fill(tmp_path / "s.jsonl")
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=message):
        SampleStore(path, SETTINGS)


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "new" / "s.jsonl"
    with SampleStore(path, SETTINGS) as first:
        append(first, "p0", 0, 1000, "text", 5)
        with pytest.raises(ValueError, match="another process"):
            SampleStore(path, SETTINGS)
        append(first, "p1", 1, 1001, "text", 5)
    with SampleStore(path, SETTINGS):
        pass
    assert [record["problem"] for record in read_samples(path)] == ["p0", "p1"]
    assert list(path.parent.iterdir()) == [path]


def test_grades_and_the_samples_they_are_of(tmp_path):
    with SampleStore(evaluation_file(tmp_path, "samples", "miniature/terms"), SETTINGS) as store:
        for sample in range(3):
            append(store, "p", sample, 7, f"text {sample}", 3)
    grades = evaluation_file(tmp_path, "grades", "miniature/terms")
    assert grades == tmp_path / "grades" / "miniature_terms.json"
    with pytest.raises(ValueError, match="miniature_terms.json"):
        read_graded(tmp_path, "miniature/terms")
    grades.parent.mkdir()
    grades.write_text('{"p": "1-"}')  # the store holds more than was graded
    outcomes, records = read_graded(tmp_path, "miniature/terms")
    assert outcomes == {"p": "1-"} and {key: r["completion"] for key, r in records.items()} == {
        ("p", 0): "text 0",
        ("p", 1): "text 1",
    }
    grades.write_text('{"p": "1-00"}')
    with pytest.raises(ValueError, match="miniature_terms"):
        read_graded(tmp_path, "miniature/terms")
