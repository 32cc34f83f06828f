"""Which package may import which, and what an import may load.

Two kinds of check: the text of every module says what it imports, wherever in the file; a fresh
interpreter says what an import really loads. `test_the_checks_can_fail` holds both against
modules that break the rules.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

PACKAGES = ("ctrl_rl", "robots", "sim2real", "offline")

ALLOWED = {
    "ctrl_rl": {"ctrl_rl"},
    "robots": {"robots", "ctrl_rl.spec", "ctrl_rl.env", "ctrl_rl.random"},
    "offline": {"offline", "ctrl_rl"},
    "sim2real": {"sim2real", "ctrl_rl", "robots"},
}
"""Package -> what its modules may import of the four, by prefix."""

ROBOT_SIDE = ("card", "observer", "runtime", "safety", "mock")
"""Modules of sim2real that a robot's computer runs with numpy and onnxruntime alone."""


def imports(source: str, module: str) -> set[str]:
    """Dotted names that a module imports anywhere, functions included.

    `from a import b` counts as a.b, for b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def broken_arrows(source: str, module: str) -> set[str]:
    """Imports among the four packages that `ALLOWED` does not name."""
    allowed = ALLOWED[module.split(".")[0]]
    ours = {name for name in imports(source, module) if name.split(".")[0] in PACKAGES}
    return {n for n in ours if not any(f"{n}.".startswith(f"{a}.") for a in allowed)}


def loaded(statement: str, path: Path | None = None) -> set[str]:
    """Top-level modules in memory after `statement` in a fresh interpreter."""
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def modules(repository: Path, package: str) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted((repository / package).rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_packages(repository, package):
    found = modules(repository, package)
    assert found
    broken = {m: broken_arrows(p.read_text(), m) for m, p in found.items()}
    assert not {m: names for m, names in broken.items() if names}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_tests_examples_or_benchmarks(repository, package):
    for module, path in modules(repository, package).items():
        outside = {n.split(".")[0] for n in imports(path.read_text(), module)}
        assert not outside & {"tests", "examples", "benchmarks", "tools"}, module


@pytest.mark.parametrize("module", ROBOT_SIDE)
def test_robot_side_loads_neither_torch_nor_mujoco(repository, module):
    names = loaded(f"import sim2real.{module}", repository)
    assert f"sim2real.{module}" in names
    assert not names & {"torch", "mujoco", "gymnasium", "tyro", "robots"}
    source = (repository / "sim2real" / f"{module}.py").read_text()
    assert not {n.split(".")[0] for n in imports(source, "sim2real.x")} & {"torch", "mujoco"}


@pytest.mark.parametrize(
    "statement",
    [
        "import ctrl_rl",
        "import ctrl_rl.spec",
        "import ctrl_rl.registry",
        "import ctrl_rl.cli",
        "import robots",
        "import robots.registry",
        "import sim2real",
        "import sim2real.registry",
        "import offline",
    ],
)
def test_light_imports_load_nothing_heavy(repository, statement):
    heavy = {"torch", "mujoco", "gymnasium", "onnx", "onnxruntime", "matplotlib", "scipy"}
    assert not loaded(statement, repository) & heavy


def test_spec_needs_the_standard_library_alone(repository):
    names = loaded("import ctrl_rl.spec", repository)
    before = loaded("pass", repository)
    added = {n.split(".")[0] for n in names - before} - set(sys.stdlib_module_names)
    assert added == {"ctrl_rl"}


def test_lists_of_tasks_and_commands_load_no_torch(repository):
    names = loaded(
        "from ctrl_rl import registry; [registry.names(g) for g in registry.GROUPS]", repository
    )
    assert not names & {"torch", "mujoco"}


def test_every_registered_name_leads_to_an_object():
    from ctrl_rl import registry

    for group in registry.GROUPS:
        for name, target in registry.names(group).items():
            module, _, attribute = target.partition(":")
            assert importlib.util.find_spec(module), f"{group} {name}: no module {module}"
            assert registry.load(group, name), f"{group} {name}: no {attribute} in {module}"


def test_no_unfinished_places(repository):
    """Words that put work off; built from pieces so that this file does not name them."""
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    for folder in (*PACKAGES, "tests", "benchmarks", "examples", "docs", "tools"):
        for path in (repository / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".toml", ".xml"):
                found = words.search(path.read_text())
                assert not found, f"{path.relative_to(repository)}: {found.group()}"


def test_no_file_is_called_utils(repository):
    for package in PACKAGES:
        assert not list((repository / package).rglob("utils*"))
        assert not list((repository / package).rglob("common*"))


def test_the_checks_can_fail(tmp_path):
    source = """
        import robots.sim
        from offline import data
        def late():
            from ctrl_rl import ppo
    """
    source = textwrap.dedent(source)
    assert broken_arrows(source, "ctrl_rl.bad") == {"robots.sim", "offline.data"}
    assert broken_arrows(source, "robots.bad") == {"offline.data", "ctrl_rl.ppo"}
    assert broken_arrows(source, "sim2real.bad") == {"offline.data"}
    assert broken_arrows("from ctrl_rl.spec import EnvSpec", "robots.good") == set()
    assert broken_arrows("import ctrl_rl.specials", "robots.bad") == {"ctrl_rl.specials"}
    assert imports("from .. import go1", "robots.sim.good") == {"robots.go1"}
    (tmp_path / "heavy.py").write_text("def f():\n    import colorsys\nf()\n")
    assert "colorsys" in loaded("import heavy", tmp_path)
    assert "colorsys" not in loaded("pass", tmp_path)


def test_lazy_names_are_the_public_ones():
    import ctrl_rl

    assert sorted((*ctrl_rl._LAZY, *ctrl_rl._MODULES)) == ctrl_rl.__all__
    for name in ctrl_rl.__all__:
        assert getattr(ctrl_rl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ctrl_rl.nothing


@pytest.mark.parametrize("module", ["ctrl_rl", "robots.sim.x", "sim2real.card", "offline"])
def test_a_warning_of_our_packages_is_an_error(module):
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "file.py", 1, module=module)


@pytest.mark.parametrize("module", ["numpy", "robotsuite", "torch.robots"])
def test_a_warning_of_others_is_none(module):
    with warnings.catch_warnings(record=True) as caught:  # the filters stay as they are
        warnings.warn_explicit("theirs", UserWarning, "file.py", 1, module=module)
    assert len(caught) == 1
