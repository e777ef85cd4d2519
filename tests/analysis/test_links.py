"""Link matrices by counting, and planted slow links, cards, hosts and ranks: found where they are, none in clean runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.analysis._transfers import bus_factor
from mappnb.errors import MappnbError
from mappnb.schema import EVENTS, empty
from mappnb.testing import Clocks, MoeImbalance, SlowLink, SlowNic, SlowRank, generate_run

MB = 2**20


def events(rows: list[dict], groups: dict[int, list[int]] | None = None) -> xr.Dataset:
    data = empty(EVENTS, {"event": len(rows)})
    for i, row in enumerate(rows):
        for key, value in {"incarnation": 0, "step": 0, "thread": 0, "flags": 0, **row}.items():
            data[key][i] = value
    attrs = {"groups": json.dumps({str(k): {"ranks": v} for k, v in (groups or {}).items()})}
    return xr.Dataset({k: ("event", v) for k, v in data.items()}, attrs=attrs)


def message(source: int, destination: int, seq: int, at: int, ns: int, size: int = MB) -> list[dict]:
    """The receiver is there 10 ns before the send."""
    pair = dict(category="p2p", group=5, seq=seq, bytes=size)
    return [
        dict(op="send", rank=source, peer=destination, start_ns=at, duration_ns=1, **pair),
        dict(op="recv", rank=destination, peer=source, start_ns=at - 10, duration_ns=ns + 10, **pair),
    ]


def collective(op: str, group: int, members: dict[int, int], seq: int, at: int, ns: int, size: int) -> list[dict]:
    """``members``: by how much each comes late."""
    end = at + max(members.values()) + ns
    common = dict(category="collective", op=op, group=group, seq=seq, bytes=size)
    return [dict(rank=r, start_ns=at + d, duration_ns=end - at - d, **common) for r, d in members.items()]


def test_bus_factors_are_those_of_nccl_tests():
    ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]
    got = bus_factor(np.array(ops, object), np.full(7, 8))
    np.testing.assert_allclose(got, [2 * 7 / 8, 7 / 8, 7 / 8, 7 / 8, 1, 1, 1])


def test_matrices_by_hand():
    rows = collective("all_reduce", 1, {0: 0, 1: 500, 2: 80, 3: 0}, 0, 0, 1000, 4 * MB)
    rows += collective("all_to_all", 1, {0: 0, 1: 0, 2: 0, 3: 7}, 1, 9000, 300, 8 * MB)
    for row, share in zip(rows[-4:], (1, 3, 2, 2), strict=True):
        row["bytes"] = share * MB
    rows += message(0, 2, 0, 20_000, 100) + message(
        0, 2, 1, 20_050, 150
    )  # the second waits for the first: 100 of its own
    rows += [dict(r, rank=r["rank"], start_ns=r["start_ns"] + 30_000) for r in message(2, 0, 0, 0, 50)]
    ds = analysis.links(events(rows, {1: [0, 1, 2, 3], 5: [0, 1, 2, 3]}))
    one = ds.sel(op="all_reduce")
    assert one.bytes.sum("destination").values.tolist() == [4 * MB * 1.5] * 4  # a row sums to the bus bytes
    assert np.diag(one.bytes).tolist() == [0] * 4
    np.testing.assert_allclose(one.seconds.sel(source=0, destination=3), 1e-6)  # 1000 ns after the last had come
    np.testing.assert_allclose(one.bus_bandwidth.sel(source=1, destination=2), 4 * MB * 1.5 / 1e-6)
    pair = ds.sel(op="send_recv")
    assert pair.bytes.sel(source=0, destination=2) == 2 * MB and pair.num_calls.sum() == 3
    np.testing.assert_allclose(pair.seconds.sel(source=0, destination=2), 200e-9)
    np.testing.assert_allclose(pair.bus_bandwidth.sel(source=2, destination=0), MB / 50e-9)
    assert float(ds.load_imbalance[0]) == 1.5  # 3 of 1, 3, 2, 2
    assert np.isnan(ds.ratio).all() and ds.attrs["suspects"] == "[]"  # too little to compare
    np.testing.assert_allclose(ds.host_bytes.sum(), ds.bytes.sum())


def test_a_message_that_was_there_first_tells_nothing():
    rows = message(0, 1, 0, 1000, 100)
    rows[1] |= {"start_ns": 5000, "duration_ns": 3}
    ds = analysis.links(events(rows))
    assert float(ds.bytes.sum()) == MB and float(ds.seconds.sum()) == 0 and np.isnan(ds.bus_bandwidth).all()


def lattice(slow, *, hosts: int = 4, per_host: int = 3, calls: int = 4, seed: int = 0) -> list[dict]:
    """Every rank sends to every other; within a host 100 µs, between hosts 400 µs, times ``slow(source, destination)``."""
    rng, rows = np.random.default_rng(seed), []
    ranks = hosts * per_host
    for s in range(ranks):
        for d in range(ranks):
            for seq in range(calls if s != d else 0):
                usual = 100_000 if s // per_host == d // per_host else 400_000
                ns = round(usual * slow(s, d) * np.exp(0.05 * rng.standard_normal()))
                rows += message(s, d, seq, 10_000_000 * seq + 1000 * s, ns)
    return rows


HOSTS = {r: f"host{r // 3}" for r in range(12)}


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        (lambda s, d: 1.0, []),
        (lambda s, d: 2.0 if (s, d) == (4, 7) else 1.0, [("link", "4->7")]),
        (lambda s, d: 2.0 if {s, d} == {4, 7} else 1.0, [("link", "4->7"), ("link", "7->4")]),
        (lambda s, d: 1.6 if 4 in (s, d) else 1.0, [("rank", "4")]),
        (lambda s, d: 1.6 if s == 4 else 1.0, [("rank", "4 (sends)")]),
        (lambda s, d: 1.6 if d == 4 else 1.0, [("rank", "4 (receives)")]),
        (lambda s, d: 2.0 if (s // 3 == 1) != (d // 3 == 1) else 1.0, [("nic", "host1")]),
        (lambda s, d: 2.0 if s // 3 == 1 and d // 3 != 1 else 1.0, [("nic", "host1 (sends)")]),
        (lambda s, d: 2.0 if 1 in (s // 3, d // 3) else 1.0, [("host", "host1")]),
        (lambda s, d: 2.0 if (s // 3, d // 3) == (1, 2) else 1.0, [("link", "host1->host2")]),
        (
            lambda s, d: 2.0 if (s, d) == (0, 5) else 3.0 if 8 in (s, d) else 1.0,
            [("rank", "8"), ("link", "0->5")],
        ),
    ],
)
def test_planted(slow, found):
    ds = analysis.links(events(lattice(slow)), hosts=HOSTS)
    table = analysis.link_suspects(ds)
    assert sorted(zip(table.subject_kind, table.subject, strict=True)) == sorted(found)
    assert (table.verdict == "suspect").all() and (table.ratio > 1.4).all()
    ratio = ds.ratio.sel(op="send_recv").values
    log = np.log([[slow(s, d) for d in range(12)] for s in range(12)])
    inter = np.arange(12)[:, None] // 3 != np.arange(12) // 3
    for mask in (inter, ~inter & ~np.eye(12, dtype=bool)):  # each against the median of its class
        np.testing.assert_allclose(np.log(ratio[mask]), log[mask] - np.median(log[mask]), atol=0.15)


def test_what_cannot_be_told_apart_is_undecided():
    """One rank a host: its card and the rank itself have the same lanes."""
    rows = lattice(lambda s, d: 2.0 if 1 in (s, d) else 1.0, hosts=5, per_host=1)
    table = analysis.link_suspects(events(rows), hosts={r: f"host{r}" for r in range(5)})
    assert table.verdict.tolist() == ["undecided"] and {"rank 1", "nic host1"} & {
        f"{table.subject_kind[0]} {table.subject[0]}"
    }
    assert "the same lanes are those of" in table.evidence[0]


def test_a_slow_group_without_a_culprit_is_undecided():
    rows = []
    for group in range(6):
        for seq in range(5):
            members = {3 * group + i: 0 for i in range(3)}
            ns = (3000 if group == 2 else 1000) + seq
            rows += collective("all_gather", 10 + group, members, seq, 10_000 * seq, ns, 4 * MB)
    table = analysis.link_suspects(events(rows))
    assert table[["subject_kind", "subject", "verdict"]].values.tolist() == [["group", "6, 7, 8", "undecided"]]


LAYOUT = dict(layout=Layout(tp=2, dp=2, pp=4), num_steps=3, ranks_per_host=4)


@pytest.mark.parametrize(
    ("faults", "clocks"),
    [([], None), ([SlowRank(rank=5, factor=1.5)], None), ([], Clocks(offset_s=0.001, drift_ppm=10))],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_in_clean_runs(tmp_path, faults, clocks, seed):
    """Neither a slow rank nor clocks that disagree is a slow link."""
    generate_run(tmp_path / "run", faults=faults, clocks=clocks, seed=seed, **LAYOUT)
    assert not len(analysis.link_suspects(mappnb.attach(tmp_path / "run")))


def test_a_slow_link_in_a_run(tmp_path):
    clocks = Clocks(offset_s=0.001, drift_ppm=10)
    generate_run(tmp_path / "run", faults=[SlowLink(source=5, destination=9, factor=2)], clocks=clocks, **LAYOUT)
    run = mappnb.attach(tmp_path / "run")
    table = analysis.link_suspects(run)
    assert table[["subject_kind", "subject", "verdict"]].values.tolist() == [["link", "5->9", "suspect"]]
    assert table.ratio[0] == pytest.approx(2, rel=0.15)
    again = analysis.link_suspects(run.events.mapp.links())  # a dataset knows hosts by the clocks that they share
    assert again.subject.tolist() == ["5->9"]


def test_a_slow_card_in_a_run(tmp_path):
    generate_run(
        tmp_path / "run", layout=Layout(tp=2, dp=2, pp=8), num_steps=2, ranks_per_host=4, faults=[SlowNic(host=2, factor=3)]
    )  # fmt: skip
    ds = analysis.links(mappnb.attach(tmp_path / "run"))
    table = analysis.link_suspects(ds)
    assert table[["subject_kind", "subject", "verdict"]].values.tolist() == [["nic", "host2", "suspect"]]
    slow = ds.host_ratio.sel(op="send_recv", source_host="host2").max()
    assert float(slow) > 2


def test_experts(tmp_path):
    layout = Layout(tp=1, dp=4, ep=4)
    generate_run(tmp_path / "run", layout=layout, num_steps=2, faults=[MoeImbalance(ep_rank=1, factor=2.0)])
    run = mappnb.attach(tmp_path / "run")
    ds = analysis.links(run, step=1)
    assert ds.token_imbalance.values.tolist() == [2 / (5 / 4)] and ds.expert_group.values.tolist() == ["0, 1, 2, 3"]
    assert ds.load_imbalance.values.tolist() == [1.0]


def test_without_transfers(make):
    with pytest.raises(MappnbError, match="no transfer with bytes"):
        analysis.links(make(layout=Layout()))
