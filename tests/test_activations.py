"""Reading activations: shards of any layout come together as the whole, lazily, and what is missing is a mask."""

import json
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb._activation_chunks import BlockFile
from mappnb.activation_blocks import Block, Stored, open_block, write_block
from mappnb.activations import open_activations, stream_with
from mappnb.errors import SchemaError
from mappnb.layout import Layout
from mappnb.testing import make_run

sys.path.insert(0, str(Path(__file__).parent))
from activation_runs import HEAD_DIM, HEADS, KV, LAYERS, TOKENS, add_block, block_of, folder_of, ids, whole, write_run

ALL = ("embed", "resid_pre", "q", "k", "z", "mlp_act", "router_prob", "resid_post", "logits", "resid_post_grad")
LAYOUTS = {
    "single": (Layout(), False),
    "tp2": (Layout(tp=2), False),
    "tp4_kv_replicated": (Layout(tp=4), False),
    "pp2": (Layout(pp=2), False),
    "tp2_pp2": (Layout(tp=2, pp=2), False),
    "tp2_sp": (Layout(tp=2), True),
    "cp2": (Layout(cp=2), False),
    "cp2_tp2_sp": (Layout(cp=2, tp=2), True),
    "vpp2": (Layout(pp=2, num_chunks=2), False),
    "dp2": (Layout(dp=2), False),
}


def expected(point, ds):
    """The whole tensor in the order of a dataset's samples."""
    keys = zip(ds.step.values, ds.dp_rank.values, ds.microbatch.values, ds["index"].values, strict=True)
    return np.stack([whole(point, int(s), int(d), int(m))[int(i)] for s, d, m, i in keys])


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_of_any_layout_are_the_whole(tmp_path, name):
    layout, sp = LAYOUTS[name]
    run = mappnb.attach(write_run(tmp_path / "run", layout, points=ALL, sp=sp))
    ds = run.activations["full"].to_dataset()
    assert set(ds.data_vars) == set(ALL)
    assert ds.sizes["sample"] == 2 * 2 * 2 * layout.dp
    for point in ALL:
        np.testing.assert_array_equal(ds[point].values, expected(point, ds))
        assert ds[f"{point}_present"].values.all()
    assert ds.q.dims == ("sample", "layer", "token", "head", "head_dim")
    assert ds.k.dims == ("sample", "layer", "token", "kv_head", "head_dim")
    assert ds.q_present.dims == ("sample", "layer", "token", "head")
    assert ds.resid_post_present.dims == ("sample", "layer", "token")
    assert ds.k.sizes["kv_head"] == KV and ds.q.sizes["head"] == HEADS
    np.testing.assert_array_equal(ds.token_id.values[:2], ids(0, 0, 0))
    assert ds.token_text.values[0, 0] == chr(ids(0, 0, 0)[0, 0])
    np.testing.assert_array_equal(ds.token, np.arange(TOKENS))
    assert ds["mask"].values.all()
    assert run.meta["problems"] == {}
    assert json.loads(ds.attrs["model"])["num_layers"] == LAYERS


def test_order_of_samples_and_their_coordinates(tmp_path):
    ds = (
        mappnb.attach(write_run(tmp_path / "run", Layout(dp=2), points=("resid_post",)))
        .activations["full"]
        .to_dataset()
    )
    rows = np.stack([ds[c].values for c in ("step", "dp_rank", "microbatch", "index")], axis=1)
    np.testing.assert_array_equal(rows, [[s, d, m, i] for s in (0, 1) for d in (0, 1) for m in (0, 1) for i in (0, 1)])


SELECTIONS = [
    {"layer": 3, "sample": 0},
    {"layer": [2, 0], "sample": slice(1, 4)},
    {"token": slice(3, 9), "head": 1},
    {"token": [9, 1, 1], "head": [3, 0], "sample": -1},
    {"head_dim": 2, "sample": [5, 2]},
    {"sample": []},
]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_selections_equal_those_of_the_whole(tmp_path, selection):
    ds = mappnb.attach(write_run(tmp_path / "run", Layout(tp=2, cp=2), points=("q",))).activations["full"].to_dataset()
    eager = xr.DataArray(expected("q", ds), dims=ds.q.dims)
    np.testing.assert_array_equal(ds.q.isel(selection).values, eager.isel(selection).values)
    assert ds.q_present.isel({k: v for k, v in selection.items() if k != "head_dim"}).values.all()


