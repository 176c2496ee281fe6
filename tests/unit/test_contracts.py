"""Contracts over the source text: where torch may be imported, and what package code never does.

Layering itself is import-linter's (see pyproject.toml); what is imported at run time is in test_contracts_imports.py.
Each rule is a function of one module's syntax tree, and is itself tested on code that breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("corellm", "cli", "tui")
TORCH_ROOMS = ("corellm/worker/", "corellm/layers/", "corellm/kernels/", "corellm/models/llama/graph.py")

COMPUTE_LIBRARIES = {"torch", "triton"}
UNSAFE_LIBRARIES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "multiprocessing"}
UNSAFE_ATTRIBUTES = {
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
}
UNSAFE_NAMES = {"eval", "exec"}

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

Rule = Callable[[ast.Module], Iterator[str]]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, lazy ones and those by name included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.partition(".")[0]


def _docstrings(tree: ast.Module) -> set[int]:
    """Identities of the constants that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def compute_imports(tree: ast.Module) -> Iterator[str]:
    for line, package in _imports(tree):
        if package in COMPUTE_LIBRARIES:
            yield f"line {line}: imports {package}"


def unsafe_code(tree: ast.Module) -> Iterator[str]:
    """Ways to run code that came as data, or to be reached from the network."""
    for line, package in _imports(tree):
        if package in UNSAFE_LIBRARIES:
            yield f"line {line}: imports {package}"
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in UNSAFE_ATTRIBUTES:
                yield f"line {node.lineno}: {name}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield f"line {node.lineno}: torch.load"
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_NAMES:
                yield f"line {node.lineno}: {name}()"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield f"line {node.value.lineno}: shell=True"
            case ast.Constant(value=str(text)) if "tcp://" in text and id(node) not in docstrings:
                yield f"line {node.lineno}: tcp://"


def asserts(tree: ast.Module) -> Iterator[str]:
    """`python -O` drops asserts, so none may check anything that matters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: assert"


def missing_docstring(tree: ast.Module) -> Iterator[str]:
    if tree.body and not ast.get_docstring(tree):
        yield "line 1: no module docstring"


def unfinished(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            yield f"line {node.lineno}: NotImplementedError"


def _broken(rule: Rule, files: list[Path]) -> list[str]:
    return [f"{path.relative_to(ROOT)}, {found}" for path in files for found in rule(ast.parse(path.read_text()))]


def test_there_is_code_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def test_torch_stays_in_the_compute_plane() -> None:
    outside = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(TORCH_ROOMS)]
    assert _broken(compute_imports, outside) == []


@pytest.mark.parametrize("rule", [unsafe_code, asserts, missing_docstring, unfinished])
def test_package_code_keeps_the_rule(rule: Rule) -> None:
    assert _broken(rule, FILES) == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (compute_imports, "import torch"),
        (compute_imports, "def f():\n    from torch.nn import functional"),
        (compute_imports, "import importlib\nimportlib.import_module('torch.cuda')"),
        (compute_imports, "import numpy, triton.language"),
        (unsafe_code, "import pickle"),
        (unsafe_code, "from multiprocessing import Queue"),
        (unsafe_code, "socket.recv_pyobj()"),
        (unsafe_code, "torch.load(path)"),
        (unsafe_code, "dist.broadcast_object_list(x)"),
        (unsafe_code, "socket.bind('tcp://*:5555')"),
        (unsafe_code, "socket.bind(f'tcp://{host}')"),
        (unsafe_code, "eval(text)"),
        (unsafe_code, "run(command, shell=True)"),
        (asserts, "def f(x):\n    assert x"),
        (missing_docstring, "x = 1"),
        (unfinished, "def f():\n    raise NotImplementedError('later')"),
    ],
)
def test_the_rule_finds_what_it_forbids(rule: Rule, code: str) -> None:
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (compute_imports, "from corellm.worker import torch_free\nimport torchless"),
        (unsafe_code, '"""Never pickle, never tcp://."""\nimport json\njson.load(f)'),
        (missing_docstring, ""),
    ],
)
def test_the_rule_leaves_innocent_code_alone(rule: Rule, code: str) -> None:
    assert list(rule(ast.parse(code))) == []
