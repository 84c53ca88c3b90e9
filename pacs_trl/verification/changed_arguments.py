"""Comparisons of an argument as a call changed it with a literal, as in `k = f(x)` and `assert x[:k] == [1, 2]`.

For confined processes, hence the standard library only.
"""

import ast


CHANGED = "<changed>"  # among the names of asserts, none of theirs


class ComparisonsOfArguments(ast.NodeTransformer):
    """Lets asserts compare a variable as a call changed it, as in `k = f(x)` and `assert x[:k] == [1, 2]`.

    What they compare it with must be a literal, a name that is bound to literals only, or an item of it. If it came
    from the program, too, the program could make both equal."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        calls = [node for node in nodes if isinstance(node, ast.Call) and not _is_pure(node)]
        arguments = [argument for call in calls for argument in (*call.args, *(word.value for word in call.keywords))]
        self.passed = {argument.id for argument in arguments if isinstance(argument, ast.Name)}
        self.any_compared = False
        bound = [name for node in nodes for name in _names_bound_in(node)]
        values = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        values += [(node.target, node.iter) for node in nodes if isinstance(node, ast.For)]
        self.literals: set[str] = set()
        used = [node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
        changed = [node for node in used if isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load)]
        changeable = self.passed | {_variable_of(node.value) for node in changed}
        for _ in range(2):  # the second time for loops over names of literals
            targets = [target for target, value in values if self._is_expected(value)]
            literals = [name for target in targets for node in ast.walk(target) for name in _names_bound_in(node)]
            self.literals = {name for name in literals if literals.count(name) == bound.count(name)} - changeable

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        is_conjunction = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
        for part in parts if is_conjunction else []:
            if isinstance(part, ast.Compare) and [type(operator) for operator in part.ops] == [ast.Eq]:
                if self._is_expected(part.comparators[0]):
                    part.left = self._changed(part.left)
        return node

    def _is_expected(self, node: ast.expr) -> bool:
        return _is_literal(node) or _variable_of(node) in self.literals

    def _changed(self, node: ast.expr) -> ast.expr:
        """Return an expression in which a variable, or what stands in it, is the one that the program changed."""
        if isinstance(node, ast.Name) and node.id in self.passed:
            self.any_compared = True
            return ast.Call(ast.Name(CHANGED, ast.Load()), [node], [])
        if isinstance(node, ast.Subscript):
            node.value = self._changed(node.value)
        elif isinstance(node, ast.Call) and _is_pure(node):
            node.args = [self._changed(node.args[0])]
        return node


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _is_pure(call: ast.Call) -> bool:
    """Whether a call is one of Python's functions of one container."""
    names = ("len", "list", "set", "sorted", "tuple")
    return isinstance(call.func, ast.Name) and call.func.id in names and len(call.args) == 1 and not call.keywords


def _variable_of(node: ast.expr) -> str | None:
    """Return the name of the variable that is an expression, or of which it is an item."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _names_bound_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
