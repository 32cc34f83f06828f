"""Settings of every test: one thread, no window, a folder of its own for whatever is written.

Environment variable `CTRL_RL_TEST_DATA`: folder with data that only some machines have; tests
that need it use the fixture `test_data` and say what they miss.
"""

import os
import sys
from pathlib import Path

# Before torch and MuJoCo are imported: two threads are slower than one on small networks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run each test in an empty folder, so that nothing lands in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cli() -> str:
    """The installed console script."""
    script = Path(sys.executable).parent / "ctrl-rl"
    if not script.exists():
        pytest.fail(f"{script} does not exist: install the package with pip install -e .")
    return str(script)


@pytest.fixture
def our_names(monkeypatch):
    """The names of offline algorithms that this checkout has, whatever is installed."""
    from ctrl_rl import registry
    from offline.registry import ALGOS

    names = registry.names
    monkeypatch.setattr(
        registry, "names", lambda g: {**names(g), **(ALGOS if g == "offline_algos" else {})}
    )


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of data that is not part of the repository."""
    folder = os.environ.get("CTRL_RL_TEST_DATA")
    if not folder:
        pytest.skip("CTRL_RL_TEST_DATA names no folder")
    return Path(folder)
