"""All figures and tables, the best chunk size, and results/index.html.

index.html is a gallery: what the papers claim, what we see, and where we differ. Its texts stand in
captions.toml. All numbers in them come from the CSV files.

    python experiments/all.py           (or: make figures)
    python experiments/all.py --slow    also the scripts that take long (SLOW)

Each script runs as a reader would run it, without --measure. Measured rows that results/ already
holds stay, and are shown. So do the results of SLOW scripts.
"""

import enter  # noqa: F401

import html
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from string import Template

from checks import UserError
from cli import MARK, run_main
from experiments import fidelity, fig9
from experiments.lib import common
from experiments.lib.common import ROOT, Point, curves, three_digits
from experiments.lib.flags import Flag, start

# They take minutes, or need a compiler and transformers: without --slow the gallery shows the
# results that are there.
SLOW = {"serve_pipelines", "td_throughput", "td_options", "segment_operators"}
LONG = {"serve_capacity", "fig12"}  # these take most of the time, so they start first
NEED_TORCH = {"fig6"}  # it draws the masks that attention uses
# the paper's B, where the memory formula alone would take more
FLAGS = {"choose_chunk": ["--max-batch-size", "18"]}

KEPT = """<p><i>This takes long, so <code>make figures</code> shows the results kept in results/.
<code>python experiments/all.py --slow</code> makes them anew.</i></p>"""


@dataclass(frozen=True)
class Caption:
    """The texts of one figure. The head of captions.toml says what they may hold."""

    where: str
    claim: str
    see: str
    differ: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in astuple(self)):
            raise TypeError("each field is a text")


@cache
def captions() -> dict[str, Caption]:
    """Script -> its caption. Raises UserError where captions.toml has something else."""
    found = {}
    for name, texts in fidelity.read_texts("captions.toml").items():
        try:
            found[name] = Caption(**texts)
        except TypeError:
            raise UserError(
                f"experiments/captions.toml: [{name}] must have where, claim and see, and may have"
                " differ: texts, and nothing else"
            ) from None
    return found


def by_place(points: list[Point], source: str) -> dict[str, float]:
    """y of the points of one source by SERIES@X, or by SERIES where no x belongs to them."""
    return {p.series + (f"@{p.x:g}" if p.x_unit else ""): p.y for p in points if p.source == source}


def fill(name: str, text: str, points: list[Point]) -> str:
    """A caption's text with its holes filled, as HTML."""
    holes = {source: by_place(points, source) for source in ("paper", "predicted", "measured")}
    if "{measured[" in text and not holes["measured"]:
        return f"Not measured yet: python experiments/{name}.py --measure does it."
    predicted = curves(points, "predicted").items()
    holes["peak"] = {series: max(curve, key=lambda p: p.y) for series, curve in predicted}
    return html.escape(fidelity.fill(text, holes, f"captions.toml, {name}"))


def table(heading: str, rows: list[list[str]]) -> str:
    """A table that unfolds below its heading; "" if there are no rows."""
    if not rows:
        return ""
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details><summary>{html.escape(heading)}</summary><table>{body}</table></details>"


def measured_table(points: list[Point]) -> str:
    """What was measured last, without long curves."""
    found = curves(points, "measured").values()
    newest = [point for curve in found if len(curve) < 50 for point in curve]
    where = f"{newest[0].model} on {newest[0].hardware}" if newest else ""
    rows = []
    for p in newest:
        place = f"{p.x_unit} = {p.x:.4g}" if p.x_unit else ""
        rows.append([p.series, place, three_digits(p.y), p.y_unit])
    return table(f"Measured: {where}", rows)


def published(points: list[Point]) -> list[list[str]]:
    """Published numbers that fidelity.py leaves out: what, paper, predicted, error."""
    paper, predicted = by_place(points, "paper"), by_place(points, "predicted")
    rows = []
    for name in [name for name in paper if name in predicted]:
        error = f"{100 * (predicted[name] / paper[name] - 1):+.1f} %"
        rows.append([name, three_digits(paper[name]), three_digits(predicted[name]), error])
    return rows


