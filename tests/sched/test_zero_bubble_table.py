"""Tables 5 and 6 of Zero Bubble Pipeline Parallelism (arXiv:2401.10241): profiled times in, published bubble rates out."""

import pytest

from mappnb.sched import schedule

from .sim import bubbles, costs

# model, p, m, F, I, W, c (ms), chunks of the interleaved column; rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2
TABLE = [
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 3, 0.2431, 0.1055, 0.1585, 0.1083),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 3, 0.1985, 0.0818, 0.1242, 0.0837),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 3, 0.1240, 0.0443, 0.0674, 0.0444),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 3, 0.2552, 0.1104, 0.1397, 0.0672),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 3, 0.2082, 0.0852, 0.1088, 0.0516),
    ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 3, 0.1251, 0.0445, 0.0576, 0.0266),
]
COLUMNS = {"1f1b": 8, "interleaved": 9, "zb_h1": 10, "zb_h2": 11}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r[0]}-m{r[2]}")
def test_published_bubble_rates(row, name):
    """Rate = (cost − m T) / cost; cost: the longest time from a rank's first start to its last end."""
    _, p, m, f, i, w, c, v = row[:8]
    sizes = {"num_stages": p * v, "num_chunks": v} if name == "interleaved" else {"num_stages": p}
    makespan, span = bubbles(schedule(name, num_microbatches=m, **sizes), costs(f, i, w, p2p_s=c))
    cost = (
        makespan - p * c if name == "interleaved" else span
    )  # the paper's generator hides p hops of the interleaved one
    assert round((cost - m * (f + i + w)) / cost, 4) == row[COLUMNS[name]]


@pytest.mark.parametrize(("c", "m"), [(0.01, 16), (0.2, 32)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_latency(p, m, c):
    """Equal F, I and W of 1: ZB-H1's span is (p − 1)(1 + 4 c) longer than the work, ZB-H2's 2 (p − 1) c."""
    for name, bubble in (("zb_h1", (p - 1) * (1 + 4 * c)), ("zb_h2", 2 * (p - 1) * c)):
        _, span = bubbles(schedule(name, num_stages=p, num_microbatches=m), costs(p2p_s=c))
        assert span - 3 * m == pytest.approx(bubble)
