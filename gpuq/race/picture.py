"""The picture of a race: who holds which buffer at each step, and what arrived in the end."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from gpuq.errors import ConfigError
from gpuq.race.board import Holder, Run

COLOURS = {
    Holder.FREE: "#dfe5ea",
    Holder.READER: "#2f6fd0",
    Holder.FILLED: "#f2c14e",
    Holder.COPYING: "#8a6fc8",
    Holder.COPIED: "#8fcf9a",
    Holder.FREE_TOO_EARLY: "#ef4136",
    Holder.FILLED_TOO_EARLY: "#7d0d14",
}
_RIGHT = COLOURS[Holder.COPIED]
_WRONG = COLOURS[Holder.FREE_TOO_EARLY]
_LEGEND = {
    Holder.FREE: "free",
    Holder.READER: "being filled",
    Holder.FILLED: "filled, waits for a batch",
    Holder.COPYING: "its copy is still to come",
    Holder.COPIED: "its copy has ended",
    Holder.FREE_TOO_EARLY: "free, yet its copy is still to come",
    Holder.FILLED_TOO_EARLY: "being filled, yet its copy is still to come",
}

_TITLES = {
    1: "All 64 are in use; A needs one",
    2: "Gate 1 opens: 33 copies end",
    3: "B reads two more blocks",
    4: "A gets a buffer, reads 999 into it",
}
_LAST_TITLE = "Gate 2 opens: what arrived"
_CAPTIONS = {
    "original": {
        1: "33 copies are submitted, with an event behind them; 31 wait for the next batch. "
        "A sleeps until the event is complete.",
        2: "The event is complete. A is awake, but B gets the lock first.",
        3: "B takes the 33 back and uses 2. With these, 33 copies wait and are submitted; the "
        "same event is recorded again.",
        4: "A has the lock and takes back all that is scheduled. That is now the second batch: "
        "none of it has been copied.",
    },
    "event-recheck": {
        1: "The same: A sleeps until the event is complete.",
        2: "The same: A is awake, but B gets the lock first.",
        3: "The same: a second batch is submitted, the event recorded again.",
        4: "A has the lock and asks the event again. It is not complete: A takes nothing back, "
        "and uses one that is free.",
    },
    "gpuq": {
        1: "Every copy was submitted at once, with an event of its own. A has begun to ask and is "
        "stopped; B overtakes it.",
        2: "33 of the 64 events are complete.",
        3: "The poller sees them and frees these 33 buffers, no other. B's two blocks use 2.",
        4: "A goes on. What it asks for is read into one that is free.",
    },
}
_NAMES = {
    "original": ("original", "one event for all", "copies, no second", "look at it"),
    "event-recheck": ("event recheck", "one event for all", "copies, looked at", "again"),
    "gpuq": ("gpuq", "an event of its", "own for each", "buffer"),
}

_CELL = 15.0
_GAP = 2.0
_ACROSS = 8
_BLOCKS_ACROSS = 9
_LEFT = 150.0
_COLUMN = 194.0
_TOP = 126.0
_ROW = 234.0
_LINE = 14.0
_TITLE_CHARACTERS = 22
_CAPTION_CHARACTERS = 29
_INK = "#1d2733"
_FAINT = "#5b6875"


class Box(NamedTuple):
    """A filled rectangle, in points from the top left."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


class Label(NamedTuple):
    """A line of text; (x, y) is where its base line begins."""

    x: float
    y: float
    text: str
    size: float
    colour: str = _INK
    is_bold: bool = False


@dataclass
class Drawing:
    """Boxes and labels, to be written in one format or another."""

    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


