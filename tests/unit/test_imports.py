"""Imports go one way: shapes <- plan <- {reference, symmetric} <- kernels <- layer <- recipes <- tools."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each part may import besides itself, of the parts of this project. Every part of uniep must be listed.
ALLOWED = {
    "uniep": set(),
    "uniep.shapes": set(),
    "uniep.plan": {"uniep.shapes"},
    "uniep.reference": {"uniep.shapes", "uniep.plan"},
    "uniep.symmetric": {"uniep.shapes", "uniep.plan"},
    "uniep.autotune": {"uniep.shapes", "uniep.plan"},
    "uniep.kernels": {"uniep.shapes", "uniep.plan", "uniep.reference", "uniep.symmetric"},
    "uniep.layer": {"uniep.shapes", "uniep.plan", "uniep.reference", "uniep.symmetric", "uniep.kernels"},
    "recipes": {"uniep"},
    "tools": {"uniep", "recipes"},
}
PACKAGES = ("uniep", "recipes", "tools")


def wrong_imports(root: Path) -> list[str]:
    """Imports against the direction, as "file:line: part must not import module"."""
    found = []
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        part = _part(module)
        where = path.relative_to(root)
        if part not in ALLOWED:
            found.append(f"{where}: {part} must be listed in ALLOWED")
            continue
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for line, target in _imports(path, package):
            if not _is_allowed(part, target):
                found.append(f"{where}:{line}: {part} must not import {target}")
    return found


def _part(module: str) -> str:
    """uniep's parts are its children; the other packages are one part each."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "uniep" else names[0]


def _imports(path: Path, package: str) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            # `from uniep import layer` imports a module, `from uniep.layer import f` a name of one.
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _is_allowed(part: str, target: str) -> bool:
    top = target.split(".")[0]
    if top in ("tests", "benchmarks"):
        return False
    if top not in PACKAGES:
        return top != "torchtitan" or not part.startswith("uniep")
    imported = _part(target)
    return imported == part or imported in ALLOWED[part] or top in ALLOWED[part]


def test_no_import_goes_up():
    assert (ROOT / "uniep" / "reference.py").exists()
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("uniep/reference.py", "import torchtitan.config", "torchtitan.config"),
        ("uniep/layer.py", "from recipes.config import Backend", "recipes.config.Backend"),
        ("uniep/kernels/a.py", "def f():\n    import tools.records", "tools.records"),
        ("uniep/kernels/a.py", "from uniep import layer", "uniep.layer"),
        ("uniep/kernels/a.py", "from ..layer import f", "uniep.layer.f"),
        ("uniep/kernels/__init__.py", "from .. import layer", "uniep.layer"),
        ("uniep/reference.py", "from uniep.symmetric.heap import H", "uniep.symmetric.heap.H"),
        ("uniep/symmetric/heap.py", "import uniep.reference", "uniep.reference"),
        ("uniep/plan/a.py", "import uniep.kernels.b", "uniep.kernels.b"),
        ("uniep/shapes.py", "from uniep.plan import a", "uniep.plan.a"),
        ("uniep/__init__.py", "from uniep.layer import f", "uniep.layer.f"),
        ("uniep/autotune/a.py", "import uniep.kernels", "uniep.kernels"),
        ("recipes/a.py", "from tools import records", "tools.records"),
        ("recipes/a.py", "import tests.recipe", "tests.recipe"),
    ],
)
def test_an_upward_import_is_found(tmp_path, file, line, wrong):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    (found,) = wrong_imports(tmp_path)
    assert found.endswith(f"must not import {wrong}")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("uniep/kernels/a.py", "import torch, triton\nfrom uniep.symmetric.heap import H\nfrom . import b"),
        ("uniep/plan/a.py", "from uniep.shapes import MoEShape\nfrom uniep.plan.b import c"),
        ("recipes/a.py", "from torchtitan.config import JobConfig\nfrom uniep.layer import f"),
        ("tools/a.py", "from recipes.load import load_config\nimport uniep.shapes\nimport torchtitan"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(line + "\n")
    assert wrong_imports(tmp_path) == []


def test_a_new_part_must_be_listed(tmp_path):
    (tmp_path / "uniep").mkdir()
    (tmp_path / "uniep" / "helpers.py").write_text("")
    assert wrong_imports(tmp_path) == ["uniep/helpers.py: uniep.helpers must be listed in ALLOWED"]
