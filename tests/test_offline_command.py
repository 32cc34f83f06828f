"""`ctrl-rl offline train`, and how data finds its task."""

import dataclasses
import importlib
import json
import re
import typing

import h5py
import numpy as np
import pytest
import torch
from recorded import episodes, same

from ctrl_rl import cli, registry
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.commands.list import List
from ctrl_rl.commands.list import main as list_main
from ctrl_rl.policy import Policy, load_policy
from ctrl_rl.run_folder import read_config, read_metrics
from offline import d4rl, minari, online, playing, published, training
from offline.commands import online as online_command
from offline.commands import train
from offline.datasets import load
from offline.published import NAMES
from offline.registry import ALGOS, COMMANDS
from offline.td3_bc import TD3BC, TD3BCConfig
from offline.transitions import Transitions

SMALL = (
    "--algo.hidden 8 --algo.batch-size 16 --algo.compile off --total-steps 40 --eval-every 20"
    " --checkpoint-every 20 --episodes 2"
).split()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short rows, no pictures, and this checkout's names whatever is installed."""
    monkeypatch.setattr(training, "LOG_EVERY", 10)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    names, ours = registry.names, {"offline_algos": ALGOS, "commands": COMMANDS}
    monkeypatch.setattr(registry, "names", lambda g: {**names(g), **ours.get(g, {})})


def write(path, obs_size=11, action_size=3, metadata=None, seed=0):
    draw = np.random.default_rng(seed)
    lengths = np.full(10, 20)
    found = episodes(
        draw.standard_normal((210, obs_size)),
        draw.uniform(-1, 1, (200, action_size)),
        draw.uniform(0, 1, 200),
        lengths,
        np.arange(10) % 2 == 0,
        np.arange(10) % 2 == 1,
    )
    d4rl.write(path, dataclasses.replace(found, metadata=metadata or {}))
    return path


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "hopper-noise-v0.hdf5"
    return write(path, metadata={"task": "Hopper-v5"})


def trained(folder, *words):
    found = train.main([*words, "--run-dir", str(folder)] if words[0] != "--resume" else [*words])
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)
    ]
    last = load_checkpoint(folder / "checkpoints/last.pt")
    return found, {k: v for k, v in last.items() if k != "config"}, rows


def test_train_evaluates_in_the_task_of_the_data(tmp_path, hopper, capsys):
    found, last, rows = trained(
        tmp_path / "r", "--algo", "td3_bc", "--dataset", str(hopper), *SMALL
    )
    assert found["task"] == "Hopper-v5" and found["updates"] == last["step"] == 40
    assert [("eval/episode_return" in row) for row in rows] == [False, True, False, True]
    episode_return = found["metrics"]["episode_return"]["mean"]
    assert rows[-1]["eval/episode_return"] == episode_return
    low, high = -20.272305, 3234.3  # D4RL's references of hopper
    score = 100 * (episode_return - low) / (high - low)
    assert rows[-1]["eval/normalized_score"] == pytest.approx(score, abs=1e-3)
    config = read_config(tmp_path / "r")
    assert config["task"] == "Hopper-v5" and config["run"]["episodes"] == 2
    assert config["data"]["dataset"] == "hopper-noise-v0" and len(config["data"]["sha256"]) == 64
    assert config["data"]["file"] == str(hopper.resolve())
    text = capsys.readouterr().out
    assert "hopper-noise-v0: 195 transitions of 10 episodes; dropped 5 at time-outs" in text
    assert "observations are standardised" in text  # the paper's, by the preset
    assert f"score {score:.1f} of 100" in text and "not comparable" in text
    policy = load_policy(tmp_path / "r")
    assert policy.section()["normalizer"] is not None
    assert policy(torch.zeros(1, 11)).shape == (1, 3)


def test_stopped_and_resumed_equals_uninterrupted_and_may_be_longer(tmp_path, hopper):
    words = ("--algo", "td3_bc", "--dataset", str(hopper), "--seeds", "2", *SMALL)
    _, whole, rows = trained(tmp_path / "whole", *words)
    trained(tmp_path / "parts", *words, "--stop-after", "20")
    _, resumed, again = trained(tmp_path / "parts", "--resume", str(tmp_path / "parts"))
    for each in (whole, resumed):  # but for times
        each["learner"]["rows"] = [
            [{k: v for k, v in row.items() if not k.startswith("time/")} for row in mine]
            for mine in each["learner"]["rows"]
        ]
    same(resumed, whole)
    assert again == rows and read_config(tmp_path / "parts")["run"]["seeds"] == [0, 1]
    longer = ("--resume", str(tmp_path / "parts"), "--total-steps", "60")
    found, last, rows = trained(tmp_path / "parts", *longer)
    assert last["step"] == rows[-1]["step"] == found["updates"] == 60
    with pytest.raises(ValueError, match=r"another reward \('raw', now 'locomotion'\)"):
        train.main([*longer, "--reward", "locomotion"])
    with pytest.raises(ValueError, match="is one seed of a job; go on with --resume .*parts$"):
        train.main(["--resume", str(tmp_path / "parts" / "s1")])
    with pytest.raises(ValueError, match="is a run of td3_bc, not of bc"):
        train.main([*longer, "--algo", "bc"])