def section(name: str, out: Path, rows: list[fidelity.Row]) -> str:
    """One figure of the gallery. rows: its published numbers beside ours."""
    caption, points = captions()[name], common.read_csv(out / f"{name}.csv")
    numbers = [fidelity.cells(row)[1:] for row in rows]
    if not numbers and caption.differ:
        numbers = published(points)
    explained = [row for row in rows if row.explanation]
    texts = [f"{row.quantity}: {fidelity.cells(row)[5]}. {row.explanation}" for row in explained]
    texts = [html.escape(text) for text in texts]
    texts += [fill(name, caption.differ, points)] if caption.differ else []
    texts = texts or ["Nowhere." if numbers else "The paper states no number here."]
    differ = "".join(f"<dd>{text}</dd>" for text in texts)
    title = name.removeprefix("td_").removeprefix("segment_")
    title = title.replace("fig", "Fig ").replace("table", "Table ").replace("_", " ").capitalize()
    title = f"{title} ({caption.where})"
    second = f"{name}_measured.png"
    measured = f'<img src="{second}" alt="{title}, measured">' if (out / second).exists() else ""
    return f"""<section id="{name}"><h2>{title}</h2>
<img src="{name}.png" alt="{title}">{measured}{KEPT if name in SLOW else ""}<dl>
<dt>The paper claims</dt><dd>{fill(name, caption.claim, points)}</dd>
<dt>We see</dt><dd>{fill(name, caption.see, points)}</dd>
<dt>Where we differ by more than {fidelity.LIMIT:g} %</dt>{differ}</dl>
{table("Numbers: paper, predicted, error", numbers)}{measured_table(points)}</section>"""


def gallery(out: Path) -> str:
    """results/index.html: gallery.html with a section for each figure that is there."""
    rows = fidelity.read(out / "fidelity.csv")
    ids = {figure.name: set(figure.paper) for figure in fidelity.FIGURES + fidelity.SERVING}
    ids["fig9"] = set(fig9.PUBLISHED)
    sections = [
        section(name, out, [row for row in rows if row.id in ids.get(name, ())])
        for name in captions()
        if (out / f"{name}.csv").exists()
    ]
    summary = "".join(f"<li>{html.escape(line)}</li>" for line in fidelity.summary(rows))
    page = Template((ROOT / "experiments" / "gallery.html").read_text(encoding="utf-8"))
    return page.substitute(mark=MARK, summary=summary, sections="".join(sections))


def run_script(
    name: str, flags: list[str], running: set[subprocess.Popen]
) -> tuple[float, subprocess.CompletedProcess]:
    """Run experiments/NAME.py. Returns the seconds that it took, and how it ended.

    running: the script's process is in there while it runs, for `run_all` to end it.
    """
    begin = time.perf_counter()
    script = ROOT / "experiments" / f"{name}.py"
    command = [sys.executable, str(script), *FLAGS.get(name, []), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        running.add(process)
        output, errors = process.communicate()
    running.discard(process)
    ended = subprocess.CompletedProcess(command, process.returncode, output, errors)
    return time.perf_counter() - begin, ended


def run_all(
    names: list[str], flags: list[str]
) -> dict[str, tuple[float, subprocess.CompletedProcess]]:
    """Run these scripts, as many at once as there are cores, and fidelity.py.

    Ctrl-C ends those that run, and starts no other.
    """
    running: set[subprocess.Popen] = set()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            longest_first = sorted(names, key=lambda name: name not in {*SLOW, *LONG})
            jobs = {pool.submit(run_script, name, flags, running): name for name in longest_first}
            done = common.progress(as_completed(jobs), "running", total=len(jobs))
            results = {jobs[job]: job.result() for job in done}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                process.terminate()
            raise
    # last: it reads what others wrote
    return results | {"fidelity": run_script("fidelity", flags, running)}


def main() -> None:
    slow = Flag(f"also run {', '.join(sorted(SLOW))}")
    options = start("", __doc__, others=["index.html"], slow=slow)
    flags = ["--out", str(options.out)]
    flags += [f"--{name}" for name in ("quick", "force") if getattr(options, name)]
    left_out = {}
    if find_spec("torch") is None:
        left_out |= dict.fromkeys(NEED_TORCH, "it needs torch: make install")
    if not options.slow:
        left_out |= dict.fromkeys(sorted(SLOW), "its results are kept; --slow runs it")
    names = [name for name in captions() if name not in left_out]
    results = run_all(names, flags)
    rows = [[f"{name}.py", "-", f"not run: {reason}"] for name, reason in left_out.items()]
    failed = []
    for name in [*names, "fidelity"]:
        seconds, result = results[name]
        code = result.returncode
        rows.append([f"{name}.py", f"{seconds:.1f}", f"FAILED, status {code}" if code else "ok"])
        if code:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            failed.append(f"{name}.py: {last}")
    common.print_table(["script", "seconds", ""], rows)
    if failed:
        print("", *failed, sep="\n", file=sys.stderr)
        raise SystemExit(1)
    (options.out / "index.html").write_text(gallery(options.out), encoding="utf-8")
    print(f"\nwrote {options.out / 'index.html'}")


if __name__ == "__main__":
    run_main(main)
