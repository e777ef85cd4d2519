"""The report of an import: which file was mended, and what was wrong with it."""

from __future__ import annotations

import json

from capture.importers.trace_files import document, event, kineto

from mappnb.capture.importers import import_trace


def test_a_cut_file_is_named_and_not_taken_for_junk(tmp_path):
    for rank in range(3):
        text = json.dumps(kineto(rank)).encode()
        (tmp_path / f"rank{rank}.json").write_bytes(text[: len(text) - 2000] if rank == 1 else text)
    report = import_trace([tmp_path / f"rank{r}.json" for r in range(3)], tmp_path / "run", rank_from=r"rank(\d)")
    cut = str(tmp_path / "rank1.json")
    assert report.repairs == {"truncated": 1} and report.repaired_in == {"truncated": {cut: 1}}
    line = next(x for x in str(report).splitlines() if x.startswith("repaired"))
    assert line == f"repaired  1 × truncated (cut off at the end; what came before was read) in {cut}"


def test_junk_in_the_middle_and_at_the_end_is_no_cut(tmp_path):
    text = document([event(ts=i) for i in range(40)], distributedInfo={"rank": 0})
    at = text.index(b', {"ph"', 1000)
    (tmp_path / "a.json").write_bytes(text[:at] + b", @@@@" + text[at:] + b"\0" * 50)
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    assert report.num_events == 40 and set(report.repairs) == {"junk_bytes"} and report.repairs["junk_bytes"] >= 54
    assert f"(bytes that belong to no event, left out) in {tmp_path / 'a.json'}" in str(report)


def test_an_event_that_swallows_the_rest_is_damaged_not_cut(tmp_path):
    text = document([event(ts=i, args={"s": "x"}) for i in range(40)], distributedInfo={"rank": 0})
    at = text.index(b'"s": "x"', 1500)
    (tmp_path / "a.json").write_bytes(text[:at] + b'"s": [' + text[at + 8 :])
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    assert report.num_events == 39 and report.repairs["broken_events"] == 1 and "truncated" not in report.repairs


def test_each_file_of_many_is_counted(tmp_path):
    for rank in range(6):
        (tmp_path / f"rank{rank}.json").write_bytes(document([event(dur=-1)] * (rank + 1)))
    report = import_trace(tmp_path, tmp_path / "run", format="chrome")
    assert report.repairs == {"negative_durations": 21}
    line = next(x for x in str(report).splitlines() if x.startswith("repaired"))
    assert line.startswith("repaired  21 × negative durations in ") and line.endswith("and 2 more files")
    assert f"{tmp_path / 'rank2.json'}: 3" in line
