"""What the documentation says holds: commands, flags, links, tables, versions, task pages."""

import ast
import contextlib
import importlib
import io
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page: Path) -> list[list[str]]:
    """Words of every command line in a page's bash blocks."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def faults_of_command(words: list[str]) -> list[str]:
    """What is wrong with a command line of the documentation; nothing if it would be accepted."""
    name = words[0].removeprefix(".venv/bin/")
    if name == "ctrl-rl":
        return faults_of_ctrl_rl(words[1:])
    if name == "torchrun":
        return faults_of_ctrl_rl(words[words.index("ctrl_rl.cli") + 1 :])
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [f"make has no target {w}" for w in words[1:] if "=" not in w and w not in targets]
    if name == "python" and words[1] == "-m":
        module = ROOT / (words[2].replace(".", "/") + ".py")
        ours = words[2].split(".")[0] in ("benchmarks", "sim2real", "ctrl_rl", "robots", "offline")
        return [f"no module {words[2]}"] if ours and not module.exists() else []
    if name == "python":
        return [] if (ROOT / words[1]).exists() else [f"no file {words[1]}"]
    if name in (".ci/run", "pip", "source", "git", "cd", "pytest"):
        return []
    return [f"unknown program {name}"]


def faults_of_ctrl_rl(words: list[str]) -> list[str]:
    """Unknown commands, tasks and flags."""
    from ctrl_rl import cli, registry

    command, *rest = words
    if command.startswith("-"):
        return []
    if command not in registry.names("commands"):
        return [f"no command {command}"]
    tasks = [w for w in rest if re.fullmatch(r"[A-Z]\w*(-\w+)*-v\d+", w)]
    faults = [f"no task {t}" for t in tasks if t not in registry.names("tasks")]
    if faults:
        return faults
    first = {"train": tasks, "dataset": rest[:1]}.get(command, [])  # what the flags depend on
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        if cli.main([command, *first, "--help"]) != 0:
            return [f"{command} refuses {' '.join(first)}"]
    shown = set(re.findall(r"--[\w.-]+", out.getvalue())) | {"--json", "--debug", "--help"}
    if command == "train":
        shown |= {"--resume", "--algo"}
    return [f"{command} has no {w}" for w in rest if w.startswith("--") and w not in shown]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page):
    faults = [f"{' '.join(w)}: {f}" for w in commands(page) for f in faults_of_command(w)]
    assert not faults


def test_the_command_check_can_fail():
    assert faults_of_command(["ctrl-rl", "trian", "Pendulum-v0"]) == ["no command trian"]
    assert faults_of_command(["ctrl-rl", "train", "Pendulum-v9"]) == ["no task Pendulum-v9"]
    assert faults_of_command(["ctrl-rl", "eval", "r", "--episode", "3"]) == [
        "eval has no --episode"
    ]
    assert faults_of_command(["ctrl-rl", "train", "Pendulum-v0", "--algo.gama", "1"])
    assert faults_of_command(["ctrl-rl", "dataset", "inof", "x"]) == ["dataset refuses inof"]
    assert faults_of_command(["ctrl-rl", "dataset", "info", "x", "--form", "arrow"])
    assert faults_of_command(["make", "cake"]) == ["make has no target cake"]
    assert faults_of_command(["python", "examples/nothing.py"])
    assert faults_of_command(["ctrl-rl", "train", "Pendulum-v0", "--algo.gamma", "1"]) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_resolve(page):
    targets = [t.partition("#")[0] for t in LINK.findall(page.read_text())]
    local = [t for t in targets if t and not re.match(r"[a-z]+:", t)]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_use_what_there_is(page):
    import ctrl_rl

    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "ctrl_rl":
                    assert hasattr(ctrl_rl, node.attr), f"ctrl_rl.{node.attr}"


def test_tables_are_current():
    from benchmarks import table

    for page in table.pages():
        text = page.read_text()
        assert table.fill(text) == text, f"{page.name}: run python -m benchmarks.table"


def test_every_page_is_reachable_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in LINK.findall(page.read_text()):
            path = (page.parent / target.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.exists():
                todo.append(path)
    assert not [str(p.relative_to(ROOT)) for p in PAGES if p not in seen]


def test_versions_agree():
    import ctrl_rl

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ctrl_rl.__version__
    assert f"\n## {ctrl_rl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_lock_has_every_dependency_without_local_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    locked = {name.lower().replace("_", "-") for name in pins}
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w-]+", r).group().lower() for r in needed} - {"ctrl-rl", "pip"}
    assert not names - locked
    assert not [v for v in pins.values() if "+" in v]
    assert pins["torch"] == "2.13.0" and pins["mujoco"] == pins["mujoco-warp"] == "3.17.0"


def test_top_level_help_is_fast(cli):
    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(3):
        before = cpu()
        subprocess.run([cli, "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(cpu() - before)
    assert min(times) < 0.5, f"CPU seconds of ctrl-rl --help: {times}"


def names_of_task(task: str) -> set[str]:
    """Observation terms, reward terms, metrics and terminations."""
    import torch

    import ctrl_rl
    from ctrl_rl.spec import Discrete

    env = ctrl_rl.make(task, 2)
    spec = env.spec
    action = (
        torch.zeros(2, dtype=torch.int64)
        if isinstance(spec.action, Discrete)
        else torch.zeros(2, spec.action_size)
    )
    info = env.step(action).info
    terms = {t.name for group in spec.obs.values() for t in group}
    names = {*terms, *info.reward_terms, *info.metrics, *env.terminations()}
    env.close()
    return names


def task_pages() -> dict[str, Path]:
    """Task id -> its page: the one whose title is the id."""
    pages = (ROOT / "docs" / "tasks").glob("*.md")
    return {p.read_text().partition("\n")[0].removeprefix("# "): p for p in pages}


def test_every_task_has_a_page_that_names_all_its_parts():
    from ctrl_rl import registry

    pages = task_pages()
    ours = [t for t, where in registry.names("tasks").items() if where.startswith("robots.")]
    assert set(ours) == set(pages)
    for task in ours:
        text = pages[task].read_text()
        missing = sorted(n for n in names_of_task(task) if f"`{n}`" not in text)
        assert not missing, f"{pages[task].name} does not explain {', '.join(missing)}"


def test_algorithm_pages_explain_every_logged_key():
    import offline.registry
    from ctrl_rl import registry

    found = {**registry.names("algos"), **offline.registry.ALGOS}
    for algo, target in found.items():
        text = (ROOT / "docs" / "algorithms" / f"{algo}.md").read_text()
        metrics = importlib.import_module(target.removesuffix(":")).METRICS
        missing = [k for k in metrics if f"`{k}`" not in text]
        assert not missing, f"{algo}.md does not explain {', '.join(missing)}"


def run(words: list[str], folder: Path, seconds: float = 300) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


SHORTER = {
    ("train", "--total-steps"): "8192",
    ("train", "--stop-after"): "4096",
    ("eval", "--episodes"): "4",
}
"""What the test changes in a command of the tutorial: (command, flag) -> value."""

ADDED = {
    "train Go1-Velocity-Flat-v0": ["--total-steps", "8192"],
    "verify": ["--episodes", "4", "--episode-s", "6", "--stand-s", "2"],
    "examples/deploy_mock.py": ["--seconds", "2"],
    "examples/add_a_task.py": ["--total-steps", "4096"],
}
"""What it adds, so that the whole takes a minute."""


def shortened(words: list[str]) -> list[str]:
    """The command with less work; the program is the one of this environment."""
    bin_folder = Path(sys.executable).parent
    words = [str(bin_folder / words[0]), *words[1:]]
    for k, word in enumerate(words[:-1]):
        if (words[1], word) in SHORTER:
            words[k + 1] = SHORTER[words[1], word]
    line = " ".join(words)
    for part, extra in ADDED.items():
        if part in line:
            words += extra
    return [*words, "--video-s", "0"] if words[1] == "train" else words


@pytest.mark.parametrize("half", ["a small task", "a robot"])
def test_tutorial_runs(half, tmp_path):
    """Sections 1 to 4 and 5 to 6, each in a folder of its own, every command in order."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first, heading, second = (ROOT / "docs" / "tutorial.md").read_text().partition("\n## 5.")
    page = tmp_path / "half.md"
    page.write_text(first if half == "a small task" else heading + second)
    lines = commands(page)
    assert len(lines) >= 5
    for words in lines:
        run(shortened(words), tmp_path)
    if half == "a small task":
        assert (tmp_path / "runs" / "pendulum" / "policy.onnx").exists()
        assert (tmp_path / "comparison.png").exists()
    else:
        assert (tmp_path / "runs" / "go1" / "report.html").exists()


@pytest.mark.parametrize(
    "script", ["train_pendulum.py --total-steps 4096", "add_a_task.py --total-steps 4096"]
)
def test_examples_run(script, tmp_path):
    name, *flags = script.split()
    out = run([sys.executable, str(ROOT / "examples" / name), *flags], tmp_path)
    assert "episode_return: " in out
    assert list(tmp_path.rglob("last.pt"))