def check_picture_path(path: str) -> None:
    """Raise unless a picture can be written under this name.

    Raises
    ------
    ConfigError
        The name ends neither in .svg nor in .png, or in .png and matplotlib is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"{path}: a .png needs matplotlib, which is not installed; name a .svg instead"
            ) from None
    elif suffix != ".svg":
        raise ConfigError(f"{path}: a picture's name must end in .svg or .png")


def write_picture(path: str, runs: Sequence[Run]) -> None:
    """Draw the runs into a file; its name says the format, see `check_picture_path`."""
    drawing = draw(runs)
    if path.lower().endswith(".png"):
        _write_png(path, drawing)
    else:
        Path(path).write_text(to_svg(drawing), encoding="utf-8")


def draw(runs: Sequence[Run]) -> Drawing:
    """Draw a row for each pool and a column for each moment, and what arrived as the last one."""
    columns = len(_TITLES) + 1
    drawing = Drawing(_LEFT + columns * _COLUMN, _TOP + len(runs) * _ROW + 62)
    _draw_head(drawing, runs)
    for row, run in enumerate(runs):
        top = _TOP + row * _ROW
        drawing.boxes.append(Box(20, top - 14, drawing.width - 40, 1, "#c9d1d8"))
        _draw_name(drawing, run.pool, top)
        for column, moment in enumerate(run.moments):
            left = _LEFT + column * _COLUMN
            for buffer, holder in enumerate(moment.holders):
                title = f"buffer {buffer}: {holder.value}"
                _draw_cell(drawing, left, top, buffer, _ACROSS, COLOURS[holder], title)
            _draw_caption(drawing, left, top, _CAPTIONS[run.pool][moment.number])
        _draw_outcome(drawing, _LEFT + (columns - 1) * _COLUMN, top, run)
    _draw_legend(drawing, _TOP + len(runs) * _ROW)
    return drawing


def to_svg(drawing: Drawing) -> str:
    """Return a drawing as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width:g}" '
        f'height="{drawing.height:g}" viewBox="0 0 {drawing.width:g} {drawing.height:g}" '
        'font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for box in drawing.boxes:
        title = f"<title>{escape(box.title)}</title>" if box.title else ""
        lines.append(
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
            f'fill="{box.colour}">{title}</rect>'
        )
    for label in drawing.labels:
        weight = ' font-weight="bold"' if label.is_bold else ""
        lines.append(
            f'<text x="{label.x:g}" y="{label.y:g}" font-size="{label.size:g}" '
            f'fill="{label.colour}"{weight}>{escape(label.text)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _draw_head(drawing: Drawing, runs: Sequence[Run]) -> None:
    drawing.labels += [
        Label(20, 32, "A buffer must not be filled again before its copy was made", 20, _INK, True),
        Label(
            20,
            54,
            "64 staging buffers, one square each. Readers A and B fill them, one stream copies "
            "them out; gates hold the copies. The same order of steps for three pools.",
            13,
            _FAINT,
        ),
    ]
    if any(run.figures.watchdog_fired for run in runs):
        warning = "The watchdog opened the gates: this run proves nothing."
        drawing.labels.append(Label(20, 74, warning, 13, _WRONG, True))
    for column, title in enumerate([*_TITLES.values(), _LAST_TITLE]):
        left = _LEFT + column * _COLUMN
        lines = textwrap.wrap(f"{column + 1}. {title}", _TITLE_CHARACTERS)
        for number, line in enumerate(reversed(lines)):
            drawing.labels.append(Label(left, _TOP - 22 - number * 15, line, 12, _INK, True))


def _draw_name(drawing: Drawing, pool: str, top: float) -> None:
    name, *lines = _NAMES[pool]
    drawing.labels.append(Label(20, top + 14, name, 14, _INK, True))
    for number, line in enumerate(lines, start=1):
        drawing.labels.append(Label(20, top + 16 + number * _LINE, line, 11, _FAINT))


def _draw_cell(
    drawing: Drawing, left: float, top: float, number: int, across: int, colour: str, title: str
) -> None:
    pitch = _CELL + _GAP
    x, y = left + number % across * pitch, top + number // across * pitch
    drawing.boxes.append(Box(x, y, _CELL, _CELL, colour, title))


def _draw_caption(
    drawing: Drawing, left: float, top: float, text: str, colour: str = _INK, is_bold: bool = False
) -> None:
    below = top + _ACROSS * (_CELL + _GAP) + _LINE
    for number, line in enumerate(textwrap.wrap(text, _CAPTION_CHARACTERS)):
        drawing.labels.append(Label(left, below + number * _LINE, line, 11, colour, is_bold))


def _draw_outcome(drawing: Drawing, left: float, top: float, run: Run) -> None:
    wrong = {block.sample for block in run.wrong}
    for sample in range(run.samples):
        title = f"block {sample}: {'wrong' if sample in wrong else 'right'}"
        colour = _WRONG if sample in wrong else _RIGHT
        _draw_cell(drawing, left, top, sample, _BLOCKS_ACROSS, colour, title)
    if not run.wrong:
        _draw_caption(drawing, left, top, f"All {run.samples} blocks are right.")
    for block in run.wrong[:1]:
        text = (
            f"Block {block.sample} should hold {block.expected} and holds {block.found}, the "
            "bytes of another file."
        )
        _draw_caption(drawing, left, top, text, _WRONG, is_bold=True)


def _draw_legend(drawing: Drawing, top: float) -> None:
    entries = [(COLOURS[holder], text) for holder, text in _LEGEND.items()]
    x, y = 20.0, top
    for colour, text in entries:
        width = 40 + 6.2 * len(text)
        if x + width > drawing.width - 20:
            x, y = 20.0, y + 24
        drawing.boxes.append(Box(x, y, _CELL, _CELL, colour))
        drawing.labels.append(Label(x + _CELL + 6, y + 12, text, 12))
        x += width


def _write_png(path: str, drawing: Drawing) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    points_per_inch = 72
    size = (drawing.width / points_per_inch, drawing.height / points_per_inch)
    figure = Figure(figsize=size, dpi=2 * points_per_inch)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for box in drawing.boxes:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.colour))
    for label in drawing.labels:
        weight = "bold" if label.is_bold else "normal"
        axes.text(
            label.x, label.y, label.text, fontsize=label.size, color=label.colour, weight=weight
        )
    FigureCanvasAgg(figure).print_png(path)
