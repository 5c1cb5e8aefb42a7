"""A picture of traces. Each batch is a box over the times that it covers; updates are its height, level its colour.

    python -m examples.picture files orders --location file:./data --output trace.png

Between since (dashed) and upper (solid) every time can be read; left of since history is given up. Moments side by
side, such as a shard before and after maintenance, have the same axes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, to_rgba
from matplotlib.figure import Figure

import persist_lib as persist
from examples import console
from persist_lib.core.state import Batch, State
from persist_lib.core.trace import level_of
from persist_lib.core.units import number, of, size, size_class

PANEL_INCHES = (6.4, 2.8)
FLOOR = 0.5
"""Where boxes stand, below one update on the logarithmic axis. Empty batches are flat boxes there, in grey."""
HEADROOM = 12
"""How much higher than the highest box the axis is: room for the names of since and upper."""
COLOURS = "viridis_r"
EMPTY = "0.8"
EDGES_UP_TO = 150
"""If there are more batches than this, they are drawn without white edges, which would hide them."""

Moment = tuple[str, Mapping[str, State]]
"""A title, and the state of each shard then."""


def fetch_states(url: str, shards: Sequence[str], consensus: str | None = None) -> dict[str, State]:
    """The newest states of these shards; nothing is written."""
    with persist.open(url, consensus, read_only=True) as client:
        return {name: client.inspect(name).state for name in shards}


def draw_traces(url: str, shards: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG of these shards as they are now."""
    draw_moments([(title, fetch_states(url, shards))], path)


def draw_moments(moments: Sequence[Moment], path: Path) -> None:
    """Write a PNG: a row for each shard, a column for each moment, the same axes along a row."""
    shards = list(moments[0][1])
    width, height = PANEL_INCHES
    figure = Figure((width * len(moments) + 1, height * len(shards)), layout="constrained")
    grid = figure.subplots(len(shards), len(moments), squeeze=False, sharex="row", sharey="row")
    levels = [level_of(batch.count) for _, states in moments for state in states.values() for batch in state.trace]
    norm = BoundaryNorm(np.arange(-0.5, max([1, *levels]) + 1.5), 256)
    for column, (title, states) in enumerate(moments):
        for row, name in enumerate(shards):
            draw_trace(grid[row, column], states[name], norm)
            grid[row, column].set_title(f"{name}, {title}: {_summary(states[name])}", fontsize=9, loc="left")
    for axes in grid[-1]:
        axes.set_xlabel("time")
    _draw_legend(figure, grid, norm)
    figure.savefig(path, dpi=110)


def boxes(batches: Sequence[Batch], end: int) -> np.ndarray:
    """One box a batch: (left, right, height), the times it covers, `end` for the end of all, and its updates."""
    found = [(b.lower.time, end if b.upper.time is None else b.upper.time, b.count) for b in batches]
    return np.array(found, dtype=np.float64).reshape(-1, 3)


def draw_trace(axes: Axes, state: State, norm: BoundaryNorm) -> None:
    """Draw one shard's batches, since and upper."""
    end = _end(state)
    found = boxes(state.trace, end)
    left, right, height = found.T
    top = np.maximum(height, FLOOR * 1.2)
    corners = [(left, FLOOR), (left, top), (right, top), (right, FLOOR)]
    outlines = np.stack([np.column_stack(np.broadcast_arrays(x, y)) for x, y in corners], axis=1)
    colours = np.asarray(colormaps[COLOURS](norm([level_of(batch.count) for batch in state.trace])))
    colours[height == 0] = to_rgba(EMPTY)
    edges = "white" if len(found) <= EDGES_UP_TO else "face"
    axes.add_collection(PolyCollection(list(outlines), facecolors=colours, edgecolors=edges, linewidths=0.4))
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, max([axes.get_ylim()[1], 2.0, *height * HEADROOM]))
    axes.set_xlim(0, end * 1.03)
    axes.set_ylabel("updates")
    _mark_frontiers(axes, state, end)


def _mark_frontiers(axes: Axes, state: State, end: int) -> None:
    since = end if state.since.time is None else state.since.time
    upper = end if state.upper.time is None else state.upper.time
    axes.axvspan(0, since, color="0.6", alpha=0.35, linewidth=0, zorder=3)
    for at, name, style in ((since, f"since {state.since}", "--"), (upper, f"upper {state.upper}", "-")):
        axes.axvline(at, color="crimson", linestyle=style, linewidth=1)
        side, shift = ("right", -3) if at > end / 2 else ("left", 3)
        axes.annotate(
            name, (at, 0.99 if style == "-" else 0.92), (shift, -3), ("data", "axes fraction"), "offset points",
            color="crimson", fontsize=7, ha=side, va="top",
        )  # fmt: skip


def _draw_legend(figure: Figure, grid: np.ndarray, norm: BoundaryNorm) -> None:
    ticks = np.arange(0, norm.boundaries[-1], max(1, len(norm.boundaries) // 8), dtype=int)
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=list(grid.flat), ticks=ticks, aspect=40, pad=0.01)
    bar.ax.set_yticklabels([size_class(int(level)) for level in ticks], fontsize=8)
    bar.set_label("level: up to so many updates", fontsize=8)


def _end(state: State) -> int:
    """The last time worth showing: upper, or where the last batch with data ends."""
    times = [batch.upper.time or batch.lower.time or 0 for batch in state.trace]
    data = [part.time_upper + 1 for batch in state.trace for part in batch.parts]
    return max([1, state.since.time or 0, *times, *data])


def _summary(state: State) -> str:
    filled = sum(1 for batch in state.trace if batch.count)
    return f"{of(filled, 'batch')}, {number(state.count)} updates, {size(state.size)}"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.picture", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("shards", nargs="+", help="names of shards")
    parser.add_argument("--location", default="file:./data", help="where they are (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("trace.png"), help="the PNG (default: %(default)s)")
    options = parser.parse_args(arguments)
    return console.run(lambda: draw_traces(options.location, options.shards, options.output, "now"))


if __name__ == "__main__":
    sys.exit(main())
