"""`optimizer` and `monitor` of the learners with critics."""

import dataclasses
import importlib
import json
import math
import re
import typing
from pathlib import Path

import pytest
import torch
from recorded import random_data, same, spec

from ctrl_rl.commands.train import parse_flags, rebuild
from ctrl_rl.compiled import Diverged
from ctrl_rl.runs import Run
from offline import collapse, training
from offline.adamo import AdamO, AdamOConfig
from offline.collapse import CollapseMonitor, Probe, legal_bound, preconditioner
from offline.commands.train import OfflineFlags
from offline.registry import ALGOS

CRITICS = [a for a in ALGOS if hasattr(importlib.import_module(f"offline.{a}"), "critic_loss")]
WATCHED = [a for a in CRITICS if a != "iql"]
BOUNDS = ((-1.0, -1.0), (1.0, 1.0))


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 10)
    monkeypatch.setattr(collapse, "WATCH_EVERY", 20)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


@pytest.fixture(scope="module")
def data():
    return random_data()


def config(algo, **changes):
    cls = typing.get_type_hints(importlib.import_module(f"offline.{algo}").train)["config"]
    small = {"total_steps": 40, "batch_size": 16, "hidden": (8, 8), "compile": "off"}
    return cls(**small | changes)


def learner(algo, data, seeds=(0, 1), **changes):
    module = importlib.import_module(f"offline.{algo}")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fit", lambda learner, data, *_: made.append((learner, data)))
        module.train(config(algo, **changes), data, spec(data.obs_size, *BOUNDS), seeds)
    ((learner, learner.data),) = made  # as `train` prepares it
    return learner


@pytest.mark.parametrize("algo", CRITICS)
def test_adamo_has_the_critics_and_its_settings(algo, data):
    settings = AdamOConfig(mode="strict", strength=7.0)
    made = learner(algo, data, optimizer="adamo", adamo=settings)
    steps = [made.critic_step, *([made.value_step] if algo == "iql" else [])]
    for step in steps:
        assert isinstance(step.optimizer, AdamO)
        assert step.optimizer.config == settings
        assert step.optimizer.replicas == 2
        assert {group["lr"] for group in step.optimizer.param_groups} == {made.config.learning_rate}
    assert not isinstance(made.actor_step.optimizer, AdamO)
    assert not isinstance(learner(algo, data).critic_step.optimizer, AdamO)


@pytest.mark.parametrize("algo", CRITICS)
def test_without_strength_adamo_learns_what_adam_learns(algo, data):
    def weights(**changes):
        made = learner(algo, data, **changes)
        training.fit(made, made.data)
        return torch.cat([p.detach().flatten() for p in made.critic.parameters()])

    adam = weights()
    plain = weights(optimizer="adamo", adamo=AdamOConfig(strength=0.0))
    corrected = weights(optimizer="adamo", adamo=AdamOConfig(mode="none"))
    torch.testing.assert_close(plain, adam, rtol=0, atol=1e-6)
    assert (corrected - adam).abs().max() > 1e-3


