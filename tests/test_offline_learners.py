"""What every offline learner promises, whatever its losses."""

import dataclasses
import importlib
import typing

import pytest
import torch
from recorded import random_data, same, spec

from ctrl_rl.policy import Policy
from ctrl_rl.runs import Run
from offline import training
from offline.registry import ALGOS

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)
"""Bounds that no scalar stands for."""


def module(algo):
    return importlib.import_module(ALGOS[algo].removesuffix(":"))


def config(algo, **changes):
    cls = typing.get_type_hints(module(algo).train)["config"]
    small = {"total_steps": 40, "batch_size": 16, "hidden": (8, 8), "compile": "off"}
    return cls(**small | changes)


def learner(algo, data, seeds=(0,), bounds=((-1.0, -1.0), (1.0, 1.0)), **changes):
    """The class `train` uses."""
    made = []

    def keep(learner, *_):
        made.append(learner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module(algo), "fit", keep)
        module(algo).train(config(algo, **changes), data, spec(data.obs_size, *bounds), seeds)
    return made[0]


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 10)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


@pytest.fixture(scope="module")
def data():
    return random_data()


def trained(algo, data, seeds, **changes):
    made = learner(algo, data, seeds, **changes)
    return made, training.fit(made, data)


def close(a: dict, b: dict, tolerance: float) -> None:
    for key in a["weights"]:
        torch.testing.assert_close(
            a["weights"][key], b["weights"][key], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("algo", ALGOS)
def test_a_seed_learns_the_same_alone_and_in_a_job(algo, data):
    job, _ = trained(algo, data, (3, 0, 7, 1))
    for place, seed in ((1, 0), (2, 7)):
        alone, _ = trained(algo, data, (seed,))
        close(alone.policy_section(0), job.policy_section(place), 1e-5)
    first, second = job.policy_section(0)["weights"], job.policy_section(1)["weights"]
    assert all(not torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("algo", ALGOS)
def test_seeds_of_a_job_do_not_touch_each_other(algo, data):
    plain, disturbed = (learner(algo, data, (0, 1, 2)) for _ in range(2))
    draws = [torch.Generator().manual_seed(i) for i in range(3)]
    for _ in range(5):
        batch = data.batch(data.draw(16, draws))
        plain.update(batch)
        other = [x.clone() for x in batch]
        for x in other:
            x[1] = x[1].flip(0) * 0.5
        disturbed.update(type(batch)(*other))
    for place in (0, 2):
        close(plain.policy_section(place), disturbed.policy_section(place), 1e-6)
    a, b = plain.policy_section(1)["weights"], disturbed.policy_section(1)["weights"]
    assert not all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)


@pytest.mark.parametrize("seeds", [(5,), (0, 1)])
@pytest.mark.parametrize("algo", ALGOS)
def test_stopped_and_resumed_equals_uninterrupted_to_the_bit(
    tmp_path, algo, data, seeds, monkeypatch
):
    monkeypatch.setattr(training, "LOG_EVERY", 5)
    played = []

    def evaluate(policy, seed):
        played.append(seed)
        return {"eval/episode_return": float(policy(torch.ones(1, 3)).sum())}

    def run(name, **options):
        run = Run(tmp_path / name, console=False, eval_every=20, checkpoint_every=5, **options)
        made = learner(algo, data, seeds)
        rows = training.fit(made, data, run, evaluate).rows
        return made.state_dict(), [
            {k: v for k, v in row.items() if not k.startswith("time/")} for row in rows
        ]

    whole, rows = run("whole")
    _, half = run("parts", stop_after=15)
    assert [row["step"] for row in half] == [5, 10, 15]  # odd: between two steps of the policy
    resumed, again = run("parts", resume=True)
    same(resumed, whole)
    assert again == rows and [row["step"] for row in rows] == [*range(5, 41, 5)]
    assert played == [*seeds, *seeds] * 2
    assert ["eval/episode_return" in row for row in rows] == [False, False, False, True] * 2


@pytest.mark.parametrize("algo", ALGOS)
def test_an_update_moves_every_weight_and_leaves_the_batch_alone(algo, data):
    made = learner(algo, data, (0, 1))
    before = made.state_dict()
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(i) for i in range(2)]))
    copy = [x.clone() for x in batch]
    for _ in range(2):
        figures = made.update(batch)
    assert figures.shape == (len(made.stats), 2) and bool(figures.isfinite().all())
    assert all(torch.equal(a, b) for a, b in zip(batch, copy, strict=True))
    after = made.state_dict()
    for name, weights in before.items():
        if isinstance(weights, dict) and not name.endswith("_step"):
            for key, value in weights.items():
                assert not torch.equal(value, after[name][key]), f"{name}.{key}"


@pytest.mark.parametrize("algo", ALGOS)
def test_a_learner_logs_what_it_declares(algo, data):
    _, run = trained(algo, data, (0, 1))
    logged = {key for row in run.rows for key in row} - {"step"}
    declared = {key for key in module(algo).METRICS if not key.startswith("eval/")}
    assert logged == declared


@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_policy_reads_raw_observations_and_acts_within_bounds(algo, normalize_obs):
    """O-14: statistics travel with the weights; and O-17: bounds of each dimension count."""
    data = random_data(normalize_obs=normalize_obs, offset=500.0, scale=100.0, low=LOW, high=HIGH)
    made = learner(algo, data, (0, 1), (LOW, HIGH))
    training.fit(made, data)
    policy = Policy.from_section(made.policy_section(1))
    raw = 500 + 100 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    action = policy(raw)
    assert bool((action >= torch.tensor(LOW)).all() and (action <= torch.tensor(HIGH)).all())
    assert float(action[:, 1].mean()) == pytest.approx(5.0, abs=2.5)
    again = Policy.from_section(Policy.from_section(made.policy_section(1)).section())
    assert torch.equal(again(raw), action)
    seen = (raw - data.rows.new_tensor(500)) if data.normalizer is None else data.normalizer(raw)
    if normalize_obs:
        # The same policy without statistics, given what the learner saw.
        bare = Policy.from_section({**made.policy_section(1), "normalizer": None})
        torch.testing.assert_close(bare(seen), action, rtol=1e-5, atol=1e-5)
        assert float(seen.std()) == pytest.approx(1.0, abs=0.3)
    else:
        assert made.policy_section(1)["normalizer"] is None


@pytest.mark.parametrize("algo", ALGOS)
def test_a_wrong_setting_is_named(algo):
    good = config(algo)
    for name, bad in {
        "total_steps": 0,
        "batch_size": 0,
        "learning_rate": float("nan"),
        "gamma": 1.1,
        "polyak": 0.0,
        "hidden": (),
        "activation": "step",
        "compile": "maybe",
    }.items():
        if hasattr(good, name):
            with pytest.raises(ValueError, match=f"^{name} must be"):
                dataclasses.replace(good, **{name: bad})


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_compiled_learns_what_eager_does(algo, data):
    eager, compiled = (learner(algo, data, (0, 1), compile=mode) for mode in ("off", "on"))
    for made in (eager, compiled):
        draws = [torch.Generator().manual_seed(i) for i in range(2)]
        for _ in range(10):
            made.update(data.batch(data.draw(16, draws)))
    close(eager.policy_section(1), compiled.policy_section(1), 1e-4)
    steps = [value for name, value in compiled.state_dict().items() if name.endswith("_step")]
    assert steps and all(step["compiled"] for step in steps)
