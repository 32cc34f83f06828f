"""`ctrl-rl dataset`: what it prints, what it refuses, and its exit status."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from recordings import all_kinds_of_ends, assert_same, family_arrays, numbered, write_hdf5

from ctrl_rl import cli, registry
from offline import d4rl, inspection
from offline.datasets import d4rl_table, load
from offline.episodes import Episodes, concatenate, digest
from offline.inspection import duplicates, figures, suspicious_facts


@pytest.fixture(autouse=True)
def known_command(monkeypatch, tmp_path):
    """The command is found, and its caches are empty folders."""
    names = registry.names
    ours = {"dataset": "offline.commands.dataset:main"}
    monkeypatch.setattr(
        registry, "names", lambda group: {**names(group), **(ours if group == "commands" else {})}
    )
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture
def call(capfd, monkeypatch):
    """Runs a command; gives its exit status, the object of --json, and stderr."""

    def run(*words) -> tuple[int, dict, str]:
        out = io.StringIO()
        monkeypatch.setattr(cli, "_move_stdout", lambda: out)  # not for the rest of the process
        status = cli.main(["dataset", *map(str, words), "--json"])
        return status, json.loads(out.getvalue() or "{}"), capfd.readouterr().err

    return run


# Suspicious facts ---------------------------------------------------------------------------------


def facts_of(**changes) -> str:
    """Facts of ten steps with nothing odd but what is changed."""
    episodes = Episodes(
        **{
            "obs": numbered(12, 2),
            "action": np.linspace(-1, 1, 10, dtype=np.float32)[:, None],
            "reward": np.linspace(-1, 1, 10),
            "lengths": np.array([5, 5]),
            "terminated": np.array([True, False]),
            "truncated": np.array([False, True]),
            "final_known": np.array([True, True]),
        }
        | changes
    )
    return "; ".join(suspicious_facts(episodes, d4rl_table()["hopper-medium-v2"]))


def test_nothing_odd_gives_no_fact():
    assert facts_of() == ""


REPEATED = numbered(12, 2)
REPEATED[6:11] = REPEATED[:5]

ODD = {
    "no terminal is ever true": {"terminated": np.zeros(2, bool)},
    "no timeouts: episodes were cut by a step limit": {"metadata": {"timeouts_missing": True}},
    "no timeouts: episodes end at terminals alone": {
        "metadata": {"timeouts_missing": True},
        "terminated": np.ones(2, bool),
        "truncated": np.zeros(2, bool),
    },
    "3 recordings were joined": {"metadata": {"joined_recordings": 3}},
    "missing in episodes 0, 7": {"metadata": {"final_obs_missing": [0, 7]}},
    "unknown in 1 episodes that did not": {"final_known": np.zeros(2, bool)},
    "1 recordings just stop": {"truncated": np.zeros(2, bool)},
    "rewards are sparse and never negative (10.00% are positive)": {"reward": np.eye(10)[9]},
    "every reward is 0": {"reward": np.zeros(10)},
    "1 of 10 rows repeat an earlier": {
        "obs": REPEATED,
        "action": np.r_[np.linspace(-1, 0.9, 9), -1].astype(np.float32)[
            [*range(5), 9, *range(5, 9)], None
        ],
    },
    "observation columns 1 never change": {"obs": numbered(12, 2) * np.array([1, 0], np.float32)},
    "actions reach 3, outside": {"action": np.linspace(-1, 3, 10, dtype=np.float32)[:, None]},
}


@pytest.mark.parametrize("fact", ODD)
def test_each_odd_thing_is_told(fact):
    assert fact in facts_of(**ODD[fact])


def test_a_step_limit_that_was_passed_is_told():
    n = 1001
    episodes = Episodes(
        obs=numbered(n + 1, 2),
        action=np.linspace(-1, 1, n, dtype=np.float32)[:, None],
        reward=np.linspace(-1, 1, n),
        lengths=np.array([n]),
        terminated=np.array([True]),
        truncated=np.array([False]),
        final_known=np.array([True]),
    )
    (fact,) = suspicious_facts(episodes, d4rl_table()["hopper-medium-v2"])
    assert fact == "episodes 0 are longer than the task's limit of 1000 steps"
    assert suspicious_facts(episodes) == []


def test_duplicates_are_counted_to_the_bit():
    episodes = all_kinds_of_ends()
    assert duplicates(episodes) == 0
    assert duplicates(concatenate([episodes, episodes])) == episodes.num_steps
    moved = Episodes(**{**vars(episodes), "obs": np.nextafter(episodes.obs, 9, dtype=np.float32)})
    assert duplicates(concatenate([episodes, moved])) == 0


def test_figures_by_hand():
    episodes = all_kinds_of_ends()
    found = figures(episodes)
    assert (found["episodes"], found["steps"]) == (6, 13)
    assert (found["terminated"], found["truncated"], found["stopped"]) == (2, 2, 2)
    returns = [episodes.reward[:3].sum(), episodes.reward[3:5].sum()]
    returns += [episodes.reward[5], episodes.reward[6:10].sum()]  # those that ended
    assert found["episode_return"]["mean"] == pytest.approx(np.mean(returns))
    assert found["episode_length"]["max"] == 4
    assert sum(found["histogram"]["episodes"]) == 4
    lines = inspection.draw_histogram({"edges": [0, 1, 2, 3], "episodes": [4, 0, 1]}, width=8)
    assert [line.count("#") for line in lines] == [8, 0, 2]
    assert lines[2].split() == ["2", "..", "3", "##", "1"]


# Commands -----------------------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    assert cli.main(["dataset"]) == 0
    out = capsys.readouterr().out
    for name in ("list", "info", "download", "collect", "convert", "verify"):
        assert f"\n  {name}" in out
    assert cli.main(["dataset", "inof"]) == 2
    assert "did you mean 'info'" in capsys.readouterr().err
    assert cli.main(["dataset", "info", "x", "--episode-lenght", "3"]) == 2
    assert "did you mean '--episode-length'" in capsys.readouterr().err


def test_list_knows_what_is_here(call, tmp_path):
    (tmp_path / "cache").mkdir()
    write_hdf5(tmp_path / "cache" / "hopper_medium-v2.hdf5", family_arrays("gym"))
    status, found, _ = call("list", "hopper-*-v2")
    assert status == 0 and len(found["datasets"]) == 6
    assert found["datasets"]["hopper-medium-v2"] == {
        "family": "gym",
        "ref_min": -20.272305,
        "ref_max": 3234.3,
        "here": True,
    }
    assert list(call("list", "--local")[1]["datasets"]) == ["hopper-medium-v2"]


def test_info_shows_everything(call, capfd, tmp_path):
    (tmp_path / "cache").mkdir()
    write_hdf5(tmp_path / "cache" / "hopper_medium-v2.hdf5", family_arrays("gym"))
    assert cli.main(["dataset", "info", "hopper-medium-v2"]) == 0
    out = capfd.readouterr().out
    assert "next_observations" in out and "12 x 11 float32" in out
    assert "3 episodes, 12 steps: 1 terminated, 2 were cut, 0 just stop" in out
    assert "references D4RL hopper-*, played in gym's hopper v2 through mujoco-py" in out
    status, found, _ = call("info", "hopper-medium-v2")
    assert status == 0 and found["figures"]["episodes"] == 3
    assert found["score"]["comparable"] and found["facts"] == []


def test_info_of_data_with_nan_says_where(call):
    arrays = family_arrays("gym")
    arrays["rewards"][[3, 5]] = np.nan
    write_hdf5(Path("x.hdf5"), arrays)
    status, found, _ = call("info", "x.hdf5")
    assert status == 1
    assert found["facts"] == ["x.hdf5: rewards, row 3 is nan: every number must be finite"]
    (bad,) = [array for array in found["schema"] if "rows_not_finite" in array]
    assert (bad["key"], bad["rows_not_finite"], bad["first"]) == ("rewards", 2, 3)
    Path("x.txt").write_text("hello")
    status, _, err = call("info", "x.txt")
    assert status == 2 and "x.txt is not an HDF5 file" in err and err.count("\n") == 1


def test_a_length_and_a_choice_of_parts_reach_the_reader(call):  # pitfalls O-44
    write_hdf5(Path("x.hdf5"), family_arrays("maze2d"))
    status, found, _ = call("info", "x.hdf5")
    assert status == 1 and "give the episode length" in found["facts"][0]
    status, found, _ = call("info", "x.hdf5", "--episode-length", "4")
    assert status == 0 and found["figures"]["episode_length"]["max"] == 4
    status, found, _ = call("info", "x.hdf5", "--obs-keys", "a")
    assert status == 1 and "no parts to choose" in found["facts"][0]
    assert call("convert", "x.hdf5", "x-v0", "--episode-length", "3")[0] == 0
    assert load("x-v0").lengths.tolist() == [3] * 4
    assert call("verify", "x.hdf5")[0] == 1
    assert call("verify", "x.hdf5", "--episode-length", "4")[0] == 0


def test_convert_loses_nothing(call):
    episodes = all_kinds_of_ends()
    d4rl.write(Path("x.hdf5"), episodes)
    assert call("convert", "x.hdf5", "toy-v0")[0] == 0
    assert call("convert", "toy-v0", "y.hdf5")[0] == 0
    assert_same(load("y.hdf5", infos=True), episodes)
    status, _, err = call("convert", "toy-v0", "y.hdf5")
    assert status == 2 and "y.hdf5 exists already" in err
    status, _, err = call("convert", "toy-v0", "z.hdf5", "--form", "arrow")
    assert status == 2 and "is for Minari's folders" in err


def test_verify_finds_what_changed(call):
    episodes = all_kinds_of_ends()
    episodes.metadata["digest"] = digest(episodes)
    d4rl.write(Path("x.hdf5"), episodes)
    inspection.checksum_path(Path("x.hdf5")).write_text(inspection.checksum_of(Path("x.hdf5")))
    status, found, _ = call("verify", "x.hdf5")
    assert status == 0 and found["datasets"]["x.hdf5"]["checksum_recorded"]
    assert found["datasets"]["x.hdf5"]["digest"] == episodes.metadata["digest"]
    assert call("convert", "x.hdf5", "toy-v0")[0] == 0
    assert call("verify", "toy-v0")[0] == 0  # the digest is the data's, whatever the format
    with h5py.File("x.hdf5", "r+") as file:
        file["rewards"][0] += 1e-3
    status, found, _ = call("verify", "x.hdf5")
    assert status == 1
    wrong = found["datasets"]["x.hdf5"]["wrong"]
    assert wrong[0] == "x.hdf5 differs from its recorded checksum" and "digest" in wrong[1]
    with h5py.File("x.hdf5", "r+") as file:
        file["rewards"][0] = np.nan
    wrong = call("verify", "x.hdf5")[1]["datasets"]["x.hdf5"]["wrong"]
    assert "rewards, row 0 is nan" in wrong[1]


def test_verify_counts_what_the_metadata_counts(call):
    episodes = all_kinds_of_ends()
    episodes.metadata["steps"] = 14
    d4rl.write(Path("x.hdf5"), episodes)
    wrong = call("verify", "x.hdf5")[1]["datasets"]["x.hdf5"]["wrong"]
    assert wrong == ["13 steps are there, the metadata counts 14"]


def test_download_by_id(call, tmp_path):
    import functools
    import http.server
    import threading

    (tmp_path / "www" / "gym_mujoco_v2").mkdir(parents=True)
    write_hdf5(tmp_path / "www" / "gym_mujoco_v2" / "hopper_medium-v2.hdf5", family_arrays("gym"))
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "www")
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        mirror = f"http://127.0.0.1:{server.server_port}/"
        words = ("download", "hopper-medium-v2", "--mirror", mirror)
        status, found, _ = call(*words)
        assert status == 0
        assert found["datasets"]["hopper-medium-v2"]["state"] == "downloaded"
        assert call(*words)[1]["datasets"]["hopper-medium-v2"]["state"] == "there"
    finally:
        server.shutdown()
        server.server_close()
    assert load("hopper-medium-v2").num_steps == 12
    assert call("verify", "hopper-medium-v2")[0] == 0
    status, _, err = call("download", "hopper-mediun-v2")
    assert status == 2 and "did you mean 'hopper-medium-v2'" in err
    assert call("download")[0] == 2


def test_collect_writes_a_file_that_verifies(call):
    words = ("collect", "Pendulum-v0", "--sources", "random", "--steps", "500", "--threads", "1")
    status, found, _ = call(*words, "--out", "x.hdf5", "--num-envs", "2", "--seed", "3")
    assert status == 0
    about = found["metadata"]
    assert (about["seed"], about["sources"][0]["num_envs"], about["steps"]) == (3, 2, 500)
    episodes = load("x.hdf5")
    assert episodes.metadata["dataset"] == "x" and episodes.num_steps == 500
    assert call("verify", "x.hdf5")[0] == 0
    status, _, err = call(*words, "--out", "x.hdf5")
    assert status == 2 and "x.hdf5 exists already" in err
    status, _, err = call(*words, "--out", "no/y.hdf5")
    assert status == 2 and "is no folder" in err
    status, _, err = call(*words, "--out", "y.csv")
    assert status == 2 and "must end in .hdf5" in err


def test_a_killed_collection_leaves_nothing(repository):
    code = (
        "import sys; from offline.commands.dataset import main; "
        "main(['collect', 'Pendulum-v0', '--sources', 'random', '--steps', '3000000', "
        "'--out', 'x.hdf5', '--threads', '1'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("x.hdf5").exists()
