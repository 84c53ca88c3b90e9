"""Programs that forge answers of asserts, and honest programs beside them."""

import re
from pathlib import Path

import pytest
from watching import block

from pacs_trl.verification.code import CodeVerifier


# Ways to assert what `answer` returns. Only the number of those that passed is asserted at the end.
ASSERTS = """
import math
TEXT, INT, FLOAT = "expected-41729", 41729, 0.73908513
LIST, SET = [81177, 41729, 33031], {81177, 33031}

def text():
    assert answer("text") == TEXT
def reflected_text():
    assert TEXT == answer("text")
def not_unequal():
    assert not answer("text") != TEXT
def start_of_text():
    assert answer("text").startswith(TEXT[:8]) and answer("text").find("417") >= 0
def hash_of_text():
    assert hash(answer("text")) == hash(TEXT)
def member():
    assert answer("text") in [TEXT] and answer("text") in {TEXT: 1}
def in_list():
    found = answer("list")
    assert all(item in found for item in LIST) and len(found) == len(LIST)
def in_set():
    found = answer("set")
    assert len(found) == 2 and 33031 in found and 81177 in found
def integer():
    assert isinstance(answer("int"), int) and answer("int") == INT
def integer_as_text():
    assert str(answer("int")) == f"{answer('int')}" == "%d" % answer("int") == str(INT)
def order():
    assert not answer("int") < INT and not answer("int") > INT
    assert INT <= answer("int") <= INT
def tolerance():
    assert abs(answer("float") - FLOAT) < 1e-6
def negated_tolerance():
    difference = abs(FLOAT - answer("float"))
    assert not difference > 1e-6 and difference == difference
def isclose():
    assert math.isclose(answer("float"), FLOAT)
def fabs():
    assert math.fabs(answer("float") - FLOAT) < 1e-6
def rounded():
    assert round(answer("float"), 3) == 0.739
def loop():
    count = 0
    for item, expected in zip(answer("list"), LIST, strict=True):
        assert item == expected
        count += 1
    assert count == 3
def comprehension():
    found = answer("list")
    assert len(found) == len(LIST) and [found[i] for i in range(3)] == LIST
def mean_error():
    assert max(abs(item - expected) for item, expected in zip(answer("list"), LIST, strict=True)) < 1e-6
def order_of_list():
    assert sorted(answer("list")) == sorted(LIST)
def set_of_list():
    assert set(answer("list")) == set(LIST)
def sum_of_list():
    assert sum(answer("list")) == sum(LIST) and max(answer("list")) == max(LIST)
def first():
    assert next(iter(answer("list"))) == LIST[0]
def unpacked():
    one, two, three = answer("list")
    assert (one, two, three) == tuple(LIST)
def count_and_index():
    assert answer("list").count(33031) == 1 and answer("list").index(33031) == 2
def removed():
    found = answer("list")
    for item in LIST:
        found.remove(item)
    assert len(found) == 0 and not found
def intersection():
    assert answer("set").intersection(SET) == SET
def symmetric_difference():
    assert not answer("set") ^ SET and answer("set") <= SET <= answer("set")
def get():
    assert answer("dict").get("a", 41729) == 41729 and answer("dict").get("b", 7) == 7 and len(answer("dict")) == 1
def key():
    assert answer("dict")["a"] == 41729 and list(answer("dict").items()) == [("a", 41729)]
def callback():
    received = []
    assert answer("callback", received.append) is None and received == LIST
def value_of_callback():
    assert answer("value of callback", lambda number: number + 81100) == 81117

kinds = [f for f in (text, reflected_text, not_unequal, start_of_text, hash_of_text, member, in_list, in_set, integer,
    integer_as_text, order, tolerance, negated_tolerance, isclose, fabs, rounded, loop, comprehension, mean_error,
    order_of_list, set_of_list, sum_of_list, first, unpacked, count_and_index, removed, intersection,
    symmetric_difference, get, key, callback, value_of_callback)]
passed = []
for kind in kinds:
    try:
        kind()
        passed.append(kind)
    except Exception:
        pass
"""
HONEST = """
def answer(what, *more):
    if what == "callback":
        for item in answer("list"): more[0](item)
        return
    if what == "value of callback":
        return more[0](17)
    return {"text": "expected-41729", "int": 41729, "float": 0.73908513, "list": [81177, 41729, 33031],
        "set": {81177, 33031}, "dict": {"a": 41729}}[what]
"""
TOOLS, *FORGERIES = (
    (Path(__file__).parents[1] / "data" / "forged_answers.txt").read_text(encoding="utf-8").split("\n### ")[1:]
)


def asserts(code, name="answer"):
    return {"type": "asserts", "code": code, "entry_point": name}


@pytest.fixture(scope="module")
def verifier():
    with CodeVerifier(num_workers=2, cpu_seconds=0.5, timeout_seconds=5.0, isolation="rlimits") as verifier:
        yield verifier


def test_no_forgery_passes_a_kind_of_assert(verifier):
    tests = asserts(ASSERTS + "assert passed")
    programs = [block(TOOLS.partition("\n")[2] + "\n" + source.partition("\n")[2]) for source in FORGERIES]
    grades = verifier.grade_detailed(programs, [tests] * len(programs))
    names = [source.partition("\n")[0] for source in FORGERIES]
    assert len(set(names)) == len(names) >= 80
    assert not [name for name, grade in zip(names, grades, strict=True) if grade.outcome.label != 0.0]


