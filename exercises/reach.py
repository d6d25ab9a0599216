"""Which tests reach which functions, from the text of the repository alone: nothing runs, so it takes a second.

    reach = Reach(files)                                   # files: {"03_zero/zero.py": bytes, ...}
    reach.running("zero", 71, 83, ["test_zero"])           # {"test_zero.py::test_three_steps_...": 5, ...}

A test reaches the functions whose names occur in it, in its parameters and in its fixtures, then those that
occur in these, and so on; the number is the distance of the function. A name is looked up as in Python: in
its module, or where that module imported it from. In `x.step()` the type of x is unknown: it may be the
`step` of each class whose name was reached, and `forward` and the like, which torch calls, are reached with
their class. A script that is named as a file, "zero.py", is reached completely.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

BY_TORCH = re.compile(r"__\w+__|forward|backward|setup_context")  # methods that are not called by name
Place = tuple[str, str]  # a module, and a name in it: "zero", "FlatParam.gather"; "*" is what runs on its import


@dataclass
class Names:
    """The names that occur in a piece of code."""

    plain: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)  # strings, which may be names for `getattr`
    of: set[tuple[str, str]] = field(default_factory=set)  # module.name, or anything.name
    files: set[str] = field(default_factory=set)


def names_in(nodes: Iterable[ast.AST]) -> Names:
    names = Names()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            names.plain.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.of.add((node.value.id if isinstance(node.value, ast.Name) else "", node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.files |= {found.removesuffix(".py") for found in re.findall(r"\w+\.py\b", node.value)}
            names.texts |= {node.value} if node.value.isidentifier() else set()
        elif isinstance(node, ast.arg):  # a fixture
            names.plain.add(node.arg)
    return names


class Module:
    def __init__(self, text: bytes) -> None:
        self.parts: dict[str, list[ast.AST]] = {"*": []}  # code by the name that it defines
        self.imports: dict[str, Place] = {}  # a module's own name is ""
        for node in _flat(ast.parse(text).body):
            if isinstance(node, ast.ClassDef):
                methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
                self.parts[node.name] = [inner for inner in ast.iter_child_nodes(node) if inner not in methods]
                for method in methods:
                    self.parts.setdefault(f"{node.name}.{method.name}", []).append(method)
            elif isinstance(node, ast.FunctionDef):
                self.parts.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    where = (alias.name, "") if isinstance(node, ast.Import) else (node.module or "", alias.name)
                    self.imports[alias.asname or alias.name] = where
            else:
                self.parts["*"].append(node)
                for target in (t for t in ast.walk(node) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)):
                    self.parts.setdefault(target.id, []).append(node)
        inside = re.search(rb"^ +(from|import) ", text, re.MULTILINE)  # of a function; most modules have none
        parts = [part for nodes in self.parts.values() for part in nodes] if inside else []
        for node in [inner for part in parts for inner in ast.walk(part)]:
            if isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name: (a.name, "") for a in node.names}

    @cached_property
    def shared(self) -> list[str]:
        """What all tests of this module use implicitly."""
        marks = {name: _decorators(node) for name, nodes in self.parts.items() for node in nodes}
        return [name for name in self.parts if "autouse" in marks.get(name, "") or name == "pytestmark"]

    @cached_property
    def names(self) -> dict[str, Names]:
        return {name: names_in(nodes) for name, nodes in self.parts.items()}


def _decorators(node: ast.AST) -> str:
    return " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, with those under its `if` and `try` one by one."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _flat(node.body)
            yield from _flat(getattr(node, "orelse", []))
        else:
            yield node


class Reach:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        paths = [path for path in files if path.endswith(".py") and not path.startswith("tests/harness/")]
        self.files = {Path(path).stem: files[path] for path in paths}
        self.module = cache(self._module)
        self.reached = cache(self._reached)
        self.steps = cache(self._steps)

    def _module(self, name: str) -> Module | None:
        return Module(self.files[name]) if name in self.files else None

    def running(self, script: str, first: int, last: int, files: Iterable[str]) -> dict[str, int]:
        """The tests of these files that reach the functions around these lines of a script, with the
        distance; nearest first."""
        targets, found = {(script, name) for name in self.names(script, first, last)}, {}
        for file in files:
            for test in self.tests(file):
                steps = [self.reached(file, test)[place] for place in targets & self.reached(file, test).keys()]
                found |= {f"{file}.py::{test}": min(steps)} if steps else {}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def names(self, script: str, first: int, last: int) -> set[str]:
        """The names defined in these lines, or around them: functions, methods, variables of a module."""
        module = self.module(script)
        names = set()
        for name, nodes in module.parts.items() if module else ():
            here = [node for node in nodes if node.lineno <= last and first <= (node.end_lineno or 0)]
            names |= {name} if here else set()
        return names

    def tests(self, file: str) -> dict[str, ast.FunctionDef]:
        """The tests of a file, in its order."""
        parts = module.parts if (module := self.module(file)) else {}
        tests = {name: nodes[-1] for name, nodes in parts.items() if name.startswith("test_")}
        return {name: node for name, node in tests.items() if isinstance(node, ast.FunctionDef)}

    def marked(self, test: str, marks: str) -> bool:
        """Whether a test, "test_zero.py::test_three_steps", has one of these marks."""
        file, _, name = test.partition(".py::")
        return bool(re.search(rf"mark\.({marks})\b", _decorators(self.tests(file)[name])))

    def _reached(self, file: str, test: str) -> dict[Place, int]:
        """All that a test reaches, with the number of steps to it."""
        return _Search(self).run((file, test))

    def _steps(self, place: Place) -> tuple[set[Place], set[str], dict[Place, str]]:
        """The names in the code at a place: places, names of methods, and its methods if it is a class."""
        module, part = place
        code = self.module(module)
        assert code is not None
        names, places = code.names[part], set()
        for name in names.plain | names.texts:
            places |= {*self.place(module, name)}
        for owner, name in names.of:
            where, what = code.imports.get(owner, ("", ""))
            places |= {
                *self.place(what or where, name)
            }  # `from in_depth import zero3`: a module, or what has attributes
        for name in names.texts:
            for where in {where for where, what in code.imports.values() if not what}:
                places |= {*self.place(where, name)}
        for script in names.files:
            if (whole := self.module(script)) and not script.startswith("test_"):
                places |= {(script, name) for name in ("*", "main") if name in whole.parts}
        methods = {p: p.removeprefix(f"{part}.") for p in code.parts if p.startswith(f"{part}.")}
        return places, names.texts | {name for _, name in names.of}, {(module, p): name for p, name in methods.items()}

    def place(self, module: str, name: str) -> Iterator[Place]:
        """Where a name that a module uses is defined."""
        code = self.module(module)
        if code is None:
            return
        if name in code.parts:
            yield module, name
        elif name in code.imports:
            where, what = code.imports[name]
            if what and where != module:
                yield from self.place(where, what)
        elif module.startswith("test_"):  # a fixture
            yield from self.place("conftest", name)


class _Search:
    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.found: dict[Place, int] = {}
        self.new: list[Place] = []
        self.methods: dict[Place, str] = {}  # methods of the found classes that may still be called
        self.called: set[str] = set()

    def run(self, start: Place) -> dict[Place, int]:
        depth = 0
        self.add(start, 0)
        for name in module.shared if (module := self.reach.module(start[0])) else ():
            self.add((start[0], name), 0)
        while self.new:
            depth += 1
            level, self.new = self.new, []
            for place in level:
                places, called, methods = self.reach.steps(place)
                self.called |= called
                self.methods |= methods
                for next_ in places:
                    self.add(next_, depth)
            ready = [place for place, name in self.methods.items() if name in self.called or BY_TORCH.fullmatch(name)]
            for place in ready:
                del self.methods[place]
                self.add(place, depth)
        return self.found

    def add(self, place: Place, depth: int) -> None:
        if place not in self.found:
            self.found[place] = depth
            self.new.append(place)
