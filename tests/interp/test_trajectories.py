"""Trajectories against the eigenvectors of the covariance; lines; what is left out; new data in the same basis."""

from __future__ import annotations

import numpy as np
import pytest
from interp.lens_data import stream

from mappnb.errors import InterpError, SchemaError
from mappnb.interp import trajectories
from mappnb.interp.trajectory import lines_of, project


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("center", ["all", "layer", "none"])
def test_against_the_covariances_eigenvectors(center, standardize):
    tree = stream(samples=3)
    found = trajectories(tree, components=4, center=center, standardize=standardize)
    x = tree["full"]["resid_post"].values
    means = {"all": x.reshape(-1, 8).mean(0), "layer": x.mean((0, 2))[None, :, None], "none": 0.0}
    x = x - means[center]
    flat = x.reshape(-1, 8)
    if standardize:
        flat = flat / np.sqrt((flat**2).mean(0))
    values, vectors = np.linalg.eigh(flat.T @ flat)
    values, vectors = values[::-1], vectors[:, ::-1].T
    np.testing.assert_allclose(found["explained_ratio"], values[:4] / values.sum(), rtol=1e-9)
    for i in range(4):
        assert abs(float(found["basis"].values[i] @ vectors[i])) == pytest.approx(1, abs=1e-9)
        assert found["basis"].values[i][np.abs(found["basis"].values[i]).argmax()] > 0
    np.testing.assert_allclose(
        found["projection"].values, (flat @ found["basis"].values.T).reshape(3, 4, 7, 4), atol=1e-9
    )
    np.testing.assert_allclose(project(found, tree).values, found["projection"].values, atol=1e-12)


def test_fewer_vectors_than_entries_and_known_plane():
    rng = np.random.default_rng(1)
    tree = stream(hidden=50, samples=1, layers=2, tokens=5)
    full = tree["full"].to_dataset()
    plane = np.linalg.qr(rng.standard_normal((50, 2)))[0].T
    points = rng.standard_normal((1, 2, 5, 2)) * [5, 2]
    full = full.assign(resid_post=(full["resid_post"].dims, points @ plane + 3))
    found = trajectories(full, components=6)
    assert found["explained_ratio"].values[:2].sum() == pytest.approx(1)
    apart = np.linalg.norm(points[0, 0, 0] - points[0, 1, 3])
    p = found["projection"].values[0]
    assert np.linalg.norm(p[0, 0] - p[1, 3]) == pytest.approx(apart)


def test_what_is_not_there_decides_nothing():
    tree = stream(pad=3)
    full = tree["full"].to_dataset()
    values = full["resid_post"].values.copy()
    values[1, :, :3], values[0, 1, 2] = 1e9, np.nan
    there = np.ones((2, 4, 7), bool)
    there[0, 0, 0] = False
    values[0, 0, 0] = -1e9
    dirty = full.assign(resid_post=(full["resid_post"].dims, values))
    dirty = dirty.assign_coords(resid_post_present=(("sample", "layer", "token"), there))
    found = trajectories(dirty)
    lost = np.isnan(found["projection"].values).all(-1)
    assert lost.sum() == 12 + 1 + 1 and found.attrs["count"] == 56 - 14
    assert np.nanmax(np.abs(found["projection"])) < 100


@pytest.mark.parametrize("over", ["layer", "token", "sample", "step"])
def test_lines_join_what_they_should(over):
    tree = stream(samples=2, steps=(1, 4, 9))
    found = trajectories(tree, over=over)
    line, order = lines_of(found)
    assert line.shape == order.shape == (6, 4, 7)
    long = {"layer": 4, "token": 7, "sample": 6, "step": 3}[over]
    sizes = np.unique(line, return_counts=True)[1]
    assert (sizes == long).all()
    for one in np.unique(line)[:5]:
        at = np.argwhere(line == one)
        fixed = {"layer": [0, 2], "token": [0, 1], "sample": [1, 2], "step": [1, 2]}[over]
        assert all(len(set(at[:, axis])) == 1 for axis in fixed)
        assert len(set(order[line == one])) == long
        if over == "step":
            assert sorted(order[line == one]) == [1, 4, 9] and len({int(found["index"][s]) for s in at[:, 0]}) == 1


def test_heads_have_their_own_place_and_sketches_do():
    tree = stream()
    found = trajectories(tree, point="z")
    assert found["projection"].dims == ("sample", "layer", "token", "head", "component")
    full = tree["full"].to_dataset()
    sketch = full["resid_post"].rename(hidden="component").isel(component=slice(0, 5)).to_dataset(name="resid_post")
    assert trajectories(sketch)["projection"].sizes["component"] == 3


def test_choices_and_errors():
    tree = stream()
    found = trajectories(tree, sample=1, layers=[1, 3], tokens=[0, 5])
    assert found["projection"].shape[:3] == (1, 2, 2) and found["layer"].values.tolist() == [1, 3]
    with pytest.raises(InterpError, match="did you mean 'layer'"):
        trajectories(tree, over="layers")
    with pytest.raises(InterpError, match="no layer 8"):
        trajectories(tree, layers=8)
    with pytest.raises(InterpError, match="1 vectors"):
        trajectories(tree, sample=0, layers=0, tokens=0)
    with pytest.raises(SchemaError, match="resid_mid"):
        trajectories(tree, point="resid_mids")
    with pytest.raises(InterpError, match="vectors of 3; the basis is of 8"):
        project(found, tree, point="z")
