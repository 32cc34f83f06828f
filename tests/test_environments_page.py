"""docs/environments.md: its code runs, its tables are those of the code."""

import re

import pytest

from ctrl_rl.env_check import CHECKS, NEED_MAKE, ContractError, check_env


@pytest.fixture
def page(repository):
    return (repository / "docs" / "environments.md").read_text()


@pytest.fixture
def names(page):
    """What the page's Python blocks define, run from top to bottom."""
    found = {"__name__": "environments_page"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/environments.md", "exec"), found)
    return found


def test_the_code_runs_and_the_task_keeps_the_contract(names, capsys):
    assert names["step"].obs["actor"].shape == (8, 5)
    report = check_env(lambda num_envs, seed: names["Lift"](num_envs=num_envs, seed=seed))
    assert report.passed == tuple(CHECKS)


def test_the_task_has_about_40_lines(page):
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class" in b)
    body = block[block.index("class Lift(") :]
    lines = [line for line in body.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 44


def test_the_lift_can_be_controlled(names):
    lift = names["Lift"](num_envs=50)
    for _ in range(149):
        to_go, speed = lift.observe()["actor"].unbind(1)
        step = lift.step((0.5 * to_go - speed).clamp(-1, 1)[:, None])
    assert not step.terminated.any()
    assert (step.info.metrics["miss"] < 0.1).all()


def test_the_table_of_checks_is_the_codes(page):
    section = page.partition("## What `check_env` checks")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert table == {name: check.__doc__.partition("\n")[0] for name, check in CHECKS.items()}
    assert NEED_MAKE == tuple(CHECKS)[list(CHECKS).index("determinism") :]


def test_the_report_looks_as_shown(page, names):
    class Wrong(names["Lift"]):
        def step(self, action):
            step = super().step(action)
            del step.info.reward_terms["effort"]
            return step

    with pytest.raises(ContractError) as error:
        check_env(lambda num_envs, seed: Wrong(num_envs=num_envs, seed=seed))
    shown = re.search(r"```\n(Lift-Stop-v0: .*?)\n```", page, re.DOTALL)
    assert shown is not None
    digits = re.compile(r"(\d\.\d{6})\d*")  # the last ones differ between processors
    assert digits.sub(r"\1", str(error.value)) == digits.sub(r"\1", shown[1])
