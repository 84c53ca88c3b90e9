"""Names of settings from the source of their dataclasses.

Importing the configurations of a run takes seconds, because TRL's are among their bases. Reading their source takes a
tenth of a second, so that a misspelled key does not wait. Values are checked by the classes themselves.
"""

import ast
from collections.abc import Iterator, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Declaration(NamedTuple):
    """A dataclass by module and name; an empty name stands for the only class of a module that ends in `Config`."""

    module: str
    name: str


# Classes that packages export lazily, where their source is.
_EXPORTED = {
    Declaration("trl", "GRPOConfig"): Declaration("trl.trainer.grpo_config", "GRPOConfig"),
    Declaration("trl", "ModelConfig"): Declaration("trl.trainer.model_config", "ModelConfig"),
    Declaration("transformers", "TrainingArguments"): Declaration("transformers.training_args", "TrainingArguments"),
}


def declared_names(declaration: Declaration) -> set[str] | None:
    """Return the names of the fields of a dataclass, also of those that it declares under a condition; `None` if the
    source of a base cannot be found, for example because a library has moved it."""
    source = _source(_EXPORTED.get(declaration, declaration).module)
    if source is None:
        return None
    classes = {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)}
    if not declaration.name:
        configs = [name for name in classes if name.endswith("Config")]
        declaration = declaration._replace(name=configs[0] if len(configs) == 1 else "")
    if declaration.name not in classes:
        return None
    node = classes[declaration.name]
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    names = set(_field_names(node.body)) if is_dataclass else set()
    for base in node.bases:
        if not isinstance(base, ast.Name):
            return None
        inherited = declared_names(source.origin_of(base, classes.keys()))
        if inherited is None:
            return None
        names |= inherited
    return names


def _field_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names of the fields among the statements of a class."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _field_names([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                yield statement.target.id


class _Source(NamedTuple):
    """The parsed source of a module."""

    module: str
    is_package: bool
    tree: ast.Module

    def origin_of(self, name: ast.Name, defined: Set[str]) -> Declaration:
        """Return where a name that the module uses is defined: in it, or where it is imported from."""
        if name.id in defined:
            return Declaration(self.module, name.id)
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and name.id in [alias.name for alias in node.names]:
                parents = self.module.split(".")
                if self.is_package:  # one dot is the package itself
                    parents.append("__init__")
                package = ".".join(parents[: -node.level]) if node.level else ""
                return Declaration(".".join(filter(None, (package, node.module))), name.id)
        return Declaration(self.module, name.id)


def _source(module: str) -> _Source | None:
    """Return the source of a module without importing its package; `None` if it cannot be found."""
    package, *path = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*path)
    is_package = file.is_dir()
    file = file / "__init__.py" if is_package else file.with_suffix(".py")
    if not file.is_file():
        return None
    return _Source(module, is_package, ast.parse(file.read_text(encoding="utf-8")))
