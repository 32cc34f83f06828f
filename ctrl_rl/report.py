"""`report.html` of a run: one page that opens from disk, with no network.

Curves stand in the page itself, the video beside it in the run folder. Figures come from the
files of the run alone, so that the page can be written again at any time.
"""

import base64
import html
import json
from pathlib import Path

from ctrl_rl.checkpoints import write_text
from ctrl_rl.run_folder import read_config, read_metrics, step_unit

STYLE = """
:root { --ink:#1f2937; --soft:#6b7280; --line:#e5e7eb; --card:#fff; --page:#f6f7f9;
        --accent:#2563eb; }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink);
       font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1080px; margin:0 auto; padding:36px 20px 60px }
h1 { font-size:27px; margin:0; letter-spacing:-.01em }
h2 { font-size:17px; margin:0 0 12px }
p { margin:.4em 0 }
.soft { color:var(--soft) }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(165px,1fr)); gap:12px;
         margin:22px 0 }
.tile, section { background:var(--card); border:1px solid var(--line); border-radius:10px }
.tile { padding:13px 15px }
.tile b { display:block; font-size:21px; font-weight:650; font-variant-numeric:tabular-nums }
.tile span { color:var(--soft); font-size:13px }
section { padding:19px 21px; margin:16px 0; overflow-x:auto }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(340px,1fr)); gap:16px }
.pair section { margin:0 }
table { border-collapse:collapse; width:100%; font-size:14px }
th, td { text-align:left; padding:5px 12px 5px 0; border-bottom:1px solid var(--line);
         vertical-align:top }
th { color:var(--soft); font-weight:500 }
td.n { font-variant-numeric:tabular-nums; white-space:nowrap }
tr:last-child td { border-bottom:0 }
img, video { width:100%; border-radius:8px; display:block }
code, pre { font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
pre { background:#f3f4f6; border-radius:8px; padding:11px 13px; overflow-x:auto; margin:8px 0 0 }
.good { color:#15803d }
.bad { color:#b91c1c; font-weight:600 }
details summary { cursor:pointer; color:var(--accent) }
"""


def write_report(folder: Path) -> Path:
    """Write report.html from what the run folder holds; returns its path.

    Raises:
        ValueError: not a run folder.
    """
    folder = Path(folder)
    config = read_config(folder)
    rows = read_metrics(folder)
    evaluations = read_evaluations(folder)
    title = f"{config['task']} · {config['algo']}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=soft>{_subtitle(config, rows)}</p>",
        _tiles(config, rows, evaluations),
        f"<div class=pair>{_video(folder)}{_evaluation(evaluations)}</div>",
        _curves(folder),
        _card(folder),
        _verification(folder),
        f"<div class=pair>{_settings(config)}{_machine(config)}</div>",
        _terms(config),
        _legend(config, rows),
        _next_steps(folder, config),
    ]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style><main>{''.join(parts)}</main></html>\n"
    )
    path = folder / "report.html"
    write_text(path, page)
    return path


def read_evaluations(folder: Path) -> dict[str, dict]:
    """evaluation.json: variant ("randomised", "nominal") -> what `ctrl-rl eval` found."""
    path = Path(folder) / "evaluation.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except json.JSONDecodeError:
        raise ValueError(f"{path} is damaged; delete it and evaluate again") from None


def add_evaluation(folder: Path, variant: str, found: dict) -> None:
    """Put one evaluation into evaluation.json, in the place of the last one of its variant."""
    every = read_evaluations(folder) | {variant: found}
    write_text(
        Path(folder) / "evaluation.json", json.dumps(every, indent=1, allow_nan=False) + "\n"
    )


def refresh(folder: Path, verification: dict | None = None) -> Path | None:
    """Write the page again after an export or a verification; None if this is no run folder.

    Args:
        folder: where the policy file lies.
        verification: what `ctrl-rl verify` found, kept as verification.json.
    """
    if not (Path(folder) / "config.json").is_file():
        return None
    if verification is not None:
        text = json.dumps(verification, indent=1, default=str) + "\n"
        write_text(Path(folder) / "verification.json", text)
    return write_report(folder)


# Parts of the page --------------------------------------------------------------------------


def _subtitle(config: dict, rows: list[dict]) -> str:
    step = rows[-1]["step"] if rows else 0
    total = config["algo_config"].get("total_steps", step)
    unit = step_unit(config)
    state = "complete" if step >= total else f"stopped at {step:,} of {total:,} {unit}"
    commit = config.get("commit")
    num_envs = config["run"]["num_envs"]
    source = f"{num_envs} environments" if num_envs else config["data"]["dataset"]
    return f"seed {config['run']['seed']} · {_text(source)} · {state}" + (
        f" · commit <code>{_text(commit[:10])}</code>" if commit else ""
    )


