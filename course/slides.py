"""The lecture's pictures at a projector's size, 16:9, and a deck of them.

The pictures are those of the experiments and of `course picture`. The deck is a .pptx,
which the lecturer may change. Its notes are instructor/lecture90.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
from pptx import Presentation
from pptx.util import Inches, Pt

from command.cli import claim, write_file
from course.drive import serve
from course.exercises import find
from course.local import asker
from course.paint import figure_of
from course.picture import answers, batches, picture
from course.plants import named
from course.reference import solution
from experiments import family, fig3, fig4, fig6, fig7, fig9, policies
from experiments.lib import look
from experiments.lib.rows import Rows
from more.pictures.gantt import draw_runs

# inches; 1920 x 1080 pixels
SIZE = (12.0, 6.75)
DPI = 160
DECK = "lecture.pptx"
LECTURE = Path(__file__).with_name("instructor") / "lecture90.md"
PAPER = [(40, 4), (90, 3), (20, 6), (30, 2)]  # prompt and output tokens


def cost_of_a_token() -> plt.Figure:
    title = f"What a decoded token costs, L = {fig3.LENGTH}"
    rows = fig3.STUDY.predict().where("B", phase="decode")
    return replace(fig3.STUDY, title=title).picture(rows)


def intensity() -> plt.Figure:
    study = replace(fig4.STUDY, panels=fig4.STUDY.panels[1:2], title="Arithmetic intensity")
    return study.picture(study.predict())


def slots() -> plt.Figure:
    exercise = find("2")
    draw, case, ask = answers(exercise, asker(exercise, solution("e02")))
    return figure_of("Three slots of six tokens, after each call", [draw(case, ask(case), False)])


def mistake(number: str) -> plt.Figure:
    plant = named(number)
    exercise = find(plant.exercise)
    shown = picture(exercise, plant.load(), name="with the mistake")
    return figure_of(f"{exercise.name}: {exercise.title}", shown)


def four_requests() -> plt.Figure:
    requests = [[list(range(prompt)), most, [], 0.0] for prompt, most in PAPER]
    case = {"B": 4, "C": 64, "cache": None, "requests": requests}
    shown = batches(case, serve(solution("e06").Sarathi, case), True)
    return figure_of("Prompts of 40, 90, 20 and 30 tokens; C = 64, B = 4", [shown])


def gain() -> plt.Figure:
    study = replace(fig9.STUDY, columns=1)
    return study.picture(study.predict(model="llama-13b").where(L=1024))


def who_waits(*names: str) -> Callable[[], plt.Figure]:
    def draw() -> plt.Figure:
        found = policies.predict()
        title = f"{policies.MODEL} on {policies.GPU}, predicted; dotted: Y and Z arrive"
        traces = {name: found.traces[name] for name in names}
        figure = draw_runs(traces, found.bound, policies.NAMES, title)
        for axes in figure.axes:
            axes.axvline(found.arrival, color="black", linestyle=":", zorder=1)
        return figure

    return draw


@dataclass(frozen=True)
class Slide:
    """minute: of lecture90.md."""

    name: str
    minute: int
    caption: str
    draw: Callable[[], plt.Figure]


SLIDES = (
    Slide("01_cost_of_a_token", 0, "One decode alone pays for all weights.", cost_of_a_token),
    Slide("02_intensity", 8, "Batching helps all operators but attention.", intensity),
    Slide("03_slots", 20, "A slot is taken, filled in place, and given back.", slots),
    Slide("04_masks", 28, "Each chunk sees all earlier keys.", lambda: fig6.draw(Rows())),
    Slide("05_mistake_12", 28, "A prompt of one chunk hides this mistake.", lambda: mistake("12")),
    Slide("06_mistake_14", 28, "Chunks of one token hide this mistake.", lambda: mistake("14")),
    Slide("07_four_requests", 42, "Decodes ride on the chunks of others.", four_requests),
    Slide("08_gain", 57, "The gain is largest where chunks and decodes match.", gain),
    Slide(
        "09_tiles",
        57,
        "One row more opens a tile.",
        lambda: fig7.STUDY.picture(fig7.STUDY.predict()),
    ),
    Slide(
        "10_extremes", 70, "Y and Z wait, or W and X stall.", who_waits("request_level", "vllm_v0")
    ),
    Slide(
        "11_chunks",
        70,
        "A whole prompt delays all decodes, a chunk only a little.",
        who_waits("orca", "sarathi_serve"),
    ),
    Slide("12_family", 70, "Each policy changes one decision.", family.draw),
    Slide("13_mistake_1", 82, "C counts the decodes, too.", lambda: mistake("1")),
)


def notes() -> list[str]:
    """What lecture90.md says of each slide; before that, of its minutes, on their first slide."""
    plain = re.sub(r"\*\*|\*|`|\[(.*?)\]\(.*?\)", r"\1", LECTURE.read_text("utf-8"))
    said = re.findall(r"^\d+\. (.*?)\n(?=\d+\. |\n)", plain, re.MULTILINE | re.DOTALL)
    found = []
    before = None
    for slide, text in zip(SLIDES, said, strict=True):
        text = " ".join(text.split())
        row = re.search(rf"^\| ({slide.minute}-\d+) \| (.*?) \| (.*?) \|$", plain, re.MULTILINE)
        if slide.minute != before:
            text = f"Minutes {row[1]}. Ask first: {row[2]}\nThen show: {row[3]}\n\n{text}"
        found.append(text)
        before = slide.minute
    return found


def deck(out: Path) -> bytes:
    """The pictures of a folder as a .pptx: the caption as a title, and the notes."""
    show = Presentation()
    show.slide_width, show.slide_height = Inches(13.333), Inches(7.5)
    [layout] = [each for each in show.slide_layouts if each.name == "Title Only"]
    for slide, said in zip(SLIDES, notes(), strict=True):
        page = show.slides.add_slide(layout)
        title = page.shapes.title
        title.left, title.top, title.width, title.height = map(Inches, (0.4, 0.1, 12.5, 0.8))
        title.text = slide.caption
        title.text_frame.paragraphs[0].font.size = Pt(30)
        path = str(out / f"{slide.name}.png")
        picture = page.shapes.add_picture(path, Inches(1.067), Inches(0.95), width=Inches(11.2))
        picture._element.nvPicPr.cNvPr.set("descr", slide.caption)  # for who cannot see it
        page.notes_slide.notes_text_frame.text = said
    data = BytesIO()
    show.save(data)
    return data.getvalue()


def slides(out: Path, force: bool) -> None:
    """Write the pictures and the deck to a folder. force: also over a deck that is there."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{slide.name}.png" for slide in SLIDES]
    for path in (*paths, out / DECK):
        claim(path, force)
    look.use_style()
    for slide, path in zip(SLIDES, paths, strict=True):
        figure = slide.draw()
        figure.set_size_inches(*SIZE)
        look.save_figure(figure, path, dpi=DPI, bbox=None)
        print(f"wrote {path}")
    write_file(out / DECK, deck(out))
    print(f"wrote {out / DECK}, with notes")
