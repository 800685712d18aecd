"""Imports go one way: import-linter checks the contracts of pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("uniep", "recipes", "tools")
# A file, a line that it must not have, and what import-linter says of it.
WRONG = [
    ("recipes/data.py", "from tools import records", "recipes is not allowed to import tools"),
    ("uniep/plan/tiles.py", "def f():\n    import recipes.config", "uniep is not allowed to import recipes"),
    ("uniep/layer.py", "from uniep import autotune", "uniep.layer is not allowed to import uniep.autotune"),
    ("uniep/kernels/tasks.py", "from ..layer import f", "uniep.kernels is not allowed to import uniep.layer"),
    ("uniep/reference.py", "import uniep.symmetric", "uniep.reference is not allowed to import uniep.symmetric"),
    ("uniep/symmetric/heap.py", "import uniep.reference", "uniep.symmetric is not allowed to import uniep.reference"),
    ("uniep/shapes.py", "from .plan import tiles", "uniep.shapes is not allowed to import uniep.plan"),
    ("uniep/helpers.py", "", "not listed as layers:\n\n- uniep.helpers"),
    ("uniep/autotune/fit.py", "import uniep.kernels", "uniep.autotune is not allowed to import uniep.kernels"),
    ("uniep/__init__.py", "from uniep.layer import f", "uniep is not allowed to import uniep.layer"),
    ("uniep/reference.py", "import torchtitan.config", "uniep is not allowed to import torchtitan"),
    ("tools/records.py", "import tests.recipe", "tools is not allowed to import tests"),
]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    arguments = [sys.executable, "-c", command, "--no-cache", ROOT / "pyproject.toml"]
    return subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=120)


def test_no_import_goes_up() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_can_be_broken(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line, _ in WRONG:
        with open(tmp_path / file, "a") as source:
            source.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Contracts: 0 kept" in done.stdout
    for _, _, found in WRONG:
        assert found in done.stdout
