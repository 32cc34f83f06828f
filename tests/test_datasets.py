"""Files of every family are read as they are meant; a wrong one is refused in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from recordings import (
    SIZES,
    all_kinds_of_ends,
    assert_same,
    family_arrays,
    numbered,
    write_hdf5,
)

from offline import d4rl, datasets
from offline.datasets import d4rl_table, load
from offline.scores import Score, dataset_score, find_reference, played_in
from offline.transitions import Transitions


def small(path="x.hdf5", **changes) -> Path:
    """A file of five steps; None takes a key out."""
    arrays = {
        "observations": numbered(5, 2),
        "actions": np.linspace(-1, 1, 5, dtype=np.float32)[:, None],
        "rewards": np.arange(5, dtype=np.float32),
        "terminals": np.zeros(5, bool),
        "timeouts": np.array([0, 0, 1, 0, 0], bool),
    }
    arrays |= changes
    return write_hdf5(Path(path), {k: v for k, v in arrays.items() if v is not None})


def pairs(episodes, timeouts="keep") -> list[tuple[float, float]]:
    data = Transitions.from_episodes(episodes, timeouts=timeouts)
    batch = data.batch(data.index[None])
    return [
        (s, n if not t else None)
        for s, n, t in zip(
            batch.obs[0, :, 0].tolist(),
            batch.next_obs[0, :, 0].tolist(),
            batch.terminated[0].tolist(),
            strict=True,
        )
    ]


# Families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SIZES)
def test_every_family(family):
    arrays = family_arrays(family)
    path = write_hdf5(Path("x.hdf5"), arrays)
    length = 4 if family == "maze2d" else None
    episodes = load(path, episode_length=length)
    lengths = [4, 4, 4] if family == "maze2d" else [4, 3, 5]
    assert episodes.lengths.tolist() == lengths
    assert (episodes.obs_size, episodes.action_size) == SIZES[family]
    np.testing.assert_array_equal(episodes.obs[episodes.step_rows()], arrays["observations"])
    np.testing.assert_array_equal(episodes.action, arrays["actions"])
    np.testing.assert_array_equal(episodes.reward, arrays["rewards"].reshape(-1))
    assert episodes.reward.dtype == np.float32
    ends = {
        "gym": ([1, 0, 0], [0, 1, 1]),
        "antmaze": ([1, 1, 1], [0, 0, 0]),
        "maze2d": ([0, 0, 0], [1, 1, 1]),
        "adroit": ([0, 0, 0], [1, 1, 1]),
        "kitchen": ([1, 1, 1], [0, 0, 0]),
    }[family]
    assert episodes.terminated.astype(int).tolist() == ends[0]
    assert episodes.truncated.astype(int).tolist() == ends[1]
    assert episodes.final_known.all() == (family == "gym")
    if family == "gym":  # the stored successor, also of the last step
        np.testing.assert_allclose(episodes.obs[[4, 8, 14], 0], [4, 7, 12])
        assert episodes.metadata["metadata"] == {"algorithm": "SAC", "iteration": 7}
    assert not episodes.infos
    assert ("timeouts_missing" in episodes.metadata) == (family in ("maze2d", "kitchen"))
    assert load(path, infos=True, episode_length=length).infos.keys() == {
        k.removeprefix("infos/") for k in arrays if k.startswith("infos")
    }


def test_infos_come_on_request():
    arrays = family_arrays("gym")
    path = write_hdf5(Path("x.hdf5"), arrays)
    found = load(path, infos=["qpos"]).infos
    assert list(found) == ["qpos"] and found["qpos"].dtype == np.float64
    np.testing.assert_array_equal(found["qpos"], arrays["infos/qpos"])
    with pytest.raises(ValueError, match="no infos/qvel; there are: action_log_probs, qpos"):
        load(path, infos=["qvel"])


def test_infos_that_are_no_numbers_are_left_alone():
    arrays = family_arrays("gym") | {
        "infos/text": np.array([b"x"] * 12),
        "infos/one": np.float32(3),
    }
    path = write_hdf5(Path("x.hdf5"), arrays)
    assert load(path, infos=True).infos.keys() == {"qpos", "action_log_probs"}
    with pytest.raises(ValueError, match="infos/text holds .S1, not numbers"):
        load(path, infos=["text"])
    with pytest.raises(ValueError, match="infos/one has 1 rows, observations 12"):
        load(path, infos=["one"])


def test_no_pair_across_a_time_out():  # pitfalls O-20
    following = numbered(5, 2) + 1
    following[2] += 100
    every = [(0, 1), (1, 2), (2, 103), (3, 4), (4, 5)]
    path = small(next_observations=following)
    assert pairs(load(path)) == every  # (a)
    assert pairs(load(path), timeouts="drop") == [p for p in every if p[0] != 2]
    episodes = load(small(next_observations=None))  # (b) and (d)
    assert episodes.truncated.tolist() == [True, False]
    data = Transitions.from_episodes(episodes, timeouts="keep")
    assert pairs(episodes) == [(0, 1), (1, 2), (3, 4)]
    assert data.report["dropped_unknown_successor"] == 2
    path = small(timeouts=None)  # (c)
    with pytest.raises(ValueError, match="no dataset 'timeouts'.*give the episode length"):
        load(path)
    assert pairs(load(path, episode_length=2)) == [(0, 1), (2, 3)]
    assert load(path, episode_length=2).truncated.tolist() == [True, True, False]


def test_a_terminal_at_the_very_end_says_nothing_of_the_ends_before():  # pitfalls O-20
    """Three recordings, two cut without a mark: only kitchen's form says where each one ends."""
    last = np.array([0, 0, 0, 0, 1], bool)
    with pytest.raises(ValueError, match="no dataset 'timeouts'.*give the episode length"):
        load(small(timeouts=None, terminals=last))
    with pytest.raises(ValueError, match="no dataset 'timeouts'"):  # successors may cross ends, too
        load(small(timeouts=None, terminals=last, next_observations=numbered(5, 2) + 1))
    with pytest.raises(ValueError, match="no dataset 'timeouts'"):  # an end without a terminal
        load(small(timeouts=None, terminals=last, infos=np.array([0, 0, 1, 1, 1])))
    with pytest.raises(ValueError, match="no dataset 'timeouts'"):  # other infos than kitchen's
        load(small(timeouts=None, terminals=last, **{"infos/qpos": numbered(5, 2)}))
    for recordings in ([0, 0, 0, 0, 0], [7, 7, 8, 8, 8]):
        ends = np.append(np.diff(recordings) != 0, True)
        episodes = load(small(timeouts=None, terminals=ends, infos=np.array(recordings)))
        assert episodes.terminated.all() and episodes.num_episodes == ends.sum()
    named = "kitchen_microwave_kettle_light_slider-v0.hdf5"  # D4RL's own, whatever infos holds
    arrays = family_arrays("kitchen")
    del arrays["infos"]
    assert load(write_hdf5(Path(named), arrays)).lengths.tolist() == [4, 3, 5]
    arrays["terminals"][-1] = 0
    with pytest.raises(ValueError, match="no dataset 'timeouts'"):
        load(write_hdf5(Path(named), arrays))


