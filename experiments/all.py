"""All figures and tables, the best chunk size, and results/index.html.

index.html is a gallery: what the papers claim, what we see, and where we differ. Its texts stand in
texts.toml. All numbers in them come from the CSV files.

    python experiments/all.py           (or: make figures)
    python experiments/all.py --slow    also the scripts that take long (SLOW)
    python experiments/all.py --page    only the page, from the results that are there
    python experiments/all.py --quick   few runs of each script, and no page: does all of it work?

Each script runs as a reader would run it, without --measure. Measured rows that results/ already
holds stay, and are shown. So do the results of SLOW scripts, and of those that only measure.
"""

import enter  # noqa: F401

import html
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from string import Template

from command.checks import UserError, lookup
from command.cli import MARK, cores, run_main, to_run, write_file
from command.flags import Flag
from experiments import choose_chunk, fidelity, studies
from experiments.lib import common, holes, look
from experiments.lib.common import ROOT, three_digits
from experiments.lib.flags import start
from experiments.lib.rows import SOURCES, Rows, error_text, read_rows

STUDIES = studies()
# They take minutes: without --slow the gallery shows the results that are there.
SLOW = {name for name, study in STUDIES.items() if study.slow}
TORCH = {name for name, study in STUDIES.items() if study.torch}
# the paper's B, where the memory formula alone would take more
FLAGS = {"choose_chunk": ["--max-batch-size", "18"]}

# The page's groups, in order: the name in texts.toml -> heading, and what is in it.
GROUPS = {
    "first": ("Start here", "The idea in two figures."),
    "sarathi": ("SARATHI", "Chunked prefills and decode-maximal batches on one GPU."),
    "serve": ("Sarathi-Serve", "The same idea for requests that arrive over time: no stalls."),
    "pipelines": ("Pipelines", "A model over several GPUs: bubbles, and TD-Pipe's phases."),
    "neighbours": (
        "Neighbours",
        "Beam search over a segment KV cache; blocks that requests share.",
    ),
    "measured": ("Measured", "Predictions beside real runs; engines side by side."),
    "cost": ("The cost model", "The law that predicts, beside measured kernels."),
}

PAGE = "results/index.html"  # what texts.toml calls it
MEASURED = "measured"  # the group of scripts that only measure: minutes


# What a caption says. It may also say `differ`. The head of texts.toml explains each.
KEYS = {"group", "finding", "alt", "where", "claim", "see"}


@cache
def captions() -> dict[str, dict[str, str]]:
    """Script -> its caption: texts by their keys. Raises UserError."""
    found = holes.read_texts()[PAGE]
    for name, texts in found.items():
        check_caption(f"{holes.TEXTS}, {PAGE}, {name}", texts)
    return found


def check_caption(place: str, texts: dict[str, str]) -> None:
    """Raises UserError where a text is missing or unknown, or the group is."""
    if wrong := KEYS ^ (texts.keys() - {"differ"}):
        raise UserError(f"{place}: missing, or no text of a caption: {', '.join(sorted(wrong))}")
    lookup(GROUPS, texts["group"], f"group in {place}:")


def fill(name: str, text: str, rows: Rows) -> str:
    """A caption's text with its holes filled, as HTML."""
    sources = holes.sources(rows)
    if "{measured[" in text and not sources["measured"]:
        return f"Not measured yet: python experiments/{name}.py --measure does it."
    return html.escape(holes.fill(text, sources, f"{holes.TEXTS}, {PAGE}, {name}"))


def table(heading: str, columns: list[str], rows: list[list[str]]) -> str:
    """A table that unfolds below its heading; "" if there are no rows.

    It scrolls by itself where it is wider than the screen. Arrow keys move it where it has focus.
    """
    if not rows:
        return ""
    heading = html.escape(heading)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>\n')
    return f"""<details><summary>{heading}</summary>
<div class="wide" tabindex="0" role="region" aria-label="{heading}"><table>
<thead><tr>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody></table></div></details>"""