def _tiles(config: dict, rows: list[dict], evaluations: dict) -> str:
    """The four or five figures that people look for first."""
    tiles = []
    if rows:
        unit = step_unit(config)
        tiles.append((f"{rows[-1]['step']:,}", unit))
        parts = [row.get("time/collect_s", 0) + row.get("time/update_s", 0) for row in rows]
        if sum(parts):
            did = "update" if unit == "updates" else "roll-out and update"
            tiles.append((_duration(sum(parts)), did))
            tiles.append((f"{rows[-1]['step'] / sum(parts):,.0f}", f"{unit} per second"))
    first = next(iter(evaluations.values()), None)
    if first:
        metric = first["metrics"]["episode_return"]
        tiles.append((f"{metric['mean']:.4g}", f"mean return, {metric['n']} episodes"))
        metric = first["metrics"]["terminated_rate"]
        tiles.append((f"{metric['mean']:.1%}", "episodes that terminated"))
    cells = "".join(f"<div class=tile><b>{v}</b><span>{n}</span></div>" for v, n in tiles)
    return f"<div class=tiles>{cells}</div>"


def _video(folder: Path) -> str:
    if not (folder / "video.mp4").is_file():
        return (
            "<section><h2>Video</h2><p class=soft>None: it is made when a run ends, unless it is "
            "switched off or the machine cannot render. <code>ctrl-rl play</code> shows the policy "
            "live.</p></section>"
        )
    return (
        "<section><h2>Video</h2>"
        "<video src=video.mp4 controls autoplay loop muted playsinline></video></section>"
    )


def _evaluation(evaluations: dict) -> str:
    if not evaluations:
        return (
            "<section><h2>Evaluation</h2><p class=soft>None yet: <code>ctrl-rl eval</code> makes "
            "one.</p></section>"
        )
    out = []
    for variant, found in evaluations.items():
        lines = "".join(
            f"<tr><td>{_text(name)}</td><td class=n>{_number(m['mean'])}</td>"
            f"<td class=n>{_interval(m['ci95'])}</td><td>{_text(m['unit'])}</td></tr>"
            for name, m in found["metrics"].items()
        )
        episodes = found["metrics"]["episode_return"]["n"]
        out.append(
            f"<p><b>{_text(variant.capitalize())}</b> <span class=soft>{episodes} episodes, "
            f"checkpoint {_text(found['checkpoint'])} at {found['env_steps']:,} steps, "
            f"{'mean action' if found['deterministic'] else 'sampled action'}</span></p>"
            f"<table><tr><th>figure<th>mean<th>95 % interval<th>unit</tr>{lines}</table>"
        )
    return (
        f"<section><h2>Evaluation</h2>{''.join(out)}<p class=soft>Rates: Wilson interval; means: "
        "bootstrap. Task figures are means over the steps of an episode.</p></section>"
    )


def _curves(folder: Path) -> str:
    path = folder / "curves.png"
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        "<section><h2>Learning</h2>"
        f'<img alt="learning curves" src="data:image/png;base64,{data}"></section>'
    )


def _card(folder: Path) -> str:
    """The exported file, if there is one."""
    path = folder / "policy.json"
    if not path.is_file():
        return (
            "<section><h2>Exported policy</h2><p class=soft>Not exported yet: "
            f"<code>ctrl-rl export {_text(str(folder))}</code></p></section>"
        )
    card = json.loads(path.read_text())
    onnx = folder / "policy.onnx"
    size = f"{onnx.stat().st_size / 1e3:,.0f} kB" if onnx.is_file() else "missing"
    spec = card.get("spec", {})
    lines = [
        ("file", f'<a href="policy.onnx">policy.onnx</a>, {size}'),
        ("input", _text(card.get("input", ""))),
        ("output", _text(card.get("output", ""))),
        ("trained for", f"{card.get('train_steps', 0):,} {step_unit(read_config(folder))}"),
        ("rate", f"{1 / spec['step_dt']:.4g} Hz" if spec.get("step_dt") else "-"),
    ]
    joints = (spec.get("robot") or {}).get("joints", ())
    table = "".join(
        f"<tr><td>{_text(j['name'])}</td><td class=n>{j['default_pos']:.3g}</td>"
        f"<td class=n>{j['kp']:.4g}</td><td class=n>{j['kd']:.4g}</td>"
        f"<td class=n>{j['effort_limit']:.4g}</td></tr>"
        for j in joints
    )
    if table:
        table = (
            "<details><summary>joints</summary><table><tr><th>joint<th>default [rad]"
            f"<th>kp [N·m/rad]<th>kd [N·m·s/rad]<th>limit [N·m]</tr>{table}</table></details>"
        )
    return f"<section><h2>Exported policy</h2>{_pairs(lines)}{table}</section>"