def test_a_step_limit_counts_from_the_last_terminal():
    terminals = np.array([1, 0, 0, 0, 1], bool)
    episodes = load(small(timeouts=None, terminals=terminals), episode_length=2)
    assert episodes.lengths.tolist() == [1, 2, 2]
    assert episodes.terminated.tolist() == [True, False, True]
    assert episodes.truncated.tolist() == [False, True, False]  # the last was on the limit, too


def test_a_file_that_marks_its_time_outs_takes_no_step_limit(tmp_path):
    with pytest.raises(ValueError, match="x.hdf5 has 'timeouts'.*takes no episode length"):
        load(small(), episode_length=2)
    arrays = family_arrays("maze2d", (350,))
    arrays["timeouts"] = np.arange(350) == 200  # D4RL's file says more than the task's limit, 300
    path = write_hdf5(tmp_path / "maze2d-umaze-sparse-v1.hdf5", arrays)
    assert load(path).lengths.tolist() == [201, 149]


def test_recordings_that_were_joined_without_a_mark_are_cut():
    obs = numbered(5, 2)
    following = obs + 1
    following[3] = 50
    episodes = load(small(next_observations=following))
    assert episodes.lengths.tolist() == [3, 1, 1]
    assert episodes.metadata["joined_recordings"] == 1
    assert not (episodes.terminated | episodes.truncated)[1:].any()
    assert pairs(episodes)[3] == (3, 50)


