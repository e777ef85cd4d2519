"""Arrays as pictures: truncation, colours, marks and counts against brute force; size, escaping, what is read, what is said."""

from __future__ import annotations

import base64
import json
import math
import re
import xml.etree.ElementTree
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from xarray.core import indexing

import mappnb
from mappnb.errors import SchemaError
from mappnb.widgets import ArrayView, array_view
from mappnb.widgets import _array_colours as colours
from mappnb.widgets import _array_draw as drawing
from mappnb.widgets import _array_grid as grids
from mappnb.widgets import _array_labels as labels
from mappnb.widgets import _array_values as values
from mappnb.widgets._png import palette_png
from mappnb.widgets.arrays import MOST_BYTES

Mark = values.Mark


class Page(HTMLParser):
    """Elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attrs, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs.append(dict(attrs))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def data(self) -> dict:
        return json.loads(next(a["data-mpa"] for a in self.attrs if "data-mpa" in a))


def pixels_of(png: bytes) -> np.ndarray:
    """A second reader of what palette_png writes: red, green, blue of every pixel, black where it is clear."""
    width, height = (int.from_bytes(png[k : k + 4], "big") for k in (16, 20))
    at, body, palette = 8, b"", b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        part = png[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + part) == int.from_bytes(png[at + 8 + size : at + 12 + size], "big")
        body += part if kind == b"IDAT" else b""
        palette = part if kind == b"PLTE" else palette
        at += 12 + size
    raw, rows, above = zlib.decompress(body), [], bytes(width)
    for y in range(height):
        line = raw[y * (width + 1) : (y + 1) * (width + 1)]
        above = line[1:] if line[0] == 0 else bytes((a + b) & 255 for a, b in zip(line[1:], above, strict=True))
        rows.append(list(above))
    seen = np.frombuffer(palette, np.uint8).reshape(-1, 3)[np.array(rows).reshape(height, width)]
    return np.where(np.array(rows)[..., None] == 0, 0, seen)


# ------------------------------------------------------------------ layout


@given(size=st.integers(1, 60), shown=st.integers(1, 60))
def test_cut_keeps_first_and_last(size, shown):
    axis = grids.cut("d", size, shown)
    everything = list(range(size))
    want = everything if size <= shown else everything[: math.ceil(shown / 2)] + everything[size - shown // 2 :]
    assert axis.positions().tolist() == want == np.arange(size)[axis.indexer()].tolist()
    assert axis.truncated == (size > shown) and axis.shown == len(want)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=0, max_size=7),
    most=st.integers(64, 6000),
    width=st.integers(200, 900),
)
def test_tiles_stay_inside_apart_and_within_budget(sizes, most, width):
    named = {f"d{k}": n for k, n in enumerate(sizes)}
    grid = grids.make_grid(named, grids.assign_roles(named), most_cells=most, width=width)
    assert grid.num_cells <= max(most, 16)
    assert grid.num_frames <= grids.MOST_FRAMES
    drawn = [t for t in grid.tiles if t.row >= 0]
    assert sorted((t.row, t.col) for t in drawn) == [
        (r, c) for r in range(grid.row.shown) for c in range(grid.col.shown)
    ]
    wide, high = grid.tile_size
    taken = np.zeros((grid.height, grid.width), np.uint8)
    for tile in grid.tiles:
        taken[tile.top : tile.top + high, tile.left : tile.left + wide] += 1
    assert taken.max() == 1 and taken.sum() == len(grid.tiles) * wide * high
    roles = [a.dim for a in grid.axes if a.dim is not None] + [d for d, _ in grid.fixed]
    assert sorted(roles) == sorted(named)


def test_roles():
    sizes = {"batch": 1, "layer": 4, "head": 8, "query": 5, "key": 5}
    roles = grids.assign_roles(sizes)
    assert (roles.row, roles.col, roles.y, roles.x, roles.rest) == ("layer", "head", "query", "key", ("batch",))
    roles = grids.assign_roles(sizes, x="layer", row="batch")
    assert (roles.row, roles.col, roles.y, roles.x, roles.rest) == ("batch", "query", "key", "layer", ("head",))
    assert grids.assign_roles({"a": 7, "b": 1}).x == "b"
    with pytest.raises(SchemaError, match=r"x='quary': the array has dims .* did you mean 'query'\?"):
        grids.assign_roles(sizes, x="quary")
    with pytest.raises(SchemaError, match="one role only"):
        grids.assign_roles(sizes, x="key", y="key")


# ------------------------------------------------------------------ colours and marks


def brute_mark(value, missing, low, high):
    if missing:
        return Mark.MISSING
    if math.isnan(value):
        return Mark.NAN
    if math.isinf(value):
        return Mark.POS_INF if value > 0 else Mark.NEG_INF
    return Mark.BELOW if value < low else Mark.ABOVE if value > high else Mark.NONE


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", ">f4", "c8"])
def test_marks_are_counted_as_by_hand(rng, dtype):
    raw = rng.standard_normal((5, 17, 23)) * 20
    raw = np.abs(raw) if dtype == "u1" else raw
    array = raw.astype(dtype)
    if array.dtype.kind in "fc":
        array.flat[[3, 50, 700]] = np.nan, np.inf, -np.inf
        array[0, 0, :2] = np.nan
    missing = xr.DataArray(rng.random((17, 23)) < 0.1, dims=("b", "c"))
    da = xr.DataArray(array, dims=("a", "b", "c"))
    content = array_view(da, missing=missing, vmin=-15.0, vmax=11.0).content()
    counts = dict.fromkeys(range(7), 0)
    for a, b, c in np.ndindex(array.shape):
        value = array[a, b, c]
        real = abs(complex(value)) if array.dtype.kind == "c" else float(value)
        counts[brute_mark(real, bool(missing.values[b, c]), -15.0, 11.0)] += 1
    found = content.survey.counts
    assert {m: n for m, n in found.items() if m} == {m: n for m, n in counts.items() if m}
    assert not content.survey.sampled and f"All {array.size:,} values counted" in content.counted()


@given(
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=40),
    center=st.none() | st.floats(-1e3, 1e3),
)
def test_ramp_step_is_the_nearest(numbers, center):
    array = np.array(numbers)
    found = values.survey(xr.DataArray(array, dims="a"))
    scale = colours.choose_scale(array, found, array.dtype, center=center)
    first, last = colours.ramp_ends(scale)
    got = colours.codes(array, np.zeros(array.shape, np.uint8), scale).astype(int) - first
    assert ((got >= 0) & (got <= last - first)).all()
    order = np.argsort(array, kind="stable")
    assert (np.diff(got[order]) >= 0).all(), "a greater value never gets a lower step"
    if scale.kind == "diverging":
        assert all(g <= 50 for g, v in zip(got, array, strict=True) if v <= scale.center)
        assert all(g >= 50 for g, v in zip(got, array, strict=True) if v >= scale.center)
    elif (
        scale.low < scale.high
        and abs(scale.low) < 1e300
        and abs(scale.high) < 1e300
        and scale.high - scale.low > 1e-300
    ):
        want = (np.clip(array, scale.low, scale.high) - scale.low) / (scale.high - scale.low) * 100
        np.testing.assert_allclose(got, want, atol=0.5000001)


def test_limits():
    far = np.concatenate([np.linspace(-1, 1, 1000), [1e6]])
    content = array_view(xr.DataArray(far, dims="a")).content()
    assert content.scale.how == "1st to 99th percentile" and 0.97 < content.scale.high < 1.01
    assert content.scale.kind == "diverging" and content.scale.low == -content.scale.high
    assert content.survey.counts[Mark.ABOVE] == np.count_nonzero(far > content.scale.high)
    assert array_view(xr.DataArray([0.5, 2.0], dims="a")).content().scale.kind == "sequential"
    assert array_view(xr.DataArray([0.5, 2.0], dims="a"), center=1.0).content().scale.low == 0.0
    assert array_view(xr.DataArray([np.nan, np.inf], dims="a")).content().occurring == [Mark.NAN, Mark.POS_INF]
    for bad in ({"vmin": 2, "vmax": 1}, {"vmin": np.nan}, {"center": np.inf}):
        with pytest.raises(SchemaError, match="give finite limits, vmin <= vmax"):
            array_view(xr.DataArray([0.5, 2.0], dims="a"), **bad).content()


def luminance(rgb):
    x = np.asarray(rgb, float) / 255
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722], linear


def test_ramps_are_told_apart_without_hue():
    ramp = colours.PALETTE[16 : 16 + colours.STEPS]
    light, _ = luminance(ramp)
    assert (np.diff(light) > 0).all() and light[-1] / light[0] > 20
    both, linear = luminance(colours.PALETTE[16 + colours.STEPS : 16 + 2 * colours.STEPS])
    assert (np.diff(both[:51]) > 0).all() and (np.diff(both[50:]) < 0).all()
    # what a deuteranope sees of linear RGB (Vienot, Brettel, Mollon 1999, table 1): the two arms stay apart by blue against yellow
    seen = linear @ np.array([[0.29275, 0.70725, -0.02234], [0.29275, 0.70725, 0.02234], [0, 0, 1.0]])[:, [0, 1, 2]]
    for k in (0, 15, 30):
        low, high = seen[k], seen[100 - k]
        assert (low[2] - low[0]) - (high[2] - high[0]) > 0.1


def test_text_on_categories_has_contrast():
    ink, _ = luminance(colours.PALETTE[colours.Index.INK])
    for k in range(colours.MOST_CATEGORIES):
        paper, _ = luminance([int(colours.category_colour(k)[i : i + 2], 16) for i in (1, 3, 5)])
        assert (paper + 0.05) / (ink + 0.05) >= 4.5


def test_every_pixel_is_the_colour_of_its_value(rng):
    array = rng.standard_normal((3, 40, 50)).astype("f4")
    array[0, 0, 0], array[1, 39, 49] = np.nan, np.inf
    content = array_view(xr.DataArray(array, dims=("a", "b", "c")), width=400).content()
    grid, (frame,) = content.grid, content.frames()
    assert grid.x.truncated and grid.y.truncated
    assert (
        pixels_of(palette_png(frame, colours.PALETTE)) == np.where(frame[..., None] > 0, colours.PALETTE[frame], 0)
    ).all()
    patterns = {m: drawing.pattern(m, grid.cell, ink=0) for m in (Mark.NAN, Mark.POS_INF)}
    owned = np.zeros(frame.shape, bool)
    for tile in grid.tiles:
        for y in range(grid.y.shown):
            for x in range(grid.x.shown):
                left = tile.left + x * grid.cell + (grids.GAP if x >= grid.x.head else 0)
                top = tile.top + y * grid.cell + (grids.GAP if y >= grid.y.head else 0)
                value = array[grid.col.positions()[tile.col], grid.y.positions()[y], grid.x.positions()[x]]
                size = grid.cell - 1 if grid.cell >= drawing.LINED else grid.cell
                cell = frame[top : top + size, left : left + size]
                owned[top : top + grid.cell, left : left + grid.cell] = True
                if np.isfinite(value):
                    assert (cell == content.cells[0, tile.col, y, x]).all()
                else:
                    drawn = patterns[Mark.NAN if np.isnan(value) else Mark.POS_INF][:size, :size] > 0
                    assert len(np.unique(cell)) == 2 and (cell[~drawn] == cell[size // 2, 0]).all()
    assert set(np.unique(frame[~owned])) <= {0, colours.Index.DOTS}
    dots = (frame[~owned] == colours.Index.DOTS).sum()
    assert dots == 3 * 5 * 4, "in each tile three dots of four pixels across and three down, the middle one shared"


@pytest.mark.parametrize("size", range(grids.MIN_CELL, grids.MAX_CELL + 1))
def test_marks_differ_at_every_size(size):
    seen = {drawing.pattern(mark, size).tobytes() for mark in range(7)}
    assert len(seen) == 7


# ------------------------------------------------------------------ size and what is read

SHAPES = [
    (30, 4096, 576),
    (1, 1),
    (),
    (1,),
    (50_000,),
    (4096, 576),
    (2,) * 12,
    (1000, 1000, 1000),
    (12, 16, 64, 64),
    (3, 5, 4, 40, 40),
]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?", "c16", "M8[ns]", "U9"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_page_is_small(rng, shape, dtype):
    seed = rng.integers(-(2**62), 2**62, shape[-1:] or (1,))
    seed = seed / 2**60 if np.dtype(dtype).kind in "fc" else seed
    seed = seed.astype(dtype)
    if dtype[0] == "M":
        shape = tuple(min(n, 200) for n in shape)  # xarray copies times
        seed = seed[: shape[-1] if shape else 1]
    array = np.broadcast_to(seed if shape else seed[0], shape)
    view = array_view(xr.DataArray(array))
    assert len(view._repr_html_().encode()) <= MOST_BYTES
    assert Page(view._repr_html_()).data["a"][-1]["k"] == view.content().grid.x.shown


def test_hostile_texts_stay_small():
    nasty = ["'<\"&>\u202e\0" * 40 + str(k) for k in range(2000)]
    da = xr.DataArray(np.array(nasty * 2).reshape(2, 2000), dims=("d<" * 90, "x" * 5000), name="&'" * 500)
    da = da.assign_coords({"x" * 5000: [f"{n}{k}" for k, n in enumerate(nasty)]})
    assert len(array_view(da)._repr_html_().encode()) <= MOST_BYTES


class Counting(xr.backends.BackendArray):
    """A store of 10**9 numbers, that counts what is read of it."""

    def __init__(self):
        self.shape, self.dtype, self.read = (1000, 1000, 1000), np.dtype("f4"), 0

    def __getitem__(self, key):
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._raw)

    def _raw(self, key):
        places = [np.arange(n)[k] for n, k in zip(self.shape, key, strict=True)]
        shape = [p.size for p, k in zip(places, key, strict=True) if not isinstance(k, int | np.integer)]
        self.read += math.prod(p.size for p in places)
        return np.ones(shape, "f4")


def test_lazy_arrays_are_read_in_part_only():
    store = Counting()
    da = xr.DataArray(xr.Variable(("a", "b", "c"), indexing.LazilyIndexedArray(store)))
    view = array_view(da)
    assert len(view._repr_html_()) <= MOST_BYTES
    assert 0 < store.read <= values.MOST_LOADED + 6000
    assert "Of a sample of 260,000 of 1,000,000,000 values: all finite." in view.content().counted()


def test_zarr_of_a_billion(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array(
        "big", shape=(1000, 1000, 1000), chunks=(50, 200, 200), dtype="f4", dimension_names=("a", "b", "c")
    )
    da = xr.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False).big
    content = array_view(da).content()
    assert content.survey.sampled and content.survey.looked_at <= values.MOST_LOADED
    assert len(array_view(da)._repr_html_()) <= MOST_BYTES


def test_dask_is_not_computed_whole():
    dask = pytest.importorskip("dask.array", reason="dask is optional")
    da = xr.DataArray(dask.zeros((1000, 1000, 1000), chunks=(50, 200, 200), dtype="f4"), dims=("a", "b", "c"))
    assert array_view(da).content().survey.looked_at <= values.MOST_LOADED


def test_sample_is_spread_and_said(rng):
    array = np.broadcast_to(rng.standard_normal(1000), (50, 300, 1000))
    content = array_view(xr.DataArray(array)).content()
    assert (
        content.survey.sampled
        and content.survey.looked_at <= values.MOST_COUNTED_BYTES // 8 < 4 * content.survey.looked_at
    )
    assert "Of a sample of" in content.counted() and "Of a sample of" in content.summary()


def test_mark_outside_the_sample_is_still_explained():
    array = np.ones((3000, 3001), "f4")
    array[-1, -1] = np.nan
    view = array_view(xr.DataArray(array))
    assert "NaN" in view.content().counted()


# ------------------------------------------------------------------ dtypes, texts


EXACT = [
    np.array([[0.1, -0.0, 1e-45], [3.4e38, np.nan, np.inf]], "f4"),
    np.array([[0.1, 6e-8, 65504.0]], "f2"),
    np.array([[5e-324, 0.1, 1e308]]),
    np.array([[2**63 - 1, -(2**63)]]),
    np.array([[2**64 - 1, 0]], "u8"),
    np.array([[-5, 300]]),
    np.array([[True, False]]),
    np.array([[0.1 - 2j, np.nan]], "c8"),
    np.array([[0.1 - 2j, np.inf]], "c16"),
    np.array([[0.5]], ">f8"),
]


@pytest.mark.parametrize("array", EXACT, ids=lambda a: a.dtype.str)
def test_values_reach_the_page_bit_by_bit(array):
    data = Page(array_view(xr.DataArray(array))._repr_html_()).data
    kind = {"b1": "?"}.get(data["t"], "<" + data["t"])
    got = np.frombuffer(base64.b64decode(data["v"]), kind)
    assert (
        got.astype(array.dtype.newbyteorder("=")).tobytes()
        == array.ravel().astype(array.dtype.newbyteorder("=")).tobytes()
    )


def test_words_reach_the_page():
    for array in (
        np.array(["2024-01-02T03:04:05", "NaT"], "M8[ns]")[None],
        np.array([["é", "b\n"]], object),
    ):
        data = Page(array_view(xr.DataArray(array))._repr_html_()).data
        words = [data["s"][k] for k in np.frombuffer(base64.b64decode(data["v"]), "<u2")]
        assert words == [labels.clean(labels.value_text(v)) for v in array.ravel()]


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with some frameworks")
    view = array_view(xr.DataArray(np.array([[1.5, np.nan]], ml_dtypes.bfloat16)))
    assert view.content().survey.counts[Mark.NAN] == 1 and "bfloat16" in view._repr_html_()


def test_categories_show_their_digits(rng):
    view = array_view(xr.DataArray(rng.integers(0, 4, (6, 8)), dims=("layer", "token")))
    assert view.content().scale.values == (0, 1, 2, 3)
    tspans = re.findall(r"<tspan[^>]*>(\d)</tspan>", view._repr_html_())
    assert tspans == [str(v) for v in view.data.values.ravel()]
    many = array_view(xr.DataArray(rng.integers(0, 999, (60, 60))))
    assert many.content().scale.kind == "sequential" and "<tspan" not in many._repr_html_()
    assert array_view(view.data, vmin=0).content().scale.kind == "sequential"


NASTY = "</script><img src=x onerror=alert(1)>'\"\u202e{{7*7}}"


def test_texts_are_escaped():
    da = xr.DataArray(
        np.array([[NASTY, "b"], ["c", "d"]]),
        dims=(NASTY, "שלום"),
        name=NASTY,
        attrs={"units": NASTY},
        coords={NASTY: [NASTY, "😀"]},
    )
    out = array_view(da, tokens={"שלום": [NASTY, "\n"]})._repr_html_()
    page = Page(out)
    assert set(page.tags) <= set(
        re.findall(
            r"\w+", "div style b bdi span i img p details summary table thead tbody tr td th script svg text tspan"
        )
    )
    assert page.tags.count("script") == 1 and not any(k.startswith("on") for a in page.attrs for k in a)
    assert all(
        a["src"].startswith("data:image/png;base64,") for t, a in zip(page.tags, page.attrs, strict=True) if t == "img"
    )
    assert "\u202e" not in out and "\\u202e" in out
    assert "http" not in out.replace("http://www.w3.org", "")
    assert page.data["a"][-1]["w"][1] == "\\n" and page.data["a"][-2]["w"][1] == "😀"
    xml.etree.ElementTree.fromstring(array_view(da).snapshot())


@given(st.text(max_size=80))
def test_clean_text_is_one_safe_line(text):
    out = labels.clean(text)
    assert len(out) <= 6 * 60 and not re.search("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", out)
    out.encode()
    assert sum(len(t.encode()) for t in labels.shorten([out] * 10, 900)) <= 900


def test_missing_in_its_three_forms(rng):
    array = rng.standard_normal((6, 8)).astype("f4")
    mask = xr.DataArray(np.arange(8) > 5, dims="hidden")
    da = xr.DataArray(array, dims=("token", "hidden"))
    by_option = array_view(da, missing=mask)
    by_coord = array_view(da.assign_coords(missing=("hidden", mask.values)))
    by_attr = array_view(da.where(~mask, -1e9).astype("f4").assign_attrs(missing_value=np.float32(-1e9)))
    for view in (by_option, by_coord, by_attr):
        assert view.content().survey.counts[Mark.MISSING] == 12
        assert "12 missing (no rank captured it)" in view.content().counted()
        assert view.content().scale.high < 10
    assert by_option.sel(token=slice(0, 3)).content().survey.counts[Mark.MISSING] == 6
    assert (by_option.content().marks[0, 0] == Mark.MISSING).sum() == 12
    assert "legend" not in array_view(da).content().counted() and array_view(da).content().occurring == []
    for bad in (mask.astype(int), xr.DataArray([True], dims="hidden"), xr.DataArray([True], dims="other")):
        with pytest.raises(SchemaError, match=r"missing: .* expected bool, with dims of the array"):
            array_view(da, missing=bad)


# ------------------------------------------------------------------ the object


def test_repr_code_and_sel(rng):
    da = xr.DataArray(rng.standard_normal((30, 4, 6)).astype("f4"), dims=("layer", "token", "hidden"), name="act")
    view = array_view(da, x="token", vmin=-1.0)
    assert repr(view) == "ArrayView(float32, layer 30 x token 4 x hidden 6)"
    assert view.code == "mappnb.widgets.array_view(act, x='token', vmin=-1.0)"
    tokens, missing = {"token": list("abcd")}, xr.DataArray([True, False, False, False], dims="token")
    part = array_view(da, tokens=tokens, missing=missing, width=500).sel(layer=3, token=slice(1, 3))
    assert part.code == (
        "mappnb.widgets.array_view(act.sel(layer=3, token=slice(1, 3, None)), tokens=tokens, missing=missing, width=500)"
    )
    assert part.data.sizes == {"token": 2, "hidden": 6} and list(part.data.coords) == []
    again = eval(view.code, {"mappnb": mappnb, "act": da})
    assert again._repr_html_() == view._repr_html_() and isinstance(again, ArrayView)
    assert repr(array_view(da.sel(layer=2), x="hidden").sel(hidden=1)) == "ArrayView(float32, token 4)"
    with pytest.raises(SchemaError, match=r"sel\(tokem=...\).* did you mean 'token'\?"):
        view.sel(tokem=1)
    with pytest.raises(SchemaError, match=r"tokens\['token'\]: 2 texts"):
        array_view(da, tokens={"token": ["a", "b"]})


def test_bundle_accessor_and_files(rng, tmp_path):
    da = xr.DataArray(rng.standard_normal((4, 6)), dims=("a", "b"))
    assert "widgets" in dir(mappnb) and mappnb.widgets.array_view is array_view
    assert mappnb.attach  # makes da.mapp known
    view = da.mapp.show(center=0.5)
    assert view._repr_mimebundle_() == {"text/plain": repr(view), "text/html": view._repr_html_()}
    page = view.to_html(tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>") and view._repr_html_() in page
    picture = xml.etree.ElementTree.fromstring(view.snapshot(tmp_path / "a.svg"))
    assert picture.tag.endswith("svg") and (tmp_path / "a.svg").read_text() == view.snapshot()
    assert array_view(np.arange(6.0).reshape(2, 3))._repr_html_().count("<img") == 1


def test_nothing_to_draw(tmp_path):
    view = array_view(xr.DataArray(np.zeros((3, 0)), dims=("a", "b")))
    assert "Nothing to draw: <bdi>b</bdi> has size 0." in view._repr_html_() and "nothing to draw" in view.snapshot()
    scalar = array_view(xr.DataArray(3.25, name="x"))
    assert "3.25" in scalar._repr_html_() and repr(scalar) == "ArrayView(float64, 0-d)"


def test_sliders_are_few_and_the_rest_is_said(rng):
    view = array_view(xr.DataArray(rng.standard_normal((9, 2, 3, 3, 8, 8)).astype("f2"), dims=tuple("abcdef")))
    grid = view.content().grid
    assert [a.dim for a in grid.sliders] == ["b"] and grid.fixed == (("a", 9),)
    assert view._repr_html_().count('class="mpa-f"') == 1 and len(Page(view._repr_html_()).data["i"]) == 1
    assert "Only a 0 of 9: view.sel(a=…) shows another." in view.content().left_out()


def test_summary_is_one_sentence(rng):
    summary = array_view(xr.DataArray(rng.standard_normal((300, 400)), dims=("a", "b"), name="w")).content().summary()
    assert summary.startswith("Picture of w, float64, a 300 by b 400: Colours from") and summary.count(". ") == 0
    assert "first" in summary and "all finite" in summary
