"""Comparisons of an argument as a call changed it with a literal, as in `k = f(x)` and `assert x[:k] == [1, 2]`.

For confined processes, hence the standard library only.
"""

import ast
import builtins
from typing import TypeGuard


CHANGED = "<changed>"  # among the names of asserts, none of theirs


class ComparisonsOfArguments(ast.NodeTransformer):
    """Lets asserts compare an argument as a call changed it: `x[:k] == [1, 2]` becomes `CHANGED(x)[:k] == [1, 2]`.

    What they compare it with must be a literal, a variable of literals, or an item of it. If it came from the program,
    too, the program could make both equal."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        self.arguments = _variables_passed_to_calls([node for node in nodes if not _is_builtin_call(node)])
        self.literals = _variables_of_literals(nodes)
        self.any_compared = False

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        parts = [node.test]
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            parts = node.test.values
        for part in parts:
            if isinstance(part, ast.Compare) and [type(operator) for operator in part.ops] == [ast.Eq]:
                if _is_from_literals(part.comparators[0], self.literals):
                    part.left = self._changed(part.left)
        return node

    def _changed(self, node: ast.expr) -> ast.expr:
        """Return an expression of one variable in which the variable, if it is an argument, is the changed one."""
        if isinstance(node, ast.Name) and node.id in self.arguments:
            self.any_compared = True
            return ast.Call(ast.Name(CHANGED, ast.Load()), [node], [])
        if isinstance(node, ast.Subscript):
            node.value = self._changed(node.value)
        elif _is_pure_call(node):
            node.args = [self._changed(node.args[0])]
        return node


def _variables_passed_to_calls(nodes: list[ast.AST]) -> set[str]:
    calls = [node for node in nodes if isinstance(node, ast.Call) and not _is_pure_call(node)]
    arguments = [argument for call in calls for argument in [*call.args, *(word.value for word in call.keywords)]]
    return {argument.id for argument in arguments if isinstance(argument, ast.Name)}


def _variables_of_literals(nodes: list[ast.AST]) -> set[str]:
    """Return the variables that only literals, or their items, are assigned to, and whose values nothing changes."""
    values = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    values += [(node.target, node.iter) for node in nodes if isinstance(node, ast.For)]
    bound = _variables_bound_in(nodes)
    may_change = _variables_passed_to_calls(nodes) | _variables_with_changes(nodes)
    variables: set[str] = set()
    for _ in range(2):  # the second time for loops over variables of literals
        targets = [target for target, value in values if _is_from_literals(value, variables)]
        names = _variables_bound_in([node for target in targets for node in ast.walk(target)])
        variables = {name for name in names if names.count(name) == bound.count(name)} - may_change
    return variables


def _variables_bound_in(nodes: list[ast.AST]) -> list[str]:
    """Return names, each as often as a value is assigned to it, and parameters."""
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return names + [node.arg for node in nodes if isinstance(node, ast.arg)]


def _variables_with_changes(nodes: list[ast.AST]) -> set[str | None]:
    """Return variables of which an item is set, or a method used, which may change the value."""
    items = [node.value for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)]
    methods = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    return set(map(_variable_of, items + methods))


def _is_from_literals(node: ast.expr, variables: set[str]) -> bool:
    return _is_literal(node) or _variable_of(node) in variables


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _is_builtin_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in vars(builtins)


def _is_pure_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node calls one of Python's functions of one container."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    names = ("len", "list", "set", "sorted", "tuple")
    return node.func.id in names and len(node.args) == 1 and not node.keywords


def _variable_of(node: ast.expr) -> str | None:
    """Return the name of the variable that an expression is, or of which it is an item; `None` for another one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
