"""A measurement as one SVG: how first tokens and gaps are distributed, and tokens over time. No library draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from ops.bench.report import percentile
from ops.bench.serving.figures import gaps_s, ttft_s
from ops.bench.serving.report import Measurement, describe_load
from ops.bench.serving.runner import Side

_WIDTH: Final = 960
_PANEL_HEIGHT: Final = 250
_TOP: Final = 64
_LEFT, _RIGHT, _HEAD, _FOOT = 70, 24, 30, 46
_MOST_POINTS: Final = 400
#: Over time: so many bins, but none shorter than a second, where that leaves ten.
_MOST_BINS, _LEAST_BINS = 60, 10
#: The few slowest would press all others against the axis; how slow the slowest is, the axis says.
_SHOWN_PERCENT: Final = 99.5
#: Two colours that differ in lightness as well, on white and on black.
_STYLE: Final = """
  svg { background: #ffffff; color: #1a1a1a; }
  text { fill: currentColor; font: 12px system-ui, sans-serif; }
  .title { font-size: 15px; font-weight: 600; }
  .name { font-weight: 600; }
  .axis { stroke: currentColor; stroke-width: 1; fill: none; }
  .grid { stroke: currentColor; stroke-opacity: 0.15; stroke-width: 1; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
  .s0 { stroke: #0b62c4; } .s1 { stroke: #c4570b; stroke-dasharray: 7 4; }
  @media (prefers-color-scheme: dark) {
    svg { background: #14161a; color: #e6e6e6; }
    .s0 { stroke: #6db3ff; } .s1 { stroke: #ffad66; }
  }
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a line for each side; a side without points has none."""

    name: str
    x_label: str
    y_label: str
    lines: Sequence[Points]
    x_most: float
    y_most: float


def render_svg(measurement: Measurement) -> str:
    """The whole drawing."""
    sides = measurement.sides
    panels = [
        _cdf(
            "Time to the first token",
            [[1000 * ttft_s(one) for one in side.outcomes if one.succeeded] for side in sides],
        ),
        _cdf(
            "Time between events with tokens (ITL)",
            [[1000 * gap for one in side.outcomes if one.succeeded for gap in gaps_s(one)] for side in sides],
        ),
        throughput(sides),
    ]
    height = _TOP + _PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img">',
        f"<title>{escape(describe_load(measurement))}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(describe_load(measurement))}</text>',
        *_legend(sides),
    ]
    for number, panel in enumerate(panels):
        parts += _draw(panel, _TOP + number * _PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float, about: int = 6) -> list[float]:
    """Round numbers from 0 up to `most`, about so many: steps of 1, 2 or 5 times a power of ten."""
    rough = most / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.floor(most / step + 1e-9) + 1)]


def cdf_points(samples: Sequence[float]) -> Points:
    """Percent of the samples at or below a value, in steps, 400 at most."""
    ordered = sorted(samples)
    count = len(ordered)
    wanted = sorted({round(index * (count - 1) / (_MOST_POINTS - 1)) for index in range(_MOST_POINTS)})
    points: list[tuple[float, float]] = []
    below = 0.0
    for index in wanted if ordered else ():
        share = 100 * (index + 1) / count
        points += [(ordered[index], below), (ordered[index], share)]
        below = share
    return points


def _cdf(name: str, samples: Sequence[Sequence[float]]) -> Panel:
    shown = [percentile(one, _SHOWN_PERCENT) for one in samples if one]
    most = max(shown, default=0.0) or 1.0
    slowest = max((max(one) for one in samples if one), default=0.0)
    beyond = f" (slowest: {slowest:.4g})" if slowest > most else ""
    return Panel(name, f"milliseconds{beyond}", "% of all", [cdf_points(one) for one in samples], most, 100.0)


def throughput(sides: Sequence[Side]) -> Panel:
    """New tokens by second of measured time; the rounds of a side stand one behind the other."""
    longest = max((side.seconds for side in sides), default=0.0) or 1.0
    width = max(longest / _MOST_BINS, min(1.0, longest / _LEAST_BINS))
    count = math.ceil(longest / width - 1e-9)
    lines: list[Points] = []
    for side in sides:
        bins = [0.0] * count
        before = 0.0
        for measured in side.rounds:
            for outcome in measured.outcomes:
                weight = outcome.tokens / max(1, len(outcome.arrivals))
                for at in outcome.arrivals if outcome.succeeded else ():
                    bins[min(count - 1, max(0, int((before + at - measured.began) / width)))] += weight
            before += measured.ended - measured.began
        # a last bin that was measured for less than half of its time says nothing
        used = min(count, max(1, round(side.seconds / width)))
        covered = [min(width, side.seconds - number * width) or width for number in range(used)]
        points = [((number + 0.5) * width, bins[number] / covered[number]) for number in range(used)]
        lines.append(points if any(bins) else [])
    most = max((rate for line in lines for _, rate in line), default=0.0) or 1.0
    return Panel("New tokens over time", "seconds of measured time", "tokens/s", lines, longest, most * 1.05)


def _legend(sides: Sequence[Side]) -> list[str]:
    parts, x = [], _LEFT
    for number, side in enumerate(sides):
        text = f"{side.target.name}: {side.target.url} ({side.target.endpoint})"
        parts.append(f'<line class="line s{number}" x1="{x}" y1="44" x2="{x + 26}" y2="44"/>')
        parts.append(f'<text x="{x + 32}" y="48">{escape(text)}</text>')
        x += 60 + 7 * len(text)
    return parts


def _draw(panel: Panel, top: int) -> list[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    upper, lower = top + _HEAD, top + _PANEL_HEIGHT - _FOOT

    def x_of(value: float) -> float:
        return left + (right - left) * min(1.0, value / panel.x_most)

    def y_of(value: float) -> float:
        return lower - (lower - upper) * min(1.0, value / panel.y_most)

    parts = [f'<text class="name" x="{left}" y="{top + 20}">{escape(panel.name)}</text>']
    for value in ticks(panel.x_most):
        x = x_of(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{upper}" x2="{x:.1f}" y2="{lower}"/>')
        parts.append(f'<text x="{x:.1f}" y="{lower + 16}" text-anchor="middle">{value:g}</text>')
    for value in ticks(panel.y_most, 4):
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<path class="axis" d="M{left} {upper}V{lower}H{right}"/>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{lower + 34}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(
        f'<text transform="translate(16 {(upper + lower) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>"
    )
    for number, line in enumerate(panel.lines):
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line if x <= panel.x_most)
        if points:
            parts.append(f'<polyline class="line s{number}" points="{points}"/>')
    return parts
