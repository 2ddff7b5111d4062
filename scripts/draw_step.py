"""Draws one optimizer step for `docs/how_it_works.md`: `python scripts/draw_step.py` writes `docs/assets/step.svg`.

Plain SVG with a background of its own, in the reader's colour scheme: it is legible on any page and needs no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).resolve().parents[1] / "docs" / "assets" / "step.svg"
WIDTH, HEIGHT = 960, 548
STYLE = """
  .page { fill: #f7f9f9; } .box { fill: #ffffff; stroke: #00796b; stroke-width: 1.6; }
  .guard { fill: #fff3e0; stroke: #e65100; stroke-width: 1.6; }
  .slow { fill: #e8eaf6; stroke: #3949ab; stroke-width: 1.6; }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 13px; fill: #37474f; }
  .name { font-weight: 600; font-size: 15px; fill: #102027; }
  .lane { font-weight: 600; font-size: 13px; fill: #607d8b; }
  .line { fill: none; stroke: #78909c; stroke-width: 1.8; } .head { fill: #78909c; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1c2326; } .box { fill: #263238; stroke: #4db6ac; } .guard { fill: #3e2c17; stroke: #ffb74d; }
    .slow { fill: #26294a; stroke: #9fa8da; } text { fill: #cfd8dc; } .name { fill: #ffffff; } .lane { fill: #90a4ae; }
  }
"""


@dataclass(frozen=True)
class Box:
    """A box with a name and lines of text."""

    kind: str
    left: int
    top: int
    width: int
    height: int
    name: str
    lines: tuple[str, ...]

    def svg(self) -> str:
        """Returns it as SVG."""
        middle = self.left + self.width // 2
        first = self.top + self.height // 2 - 10 * len(self.lines) + (5 if self.name else -5)
        texts = []
        if self.name:
            texts.append(f'<text x="{middle}" y="{first}" text-anchor="middle" class="name">{escape(self.name)}</text>')
        for place, line in enumerate(self.lines, start=1):
            texts.append(f'<text x="{middle}" y="{first + 19 * place}" text-anchor="middle">{escape(line)}</text>')
        frame = (
            f'<rect x="{self.left}" y="{self.top}" width="{self.width}" height="{self.height}" rx="8"'
            f' class="{self.kind}"/>'
        )
        return "\n".join([frame, *texts])


BOXES = (
    Box("box", 24, 60, 176, 96, "Forward", ("each layer in its format,", "weights stay float32")),
    Box("box", 232, 60, 146, 96, "Backward", ("of the loss times", "the loss scale")),
    Box("box", 410, 60, 172, 96, "Measure", ("one pass: finite? norm,", "range of each layer")),
    Box("guard", 614, 60, 132, 96, "All finite?", ("the guard asks", "at every step")),
    Box("box", 780, 60, 156, 96, "Step", ("unscale, clip, update", "in one pass")),
    Box(
        "guard",
        600,
        206,
        336,
        84,
        "Skip the step",
        ("lower the loss scale, then raise layers to fp32,", "then go back to a copy of the run"),
    ),
    Box("slow", 752, 376, 184, 92, "Readings", ("since the last decision,", "a row for each knob")),
    Box("slow", 502, 376, 210, 92, "Controller", ("rule, table, plan or policy:", "lower, keep or raise")),
    Box("guard", 270, 376, 192, 92, "Guard", ("is it legal, does it pay,", "has it just failed?")),
    Box("slow", 24, 376, 206, 92, "Apply", ("between two steps,", "all changes at once")),
    Box(
        "slow", 24, 486, 912, 40, "", ("The record: what was asked for, what was applied, refused or put off, and why",)
    ),
)
# points of each arrow, the last one has the head; a label with its place
ARROWS: tuple[tuple[tuple[tuple[int, int], ...], str, tuple[int, int]], ...] = (
    (((200, 108), (230, 108)), "", (0, 0)),
    (((378, 108), (408, 108)), "", (0, 0)),
    (((582, 108), (612, 108)), "", (0, 0)),
    (((746, 108), (778, 108)), "yes", (762, 98)),
    (((680, 156), (680, 204)), "no", (698, 185)),
    (((857, 60), (857, 36), (112, 36), (112, 58)), "next step", (496, 28)),
    (((600, 248), (160, 248), (160, 158)), "weights and statistics stay; next step", (328, 239)),
    (((496, 156), (496, 332), (844, 332), (844, 374)), "", (0, 0)),
    (((752, 422), (714, 422)), "", (0, 0)),
    (((502, 422), (464, 422)), "", (0, 0)),
    (((270, 422), (232, 422)), "", (0, 0)),
    (((70, 376), (70, 158)), "formats, loss scale, clip threshold; batch size at an epoch end", (278, 336)),
)


def arrow(points: tuple[tuple[int, int], ...], label: str, place: tuple[int, int]) -> str:
    """Returns a line with a head at its last point, and its label."""
    path = " L ".join(f"{x} {y}" for x, y in points)
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    sides = [(x1 - 7 * dx + side * dy, y1 - 7 * dy + side * dx) for side in (-5, 5)]
    head = " ".join(f"{x},{y}" for x, y in [(x1 + 3 * dx, y1 + 3 * dy), *sides])
    parts = [f'<path d="M {path}" class="line"/>', f'<polygon points="{head}" class="head"/>']
    if label:
        parts.append(f'<text x="{place[0]}" y="{place[1]}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join(parts)


def draw() -> str:
    """Returns the picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>One optimizer step, and the decisions between steps</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" class="page"/>',
            *(arrow(*each) for each in ARROWS),
            *(box.svg() for box in BOXES),
            '<text x="832" y="356" text-anchor="end" class="lane">every 50 applied steps</text>',
            '<text x="24" y="28" class="lane">every step</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw())
    print(f"wrote {TARGET}")