def test_a_step_that_terminates_at_the_limit_terminates():  # pitfalls O-09
    ends = np.array([0, 0, 1, 0, 1], bool)
    episodes = load(small(terminals=ends, timeouts=ends))
    assert episodes.terminated.all() and episodes.truncated.all()
    assert pairs(episodes, "drop") == [(0, 1), (1, 2), (2, None), (3, 4), (4, None)]


# Round trips --------------------------------------------------------------------------------------


def test_writing_loses_nothing():
    episodes = all_kinds_of_ends()
    d4rl.write(Path("x.hdf5"), episodes)
    assert_same(load("x.hdf5", infos=True), episodes)
    with h5py.File("x.hdf5") as file:  # what another reader sees
        ends = file["terminals"][:] | file["timeouts"][:]
        assert np.flatnonzero(ends).tolist() == [2, 4, 5, 9, 11]  # but the last, which just stops
        np.testing.assert_array_equal(file["observations"][:], episodes.obs[episodes.step_rows()])
        following = file["next_observations"][:]
        np.testing.assert_array_equal(following[4], episodes.obs[6])
        assert np.isnan(following[[5, 9, 12]]).all() and not np.isnan(following[:5]).any()


@pytest.mark.parametrize("family", SIZES)
def test_every_family_survives_a_round_trip(family):
    length = 4 if family == "maze2d" else None
    path = write_hdf5(Path("x.hdf5"), family_arrays(family))
    first = load(path, infos=True, episode_length=length)
    d4rl.write(Path("y.hdf5"), first)
    assert_same(load("y.hdf5", infos=True), first)


def test_the_bounds_that_a_file_states_hold():
    episodes = all_kinds_of_ends()
    episodes.action[2] = [0.5, 7.0]  # the second has no bounds
    d4rl.write(Path("x.hdf5"), episodes)
    load("x.hdf5")
    episodes.action[2, 0] = -1.5
    d4rl.write(Path("x.hdf5"), episodes)
    with pytest.raises(ValueError, match=r"actions, row 2, column 0 is -1.5, outside \[-1, 1\]"):
        load("x.hdf5")