def test_every_flag_reaches_the_run(tmp_path, hopper, monkeypatch):
    """O-44: read back from what the learner gets and from the record."""
    seen = []

    def keep(config, data, spec, seeds, run, evaluate):
        seen.append((config, data, seeds, evaluate))
        return training.fit(TD3BC(config, data, spec, seeds), data, run, evaluate)

    monkeypatch.setattr("offline.td3_bc.train", keep)
    keep.__annotations__["config"] = TD3BCConfig
    values = {
        "total_steps": 30,
        "seed": 7,
        "seeds": 2,
        "task": "Hopper-v5",
        "reward": "locomotion",
        "timeouts": "keep",
        "eval_every": 30,
        "episodes": 3,
        "checkpoint_every": 15,
        "threads": 1,
        "torch_threads": 2,
    }  # episode_length, which a file with time-outs refuses, has a test of its own
    words = [w for k, v in values.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    words += ["--no-normalize-obs", "--algo.gamma", "0.5", "--algo.hidden", "8", "4"]
    threads = torch.get_num_threads()
    try:
        train.main(["--algo", "td3_bc", "--dataset", str(hopper), *words, "--run-dir",
                    str(tmp_path / "r")])  # fmt: skip
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    config, data, seeds, judge = seen[0]
    assert (config.total_steps, config.gamma, config.hidden) == (30, 0.5, (8, 4))
    assert seeds == (7, 8) and judge.episodes == 3 and judge.threads == 1
    assert data.normalizer is None and len(data) == 200 and data.reward_scale != 1
    record = read_config(tmp_path / "r")
    for key, value in values.items():
        wanted = {"seeds": [7, 8]}.get(key, value)
        assert record["run"][key] == wanted, key
    assert record["run"]["normalize_obs"] is False
    assert record["algo_config"]["gamma"] == 0.5 and record["data"]["timeouts"] == "keep"


@pytest.mark.parametrize("algo", ["iql", "por"])
def test_a_run_whose_step_sizes_fall_cannot_be_made_longer(tmp_path, hopper, algo):
    words = ("--algo", algo, "--dataset", str(hopper), *SMALL)
    words += ("--algo.execute-hidden", "8") if algo == "por" else ()
    trained(tmp_path / "r", *words)
    before = (tmp_path / "r/metrics.csv").read_bytes()
    with pytest.raises(ValueError, match=f"total_steps must stay 40: step sizes of {algo} fall"):
        train.main(["--resume", str(tmp_path / "r"), "--total-steps", "60"])
    assert (tmp_path / "r/metrics.csv").read_bytes() == before


@pytest.mark.parametrize("part", ["state", "watch", "rows"])
def test_a_damaged_checkpoint_is_one_line(tmp_path, hopper, part):
    words = ("--algo", "td3_bc", "--dataset", str(hopper), *SMALL, "--stop-after", "20")
    trained(tmp_path / "r", *words)
    last = tmp_path / "r/checkpoints/last.pt"
    content = load_checkpoint(last)
    del content["learner"][part]
    save_checkpoint(last, {k: v for k, v in content.items() if k != "format"})
    with pytest.raises(ValueError, match=f"does not fit this run: its learner lacks {part}"):
        train.main(["--resume", str(tmp_path / "r")])


@pytest.mark.parametrize(
    ("algo", "dataset", "expected"),
    [
        ("td3_bc", "hopper-medium-v2", {"normalize_obs": True, "reward": "raw"}),
        ("iql", "walker2d-medium-replay-v2", {"normalize_obs": False, "reward": "locomotion"}),
        ("iql", "antmaze-umaze-v2", {"reward": "antmaze", "expectile": 0.9,
                                     "inverse_temperature": 10.0}),
        ("iql", "pen-human-v1", {"reward": "raw", "inverse_temperature": 0.5}),
        ("iql", "door-human_dapg.hdf5", {"dropout": 0.1, "expectile": 0.7}),
        ("cql", "antmaze-umaze-v2", {"reward": "antmaze", "conservatism": 5.0}),
        ("iql", "maze2d-umaze-v1", {"reward": "raw", "expectile": 0.7}),
        ("iql", "elephant-v2", {"reward": "raw"}),  # no ant
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_source_for_the_family(algo, dataset, expected):
    """O-22; a flag stands above them."""
    plan = train.read_plan(["--algo", algo, "--dataset", dataset])
    found = {**dataclasses.asdict(plan.algo_config), **dataclasses.asdict(plan.flags)}
    assert {key: found[key] for key in expected} == expected
    plan = train.read_plan(["--algo", algo, "--dataset", dataset, "--reward", "locomotion"])
    assert plan.flags.reward == "locomotion"


OWN_WAY = {("CQL", "antmaze"), ("ReBRAC", "antmaze")}
"""Where presets are not CORL's, which their modules say; nor are IQL's, which are its paper's."""


def test_presets_that_are_said_to_be_corl_s_are():
    ours = {printed: name for name, printed in NAMES.items() if " " not in name}
    for cell in (c for cells in published.tables().values() for c in cells):
        given = published.source_settings(cell)
        own = (cell.algo, cell.dataset.partition("-")[0]) in OWN_WAY
        if given is None or own or cell.algo not in ours.keys() - {"IQL"}:
            continue
        module = importlib.import_module(f"offline.{ours[cell.algo]}")
        algo = typing.get_type_hints(module.train)["config"]()
        known = dataclasses.asdict(train.OfflineFlags()) | dataclasses.asdict(algo)
        found = known | train.presets(module, cell.dataset)[1]
        wanted = known | {k: v for k, v in given.items() if k in known}
        assert found == wanted | {"total_steps": cell.steps}, (cell.algo, cell.dataset)


@pytest.mark.parametrize("folder", [False, True])
def test_whose_settings_were_taken_is_said_and_a_recorded_task_counts(folder, tmp_path, capsys):
    def plan_of(name, metadata):
        path = tmp_path / name if folder else write(tmp_path / f"{name}.hdf5", metadata=metadata)
        if folder:
            minari.write(path, d4rl.read(write(tmp_path / "x.hdf5", metadata=metadata)))
        return str(path), train.read_plan(["--algo", "iql", "--dataset", str(path)])

    path, plan = plan_of("mine", {"task": "Hopper-v5"})
    assert (plan.settings_of, plan.flags.reward) == ("the gym family", "locomotion")
    trained(tmp_path / "r", "--algo", "iql", "--dataset", path, *SMALL, "--stop-after", "20")
    assert "settings of the gym family\n" in capsys.readouterr().out
    trained(tmp_path / "r", "--resume", str(tmp_path / "r"))
    assert "settings of" not in capsys.readouterr().out
    path, plan = plan_of("other", {"task": "Elephant-v0"})
    assert (plan.settings_of, plan.flags.reward) == (None, "raw")
    trained(tmp_path / "s", "--algo", "iql", "--dataset", path, "--task", "Hopper-v5", *SMALL)
    assert "settings of iql alone, for no data set\n" in capsys.readouterr().out
    # A name goes first.
    assert plan_of("antmaze-mine", {"task": "Hopper-v5"})[1].flags.reward == "antmaze"
    plan = train.read_plan(["--algo", "rebrac", "--dataset", "hopper-medium-v2"])
    assert plan.settings_of == "hopper-medium-v2"


@pytest.mark.parametrize(
    ("algo", "name", "whose", "expected"),
    [
        ("por", "hopper-medium-replay.hdf5", "hopper-medium-replay-v2", {"alpha": 50.0}),
        ("edac", "hopper_medium.hdf5", "hopper-medium-v2", {"critics": 50}),
        ("edac", "hopper-medium-v5.hdf5", "hopper-medium-v2", {"critics": 50}),
        ("rebrac", "walker2d-medium", "walker2d-medium-v2", {"actor_penalty": 0.05}),
        ("edac", "hopper-medium-mixed.hdf5", "the gym family", {"critics": 10}),
    ],
)
def test_data_of_ones_own_has_the_settings_of_what_it_is_named_after(
    algo, name, whose, expected, tmp_path
):
    """As it is shown beside what is published for that; in a file, a folder or as an id."""
    if name.endswith(".hdf5"):
        name = str(write(tmp_path / name))
    plan = train.read_plan(["--algo", algo, "--dataset", name])
    assert plan.settings_of == whose
    assert {key: getattr(plan.algo_config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "algo", "whose"),
    [
        ("Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5", "iql",
         "the antmaze family"),
        ("walker_mixed.hdf5", "iql", "the gym family"),
        ("walker_mixed.hdf5", "rebrac", "walker2d-medium-replay-v2"),
    ],
)  # fmt: skip
def test_a_file_of_d4rl_is_known_by_its_id_whatever_its_name_says(name, algo, whose, tmp_path):
    with h5py.File(tmp_path / name, "w") as file:
        file["rewards"] = np.zeros(3)
    plan = train.read_plan(["--algo", algo, "--dataset", str(tmp_path / name)])
    assert plan.settings_of == whose


@pytest.mark.parametrize(
    ("command", "rows"),
    [(train.main, f"multiple of {training.LOG_EVERY}"), (online_command.main,
     f"row of the log, one in {online.LOG_EVERY} env steps")],
)  # fmt: skip
def test_help_says_how_finely_a_run_can_be_cut(command, rows, capsys):
    with pytest.raises(SystemExit):
        command(["--help"])
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    for flag in ("--stop-after", "--eval-every", "--checkpoint-every"):
        assert rows in text.partition(f"{flag} ")[2][:220], flag


def test_data_of_no_task_trains_without_evaluation(tmp_path, capsys):
    path = write(tmp_path / "door-noise.hdf5", 39, 28)
    found, last, rows = trained(tmp_path / "r", "--algo", "bc", "--dataset", str(path), *SMALL)
    text = capsys.readouterr().out
    assert "no evaluation: no task here is that of door-noise" in text
    assert found["task"] is None and found["metrics"] == {} and last["step"] == 40
    assert not any(key.startswith("eval/") for row in rows for key in row)
    assert load_policy(tmp_path / "r")(torch.zeros(2, 39)).shape == (2, 28)
    spec = read_config(tmp_path / "r")["spec"]
    assert spec["task"] == "door-noise" and spec["action"][27]["high"] == 1.0


def test_a_file_without_time_outs_needs_the_length_of_an_episode(tmp_path, hopper):
    path = tmp_path / "hopper-cut.hdf5"
    with h5py.File(hopper) as old, h5py.File(path, "w") as new:
        for key in ("observations", "actions", "rewards", "terminals", "next_observations"):
            if key in old:
                new[key] = old[key][()]
    words = ("--algo", "bc", "--dataset", str(path), *SMALL)
    with pytest.raises(ValueError, match="episode.length"):
        trained(tmp_path / "a", *words)
    assert not (tmp_path / "a").exists()
    trained(tmp_path / "b", *words, "--episode-length", "20")
    data = read_config(tmp_path / "b")["data"]
    assert data["episodes"] == 10 and data["dropped_at_timeouts"] == 5
    resumed = ("--resume", str(tmp_path / "b"), "--total-steps", "50")
    assert trained(tmp_path / "b", *resumed)[1]["step"] == 50


def data_of(obs_size, action_size) -> Transitions:
    found = episodes(np.zeros((3, obs_size)), np.zeros((2, action_size)), [0, 0], [2], [True])
    return Transitions.from_episodes(found)


def test_a_task_is_found_by_record_or_name_and_must_fit():
    hopper, cheetah = data_of(11, 3), data_of(17, 6)
    found = [
        (hopper, {"dataset": "hopper-medium-v2"}, "Hopper-v5"),
        (cheetah, {"dataset": "D4RL/halfcheetah/medium-v2"}, "HalfCheetah-v5"),
        (cheetah, {"dataset": "mine", "task": "HalfCheetah-v5"}, "HalfCheetah-v5"),
        (hopper, {"dataset": "mine"}, None),
        (cheetah, {"dataset": "hopper-medium-v2"}, None),
    ]
    for data, metadata, task in found:
        spec, chosen, line = playing.spec_of(data, metadata)
        assert chosen == task and (line == "") == (task is not None)
        assert spec.task == (task or metadata["dataset"])
        assert (spec.obs_size(), spec.action_size) == (data.obs_size, data.action_size)
    spec, chosen, line = playing.spec_of(cheetah, {"dataset": "hopper-medium-v2"})
    assert line == (
        "no evaluation: hopper-medium-v2 has observations and actions of 17 and 6 numbers, "
        "Hopper-v5 of 11 and 3"
    )
    assert playing.spec_of(hopper, {"dataset": "mine"}, "Hopper-v5")[1] == "Hopper-v5"
    with pytest.raises(ValueError, match="mine has observations .* 17 and 6 numbers, Hopper-v5"):
        playing.spec_of(cheetah, {"dataset": "mine"}, "Hopper-v5")
    with pytest.raises(registry.NotFound, match="unknown task 'Hoper-v5'; did you mean"):
        playing.spec_of(hopper, {"dataset": "mine"}, "Hoper-v5")


def test_a_made_spec_has_the_bounds_of_the_file():
    data = data_of(2, 3)
    bounds = [[-2.0, None, 0.0], [2.0, None, float("inf")]]
    spec, _, _ = playing.spec_of(data, {"dataset": "x", "action_bounds": bounds})
    assert [(d.low, d.high) for d in spec.action] == [(-2.0, 2.0), (-1.0, 1.0), (-1.0, 1.0)]


def test_an_evaluation_plays_the_same_episodes_again_and_other_ones_for_another_seed(hopper):
    data = Transitions.from_episodes(load(hopper))
    spec, task, _ = playing.spec_of(data, load(hopper).metadata)
    learner = TD3BC(TD3BCConfig(hidden=(8,), compile="off"), data, spec)
    policy = Policy.from_section(learner.policy_section(0))
    judge = playing.Judge(task, 2)
    first, other, again = judge(policy, 0), judge(policy, 1), judge(policy, 0)
    judge.close()
    assert first == again and first != other
    assert "eval/normalized_score" not in first


ERRORS = [
    (
        ["--algo", "td3_bd", "--dataset", "x"],
        "unknown offline algo 'td3_bd'; did you mean 'td3_bc'",
    ),
    (["--algo", "sac", "--dataset", "x"], "sac learns in a simulator: ctrl-rl train TASK"),
    (
        ["--algo", "metadiffuser", "--dataset", "x"],
        "metadiffuser is trained from Python: see docs/algorithms/metadiffuser.md",
    ),
    (["--algo", "bc", "--dataset", "hopper-medum-v2"], "did you mean 'hopper-medium-v2'"),
    (["--algo", "bc", "--dataset", "hopper-medium-v2"], "ctrl-rl dataset download hopper-medium"),
    (["--algo", "bc"], "needs --algo and --dataset"),
    (["--algo", "bc", "--dataset", "x", "--algo.gama", "1"], "unknown flag --algo.gama"),
    (["--algo", "bc", "--dataset", "x", "--seeds", "0"], "seeds must be at least 1"),
    (["--algo", "bc", "--dataset", "{hopper}", "--reward", "big"], "reward must be one of raw"),
    (["--algo", "bc", "--dataset", "{hopper}", "--task", "Pendulum-v0"], "Pendulum-v0 of 3 and 1"),
    (["--resume", "nowhere"], "nowhere does not exist"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_a_wrong_command_line_is_one_line_and_leaves_nothing(
    tmp_path, hopper, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "none"))
    words = [word.format(hopper=hopper) for word in words]
    assert cli.main(["offline", "train", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_the_command_has_help_json_and_subcommands(tmp_path, hopper, capsys):
    assert cli.main(["offline"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    named = {line[0]: " ".join(line[1:]) for line in lines if line}
    assert named["train"].startswith("Train on recorded data")
    assert {"bench", "report", "reproduce"} < set(named)
    assert cli.main(["offline", "trian"]) == 2
    assert "unknown subcommand 'trian'; did you mean 'train'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leave:
        train.main(["--algo", "iql", "--dataset", "antmaze-umaze-v2", "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert "--algo.inverse-temperature" in text and "--normalize-obs" in text


def test_online_train_names_the_right_command(tmp_path, hopper, capsys):
    assert cli.main(["train", "Hopper-v5", "--algo", "td3_bc"]) == 2
    message = "td3_bc learns from recorded data: ctrl-rl offline train --algo td3_bc --dataset ID"
    assert message in capsys.readouterr().err
    folder = tmp_path / "r"
    trained(folder, "--algo", "bc", "--dataset", str(hopper), *SMALL)
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(folder)]) == 2
    assert f"ctrl-rl offline train --resume {folder}" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    del config["data"]
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["offline", "train", "--resume", str(folder)]) == 2
    assert "is no offline run: ctrl-rl train --resume" in capsys.readouterr().err


def test_the_list_shows_both_kinds_of_algorithms(capsys):
    found = list_main(List(what="algos"))
    assert "td3_bc" in found["offline_algos"] and "sac" in found["algos"]
    text = capsys.readouterr().out
    assert "offline algos:" in text and "Implicit Q-learning" in text
