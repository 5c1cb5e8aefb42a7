"""The pictures of reports, as PNG. This is the only module that needs matplotlib.

It draws on figures of its own and never through pyplot, which keeps state for the whole process and may want a screen.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from persist_lib.core import units
from persist_lib.report.fleet_report import Fleet, Row
from persist_lib.report.shard_page import ShardPage
from persist_lib.report.simulated import Comparison

DPI = 80
MOST = 8
LONGEST = 34
BLUE, ORANGE, RED, GREY = "#3b6fb6", "#e08a2e", "#c33c3c", "#9aa4ae"


def draw(found: Fleet | ShardPage | Comparison) -> bytes:
    """The picture of a report: some 20 to 40 kB."""
    if isinstance(found, Comparison):
        figure = _policies(found)
    else:
        figure = _fleet(found) if isinstance(found, Fleet) else _shard(found)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _fleet(found: Fleet) -> Figure:
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    (debt, dollars), (held, wrong) = figure.subplots(2, 2)
    _bars(debt, "debt, updates", found, lambda row: row.debt, BLUE)
    _bars(dollars, "dollars a month", found, lambda row: row.dollars_month, BLUE)
    _bars(held, "garbage that waits, bytes", found, lambda row: row.held, ORANGE)
    counts = {"damaged or not readable": len(found.damaged)}
    counts |= {f"{duty} overdue": len(rows) for duty, rows in found.overdue.items()}
    counts |= {"paused": sum(1 for row in found.rows if row.paused), "not looked at": found.waiting}
    colours = [RED, *[ORANGE] * len(found.overdue), GREY, GREY]
    _barh(wrong, f"shards, of {len(found.rows):,}", list(counts), list(counts.values()), colours)
    wrong.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure


def _bars(axes: Axes, title: str, found: Fleet, by: Callable[[Row], Any], colour: str) -> None:
    rows = found.most(by, MOST)
    _barh(axes, title, [_named(row) for row in rows], [by(row) for row in rows], [colour] * len(rows))


def _barh(axes: Axes, title: str, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    if not names:
        axes.set_axis_off()
        axes.text(0, 0.8, "none", transform=axes.transAxes, color=GREY)
        return
    axes.barh(range(len(names)), values, color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _plain(axes)


def _named(row: Row) -> str:
    """Whose a shard is where its name is minted, else its name; the end of what is too long."""
    name = row.owner or row.shard
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _shard(page: ShardPage) -> Figure:
    figure = Figure(figsize=(12, 7), layout="constrained")
    batches, size, written, money = figure.subplots(4, 1, sharex=True)
    days, places = page.days, range(page.window - len(page.days), page.window)
    names = sorted({level for day in days for level in day.levels}, reverse=True)
    colours = colormaps["viridis"]
    _stacked(batches, "batches by level", places, {
        units.size_class(level): ([day.levels.get(level, 0) for day in days], colours(at / max(1, len(names) - 1)))
        for at, level in enumerate(names)
    })  # fmt: skip
    _stacked(size, "bytes stored", places, {
        "batches and rollups": ([day.stored - day.garbage for day in days], BLUE),
        "garbage": ([day.garbage for day in days], ORANGE),
    })  # fmt: skip
    _stacked(written, "bytes written", places, {
        "appended": ([day.appended for day in days], BLUE), "rewritten": ([day.rewritten for day in days], ORANGE),
    })  # fmt: skip
    _stacked(money, "dollars a day, and requests that write (red)", places, {"": ([day.dollars for day in days], BLUE)})
    requests = money.twinx()
    requests.plot(places, [day.puts + day.deletes + day.commits for day in days], color=RED, marker=".", linewidth=1)
    requests.set_ylim(bottom=0)
    requests.tick_params(axis="y", labelsize=8, labelcolor=RED)
    requests.spines[:].set_visible(False)
    shown = places[:: max(1, len(places) // 10)]
    money.set_xticks(list(shown), [days[at - places.start].day[5:] for at in shown], fontsize=8)
    if places.start:
        is_lost = page.missing or page.unread
        for axes in (batches, size, written, money):
            axes.axvspan(-0.5, places.start - 0.5, color="#eef0f2", zorder=0)
        says = "not known: the log does not go back so far" if is_lost else "before its first transition"
        batches.text(0, 0.5, says, transform=batches.get_xaxis_transform(), fontsize=8, color=GREY)
    return figure


def _policies(found: Comparison) -> Figure:
    figure = Figure(figsize=(12, 6), layout="constrained")
    batches, reads = figure.subplots(2, 1, sharex=True)
    for one, colour in zip(found.found, colormaps["tab10"].colors, strict=False):  # type: ignore[attr-defined]
        places = [found.appends * (at + 1) / len(one.batches_curve) for at in range(len(one.batches_curve))]
        batches.step(places, one.batches_curve, where="post", label=one.policy, color=colour, linewidth=1)
        reads.step(places, one.read_curve, where="post", color=colour, linewidth=1)
    for axes, title in ((batches, "batches"), (reads, "a read of the newest contents, beside one fresh batch")):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        _plain(axes)
    reads.set_xlabel("appends", fontsize=8)
    batches.legend(fontsize=8, frameon=False, ncols=6, loc="lower right", bbox_to_anchor=(1, 0.98))
    return figure


def _stacked(axes: Axes, title: str, places: range, series: dict[str, tuple[Sequence[float], Any]]) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    below: list[float] = [0] * len(places)
    for name, (values, colour) in series.items():
        axes.bar(places, values, bottom=below, color=colour, label=name, width=0.85)
        below = [sum(both) for both in zip(below, values, strict=True)]
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, min_n_ticks=1, integer=max(below, default=0) >= 1))
    axes.set_ylim(0, 1.05 * max(below, default=0) or 1)
    axes.set_xlim(-0.6, places.stop - 0.4)
    if len(series) > 1:
        axes.legend(fontsize=7, ncols=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), borderpad=0)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