def _verification(folder: Path) -> str:
    """What the exported file reached in plain MuJoCo, if it was tried."""
    path = folder / "verification.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())
    lines = "".join(
        f"<tr><td>{_text(name)}</td><td class=n>{_number(check['value'])}</td>"
        f"<td class=n>{_number(check['limit'])}</td><td>{_text(check['unit'])}</td>"
        f"<td class={'good' if check['passed'] else 'bad'}>"
        f"{'passed' if check['passed'] else 'not passed'}</td></tr>"
        for name, check in found["checks"].items()
    )
    notes = "".join(f"<p class=soft>{_text(note)}</p>" for note in found.get("notes", ()))
    return (
        "<section><h2>Verification</h2><p class=soft>The exported file, through the robot's own "
        "runtime, in single-robot MuJoCo.</p>"
        f"<table><tr><th>check<th>found<th>limit<th>unit<th></tr>{lines}</table>{notes}</section>"
    )


def _settings(config: dict) -> str:
    lines = [(k, _value(v)) for k, v in config["run"].items() if v is not None]
    algo = [(k, _value(v)) for k, v in config["algo_config"].items() if k not in config["run"]]
    task = [(k, _value(v)) for k, v in config["task_config"].items()]
    folded = f"<details><summary>task: {len(task)} settings</summary>{_pairs(task)}</details>"
    return (
        f"<section><h2>Settings</h2>{_pairs(lines)}<p><b>{_text(config['algo'])}</b></p>"
        f"{_pairs(algo)}{folded if task else ''}</section>"
    )


def _machine(config: dict) -> str:
    lines = [(k.replace("_", " "), _value(v)) for k, v in config.get("hardware", {}).items()]
    lines += [(k, _value(v)) for k, v in config.get("versions", {}).items()]
    if config.get("commit"):
        lines.append(("commit", f"<code>{_text(config['commit'])}</code>"))
    return f"<section><h2>Machine and versions</h2>{_pairs(lines)}</section>"


def _terms(config: dict) -> str:
    """What the policy sees."""
    lines = ""
    for group, terms in config["spec"]["obs"].items():
        for t in terms:
            frames = f" × {t['history']}" if t["history"] > 1 else ""
            noise = _number(t["noise"]) if t["noise"] else ""
            lines += (
                f"<tr><td>{_text(group)}</td><td>{_text(t['name'])}</td>"
                f"<td class=n>{t['size']}{frames}</td><td>{_text(t['unit'])}</td>"
                f"<td>{_text(t['kind'])}</td><td class=n>{noise}</td></tr>"
            )
    return (
        "<section><h2>Observation</h2><details><summary>terms</summary><table><tr><th>group"
        f"<th>term<th>size<th>unit<th>kind<th>noise ±</tr>{lines}</table></details></section>"
    )


def _legend(config: dict, rows: list[dict]) -> str:
    """What each logged figure means, and its last value."""
    last: dict[str, float] = {}
    for row in rows:
        last.update(row)
    explained = config["metrics"]
    lines = []
    for key, value in last.items():
        if key == "step":
            continue
        head = key.split("/")[0]
        text = explained.get(key) or next(
            (t for k, t in explained.items() if k.startswith(f"{head}/<")), ""
        )
        lines.append(
            f"<tr><td><code>{_text(key)}</code></td><td class=n>{_number(value)}</td>"
            f"<td>{_text(text)}</td></tr>"
        )
    return (
        "<section><h2>Logged figures</h2><details><summary>last value and meaning of all "
        f"{len(lines)}</summary><table><tr><th>key<th>last<th>meaning</tr>{''.join(lines)}"
        "</table></details></section>"
    )


def _next_steps(folder: Path, config: dict) -> str:
    name = _text(str(folder))
    lines = f"ctrl-rl play {name}\nctrl-rl eval {name} --episodes 200\nctrl-rl export {name}\n"
    if "total_steps" in config["algo_config"]:  # a run of ours, not an imported policy
        total = 2 * config["algo_config"]["total_steps"]
        lines += f"ctrl-rl train --resume {name} --total-steps {total}\n"
        lines += f"tensorboard --logdir {name}/tensorboard"
    return f"<section><h2>Go on</h2><pre>{lines}</pre></section>"


# Formatting ---------------------------------------------------------------------------------


def _pairs(lines) -> str:
    cells = "".join(f"<tr><th>{_text(name)}</th><td>{value}</td></tr>" for name, value in lines)
    return f"<table>{cells}</table>"


def _text(value) -> str:
    return html.escape(str(value))


def _value(value) -> str:
    """A setting as people write it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(v) for v in value)
    return _text(value)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _interval(ci95) -> str:
    return f"{_number(ci95[0])} … {_number(ci95[1])}" if ci95 else "–"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"