@pytest.mark.parametrize("target", ["x.hdf5", "toy-v0"])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(target):
    """HDF5 itself would crash the process; a limit on a file's size stands for the disk's."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from recordings import all_kinds_of_ends\n"
        "from offline import d4rl, minari\n"
        "episodes = all_kinds_of_ends()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        f"path = Path({target!r})\n"
        "try:\n"
        "    (d4rl if path.suffix else minari).write(path, episodes)\n"
        "except ValueError as error:\n"
        "    sys.exit(str(error))\n"
    )
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"cannot write {target}: File too large\n")
    assert not list(Path().iterdir())


def test_a_link_to_what_is_not_there_is_named():
    path = small()
    with h5py.File(path, "r+") as file:
        del file["rewards"]
        file["rewards"] = h5py.SoftLink("/nowhere")
    with pytest.raises(ValueError, match="x.hdf5: .*rewards"):
        load("x.hdf5")


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    path = small()
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(d4rl, "put", fail)
    with pytest.raises(ValueError, match="cannot write x.hdf5: disk full"):
        d4rl.write(path, all_kinds_of_ends())
    assert path.read_bytes() == before
    assert [p.name for p in Path().iterdir()] == ["x.hdf5"]
    with pytest.raises(ValueError, match="cannot write nowhere/x.hdf5"):
        d4rl.write(Path("nowhere/x.hdf5"), all_kinds_of_ends())


# Bad input ----------------------------------------------------------------------------------------

NAN = np.arange(5, dtype=np.float32)
NAN[3] = np.nan
BIG = numbered(5, 2).astype(np.float64)
BIG[1, 1] = 1e300

PART = numbered(5, 2) + 1  # an end, but only half of it is unknown
PART[2, 1] = np.nan
INSIDE = numbered(5, 2) + 1  # unknown, but no end
INSIDE[1] = np.nan

WRONG = {
    "next_observations, row 2, column 1 is nan": {"next_observations": PART},
    "next_observations, row 1, column 0 is nan": {"next_observations": INSIDE},
    "rewards, row 3 is nan": {"rewards": NAN},
    "actions, row 3, column 0 is nan": {"actions": NAN[:, None]},
    "observations, row 1, column 1 is inf": {"observations": BIG},
    "rewards has 4 rows, observations 5": {"rewards": np.zeros(4)},
    "next_observations has 4 rows, observations 5": {"next_observations": numbered(4, 2)},
    "next_observations has 3 columns, the task has 2": {"next_observations": numbered(5, 3)},
    "timeouts has 6 rows": {"timeouts": np.zeros(6, bool)},
    "no dataset 'rewards'; it holds actions, ": {"rewards": None},
    "no dataset 'observations'": {"observations": None},
    "terminals, row 2 is 0.5, neither 0 nor 1": {"terminals": np.array([0, 1, 0.5, 0, 0])},
    "rewards has shape (5, 2), not (rows,)": {"rewards": np.zeros((5, 2))},
    "observations has shape (5,), not (rows, width)": {"observations": np.zeros(5)},
    "observations has shape (5, 8, 8, 3)": {"observations": np.zeros((5, 8, 8, 3), np.uint8)},
    "actions are integers": {"actions": np.zeros(5, np.int64)},
    "rewards holds |S1, not numbers": {"rewards": np.array([b"x"] * 5)},
    "observations is a group": {"observations": None, "observations/x": np.zeros(5)},
    "observations has no row": {
        key: np.zeros((0, 2)) for key in ("observations", "actions", "next_observations")
    }
    | {key: np.zeros(0) for key in ("rewards", "terminals", "timeouts")},
}


@pytest.mark.parametrize("message", WRONG)
def test_one_line_names_file_key_and_row(message):
    path = small("bad.hdf5", **WRONG[message])
    with pytest.raises(ValueError) as error:
        load(path)
    assert "bad.hdf5: " in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_hdf5_or_only_part_of_one():
    Path("page.hdf5").write_text("<html>404 Not Found</html>")
    with pytest.raises(ValueError, match=r"page.hdf5 is not an HDF5 file: it begins with b'<html>"):
        load("page.hdf5")
    Path("empty.hdf5").touch()
    with pytest.raises(ValueError, match="empty.hdf5 is not an HDF5 file"):
        load("empty.hdf5")
    whole = write_hdf5(Path("x.hdf5"), family_arrays("gym", lengths=(900, 800))).read_bytes()
    Path("half.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half.hdf5 is truncated or damaged"):
        load("half.hdf5")
    with h5py.File("x.hdf5") as file:
        at = file["rewards"].id.get_chunk_info(0).byte_offset
    Path("bits.hdf5").write_bytes(whole[:at] + b"\0" * 200 + whole[at + 200 :])
    with pytest.raises(ValueError, match="bits.hdf5: rewards is damaged"):
        load("bits.hdf5")
    Path("folder").mkdir()
    with pytest.raises(ValueError, match="folder is a folder without data/metadata.json"):
        load("folder")


# Names and scores ---------------------------------------------------------------------------------


def test_the_table_is_whole():
    table = d4rl_table()
    assert len(table) == 155
    hopper = table["hopper-medium-replay-v2"]
    assert (hopper.ref_min, hopper.ref_max) == (-20.272305, 3234.3)
    assert (hopper.obs_size, hopper.action_size, hopper.episode_length) == (11, 3, 1000)
    assert hopper.file_name == "hopper_medium_replay-v2.hdf5"
    assert sum(entry.ref_min is None for entry in table.values()) == 8
    assert all(entry.url.startswith("http") for entry in table.values())
    assert len({entry.url for entry in table.values()}) == 155
    maze = {n: e.episode_length for n, e in table.items() if e.family == "maze2d" and "v1" in n}
    assert {n.split("-")[1]: v for n, v in maze.items() if "eval" not in n} == {
        "umaze": 300,
        "medium": 600,
        "large": 800,
    }


def test_an_id_is_read_from_the_cache_with_the_tasks_sizes(monkeypatch, tmp_path):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="ctrl-rl dataset download hopper-medium-v2"):
        load("hopper-medium-v2")
    (tmp_path / "cache").mkdir()
    path = write_hdf5(tmp_path / "cache" / "hopper_medium-v2.hdf5", family_arrays("gym"))
    episodes = load("hopper-medium-v2")
    assert episodes.metadata["dataset"] == "hopper-medium-v2"
    assert episodes.metadata["sha256"] == datasets.file_sha256(path)
    assert load(path).metadata["dataset"] == "hopper-medium-v2"
    write_hdf5(tmp_path / "cache" / "walker2d_medium-v2.hdf5", family_arrays("gym"))
    with pytest.raises(ValueError, match="observations has 11 columns, the task has 17"):
        load("walker2d-medium-v2")
    arrays = family_arrays("gym")
    arrays["actions"][3, 1] = 1.37
    write_hdf5(path, arrays)
    with pytest.raises(ValueError, match=r"actions, row 3, column 1 is 1.37, outside \[-1, 1\]"):
        load("hopper-medium-v2")
    arrays["actions"][3, 1] = 1.000005  # rounding
    write_hdf5(path, arrays)
    load("hopper-medium-v2")
    write_hdf5(tmp_path / "cache" / "maze2d-umaze-sparse-v1.hdf5", family_arrays("maze2d", (350,)))
    assert load("maze2d-umaze-v1").lengths.tolist() == [300, 50]
    assert load("maze2d-umaze-v1", episode_length=100).lengths.tolist() == [100, 100, 100, 50]


def test_data_of_our_own_is_not_d4rls_whatever_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    path = tmp_path / "hopper_medium-v2.hdf5"
    d4rl.write(path, all_kinds_of_ends())  # of other sizes than Hopper's
    assert datasets.locate(path) == (path, None)
    assert load(path).metadata["dataset"] == "hopper_medium-v2"
    with pytest.raises(ValueError, match="it is not D4RL's hopper-medium-v2; give its path to"):
        load("hopper-medium-v2")
    write_hdf5(path, family_arrays("gym"))
    assert datasets.locate(path) == (path, d4rl_table()["hopper-medium-v2"])
    path.write_text("no file of this kind")  # reading it says so, not the search for its name
    assert datasets.locate(path)[1] is not None


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'hopper-medium-v2'"):
        load("hopper-mediun-v2")
    with pytest.raises(ValueError, match="x.hdf5 does not exist"):
        load("x.hdf5")
    with pytest.raises(ValueError, match="dataset download D4RL/door/human-v2"):
        load("D4RL/door/human-v2")


def test_scores_by_hand_and_where_they_come_from():
    reference = find_reference({"dataset": "hopper-medium-v2"})
    assert reference is not None
    # 100 (1607.0138475 + 20.272305) / (3234.3 + 20.272305) = 50
    assert reference.normalize(1607.0138475) == pytest.approx(50)
    assert reference.normalize(np.array([-20.272305, 3234.3])).tolist() == pytest.approx([0, 100])
    score = Score(
        episode_return=1607.0138475, reference=reference, played_in=played_in("Hopper-v5")
    )
    assert not score.comparable
    assert "score 50.0 of 100 (return 1607; references D4RL hopper-*" in str(score)
    assert re.search(
        r"in Hopper-v5 \(gymnasium [\d.]+, mujoco [\d.]+\): not comparable", str(score)
    )
    assert re.fullmatch(r"Pendulum-v0 \(torch [^,]+\)", played_in("Pendulum-v0"))
    own = dataset_score({"dataset": "hopper-medium-v2"}, np.array([1600.0, 1614.027695]))
    assert own.comparable and own.normalized == pytest.approx(50)
    assert "not comparable" not in str(own)
    assert find_reference({"dataset": "mine", "task": "Hopper-v5"}) == reference
    assert find_reference({"dataset": "mine", "task": "Pendulum-v0"}) is None
    assert find_reference({"dataset": "ant-random-expert-v0"}) is None
    assert "no reference" in str(Score(episode_return=1.0, reference=None, played_in="x"))


def test_minari_names_use_their_own_references():
    own = {"dataset_id": "mujoco/hopper/medium-v0", "ref_min_score": 1.0, "ref_max_score": 3.0}
    reference = find_reference(own)
    assert reference is not None and reference.normalize(2.0) == 50
    assert find_reference({"dataset_id": "mujoco/hopper/medium-v0"}) is None
    door = find_reference({"dataset_id": "D4RL/door/human-v2"})
    assert door is not None and door.minimum == -56.512833
    assert find_reference({"dataset_id": "D4RL/antmaze/umaze-v1"}) is None


# Real files ---------------------------------------------------------------------------------------


def test_real_human_demonstrations(test_data):
    episodes = load(test_data / "door-human_dapg.hdf5")
    assert (episodes.num_episodes, episodes.num_steps) == (25, 6729)
    assert (episodes.obs_size, episodes.action_size) == SIZES["adroit"]
    assert episodes.truncated.all() and not episodes.terminated.any()
    assert not episodes.final_known.any()
    # Mean return 794, 29.0 on D4RL's scale: the figure of door-human.
    score = dataset_score({"dataset": "door-human-v1"}, episodes.returns())
    assert score.normalized == pytest.approx(29.0, abs=0.05)
    data = Transitions.from_episodes(episodes)
    assert len(data) == 6729 - 25 and data.report["dropped_at_timeouts"] == 25


def test_real_hopper_segments(test_data):
    episodes = load(test_data / "hopper-medium-expert-v2_segments.hdf5")
    assert episodes.num_steps == 21_780 and episodes.lengths.tolist() == [99] * 220
    assert episodes.final_known.all()
    assert "joined_recordings" not in episodes.metadata
    assert len(Transitions.from_episodes(episodes, timeouts="keep")) == 21_780
    assert len(Transitions.from_episodes(episodes, timeouts="drop")) == 21_780 - 220
    assert json.dumps(episodes.metadata)


def test_the_loading_benchmark_measures():
    from benchmarks.dataset_load import CELLS, measure

    config = CELLS[1].config | {"rows": 4000, "repeats": 1, "episode": 100}
    found = measure(config)
    assert found["transitions"] == 4000 - 36  # 4 of 40 episodes terminate, the others are cut
    # 16 numbers a row; an index of 8 bytes, and a row and 16 bytes more per episode.
    assert found["kept"] == pytest.approx(1 + (2 - 0.018) / 16 + (1 + 4 / 16) / 100, abs=0.002)
    assert found["s"] > 0 and found["file_mb"] > 0
