"""Colours by meaning, the same in every view: told apart by colour-blind readers (Okabe and Ito), never the only sign."""

from __future__ import annotations

from mappnb.terms import Category

__all__ = ["BREAKDOWN_COLOURS", "CATEGORY_COLOURS", "DIVERGING", "PHASE_COLOURS", "RISING", "css"]

BREAKDOWN_COLOURS: dict[str, tuple[str, str]] = {
    "compute": ("#0072b2", "#4aa3df"),
    "transfer": ("#e69f00", "#e69f00"),
    "wait_peer": ("#d55e00", "#e8743b"),
    "data": ("#009e73", "#2bb58c"),
    "checkpoint": ("#7a4b94", "#a578c0"),
    "optimizer": ("#cc79a7", "#d893b9"),
    "host": ("#8a8a8a", "#9a9a9a"),
    "idle": ("#e4e4e4", "#3a3f46"),
}
"""(light theme, dark theme) of each breakdown category."""

PHASE_COLOURS: dict[str, tuple[str, str]] = {
    "forward": ("#56b4e9", "#5fb0e0"),
    "backward": ("#0072b2", "#2f7fc0"),
    "recompute": ("#8fd0c0", "#5f9f90"),
}
"""Of the actions of a pipeline schedule."""

CATEGORY_COLOURS: dict[str, tuple[str, str]] = {
    Category.COMPUTE: BREAKDOWN_COLOURS["compute"],
    Category.COLLECTIVE: BREAKDOWN_COLOURS["transfer"],
    Category.P2P: ("#f0e442", "#d8cd3a"),
    Category.WAIT: BREAKDOWN_COLOURS["wait_peer"],
    Category.DATA: BREAKDOWN_COLOURS["data"],
    Category.OPTIMIZER: BREAKDOWN_COLOURS["optimizer"],
    Category.CHECKPOINT: BREAKDOWN_COLOURS["checkpoint"],
    Category.EVALUATION: ("#b8860b", "#c9a227"),
    Category.HOST: BREAKDOWN_COLOURS["host"],
    Category.MARK: BREAKDOWN_COLOURS["idle"],
}
"""Of events."""

DIVERGING: dict[str, tuple[str, ...]] = {
    "light": ("#08306b", "#2f7fc0", "#9ecae9", "#f7f7f5", "#fdb97a", "#d55e00", "#7f2704"),
    "dark": ("#b5dcff", "#4aa3df", "#1f4f75", "#262b31", "#7a4210", "#e8743b", "#ffd9b0"),
}
RISING: dict[str, tuple[str, ...]] = {
    "light": ("#f7f7f5", "#c9dff0", "#7fb5dc", "#2f7fc0", "#08467f", "#04254a"),
    "dark": ("#20262c", "#173a58", "#1f6aa5", "#4aa3df", "#a9d6f5", "#f2faff"),
}
"""Blue to orange and one blue by lightness: told apart by colour-blind readers, the middle and the zero near the ground."""


def css() -> str:
    """Return CSS variables for every colour, ``--c-<name>``, with the dark theme where the reader asks for it."""
    names = {**{f"b-{k}": v for k, v in BREAKDOWN_COLOURS.items()}, **{f"p-{k}": v for k, v in PHASE_COLOURS.items()}}
    names |= {f"e-{k}": v for k, v in CATEGORY_COLOURS.items()}
    light = "".join(f"--c-{k}:{v[0]};" for k, v in names.items())
    dark = "".join(f"--c-{k}:{v[1]};" for k, v in names.items())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
