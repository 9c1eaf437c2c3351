"""Draw the timelines of a pipeline's step as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from membudget.planner.pipeline_costs import COMPUTES
from membudget.planner.pipeline_simulation import PipelineEvent
from membudget.text import write_whole
from membudget.tradeoff import check_can_draw

_COLOURS = {
    "forward": "#4c78a8",
    "recompute": "#f2a93b",
    "backward": "#54a24b",
    "backward_input": "#88c27f",
    "backward_weight": "#b79ac8",
}


def save_timelines(
    path: str | Path, timelines: Mapping[str, Sequence[PipelineEvent]]
) -> None:
    """Plot what every rank computes when, and save the plot as a PNG file.

    Args:
        path: The file.
        timelines: The events of all ranks in a step, by title: measured and simulated,
            say. They share one axis of seconds.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        OptionError: If the file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.6 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for (title, events), (panel,) in zip(timelines.items(), axes, strict=True):
        for event in events:
            if event.action.kind in COMPUTES:
                bar = (event.start_s, event.end_s - event.start_s)
                colour = _COLOURS[event.action.kind]
                panel.broken_barh(
                    [bar],
                    (event.rank - 0.4, 0.8),
                    facecolor=colour,
                    edgecolor="white",
                    linewidth=0.4,
                )
        panel.set_title(title)
        panel.set_ylabel("rank")
        panel.set_yticks(sorted({event.rank for event in events}))
        panel.invert_yaxis()
    axes[-1][0].set_xlabel("seconds since the step began")
    for kind, colour in _COLOURS.items():
        axes[0][0].broken_barh(
            [], (0, 0), color=colour, label=kind.replace("_", " of ")
        )
    figure.legend(loc="outside lower center", ncols=len(_COLOURS))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_whole(Path(path), picture.getvalue(), repr(str(path)))