@pytest.mark.parametrize("algo", CRITICS)
def test_a_seed_learns_the_same_alone_as_in_a_job(algo, data):
    def last_of(*seeds):
        made = learner(algo, data, seeds, optimizer="adamo")
        training.fit(made, made.data)
        parameters = made.critic.parameters()
        return torch.cat([p.detach().reshape(len(seeds), -1)[-1] for p in parameters])

    torch.testing.assert_close(last_of(3, 5), last_of(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("algo", WATCHED)
def test_resuming_with_both_equals_not_stopping(algo, data, tmp_path):
    def run(name, **kinds):
        made = learner(algo, data, optimizer="adamo", monitor="warn")
        found = Run(tmp_path / name, console=False, checkpoint_every=20, **kinds)
        training.fit(made, made.data, found)
        return made.state_dict(), [
            {k: v for k, v in row.items() if not k.startswith("time/")} for row in found.rows
        ]

    whole, rows = run("whole")
    run("parts", stop_after=20)
    resumed, again = run("parts", resume=True)
    same(resumed, whole)
    assert again[-2:] == rows[-2:]
    assert [sum(k.startswith("collapse/") for k in row) for row in rows] == [0, 5, 0, 6]
    assert set(collapse.METRICS) <= set(rows[-1])


def test_a_run_is_watched_on_its_own_data(data):
    """The figures are those of a monitor set up by hand."""
    made = learner("td3_bc", data, monitor="warn", gamma=0.9)
    run = training.fit(made, made.data)
    batch = data.batch(data.index[torch.linspace(0, len(data) - 1, 64).long()].expand(2, -1))
    every = data.batch(data.index[None])
    bound = legal_bound(every.reward[0], every.terminated[0], 0.9)
    with torch.no_grad():
        next_action = made.target_actor(batch.next_obs)
    discount = 0.9 * (1 - batch.terminated)
    probe = Probe(batch.obs, batch.action, batch.next_obs, next_action, discount)
    params = dict(made.critic.named_parameters())
    found = CollapseMonitor(bound, 3e-4, (0, 1)).check(
        40,
        lambda p, o, a: torch.func.functional_call(made.critic, p, (o, a)),
        params,
        probe,
        preconditioner(made.critic_step.optimizer, params),
    )
    for key, values in found.items():
        assert run.rows[-1][key] == pytest.approx(sum(values) / 2)


@pytest.mark.parametrize(
    ("log_every", "totals", "watched"),
    [
        (10, (10,), [10]),  # shorter than the distance of two checks
        (10, (50,), [20, 40, 50]),
        (15, (60,), [30, 45, 60]),  # rows beside the multiples of 20
        (10, (25, 80), [20, 25, 45, 65, 80]),  # made longer
    ],
)
def test_a_run_is_watched_wherever_its_rows_fall(
    log_every, totals, watched, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "LOG_EVERY", log_every)
    run = None
    for total in totals:
        made = learner("td3_bc", data, monitor="warn", gamma=0.9, total_steps=total)
        resume = total != totals[0]
        run = Run(tmp_path / "run", console=False, eval_every=0, resume=resume)
        training.fit(made, data, run)
    assert run is not None
    assert [row["step"] for row in run.rows if "collapse/q_max" in row] == watched


def test_a_run_can_be_stopped_by_its_monitor(data):
    data = random_data()
    data.rows[:, -2] = 1e-3  # the critics' first values are beyond what these rewards allow
    made = learner("td3_bc", data, monitor="stop", gamma=0.5)
    with pytest.raises(
        Diverged, match="seed 0 is collapsing at update 20: .* earn more than 0.002"
    ):
        training.fit(made, made.data)
    with pytest.warns(RuntimeWarning) as warned:
        training.fit(learner("td3_bc", data, monitor="warn", gamma=0.5), data)
    starts = [str(w.message).partition(":")[0] for w in warned]
    assert starts == [f"the critic of seed {i} is collapsing at update 20" for i in range(2)]
    assert not any(k.startswith("collapse") for k in _logged(learner("td3_bc", data), data))
    with pytest.raises(ValueError, match="values have a bound for a discount"):
        training.fit(learner("td3_bc", data, monitor="warn", gamma=1.0), data)


@pytest.mark.parametrize(
    ("algo", "changes", "extra"),
    [
        ("edac", {"learning_rate": 3e-3}, 2.0),  # alpha 1 at the start, H = -2
        ("edac", {"learning_rate": 3e-3, "target_entropy": 0.5}, 2 * math.log(2)),
        ("rebrac", {"learning_rate": 3e-3, "critic_penalty": 0.5}, 4.0),  # two dimensions
    ],
)
def test_what_targets_add_to_rewards_is_no_collapse(algo, changes, extra, monkeypatch):
    """Rewards of 0.001, and values a hundred times what those alone allow."""
    monkeypatch.setattr(collapse, "WATCH_EVERY", 150)  # growth alone is no collapse so soon
    data = random_data()
    data.rows[:, -2] = 1e-3

    def fitted():
        made = learner(algo, data, monitor="stop", gamma=0.9, total_steps=400, polyak=0.05,
                       **changes)  # fmt: skip
        training.fit(made, made.data, run := Run())
        return made, run.rows

    made, rows = fitted()
    row = next(row for row in rows if "collapse/q_max" in row)
    bound = 1e-2 + 9 * extra
    assert row["collapse/q_max"] / row["collapse/q_share"] == pytest.approx(bound)
    assert 1 < rows[-1]["collapse/q_max"] < bound
    watch = collapse.Watch(made, made.data)
    with torch.no_grad():
        made.critic.net.layers[-1].bias.add_(3 * bound)
    with pytest.raises(Diverged, match="no policy can earn more"):
        watch.check(150)
    state = watch.state_dict()
    assert state is not None
    watch.load_state_dict(state | {"checked": 0, "extra": 70.0})  # the largest so far
    with torch.no_grad():
        made.critic.net.layers[-1].bias.add_(1e3)
    with pytest.raises(Diverged, match=r"no policy can earn more than 630;"):
        watch.check(150)
    monkeypatch.delattr(type(made), "extra_reward")
    with pytest.raises(Diverged, match="earn more than 0.01"):
        fitted()


def test_pages_name_both_for_the_learners_that_have_them():
    docs = Path(__file__).parents[1] / "docs" / "algorithms"
    page = (docs / "adamo.md").read_text()
    sentences = {
        "optimizer": page.partition("7. ")[2].partition("Actors keep Adam")[0],
        "monitor": page.partition("`--algo.monitor warn`, or `stop`, for ")[2].partition("Once")[0],
    }
    for algo in ALGOS:
        cls = typing.get_type_hints(importlib.import_module(f"offline.{algo}").train)["config"]
        fields = {f.name for f in dataclasses.fields(cls)}
        called = cls.__name__.removesuffix("Config").replace("TD3BC", "TD3+BC")
        own = " ".join((docs / f"{algo}.md").read_text().split())
        for field, sentence in sentences.items():
            assert (called in re.findall(r"[\w+]+", sentence)) == (field in fields), (algo, field)
            assert (f"--algo.{field}" in own) == (field in fields), (algo, field)
        unwatched = "optimizer" in fields and "monitor" not in fields
        assert ("There is no monitor" in own) == unwatched, algo


def _logged(made, data):
    return {key for row in training.fit(made, made.data).rows for key in row}


@pytest.mark.parametrize("algo", CRITICS)
def test_settings_are_checked_and_survive_json_and_flags(algo):
    for field, bad in (("optimizer", "sgd"), *([("monitor", "on")] if algo in WATCHED else [])):
        with pytest.raises(ValueError, match=f"^{field} must be "):
            config(algo, **{field: bad})
    for scale in ("running", 1.0):
        made = config(algo, optimizer="adamo", adamo=AdamOConfig(gram_scale=scale, head=False))
        again = rebuild(type(made), json.loads(json.dumps(dataclasses.asdict(made))))
        assert again == made
    words = "--algo.optimizer adamo --algo.adamo.budget 0.5 --algo.adamo.gram-scale 2".split()
    parsed = parse_flags(words, "train", "", algo, OfflineFlags(), config(algo))
    assert parsed.algo.optimizer == "adamo"
    assert parsed.algo.adamo == AdamOConfig(budget=0.5, gram_scale=2.0)
