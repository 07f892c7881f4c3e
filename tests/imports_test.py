"""Who may import whom: the rules that keep the parts apart."""

import ast
import pathlib

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "areal_jax"
ALLOWED = {
    "types": set(),
    "answers": set(),
    "sharding": {"types"},
    "rl": {"types"},
    "data": {"types", "answers"},
    "rewards": {"types", "answers"},
    "environments": {"types", "rewards"},
    "models": {"types", "sharding"},
    "transport": {"types", "sharding"},
    "rollout": {"types", "sharding", "models", "environments", "rewards", "transport"},
    "trainer": {"types", "sharding", "models", "rl"},
    "metrics": {"types"},
    "compiles": set(),
    "report": {"metrics"},
    "terminal": {"metrics"},
    "launch": {"types"},
    "evaluate": {"types", "rollout"},
}
"""area -> what it may import of ours. Areas not listed (main, train, sample and what they compose) may see all."""


def imports(path: pathlib.Path) -> set[str]:
    """The areas of areal_jax that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "areal_jax"
            names = [f"areal_jax.{a.name}" for a in node.names] if whole else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("areal_jax.")}
    return found


def area(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_rules(path):
    mine = area(path)
    if mine in ALLOWED:
        assert imports(path) - {mine} <= ALLOWED[mine]
    assert "ml_collections" not in path.read_text() or mine not in {
        "rl",
        "data",
        "models",
        "rollout",
        "trainer",
        "transport",
    }


def test_rollout_and_trainer_never_meet():
    for path in PACKAGE.rglob("*.py"):
        seen = imports(path)
        if area(path) == "rollout":
            assert "trainer" not in seen
        if area(path) == "trainer":
            assert "rollout" not in seen


def test_modules_and_classes_stay_small():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno - node.lineno <= 200, (path, node.name)