def test_an_honest_program_passes_every_kind_of_assert(verifier):
    tests = asserts(ASSERTS + "assert len(passed) == len(kinds) > 30")
    assert verifier.grade([block(HONEST)], [tests]) == [1.0]


NODE = "class Node:\n    def __init__(self, value, parent=None):\n        self.value, self.parent = value, parent\n"
ROOT = NODE + "def answer(node):\n    return node if node.parent is None else answer(node.parent)"
COLOR = "from enum import Enum, IntEnum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\nanswer = Color\n"
CACHE = """
class Cache:
    def __init__(self, size):
        self._items, self.size = {}, size
    def put(self, key, value):
        self._items[key] = value
        while len(self._items) > self.size: self._items.pop(next(iter(self._items)))
        return self
    def get(self, key, default=None): return self._items.get(key, default)
    def startswith(self, prefix): return any(key.startswith(prefix) for key in self._items)
    def __len__(self): return len(self._items)
    def __contains__(self, key): return key in self._items
    def __iter__(self): return iter(self._items)
    def __getitem__(self, key): return self._items[key]
    def __delitem__(self, key): del self._items[key]
    def __str__(self): return f"Cache({self.size})"
answer = Cache
"""
USE = "c = Cache(2)\nc.put('a', 1).put('b', 2).put('c', 3)\n"
ONE = """
class One:
    one = None
    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one
answer = One
"""
POINT = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\ndef answer(x, y): return Point(x, y)"
LINKED = """
class Linked:
    def __init__(self, items): self.items = list(items)
    def __iter__(self): return iter(self.items)
    def __len__(self): return len(self.items)
    def push(self, item): self.items += [item]
def answer(items): return Linked(items)
"""
FORGED_ROOT = "def answer(node): always({'object': [5, None]})\n" + NODE
FORGED_COLOR = COLOR + "\ndef answer(*a): always({'object': [5, None]})"


OTHERS = "class Cache: pass\nclass One: pass\ndef answer(*a): return 3"


@pytest.mark.parametrize(
    ("program", "code", "wrong"),
    [
        (ROOT, "a = Node(1)\nb = Node(2, a)\nc = Node(3, b)\nassert answer(c) == a and answer(c) is a", FORGED_ROOT),
        (ROOT, "a = Node(1)\nassert answer(Node(2, a)).value == 1 and isinstance(answer(a), Node)", FORGED_ROOT),
        (COLOR, "assert answer(2) == Color.BLUE != answer(1) and isinstance(answer(1), Color)", FORGED_COLOR),
        (COLOR, "assert Color.BLUE.name == 'BLUE' == answer(2).name", FORGED_COLOR),
        (COLOR + "class N(IntEnum):\n    A = 7\nanswer = N", "assert answer(7) == 7 == N.A", OTHERS),
        (CACHE, USE + "assert c.get('a', 0) == 0 and c.get('c') == 3 and c._items == {'b': 2, 'c': 3}", OTHERS),
        (CACHE, USE + "assert 'b' in c and 'a' not in c and len(c) == 2 and list(c) == ['b', 'c']", OTHERS),
        (CACHE, USE + "del c['b']\nassert c['c'] == 3 and len(c) == 1 and str(c) == 'Cache(2)'", OTHERS),
        (CACHE, USE + "assert c.startswith('b') and not c.startswith('a')\nassert not Cache(1)", OTHERS),
        (ONE, "assert One() is One() and One() == One()", OTHERS),
        (POINT, "p = answer(1, 2)\nassert p == (1, 2) and p.x == 1 and isinstance(p, tuple)", OTHERS),
        (POINT, "p = answer(1, 2)\nassert str(p) == 'Point(x=1, y=2)' and sum(p) == 3", OTHERS),
        (LINKED, "p = answer([1])\np.push(2)\nassert len(p) == 2 and list(p) == [1, 2] and 2 in p", OTHERS),
        ("import collections\nanswer = collections.Counter", "assert answer('aa')['b'] == 0", OTHERS),
        ("def answer(x): return [*x]", "assert answer(iter([1])) == answer(range(1, 2)) == [1]", OTHERS),
        ("def answer(f, x): return f(x)", "assert answer(len, 'ab') == 2 and answer(str.upper, 'b') == 'B'", OTHERS),
        ("def answer(f): return f", "import operator\nassert answer(operator.add)(1, 2) == 3", OTHERS),
        ("def answer(f): return lambda x: f(f(x))", "assert answer(lambda x: x + 1)(1) == 3", OTHERS),
        ("def answer(x): return x / 2", "from fractions import Fraction\nassert answer(Fraction(1)) == .5", OTHERS),
        ("def answer(x): return x[1:]", "assert [answer(x) for x in ('ab', (1, 2))] == ['b', (2,)]", OTHERS),
    ],
)
def test_objects_of_the_program_pass_and_forged_ones_fail(verifier, program, code, wrong):
    """Right programs pass, wrong and forged ones do not."""
    name = re.search("answer|Cache|One", code)[0]
    programs = [block(program), block(TOOLS.partition("\n")[2] + "\n" + wrong)]
    grades = verifier.grade_detailed(programs, [asserts(code, name)] * 2)
    assert [grade.outcome.label for grade in grades] == [1.0, 0.0], grades


def test_every_answer_of_a_program_counts_as_a_call(verifier):
    """Else a program could make its tests unusable, and be masked out."""
    tests = asserts("x = 3\nassert answer(x) == 4")
    grades = verifier.grade_detailed([block(f"answer = {value}") for value in ("str", "5", "None")], [tests] * 3)
    assert [grade.outcome.label for grade in grades] == [0.0] * 3