def count_reads(monkeypatch):
    read = []
    chunk = BlockFile.chunk
    monkeypatch.setattr(
        BlockFile,
        "chunk",
        lambda self, stream, name, place: read.append((name, tuple(place))) or chunk(self, stream, name, place),
    )
    return read


def test_only_the_chunks_looked_at_are_read(tmp_path, monkeypatch):
    run = mappnb.attach(write_run(tmp_path / "run", Layout(tp=2), points=ALL))
    ds = run.activations["full"].to_dataset()
    read = count_reads(monkeypatch)
    one = ds["q"].sel(layer=3, sample=0)
    assert read == []
    assert one.shape == (TOKENS, HEADS, HEAD_DIM)
    one.values  # noqa: B018
    assert sorted(read) == [("q", (0, 3, 0, 0, 0))] * 2, "one chunk of each tensor-parallel rank"
    read.clear()
    ds["q"].sel(layer=3, sample=0, head=0).values  # noqa: B018
    assert read == [("q", (0, 3, 0, 0, 0))]
    read.clear()
    repr(ds)
    ds["q_present"].values  # noqa: B018
    assert read == []


def test_a_missing_rank_is_a_mask_and_told_once(tmp_path):
    run = mappnb.attach(write_run(tmp_path / "run", Layout(tp=2), points=("q", "resid_post"), ranks=[0]))
    ds = run.activations["full"].to_dataset()
    np.testing.assert_array_equal(ds.q_present.any(("sample", "layer", "token")), [True, True, False, False])
    np.testing.assert_array_equal(ds.q.values[..., :2, :], expected("q", ds)[..., :2, :])
    assert (ds.q.values[..., 2:, :] == 0).all()
    assert ds.resid_post_present.values.all()
    assert list(run.meta["problems"].items()) == [
        ("inc=000/activations/rank=00001", "no shards of 2 steps (0 to 1); its part is masked, its values read as 0")
    ]


@pytest.mark.parametrize("lost", [{2, 3}, {1, 3}, {3}])
def test_missing_ranks_of_stages_and_peers_are_named(tmp_path, lost):
    ranks = [r for r in range(4) if r not in lost]
    run = mappnb.attach(write_run(tmp_path / "run", Layout(tp=2, pp=2), points=("q",), ranks=ranks))
    assert not run.activations["full"].q_present.values.all() or lost == {2, 3}
    assert {int(where[-5:]) for where in run.meta["problems"]} == lost


def test_a_step_that_one_rank_lost(tmp_path):
    path = write_run(tmp_path / "run", Layout(dp=2), points=("q",), steps=(0, 1, 2))
    (folder_of(path, 1) / "block-000001.zarr.zip").unlink()
    run = mappnb.attach(path)
    ds = run.activations["full"].to_dataset()
    assert ds.sizes["sample"] == 4 * 3 + 4 * 2
    assert run.meta["problems"] == {
        "inc=000/activations/rank=00001": "no shards of step 1; its part is masked, its values read as 0"
    }


@pytest.mark.parametrize(("lost", "told"), [({1, 3}, set()), ({2}, {2})])
def test_replicated_groups_are_missed_of_the_rank_that_writes_them(tmp_path, lost, told):
    ranks = [r for r in range(4) if r not in lost]
    run = mappnb.attach(write_run(tmp_path / "run", Layout(tp=4), points=("k",), ranks=ranks))
    assert run.activations["full"].k_present.values.all() == (not told)
    assert {int(where[-5:]) for where in run.meta["problems"]} == told


def test_ranks_that_hold_only_copies_are_not_missed(tmp_path):
    run = mappnb.attach(write_run(tmp_path / "run", Layout(tp=2), points=("resid_post",), ranks=[0]))
    assert run.activations["full"].resid_post_present.values.all()
    assert run.meta["problems"] == {}


def test_nan_stays_and_is_no_mask(tmp_path):
    def spoil(values):
        values = values.copy()
        values[0, 0, 0] = np.nan
        return values

    ds = mappnb.attach(write_run(tmp_path / "run", points=("q",), change=spoil)).activations["full"].to_dataset()
    assert np.isnan(ds.q.values[0, 0, 0]).all() and ds.q_present.values.all()
    assert np.isnan(ds.q.values).sum() == 2 * HEADS * HEAD_DIM


MODES = {
    "bfloat16": {"mode": "cast", "to": "bfloat16"},
    "float16": {"mode": "cast", "to": "float16"},
    "int8": {"mode": "int8"},
    "topk": {"mode": "topk", "k": 3},
}


