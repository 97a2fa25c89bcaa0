"""Facts about a vLLM release, read from its Python sources without importing them.

Classes, functions and names are given as ``module:Name`` or ``module:Class.method``. A name that a
module imports is followed to where it is defined, and a method that a class inherits to the class that
has it, as far as both lie in vLLM.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Parameter = tuple[str, str, bool]
"""Name, kind as `inspect` calls it, and whether it has a default."""


@dataclass(frozen=True)
class Call:
    """How something is called: arguments by position, by name, and whether others are unpacked."""

    positional: int
    keywords: tuple[str, ...]
    unpacks: bool


@dataclass(frozen=True)
class Place:
    """A definition and the module that holds it."""

    module: str
    node: ast.AST


class Sources:
    """The sources of a package.

    Args:
        folder: holds the package's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 - a handful of these live for one test
    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None if there is no such module."""
        base = self.folder.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None

    def find(self, name: str) -> Place | None:
        """Where something is defined; None if nowhere in these sources."""
        module, _, dotted = name.partition(":")
        first, *rest = dotted.split(".")
        place = self._top(module, first)
        for part in rest:
            if place is None:
                return None
            place = self._member(place, part)
        return place

    def _top(self, module: str, name: str) -> Place | None:
        tree = self.tree(module)
        if tree is None:
            return None
        imported: Place | None = None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return Place(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return Place(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        origin = self._origin(module, node)
                        own = name if alias.name == "*" else alias.name
                        imported = self._top(origin, own) or imported
        return imported

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self.folder.joinpath(*parts, "__init__.py").is_file()
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def classes(self, name: str) -> list[Place]:
        """A class and those that it inherits from, nearest first."""
        start = self.find(name)
        found: list[Place] = []
        queue = [start] if start else []
        while queue:
            place = queue.pop(0)
            if not isinstance(place.node, ast.ClassDef) or place in found:
                continue
            found.append(place)
            for base in place.node.bases:
                inner = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(inner, ast.Name) and (up := self._top(place.module, inner.id)):
                    queue.append(up)
        return found

    def _member(self, place: Place, name: str) -> Place | None:
        if not isinstance(place.node, ast.ClassDef):
            return None
        for holder in self.classes(f"{place.module}:{place.node.name}"):
            assert isinstance(holder.node, ast.ClassDef)
            found = [
                n
                for n in holder.node.body
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name
            ]
            if found:  # the last: overloads come first
                return Place(holder.module, found[-1])
        return None

    def signature(self, name: str) -> list[Parameter] | None:
        """Parameters of a function, a method (`self` included) or a class's constructor."""
        place = self.find(name)
        if place is None:
            return None
        if isinstance(place.node, ast.ClassDef):
            own = self._member(place, "__init__")
            fields = self._fields(name)
            if own is None or (fields and own.node not in place.node.body):
                return fields
            place = own
        if not isinstance(place.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        return _parameters(place.node.args)

    def returns(self, name: str) -> str | None:
        """What a function says that it returns."""
        place = self.find(name)
        if place is None or not isinstance(place.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        return ast.unparse(place.node.returns) if place.node.returns else ""

    def _fields(self, name: str) -> list[Parameter] | None:
        """Constructor of a dataclass, or of a class with annotated fields."""
        fields: dict[str, Parameter] = {}
        for holder in reversed(self.classes(name)):
            node = holder.node
            assert isinstance(node, ast.ClassDef)
            kind = (
                "keyword_only" if "kw_only=True" in _decorators(node) else "positional_or_keyword"
            )
            for statement in node.body:
                if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement):
                    continue
                for field in _targets(statement):
                    fields[field] = (field, kind, statement.value is not None)
        return [("self", "positional_or_keyword", False), *fields.values()] if fields else None

    def attributes(self, name: str) -> set[str]:
        """What instances of a class have: fields, methods, and what any method sets on `self`."""
        found: set[str] = set()
        for holder in self.classes(name):
            assert isinstance(holder.node, ast.ClassDef)
            for statement in holder.node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(statement.name)
                elif isinstance(statement, ast.Assign | ast.AnnAssign):
                    found |= _targets(statement)
            for node in ast.walk(holder.node):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                ):
                    found.add(node.attr)
        return found

    def calls(self, name: str, callee: str) -> list[Call]:
        """How `callee` is called inside a function, or anywhere in a class.

        Args:
            name: the function or class; a module where it ends in ``:``.
            callee: as written, such as ``self.attn``; ``*.name`` for any object's method.
        """
        if name.endswith(":"):
            root: ast.AST | None = self.tree(name[:-1])
        else:
            place = self.find(name)
            root = place.node if place else None
        found = []
        for node in ast.walk(root) if root else ():
            if not isinstance(node, ast.Call):
                continue
            written = ast.unparse(node.func)
            any_object = callee.startswith("*.") and written.endswith(callee[1:])
            if written == callee or any_object:
                found.append(
                    Call(
                        positional=sum(not isinstance(a, ast.Starred) for a in node.args),
                        keywords=tuple(k.arg for k in node.keywords if k.arg),
                        unpacks=any(isinstance(a, ast.Starred) for a in node.args)
                        or any(k.arg is None for k in node.keywords),
                    )
                )
        return found

    def texts(self, path: str) -> str:
        """All of the files that a pattern below the folder fits, one after the other."""
        return "\n".join(p.read_text(encoding="utf-8") for p in sorted(self.folder.glob(path)))


def as_signature(parameters: list[Parameter]) -> inspect.Signature:
    """Something that calls can be tried on."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind.upper()),
                default=None if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default in parameters
        ],
        __validate_parameters__=False,
    )


def _parameters(args: ast.arguments) -> list[Parameter]:
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    found: list[Parameter] = []
    for index, arg in enumerate(plain):
        only = index < len(args.posonlyargs)
        kind = "positional_only" if only else "positional_or_keyword"
        found.append((arg.arg, kind, index >= required))
    if args.vararg:
        found.append((args.vararg.arg, "var_positional", False))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((arg.arg, "keyword_only", default is not None))
    if args.kwarg:
        found.append((args.kwarg.arg, "var_keyword", False))
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under an `if` or a `try` too."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, field, []))


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _decorators(node: ast.ClassDef) -> str:
    return " ".join(ast.unparse(d) for d in node.decorator_list)
