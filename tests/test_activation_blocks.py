"""Block files: what is written is read, by us and by zarr alone; whole or not at all."""

import json
import warnings
import zipfile

import fsspec
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mappnb.activation_blocks import (
    BLOCK_FORMAT,
    Block,
    BlockWriter,
    Stored,
    append_log,
    open_block,
    read_log,
    write_block,
)
from mappnb.errors import FormatVersionError, SchemaError

DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.uint16, np.int32, np.int64, np.bool_])
DIMS = ("sample", "layer", "token", "head", "head_dim")


@st.composite
def stored(draw):
    values = draw(hnp.arrays(draw(DTYPES), hnp.array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=4)))
    return Stored(values, DIMS[: values.ndim], {"layers": [3, 1], "shard": {"replicated": False}})


@pytest.fixture
def block():
    q = np.arange(2 * 3 * 4 * 2, dtype=np.float32).reshape(2, 3, 4, 2)
    return Block(
        {"rank": 7, "coords": {"tp_rank": 1}, "layout": {"tp": 2}},
        {
            "full": {
                "step": Stored(np.array([0, 5]), ("sample",)),
                "token_index": Stored(np.zeros((2, 4), np.int32), ("sample", "token")),
                "q": Stored(q, ("sample", "layer", "token", "head_dim"), {"layers": [2, 0, 1]}),
            },
            "stats": {"step": Stored(np.array([0]), ("step",))},
        },
    )


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), stored(), min_size=1, max_size=4))
@settings(max_examples=25)
def test_round_trip(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("block") / "block-000000.zarr.zip"
    size = write_block(path, Block({"rank": 0}, {"a": arrays, "b": arrays}))
    assert size == path.stat().st_size
    with open_block(path) as block:
        assert sorted(block.streams) == ["a", "b"]
        for stream, infos in block.streams.items():
            for name, info in infos.items():
                want = arrays[name]
                assert (info.shape, info.dtype, info.dims) == (want.values.shape, want.values.dtype, want.dims)
                assert info.attrs == want.attrs
                np.testing.assert_array_equal(block.array(stream, name)[...], want.values)


def test_zarr_alone_reads_it_without_a_warning(tmp_path, block):
    write_block(tmp_path / "b.zip", block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(zarr.storage.ZipStore(tmp_path / "b.zip", mode="r"), mode="r")
        plain = zarr.open_group(zarr.storage.ZipStore(tmp_path / "b.zip", mode="r"), mode="r", use_consolidated=False)
    for root in (group, plain):  # with the metadata in one piece, and from each array's own
        assert dict(root.attrs) == {**block.attrs, "format_version": BLOCK_FORMAT}
        assert sorted(name for name, _ in root.groups()) == ["full", "stats"]
        np.testing.assert_array_equal(root["full/q"][...], block.streams["full"]["q"].values)
        assert root["full/q"].metadata.dimension_names == ("sample", "layer", "token", "head_dim")


def test_one_layer_of_one_sample_is_one_chunk(tmp_path, block):
    write_block(tmp_path / "b.zip", block)
    with open_block(tmp_path / "b.zip") as opened:
        assert opened.streams["full"]["q"].chunks == (1, 1, 4, 2)
        array = opened.array("full", "q")
        read = []
        get = array.store._get
        array.store._get = lambda key, *args, **options: read.append(key) or get(key, *args, **options)
        np.testing.assert_array_equal(array[1, 2], block.streams["full"]["q"].values[1, 2])
    assert read == ["full/q/c/1/2/0/0"]


def test_any_file_system(tmp_path, block):
    write_block(tmp_path / "b.zip", block)
    memory = fsspec.filesystem("memory")
    memory.pipe("/run/b.zip", (tmp_path / "b.zip").read_bytes())
    with open_block("/run/b.zip", memory) as opened:
        np.testing.assert_array_equal(opened.array("full", "q")[0], block.streams["full"]["q"].values[0])
        assert opened.samples("full")["step"].tolist() == [0, 5]


def test_pieces_in_any_order_and_chunks_not_filled(tmp_path):
    writer = BlockWriter(tmp_path / "x" / "b.zip", {})
    writer.declare("s/q", dtype="float32", dims=("sample", "layer", "token"), chunks=(2, 1, 4), attrs={})
    values = {}
    for at, shape in (((2, 1, 0), (2, 1, 6)), ((0, 0, 0), (1, 1, 4)), ((4, 0, 0), (2, 1, 3))):
        values[at] = np.random.default_rng(at).standard_normal(shape).astype(np.float32)
        writer.put("s/q", at, values[at])
    with pytest.raises(ValueError, match=r"s/q: values at \(1, 0, 0\) do not begin a chunk of \(2, 1, 4\)"):
        writer.put("s/q", (1, 0, 0), np.zeros((1, 1, 1), np.float32))
    assert not (tmp_path / "x" / "b.zip").exists()
    writer.close()
    expected = np.zeros((6, 2, 6), np.float32)
    for at, v in values.items():
        expected[tuple(slice(a, a + n) for a, n in zip(at, v.shape, strict=True))] = v
    with open_block(tmp_path / "x" / "b.zip") as opened:
        np.testing.assert_array_equal(opened.array("s", "q")[...], expected)


def test_nothing_is_left_of_what_was_not_finished(tmp_path, block, monkeypatch):
    writer = BlockWriter(tmp_path / "b.zip", {})
    writer.whole("a/b", Stored(np.ones(3), ("x",)))
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("mappnb.activation_blocks.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_block(tmp_path / "b.zip", block)
    assert list(tmp_path.iterdir()) == []
    wrong = Block({}, {"s": {"q": Stored(np.ones((2, 3)), ("sample",))}})
    with pytest.raises(SchemaError, match="s/q: 2 axes, but dims"):
        write_block(tmp_path / "b.zip", wrong)
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_named(tmp_path, block):
    good = tmp_path / "good.zip"
    write_block(good, block)
    data = good.read_bytes()
    cases = {"empty": b"", "text": b"hello", "cut": data[: len(data) // 2]}
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(SchemaError, match=rf"{name}: not a block of activations"):
            open_block(path)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("readme", "x")
    with pytest.raises(SchemaError, match="not a block"):
        open_block(tmp_path / "other.zip")
    with zipfile.ZipFile(tmp_path / "newer.zip", "w") as newer:
        root = {"attributes": {"format_version": 99}, "consolidated_metadata": {"metadata": {}}}
        newer.writestr("zarr.json", json.dumps(root))
    with pytest.raises(FormatVersionError, match=r"format 99.*pip install"):
        open_block(tmp_path / "newer.zip")


def test_names_that_are_not_there(tmp_path, block):
    write_block(tmp_path / "b.zip", block)
    with open_block(tmp_path / "b.zip") as opened:
        with pytest.raises(SchemaError, match="no stream 'ful'; found full, stats; did you mean 'full'"):
            opened.array("ful", "q")
        with pytest.raises(SchemaError, match="'full' has no array 'k'; found"):
            opened.array("full", "k")
        assert opened.samples("nothing") == {}


def test_log_survives_a_cut_line(tmp_path):
    for number in range(3):
        append_log(tmp_path, {"file": f"block-{number:06d}.zarr.zip", "steps": [number]})
    data = (tmp_path / "log.jsonl").read_bytes()
    assert [e["steps"] for e in read_log(data)] == [[0], [1], [2]]
    assert [e["steps"] for e in read_log(data[:-5])] == [[0], [1]]
    assert read_log(b"\xff\x00garbage\n[]\n\n") == []
    append_log(tmp_path, {"file": "x"})
    assert len(read_log((tmp_path / "log.jsonl").read_bytes())) == 4


def test_attributes_must_be_plain(tmp_path):
    writer = BlockWriter(tmp_path / "b.zip", {"loss": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
