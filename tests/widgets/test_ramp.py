"""Colours as numbers: mixed, as a palette, and values as its pixels."""

from __future__ import annotations

import numpy as np

from mappnb.widgets._ramp import between, levels_of, palette_of


def test_between_stops():
    stops = ("#000000", "#ff8000", "#ffffff")
    assert between(stops, [0, 1, 2]).tolist() == [[0, 0, 0], [255, 128, 0], [255, 255, 255]]
    assert between(stops, 0.5).tolist() == [127.5, 64, 0]
    assert between(stops, 1.25).tolist() == [255, 128 + 127 / 4, 255 / 4]


def test_a_palette_begins_with_what_is_transparent():
    assert palette_of(["#010203", "#fffefd"]).tolist() == [[255, 255, 255], [1, 2, 3], [255, 254, 253]]


def test_levels_of_values():
    values = np.array([[-5.0, 0.0, 1.0], [2.0, 9.0, np.nan]])
    assert levels_of(values, 0.0, 2.0, colours=5).tolist() == [[1, 1, 3], [5, 5, 0]]
    assert levels_of(np.array([[1.0]]), 1.0, 1.0, colours=5).tolist() == [[1]], "a scale of no length"