def published(rows: Rows) -> list[list[str]]:
    """Published numbers that fidelity.py leaves out: what, paper, predicted, error."""
    paper = rows.named("paper")
    predicted = rows.named()
    found = []
    for name in [name for name in paper if predicted.get(name) is not None]:
        ours = predicted[name]
        theirs = paper[name]
        found.append([name, three_digits(theirs), three_digits(ours), error_text(ours, theirs)])
    return found


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG, in pixels."""
    with open(picture, "rb") as file:
        return struct.unpack(">II", file.read(24)[16:])


def shown(out: Path) -> list[str]:
    """The figures that are there, in the order of the page."""
    order = list(GROUPS)
    files = {file.name for file in out.iterdir()}
    names = [name for name in captions() if {f"{name}.csv", f"{name}.png"} <= files]
    return sorted(names, key=lambda name: order.index(captions()[name]["group"]))


def draw_kept(out: Path) -> None:
    """Draw the results that are there without a picture: those of a script that did not run."""
    look.use_style()
    torch = find_spec("torch") is not None
    pictures = {name: study.picture for name, study in STUDIES.items()}
    pictures["choose_chunk"] = choose_chunk.picture
    for name, draw in common.progress(pictures.items(), "drawing"):
        path = out / f"{name}.csv"
        if name not in captions() or not path.exists() or (name in TORCH and not torch):
            continue
        if not path.with_suffix(".png").exists():
            look.save_figure(draw(read_rows(path)), path.with_suffix(".png"))
        if name in STUDIES and not (out / f"{name}_measured.png").exists():
            STUDIES[name].draw_measured(path)


def title_of(name: str) -> str:
    """Such as "Fig 9", for people."""
    title = name.removeprefix("td_").removeprefix("segment_").removeprefix("serve_")
    return title.replace("fig", "Fig ").replace("table", "Table ").replace("_", " ").capitalize()


def sources_of(rows: Rows) -> str:
    """What the numbers of a figure are, and of which model and hardware, as a list."""
    lines = []
    for source in SOURCES:
        found = rows.newest().where(source=source)
        places = list(dict.fromkeys(f"{row['model']} on {row['hardware']}" for row in found))
        if places:
            more = f", and {len(places) - 2} more" if len(places) > 2 else ""
            where = "" if source == "paper" else f": {html.escape('; '.join(places[:2]) + more)}"
            lines.append(f'<li><span class="{source}">{source}</span>{where}</li>')
    return f'<ul class="sources">{"".join(lines)}</ul>'


def picture(out: Path, name: str, alt: str) -> str:
    """A figure that leads to itself, in full size."""
    width, height = size_of(out / f"{name}.png")
    image = f'<img src="{name}.png" width="{width}" height="{height}" loading="lazy" alt="{alt}">'
    return f'<a href="{name}.png">{image}</a>'


def section(name: str, out: Path, rows: list[fidelity.Row]) -> str:
    """One figure of the gallery. rows: its published numbers beside ours."""
    caption = captions()[name]
    results = read_rows(out / f"{name}.csv")
    numbers = [fidelity.cells(row)[1:] for row in rows]
    columns = [*fidelity.HEADER[1:-1], "note"]
    if not numbers:
        numbers = published(results)
        columns = ["what", "paper", "predicted", "error"]
    explained = [row for row in rows if row.explanation]
    texts = [f"{row.quantity}: {fidelity.told(row)}" for row in explained]
    texts = [html.escape(text) for text in texts]
    texts += [fill(name, caption["differ"], results)] if "differ" in caption else []
    if not texts and rows:
        texts = ["Nowhere."]
    differ = "".join(f"<dd>{text}</dd>" for text in texts)
    if differ:
        differ = f"<dt>Where we differ by more than {fidelity.LIMIT:g} %</dt>{differ}"
    alt = fill(name, caption["alt"], results)
    second = f"{name}_measured"
    measured = ""
    if (out / f"{second}.png").exists():
        measured = picture(out, second, f"The same picture, from real runs. {alt}")
    claim = "We ask" if caption["group"] in ("measured", "cost") else "The paper claims"
    return f"""<section id="{name}"><h3>{fill(name, caption["finding"], results)}</h3>
