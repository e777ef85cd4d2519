"""Statistics that wait for their block: merged over microbatches and parts of a step, placed by step and layer."""

import numpy as np

from mappnb.activation_stats import tensor_stats, tensor_stats_reference
from mappnb.capture.activations.block_stats import StreamStats
from mappnb.capture.activations.pieces import StatsOfStep


def test_points_of_unequal_counts_and_a_step_that_comes_twice(rng):
    stats, whole = StreamStats(), {}
    counts = {("z", 1): 3, ("embed", -1): 1, ("z", 0): 3, ("a", 2): 4}
    for step in (7, 3, 7):
        part = StatsOfStep("stats", step, {}, {"z": {"step": step}})
        for key, count in counts.items():
            if step == 3 and key == ("z", 1):
                continue
            values = rng.normal(key[1], 2, (count, 50))
            whole.setdefault((step, *key), []).append(values)
            part.rows[key] = [tensor_stats(x) for x in values]
        stats.add(part)
    assert stats.steps == {3, 7} and stats.names == ["z", "embed", "a"]
    arrays = dict(stats.arrays())
    assert list(arrays) == ["step", "z", "z_histogram", "embed", "embed_histogram", "a", "a_histogram"]
    assert arrays["step"].values.tolist() == [3, 7]
    assert arrays["z"].attrs["layers"] == [0, 1] and arrays["a"].attrs["layers"] == [2]
    assert arrays["embed"].attrs["layers"] == [] and arrays["embed"].dims == ("step", "field")
    assert arrays["z"].attrs["shard"] == {"step": 7} and arrays["a"].attrs["shard"] == {}
    for (step, name, layer), parts in whole.items():
        fields, histogram = tensor_stats_reference(np.concatenate(parts))
        at = [3, 7].index(step), *([] if layer < 0 else [arrays[name].attrs["layers"].index(layer)])
        np.testing.assert_allclose(arrays[name].values[at], fields, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(arrays[f"{name}_histogram"].values[at], histogram)
    assert arrays["z"].values[0, 1, 0] == 0 and not arrays["z_histogram"].values[0, 1].any()  # never came