@pytest.mark.parametrize("name", MODES)
def test_packed_modes_read_as_numbers(tmp_path, name):
    path = write_run(tmp_path / "run", Layout(tp=2), points=("q", "resid_post"), mode=MODES[name])
    ds = mappnb.attach(path).activations["full"].to_dataset()
    truth = expected("q", ds)
    if name == "topk":
        kept = np.sort(np.abs(truth), axis=-1)[..., -3:-2]
        truth = np.where(np.abs(truth) >= kept, truth, 0)
    assert ds.q.dtype == (np.float16 if name == "float16" else np.float32)
    np.testing.assert_allclose(
        ds.q.values, truth, atol={"bfloat16": 0.02, "float16": 2e-3, "int8": 0.02, "topk": 0}[name]
    )
    np.testing.assert_array_equal(ds.q.isel(sample=1, head_dim=slice(2, 4)).values, ds.q.values[1][..., 2:4])
    assert ds.q.attrs["mode"] == MODES[name]["mode"]


def test_buckets_of_shards_follow_each_other(tmp_path):
    path = write_run(tmp_path / "run", Layout(tp=2), points=("mlp_act",), mode={"mode": "bucket", "size": 4})
    ds = mappnb.attach(path).activations["full"].to_dataset()
    truth = expected("mlp_act", ds)
    assert ds.mlp_act.dims[-1] == "bucket"
    np.testing.assert_allclose(ds.mlp_act.values, truth.reshape(*truth.shape[:-1], 4, 4).mean(-1), rtol=1e-5, atol=1e-6)


def test_sketches_of_shards_add_up(tmp_path):
    from mappnb.activation_codecs import sketch_matrix

    path = write_run(tmp_path / "run", Layout(tp=2), points=("mlp_act",), mode={"mode": "sketch", "size": 8, "seed": 3})
    ds = mappnb.attach(path).activations["full"].to_dataset()
    truth = expected("mlp_act", ds)
    np.testing.assert_allclose(ds.mlp_act.values, truth @ sketch_matrix(8, 3, 0, truth.shape[-1]), rtol=1e-4, atol=1e-5)
    assert ds.mlp_act_present.values.all()


def test_the_last_restart_of_a_step_counts_whatever_its_layout(tmp_path):
    path = write_run(tmp_path / "run", Layout(tp=2), points=("q",), steps=(0, 1))
    write_run(path, Layout(pp=2), points=("q",), steps=(1, 2), resume=True, incarnation=1, change=lambda v: v + 1000)
    run = mappnb.attach(path)
    ds = run.activations["full"].to_dataset()
    truth = expected("q", ds)
    np.testing.assert_array_equal(ds.step, [0] * 4 + [1] * 4 + [2] * 4)
    np.testing.assert_array_equal(ds.incarnation, [0] * 4 + [1] * 8)
    np.testing.assert_array_equal(ds.q.values[:4], truth[:4])
    np.testing.assert_array_equal(ds.q.values[4:], truth[4:] + np.float32(1000))
    assert run.meta["problems"] == {}
    assert json.loads(ds.attrs["layout"])["pp"] == 2