<p class="where">{title_of(name)} &middot; {html.escape(caption["where"])} &middot;
<code>experiments/{name}.py</code> &middot; <a href="{name}.csv">all numbers</a></p>
<figure>{picture(out, name, alt)}{measured}<figcaption>{sources_of(results)}</figcaption></figure>
<dl>
<dt>{claim}</dt><dd>{fill(name, caption["claim"], results)}</dd>
<dt>We see</dt><dd>{fill(name, caption["see"], results)}</dd>
{differ}</dl>
{table("Numbers: paper, predicted, error", columns, numbers)}
<p class="back"><a href="#contents">Contents</a></p></section>
"""


def line(name: str, out: Path) -> str:
    """One line of the contents: what the figure shows."""
    finding = fill(name, captions()[name]["finding"], read_rows(out / f"{name}.csv"))
    return f'<li><a href="#{name}"><b>{title_of(name)}</b> {finding}</a></li>\n'


def gallery(out: Path) -> str:
    """results/index.html: gallery.html with a section for each figure that is there."""
    rows = fidelity.read(out / "fidelity.csv")
    ids = {figure.name: set(figure.paper) for figure in fidelity.FIGURES + fidelity.SERVING}
    jumps = []
    contents = []
    sections = []
    for group, (heading, about) in GROUPS.items():
        names = [name for name in shown(out) if captions()[name]["group"] == group]
        if not names:
            continue
        lines = "".join(line(name, out) for name in names)
        jumps.append(f'<a href="#{group}">{heading}</a>')
        contents.append(f"<h3>{heading}</h3>\n<p>{about}</p>\n<ul>{lines}</ul>")
        sections.append(f'<h2 id="{group}">{heading}</h2>\n<p>{about}</p>\n')
        for name in names:
            numbers = [row for row in rows if row.id in ids.get(name, ())]
            sections.append(section(name, out, numbers))
    summary = "".join(f"<li>{html.escape(line)}</li>\n" for line in fidelity.summary(rows))
    page = Template((ROOT / "experiments" / "gallery.html").read_text(encoding="utf-8"))
    return page.substitute(
        mark=MARK,
        jumps=" &middot; ".join(jumps),
        contents="\n".join(contents),
        summary=summary,
        sections="".join(sections),
    )


def write_page(out: Path) -> None:
    """Pictures that are missing, then the page."""
    draw_kept(out)
    there = [name for name in captions() if (out / f"{name}.csv").exists()]
    left = [name for name in there if name not in shown(out)]
    if left:
        print(f"\nnot in the gallery: {', '.join(left)} (to add it, run its script)")
    write_file(out / "index.html", gallery(out))
    print(f"\nwrote {out / 'index.html'}")


def run_script(name: str, flags: list[str]) -> tuple[float, subprocess.CompletedProcess]:
    """Run experiments/NAME.py. Returns the seconds that it took, and how it ended."""
    begin = time.perf_counter()
    script = ROOT / "experiments" / f"{name}.py"
    command = [sys.executable, str(script), *FLAGS.get(name, []), *flags]
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    return time.perf_counter() - begin, ended


def run_all(
    names: list[str], flags: list[str]
) -> dict[str, tuple[float, subprocess.CompletedProcess]]:
    """Run these scripts, as many at once as there are cores, and fidelity.py."""
    with ThreadPoolExecutor(cores()) as pool:
        try:
            longest_first = sorted(names, key=lambda name: name not in SLOW)
            jobs = {pool.submit(run_script, name, flags): name for name in longest_first}
            done = common.progress(as_completed(jobs), "running", total=len(jobs))
            results = {jobs[job]: job.result() for job in done}
        except BaseException:  # a terminal sends Ctrl-C to those that run, too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # last: it reads what others wrote
    return results | {"fidelity": run_script("fidelity", flags)}


def main() -> None:
    slow = Flag(f"also run {', '.join(sorted(SLOW))}")
    page = Flag("write only index.html, from the results that are there")
    options = start("", __doc__, others=["index.html"], slow=slow, page=page)
    if options.page:
        write_page(options.out)
        return common.print_link(options.out / "index.html")
    flags = ["--out", str(options.out)]
    flags += [f"--{name}" for name in ("quick", "force") if getattr(options, name)]
    left_out = {}
    if find_spec("torch") is None:
        why = f"it needs torch: {to_run('install')} .venv/bin/python experiments/all.py"
        left_out |= dict.fromkeys(sorted(TORCH), why)
    measured = [name for name, texts in captions().items() if texts["group"] == MEASURED]
    left_out |= dict.fromkeys(measured, "it measures this machine: run it by itself")
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
    if options.quick:
        print(f"\nwrote {options.out}, to see that all scripts run: these are no results")
        print("no page: its texts quote results that --quick does not compute")
    else:
        write_page(options.out)
        common.print_link(options.out / "index.html")


if __name__ == "__main__":
    run_main(main)
