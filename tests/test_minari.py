"""Minari's folders, read and written without the package, and checked against it where it is."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from recordings import all_kinds_of_ends, assert_same, family_arrays, numbered, write_hdf5

from offline import d4rl, minari, minari_files
from offline.datasets import data_checksum, load
from offline.episodes import digest
from offline.inspection import verify
from offline.transitions import Transitions

FORMATS = minari.FORMATS


@pytest.fixture(params=FORMATS)
def data_format(request) -> str:
    """Each form; two of them need pyarrow."""
    if request.param != "hdf5":
        pytest.importorskip("pyarrow")
    return request.param


def episode(steps: int, obs_rows: int | None = None, first=0.0, **changes) -> dict:
    """Arrays of one episode that terminates; observation = number of the step."""
    rows = steps + 1 if obs_rows is None else obs_rows
    ends = np.zeros(steps, bool)
    ends[-1:] = True
    arrays = {
        "observations": numbered(rows, 2, first).astype(np.float64),
        "actions": np.linspace(-1, 1, steps)[:, None],
        "rewards": np.arange(steps) + first,
        "terminations": ends,
        "truncations": np.zeros(steps, bool),
    }
    return arrays | changes


def folder_of(*episodes: dict, name="toy-v0", **about) -> Path:
    """A data set in its HDF5 form, as plainly as can be."""
    folder = Path(name) / "data"
    folder.mkdir(parents=True)
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for e, arrays in enumerate(episodes):
            group = file.create_group(f"episode_{e}")
            for key, values in arrays.items():
                if values is not None:
                    group[key] = values
    plain = {"data_format": "hdf5", "total_episodes": len(episodes)}
    (folder / "metadata.json").write_text(json.dumps(plain | about))
    return Path(name)


def test_steps_are_aligned():  # pitfalls O-21
    folder = folder_of(episode(3), episode(3, obs_rows=3, first=10.0))
    episodes = load(folder)
    assert episodes.final_known.tolist() == [True, False]
    assert episodes.metadata["final_obs_missing"] == [1]
    data = Transitions.from_episodes(episodes)
    batch = data.batch(data.index[None])
    rows = zip(
        batch.obs[0, :, 0].tolist(),
        batch.action[0, :, 0].tolist(),
        batch.reward[0].tolist(),
        batch.next_obs[0, :, 0].tolist(),
        batch.terminated[0].tolist(),
        strict=True,
    )
    assert list(rows) == [
        (0, -1, 0, 1, 0),
        (1, 0, 1, 2, 0),
        (2, 1, 2, 3, 1),
        (10, -1, 10, 11, 0),
        (11, 0, 11, 12, 0),
        (12, 1, 12, 12, 1),  # it terminated: what followed is not looked at
    ]


def test_episodes_come_by_number_and_not_by_name():
    folder = folder_of(*(episode(1, first=float(e)) for e in range(12)))
    assert load(folder).reward.tolist() == list(range(12))


def test_infos_have_a_row_for_each_observation_and_lose_the_last():
    infos = {"infos/qpos": numbered(4, 2), "infos/text": np.array([b"x"] * 4), "infos/one": 3.0}
    folder = folder_of(episode(3, **infos))
    found = load(folder, infos=True).infos
    assert list(found) == ["qpos"]
    np.testing.assert_array_equal(found["qpos"], numbered(3, 2))
    with pytest.raises(ValueError, match="infos/text holds .S1, not numbers"):
        load(folder, infos=["text"])
    with pytest.raises(ValueError, match="infos/one has not one row for each of 3 steps"):
        load(folder, infos=["one"])
    with pytest.raises(ValueError, match="no infos/goal; there are: one, qpos, text"):
        load(folder, infos=["goal"])


def test_parts_of_a_dict_are_laid_out_by_name():  # pitfalls O-19
    parts = {
        "observations": None,
        "observations/b": numbered(4, 2),
        "observations/a": numbered(4, 1, 100.0),
        "observations/c/x": numbered(4, 2, 200.0).reshape(4, 1, 2),
    }
    folder = folder_of(episode(3, **parts))
    episodes = load(folder)
    assert episodes.metadata["obs_order"] == [["a", 1], ["b", 2], ["c/x", 2]]
    assert episodes.obs[1].tolist() == [101, 1, 1 + 1 / 64, 201, 201 + 1 / 64]
    chosen = load(folder, obs_keys=["b", "a"])
    assert chosen.metadata["obs_order"] == [["b", 2], ["a", 1]]
    assert chosen.obs[1].tolist() == [1, 1 + 1 / 64, 101]
    with pytest.raises(ValueError, match="no part 'goal' in observations; there are: a, b, c/x"):
        load(folder, obs_keys=["goal"])


def test_writing_loses_nothing(data_format):
    episodes = all_kinds_of_ends()
    minari.write(Path("toy-v0"), episodes, data_format)
    assert_same(load("toy-v0", infos=True), episodes)
    assert not load("toy-v0").infos
    assert [p.name for p in Path().iterdir()] == ["toy-v0"]
    with pytest.raises(ValueError, match="toy-v0 exists already"):
        minari.write(Path("toy-v0"), episodes, data_format)


def test_from_one_format_to_the_other_and_back(data_format):
    first = load(write_hdf5(Path("x.hdf5"), family_arrays("gym")), infos=True)
    minari.write(Path("toy-v0"), first, data_format)
    d4rl.write(Path("y.hdf5"), load("toy-v0", infos=True))
    assert_same(load("y.hdf5", infos=True), first)


def test_a_folder_is_known_by_what_is_in_it():
    """Also one of others, without a recorded digest; a recorded one is not taken on trust."""
    folder = folder_of(episode(3))
    before = load(folder).metadata["digest"]
    assert before == digest(load(folder)) and before == load(folder, infos=True).metadata["digest"]
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        file["episode_0/rewards"][0] += 1
    assert load(folder).metadata["digest"] != before
    assert data_checksum(folder) == load(folder).metadata["digest"]
    first = load(write_hdf5(Path("x.hdf5"), family_arrays("gym")))  # with the file's sha256
    first.metadata["digest"] = was = digest(first)
    minari.write(Path("ours-v0"), first)
    metadata = load("ours-v0").metadata
    assert metadata["digest"] == was and not {"sha256", "digest_recorded"} & metadata.keys()
    with h5py.File("ours-v0/data/main_data.hdf5", "r+") as file:
        file["episode_1/actions"][0] = 0.5
    episodes = load("ours-v0")
    assert episodes.metadata["digest"] == digest(episodes) != was
    assert "recorded is" in verify(episodes)[0] and was[:12] in verify(episodes)[0]


def test_a_failed_write_leaves_nothing(monkeypatch):
    monkeypatch.setattr(
        minari_files, "put", lambda *args: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(ValueError, match="cannot write toy-v0: disk full"):
        minari.write(Path("toy-v0"), all_kinds_of_ends())
    assert not list(Path().iterdir())
    with pytest.raises(ValueError, match="is no folder"):
        minari.write(Path("no/toy-v0"), all_kinds_of_ends())
    with pytest.raises(ValueError, match="data_format must be one of hdf5, arrow, parquet"):
        minari.write(Path("toy-v0"), all_kinds_of_ends(), "csv")


NAN = np.array([0.0, np.nan, 0.0])
WRONG = {
    "episode_1: rewards, row 1 is nan": {"rewards": NAN},
    "episode_1: actions, row 1, column 0 is nan": {"actions": NAN[:, None]},
    "episode_1: actions has 2 rows, rewards 3": {"actions": np.zeros((2, 1))},
    "episode_1: observations has 6 rows, 3 steps need 4": {"observations": numbered(6, 2)},
    "episode_1: observations has 3 columns": {"observations": numbered(4, 3)},
    "episode_1: terminations, row 0 ends the episode before": {
        "terminations": np.array([1, 0, 0], bool)
    },
    "episode_1: no 'truncations'; it holds": {"truncations": None},
    "episode_1: actions holds discrete values (int64)": {"actions": np.zeros(3, np.int64)},
    "episode_1: observations holds pictures (uint8)": {
        "observations": np.zeros((4, 2, 2, 3), np.uint8)
    },
    "episode_1: rewards has no row": episode(0, obs_rows=1),
}


@pytest.mark.parametrize("message", WRONG)
def test_one_line_names_episode_key_and_row(message):
    folder = folder_of(episode(3), episode(3, **WRONG[message]))
    with pytest.raises(ValueError) as error:
        load(folder)
    assert "main_data.hdf5/" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_that_are_damaged():
    space = json.dumps({"type": "Box", "low": [-0.5], "high": [0.5]})
    with pytest.raises(ValueError, match=r"actions, row 0, column 0 is -1, outside \[-0.5, 0.5\]"):
        load(folder_of(episode(3), name="bounds-v0", action_space=space))
    with pytest.raises(ValueError, match="1 episodes are there, metadata.json counts 3"):
        load(folder_of(episode(3), name="lost-v0", total_episodes=3))
    folder = folder_of(episode(3), name="text-v0")
    (folder / "data" / "metadata.json").write_text("{")
    with pytest.raises(ValueError, match=r"metadata.json is no JSON text"):
        load(folder)
    folder = folder_of(episode(3), name="half-v0")
    main = folder / "data" / "main_data.hdf5"
    main.write_bytes(main.read_bytes()[:3000])
    with pytest.raises(ValueError, match="main_data.hdf5 is truncated or damaged"):
        load(folder)


def test_an_id_is_found_in_minaris_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    folder_of(episode(3), name=str(tmp_path / "root" / "toy" / "walk-v1"), dataset_id="toy/walk-v1")
    assert load("toy/walk-v1").metadata["dataset"] == "toy/walk-v1"
    with pytest.raises(ValueError, match="ctrl-rl dataset download toy/walk-v2"):
        load("toy/walk-v2")


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'ctrl-rl\[data\]'"):
        minari.write(Path("toy-v0"), all_kinds_of_ends(), "arrow")


# Against the package ------------------------------------------------------------------------------


def test_the_package_reads_what_we_write(data_format):
    library = pytest.importorskip("minari")
    episodes = all_kinds_of_ends()
    minari.write(Path("toy-v0"), episodes, data_format)
    theirs = library.MinariDataset(str(Path("toy-v0/data").resolve()))
    assert (theirs.total_episodes, theirs.total_steps) == (episodes.num_episodes, 13)
    assert theirs.spec.dataset_id == "toy-v0"
    assert theirs.spec.action_space.low.tolist() == [-1, -np.inf]
    for e, found in enumerate(theirs.iterate_episodes()):
        want = episodes.select([e])
        np.testing.assert_array_equal(found.observations, want.obs)
        np.testing.assert_array_equal(found.actions, want.action)
        np.testing.assert_array_equal(found.rewards, want.reward)
        np.testing.assert_array_equal(found.infos["qpos"][:-1], want.infos["qpos"])
        assert found.terminations.tolist()[-1] == want.terminated[0]
        assert found.truncations.tolist()[-1] == want.truncated[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_we_read_what_the_package_writes(data_format, monkeypatch, tmp_path):
    library = pytest.importorskip("minari")
    from gymnasium.spaces import Box, Dict, Tuple
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    parts = {"observation": Box(-9, 9, (3,)), "achieved": Box(-9, 9, (2,))}
    space = Dict({**parts, "pair": Tuple([Box(-9, 9, (1,)), Box(-9, 9, (2, 2))])})
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)  # noqa: E731
    buffers = [
        EpisodeBuffer(
            observations={
                "observation": draw(n + 1, 3),
                "achieved": draw(n + 1, 2),
                "pair": (draw(n + 1, 1), draw(n + 1, 2, 2)),
            },
            actions=draw(n, 2),
            rewards=[float(r) for r in draw(n)],
            terminations=[False] * n,
            truncations=[False] * (n - 1) + [True],
            infos={"qpos": draw(n + 1, 2)},
        )
        for n in (3, 5)
    ]
    library.create_dataset_from_buffers(
        "toy/walk-v0",
        buffers,
        observation_space=space,
        action_space=Box(-1, 1, (2,)),
        data_format=data_format,
    )
    episodes = load("toy/walk-v0", infos=True)
    assert [name for name, _ in episodes.metadata["obs_order"]][:2] == ["achieved", "observation"]
    flat = [
        np.concatenate(
            [
                b.observations["achieved"],
                b.observations["observation"],
                b.observations["pair"][0],
                b.observations["pair"][1].reshape(-1, 4),
            ],
            1,
        )
        for b in buffers
    ]
    np.testing.assert_array_equal(episodes.obs, np.concatenate(flat))
    np.testing.assert_array_equal(episodes.action, np.concatenate([b.actions for b in buffers]))
    np.testing.assert_array_equal(episodes.reward, np.concatenate([b.rewards for b in buffers]))
    qpos = np.concatenate([b.infos["qpos"][:-1] for b in buffers])
    np.testing.assert_array_equal(episodes.infos["qpos"], qpos)
    assert episodes.truncated.all() and episodes.final_known.all()
    assert episodes.lengths.tolist() == [3, 5]