def test_copies_are_read_once_and_compared_on_request(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run", Layout(tp=2), points=("resid_post",), ranks=[0])
    for number, step in enumerate((0, 1)):
        block = block_of(0, Layout(tp=2), step, points=("resid_post",), change=(lambda v: v + 0.5) if step else None)
        add_block(path, 1, number, Block({**block.attrs, "rank": 1}, block.streams))
    run = mappnb.attach(path)
    ds = run.activations["full"].to_dataset()
    read = count_reads(monkeypatch)
    np.testing.assert_array_equal(ds.resid_post.values, expected("resid_post", ds))
    assert len([r for r in read if r[0] == "resid_post"]) == 2 * 4 * LAYERS, "one of the two copies"
    assert run.meta["problems"] == {}
    tree = open_activations(run, verify=True)
    told = json.loads(tree.attrs["differences"])
    assert len(told) == 1 and "rank=00001/block-000001.zarr.zip: full/resid_post differs by up to 0.5" in told[0]
    assert len(run.meta["problems"]) == 1


def test_blocks_appear_while_the_job_runs(tmp_path):
    path = write_run(tmp_path / "run", Layout(dp=2), points=("q",), steps=(0,))
    run, follow = mappnb.attach(path), mappnb.attach(path, follow=True)
    assert run.activations["full"].sizes["sample"] == follow.activations["full"].sizes["sample"] == 8
    add_block(path, 0, 1, block_of(0, Layout(dp=2), 1, points=("q",)))
    assert run.activations["full"].sizes["sample"] == 8
    ds = run.refresh().activations["full"].to_dataset()
    assert ds.sizes["sample"] == 12
    np.testing.assert_array_equal(ds.q.values, expected("q", ds))
    deadline = time.monotonic() + 10
    while follow.activations["full"].sizes["sample"] != 12 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert follow.activations["full"].sizes["sample"] == 12


def test_a_damaged_block_is_skipped_and_told(tmp_path):
    path = write_run(tmp_path / "run", points=("q",), steps=(0, 1))
    bad = folder_of(path, 0) / "block-000001.zarr.zip"
    bad.write_bytes(bad.read_bytes()[:-100])
    (folder_of(path, 0) / "block-000002.zarr.zip.99.tmp").write_bytes(b"PK")
    run = mappnb.attach(path)
    ds = run.activations["full"].to_dataset()
    np.testing.assert_array_equal(ds.step, [0] * 4)
    assert list(run.meta["problems"]) == ["inc=000/activations/rank=00000/block-000001.zarr.zip"]
    assert "not a block of activations" in next(iter(run.meta["problems"].values()))


def test_samples_of_unequal_lengths_and_fillers(tmp_path):
    path = write_run(tmp_path / "run", points=("resid_post",), steps=(0,))
    block = block_of(0, Layout(), 1, points=("resid_post",))
    arrays = dict(block.streams["full"])
    slots = arrays["token_index"].values.copy()
    slots[1, 10:] = -1
    steps = arrays["step"].values.copy()
    steps[2] = -1
    arrays |= {"token_index": Stored(slots, ("sample", "token")), "step": Stored(steps, ("sample",))}
    there = np.ones((4, LAYERS), bool)
    there[3, 2] = False
    arrays["resid_post_present"] = Stored(there, ("sample", "layer"))
    add_block(path, 0, 1, Block(block.attrs, {"full": arrays}))
    ds = mappnb.attach(path).activations["full"].to_dataset()
    assert ds.sizes["sample"] == 7
    present = ds.resid_post_present.sel(sample=slice(4, None)).values
    assert present[0].all()
    assert present[1, :, :10].all() and not present[1, :, 10:].any()
    assert not present[2, 2].any() and present[2, [0, 1, 3]].all()
    assert (ds.resid_post.values[5][:, 10:] == 0).all()


def test_a_stream_with_points_is_found(tmp_path):
    run = mappnb.attach(write_run(tmp_path / "run", points=("q", "k")))
    assert set(stream_with(run.activations, "q", "k").data_vars) == {"q", "k"}
    assert stream_with(run.activations["full"].to_dataset(), "q").attrs["stream"] == "full"
    with pytest.raises(SchemaError, match=r"no stream holds qq; did you mean 'q'\?; streams: 'full': q, k"):
        stream_with(run.activations, "qq")


def test_whole_vectors_come_before_packed_ones():
    def stream(mode, samples, tokens=4):
        values = xr.DataArray(np.zeros((samples, tokens, 2)), dims=("sample", "token", "hidden"), attrs={"mode": mode})
        return xr.Dataset({"resid_post": values}, attrs={"stream": f"{mode}{samples}{tokens}"})

    order = [
        ("full", 3, 9),
        ("full", 2, 9),
        ("cast", 2, 9),
        ("int8", 2, 9),
        ("full", 2, 4),
        ("topk", 5, 9),
        ("sketch", 6, 9),
    ]
    for first in range(len(order)):
        tree = xr.DataTree.from_dict(
            {f"s{i}": stream(*one) for i, one in reversed(list(enumerate(order))) if i >= first}
        )
        assert stream_with(tree, "resid_post").attrs["stream"] == "{}{}{}".format(*order[first])


def test_no_activations_is_an_empty_tree(make):
    run = make()
    assert not run.activations.children
    with pytest.raises(SchemaError, match="nothing was captured, so no q; record with"):
        stream_with(run.activations, "q")


def test_our_reader_and_zarr_read_the_same(tmp_path, rng):
    values = {
        "a": Stored(rng.standard_normal((3, 4, 7)).astype(np.float32), ("sample", "token", "hidden"), {}, (2, 3, 7)),
        "b": Stored(rng.integers(0, 9, 5), ("sample",)),
    }
    path = tmp_path / "block-000000.zarr.zip"
    write_block(path, Block({"rank": 0}, {"s": values}))
    file = BlockFile(str(path))
    with open_block(path) as block:
        for name in values:
            np.testing.assert_array_equal(file.read("s", name), block.array("s", name)[...])
        box = (slice(1, 3), slice(2, 4), slice(0, 5))
        np.testing.assert_array_equal(file.read("s", "a", box), block.array("s", "a")[box])
    assert file.attrs["rank"] == 0


def test_blocks_through_another_file_system(tmp_path):
    import fsspec

    path = write_run(tmp_path / "run", Layout(tp=2), points=("q",))
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/activation-run", recursive=True)
    ds = mappnb.attach("memory://activation-run").activations["full"].to_dataset()
    np.testing.assert_array_equal(ds.q.values, expected("q", ds))
    memory.rm("/activation-run", recursive=True)


def statistics_of(values, layers):
    from mappnb.activation_stats import tensor_stats_reference

    rows = [tensor_stats_reference(values[:, i]) for i in range(len(layers))]
    attrs = {"mode": "stats", "layers": layers}
    return {
        "q": Stored(np.stack([r[0] for r in rows])[None], ("step", "layer", "field"), attrs),
        "q_histogram": Stored(np.stack([r[1] for r in rows])[None], ("step", "layer", "bin"), {"layers": layers}),
    }


def test_statistics_of_shards_merge_into_those_of_the_whole(tmp_path, rng):
    values = rng.standard_normal((5, LAYERS, 40)) * np.arange(1, 5)[:, None] + 3
    values[0, 1, 0] = np.nan
    path = write_run(tmp_path / "run", Layout(tp=2, pp=2), steps=())
    for rank in range(4):
        tp, pp = rank % 2, rank // 2
        layers = [2 * pp, 2 * pp + 1]
        stream = {
            "step": Stored(np.array([7]), ("step",)),
            **statistics_of(values[:, layers, 20 * tp : 20 * tp + 20], layers),
        }
        attrs = {"rank": rank, "layout": Layout(tp=2, pp=2).to_dict(), "model": {}, "plan": {}}
        write_block(folder_of(path, rank) / "block-000000.zarr.zip", Block(attrs, {"stats": stream}))
    ds = mappnb.attach(path).activations["stats"].to_dataset()
    assert ds["mean"].dims == ("step", "point", "layer") and list(ds.point.values) == ["q"]
    finite = np.where(np.isnan(values), np.nan, values)
    for layer in range(LAYERS):
        row = ds.sel(step=7, point="q", layer=layer)
        x = finite[:, layer][np.isfinite(finite[:, layer])]
        assert float(row["count"]) == len(x) and int(row["num_nan"]) == (layer == 1)
        np.testing.assert_allclose(
            [row["mean"], row["std"], row["min"], row["max"]], [x.mean(), x.std(), x.min(), x.max()]
        )
        np.testing.assert_allclose(row["kurtosis"], ((x - x.mean()) ** 4).mean() / x.var() ** 2)
        exponents = np.floor(np.log2(np.abs(x))).astype(int)
        assert int(row["histogram"].sel(bin=1)) == (exponents == 1).sum()


def test_export_puts_shards_together_and_redacts(tmp_path, capsys):
    from mappnb.cli import main

    path = write_run(tmp_path / "run", Layout(tp=2, cp=2), points=ALL)
    out = tmp_path / "out.zarr"
    assert main(["export", str(path), str(out), "--step", "1"]) == 0
    with xr.open_datatree(out, engine="zarr", consolidated=False) as tree:
        ds = tree["full"].to_dataset().load()
    np.testing.assert_array_equal(ds.step, [1] * 4)
    np.testing.assert_array_equal(ds.q.values, expected("q", ds))
    texts = np.array(ds.attrs["token_text_values"])[ds.token_text.values]
    assert texts[0, 0] == chr(int(ds.token_id[0, 0]))
    assert main(["export", str(path), str(out), "--redact"]) == 0
    with xr.open_datatree(out, engine="zarr", consolidated=False) as tree:
        ds = tree["full"].to_dataset().load()
    assert not {"token_id", "token_text", "prompt", "embed", "logits", "embed_present"} & set(map(str, ds.variables))
    assert "token_text_values" not in ds.attrs
    np.testing.assert_array_equal(ds.q.values, expected("q", ds))
    files = b"".join(f.read_bytes() for f in out.rglob("*") if f.is_file())
    assert b"token_" not in files.replace(b"token_index", b"")


def test_export_without_activations(make, tmp_path):
    from mappnb.analysis import export

    with pytest.raises(mappnb.MappnbError, match="no activations to export; captured: none"):
        export(make(), tmp_path / "out.zarr")
    assert list(tmp_path.glob("out*")) == []


def test_a_run_shows_that_it_has_activations(tmp_path, make):
    run = mappnb.attach(write_run(tmp_path / "acts", Layout(tp=2), points=("q",)))
    assert "of 2 ranks: run.activations" in run._repr_html_()
    assert "run.activations" not in make()._repr_html_()


def test_info_and_check_tell_of_activations(tmp_path, capsys):
    from mappnb.cli import main

    path = write_run(tmp_path / "run", Layout(tp=2), points=("q", "k"), ranks=[0])
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "tensors    full: q, k (sample 8, layer 4, token 16)" in text
    assert "rank=00001: no shards of 2 steps" in text
    assert main(["check", str(path)]) == 1
    assert "rank=00001: no shards of 2 steps (0 to 1); its part is masked" in capsys.readouterr().out


def test_tokens_that_a_stage_was_not_told_come_from_another_stream(tmp_path):
    layout = Layout(pp=2)
    path = write_run(tmp_path / "run", layout, points=("q",), steps=())
    for rank in range(2):
        block = block_of(rank, layout, 3, points=("q",))
        arrays = dict(block.streams["full"])
        if rank:  # the last stage is told no tokens
            for name in ("token_id", "position", "mask"):
                del arrays[name]
        rows = np.array([3, 1])
        late = {n: Stored(s.values[rows], s.dims, s.attrs) for n, s in arrays.items()}
        add_block(path, rank, 0, Block(block.attrs, {"full": arrays, **({"late": late} if rank else {})}))
    tree = mappnb.attach(path).activations
    late, full = tree["late"].to_dataset(), tree["full"].to_dataset()
    assert late.sizes["sample"] == 2
    for table in ("token_id", "token_text", "position", "mask"):
        np.testing.assert_array_equal(late[table].values, full[table].values[[1, 3]])
    np.testing.assert_array_equal(late.q.values, expected("q", full)[[1, 3]][:, 2:])


def test_a_chunk_that_was_damaged_says_where(tmp_path):
    path = write_run(tmp_path / "run", points=("q",), steps=(0,))
    block = folder_of(path, 0) / "block-000000.zarr.zip"
    with zipfile.ZipFile(block) as archive:
        at = archive.getinfo("full/q/c/0/3/0/0/0").header_offset
    data = bytearray(block.read_bytes())
    data[at + 48 : at + 80] = bytes(32)
    block.write_bytes(data)
    ds = mappnb.attach(path).activations["full"].to_dataset()
    assert np.isfinite(ds.q.sel(layer=2).values).all()
    with pytest.raises(SchemaError, match=r"block-000000.zarr.zip: full/q chunk 0/3/0/0/0: damaged"):
        ds.q.sel(layer=3, sample=0).values  # noqa: B018


def test_the_steps_of_a_sample_can_be_chosen_lazily(tmp_path, monkeypatch):
    ds = mappnb.attach(write_run(tmp_path / "run", points=("q",))).activations["full"].to_dataset()
    read = count_reads(monkeypatch)
    chosen = ds["q"].isel(sample=ds["step"].values == 1)
    assert read == [] and chosen.shape[0] == 4
    np.testing.assert_array_equal(chosen.values, expected("q", ds)[4:])
    assert len(read) == 4 * LAYERS


def test_token_texts_of_the_first_block_are_those_of_all(tmp_path):
    """A list of texts is written into the first block of rank 0 only; streams that begin later have them too."""
    texts = [f"w{n}" for n in range(256)]
    path, layout = tmp_path / "run", Layout(tp=2)
    make_run(path, layout=layout, num_steps=2)
    for rank in (0, 1):
        for step in (0, 1):
            block = block_of(rank, layout, step, points=("resid_post",))
            block.attrs["plan"] = {"rules": []} | ({"vocabulary": texts} if rank == step == 0 else {})
            add_block(path, rank, step, Block(block.attrs, {f"stream{step}": block.streams["full"]}))
    activations = mappnb.attach(path).activations
    for step in (0, 1):
        ds = activations[f"stream{step}"].to_dataset()
        assert ds.token_text.values[0, 0] == f"w{ids(step, 0, 0)[0, 0]}"
