"""Steps: the same loop marked in three ways gives the same rows, and late values reach the right one."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

import mappnb
from mappnb.capture.steps import MetricTable, Pending, StepTable
from mappnb.terms import Flag

NUM = 4
WORK_S = 0.015
STYLES = ["loop end", "loop end, numbered", "loop start", "loop start, numbered", "context", "context, numbered"]


def record(path, **options):
    return mappnb.record(path, **{"probes": [], "rank": 0, "world_size": 1, **options})


def loop(style: str, work, *, num: int = NUM) -> None:
    """The same training loop, its steps marked in one of the ways that are allowed."""
    for i in range(num):
        number = [i + style.startswith("loop end")] if "numbered" in style else []
        if style.startswith("context"):
            with mappnb.step(*number):
                work(i)
        elif style.startswith("loop start"):
            mappnb.step(*number)
            work(i)
        else:
            work(i)
            mappnb.step(*number)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_steps_of_the_loop(tmp_path, style):
    spans = []

    def work(i: int) -> None:
        start = time.monotonic_ns()
        with mappnb.span("work"):
            time.sleep(WORK_S)
            session.step_values(loss=float(i), tokens=10)
        spans.append((start, time.monotonic_ns()))

    with record(tmp_path) as session:
        loop(style, work)
    run = mappnb.attach(tmp_path)
    steps = run.steps.isel(rank=0)
    assert steps.step.values.tolist() == list(range(NUM))
    assert steps.loss.values.tolist() == list(range(NUM)) and (steps.tokens == 10).all()
    offset = run.clock_model.offset((0, 0))
    for (start, end), row0, row1 in zip(spans, steps.start_ns.values, steps.end_ns.values, strict=True):
        assert row0 <= start + offset and end + offset <= row1, "the work lies in its step"
    assert run.sel(op="span").step.values.tolist() == list(range(NUM))
    whole = run.sel(op="iteration")
    whole = whole.isel(event=(whole.flags.values & Flag.CLIPPED) == 0)
    assert whole.step.values.tolist() == list(range(NUM))
    assert (whole.duration_ns >= WORK_S * 1e9).all()


@pytest.mark.parametrize("style", ["loop end", "loop start", "context"])
def test_an_exception_leaves_no_row_of_the_unfinished_step(tmp_path, style):
    def work(i: int) -> None:
        time.sleep(WORK_S)
        if i == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), record(tmp_path):
        loop(style, work)
    run = mappnb.attach(tmp_path)
    expected = [0, 1, 2] if style == "context" else [0, 1]  # a `with` that fails has ended all the same
    assert run.steps.step.values.tolist() == expected
    assert run.ranks.ended.tolist() == ["ZeroDivisionError"]


def test_first_number_is_the_programs(tmp_path):
    with record(tmp_path) as session:
        for i in range(100, 103):
            mappnb.step(i)
            session.step_values(loss=i)
    assert mappnb.attach(tmp_path).steps.step.values.tolist() == [100, 101, 102]
    with record(tmp_path, start_step=7, resume=True):
        for _ in range(2):
            with mappnb.step():
                pass
    again = mappnb.attach(tmp_path)
    assert again.incarnations[1].ranks[0]["ended"]["reason"] == "finished"
    assert {7, 8} <= set(again.steps.step.values.tolist())


def test_nothing_is_recorded_without_a_recording():
    assert mappnb.step() is not None
    with mappnb.step(3), mappnb.span("x"):
        pass


@pytest.mark.parametrize("style", ["none", "loop end", "loop start", "context", "loader"])
def test_steps_of_a_torch_program(tmp_path, style):
    """Its steps are seen without marks; with marks there is still one row a step."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data.DataLoader(torch.ones(NUM, 3), batch_size=1)
    losses = []
    with mappnb.record(tmp_path, rank=0, world_size=1):
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        time.sleep(0.03)  # setting up is no step

        def work(i: int, batch=None) -> None:
            loss = model(torch.ones(1, 3) if batch is None else batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

        if style == "none":
            for i in range(NUM):
                work(i)
        elif style == "loader":
            for i, batch in enumerate(data):
                with mappnb.step():
                    work(i, batch)
        else:
            loop(style, work)
        time.sleep(0.03)  # what comes after is none either
    run = mappnb.attach(tmp_path)
    assert run.meta["degraded"] == {}
    steps = run.steps.isel(rank=0)
    assert steps.step.values.tolist() == list(range(NUM))
    np.testing.assert_allclose(steps.loss.values, losses, rtol=1e-6)
    np.testing.assert_allclose(steps.lr.values, 0.1)
    assert (steps.step_s < 0.03).sum() >= NUM - 1 and float(steps.step_s[-1]) < 0.03 + float(steps.step_s.max("step"))
    forward = run.sel(op="forward_step")
    assert forward.step.values.tolist() == list(range(NUM))


def test_a_value_that_comes_after_the_step_reaches_its_row(tmp_path):
    """Also if the row is on disk already."""
    with record(tmp_path, flush_s=3600.0) as session:
        for i in range(3):
            with mappnb.step():
                session.step_values(lr=0.5)
            if i == 1:
                assert session.flush()
                assert np.isnan(mappnb.attach(tmp_path).steps.loss.values[1, 0])
            session.step_values(loss=10.0 + i)
    steps = mappnb.attach(tmp_path).steps
    assert steps.loss.values.ravel().tolist() == [10.0, 11.0, 12.0] and (steps.lr == 0.5).all()


def test_a_finished_step_is_on_disk_at_the_next_flush(tmp_path):
    with record(tmp_path, flush_s=3600.0) as session:
        with mappnb.step():
            session.step_values(loss=1.0)
        assert session.flush()
        assert mappnb.attach(tmp_path).steps.loss.values.tolist() == [[1.0]]


def test_values_before_the_first_step_do_no_harm(tmp_path):
    with record(tmp_path) as session:
        session.step_values(loss=3.0)
        session.metric("early", 1.0)
        mappnb.step()
        mappnb.step()
    run = mappnb.attach(tmp_path)
    assert run.meta["degraded"] == {} and run.metrics.value.values.tolist() == [1.0]


def test_values_that_are_no_numbers_are_left_out_and_said_once(tmp_path, caplog):
    with record(tmp_path) as session:
        for i in range(3):
            with mappnb.step():
                session.step_values(loss="high", lr=0.1, tokens=np.float32(2))
                session.metric("text", object())
                session.metric("good", i)
    run = mappnb.attach(tmp_path)
    assert run.meta["degraded"] == {}
    assert np.isnan(run.steps.loss).all() and (run.steps.lr == 0.1).all() and (run.steps.tokens == 2).all()
    assert run.metrics.value.values.tolist() == [0, 1, 2]
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == [
        "mappnb: loss is not a number",
        "mappnb: text is not a number",
    ]


def test_tensors_are_read_as_they_were_when_given(tmp_path):
    torch = pytest.importorskip("torch")
    with record(tmp_path, flush_s=3600.0) as session:
        for i in range(3):
            with mappnb.step():
                loss = torch.tensor(float(i), requires_grad=True)
                expert_tokens = torch.arange(4, dtype=torch.int32) + i
                session.step_values(loss=loss, grad_norm=torch.tensor([2.0], dtype=torch.bfloat16))
                session.metric("expert_tokens", expert_tokens, layer=3, microbatch=1)
                session.metric("numpy", np.array([1.5, 2.5]), index=10)
                with torch.no_grad():
                    loss.fill_(99.0)  # the program goes on with its tensors
                    expert_tokens.zero_()
    run = mappnb.attach(tmp_path)
    assert run.steps.loss.values.ravel().tolist() == [0.0, 1.0, 2.0] and (run.steps.grad_norm == 2).all()
    table = run.metrics.to_dataframe()
    experts = table[table.name == "expert_tokens"]
    assert experts.value.tolist() == [float(i + k) for i in range(3) for k in range(4)]
    assert (
        experts["index"].tolist() == [0, 1, 2, 3] * 3 and set(experts.layer) == {3} and set(experts.microbatch) == {1}
    )
    assert experts.step.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert table[table.name == "numpy"]["index"].tolist() == [10, 11] * 3


class _Late(Pending):
    """A number on a device that is not done yet."""

    done = False

    def ready(self) -> bool:
        return self.done


def test_rows_wait_for_the_device_and_overtake_nothing():
    table = StepTable()
    late = _Late(5.0)
    for i in range(3):
        table.begin(i, 100 * i)
        table.add(lr=i)
        if i == 1:
            table._current.values.append(("loss", late))
        table.end(100 * i + 50, memory=lambda: (1.0, 2.0))
    assert table.take()["step"].tolist() == [0, 2]
    assert table.take() is None
    late.done = True
    rows = table.take()
    assert rows["step"].tolist() == [1] and rows["loss"].tolist() == [5.0]
    assert table.take(everything=True) is None, "nothing is written twice unless it changes"


def test_metrics_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr("mappnb.capture.steps.MAX_WAITING_METRICS", 10)
    table = MetricTable()
    for i in range(25):
        table.add((i, "m", 0, -1, -1, -1), 0, float(i))
    assert table.dropped == 15
    assert table.take()["value"].tolist() == list(range(15, 25))


def test_values_from_another_thread_while_rows_are_taken():
    """Rows are read by the writer while the training thread adds: nothing is lost, nothing raises."""
    import threading

    table, num, taken = StepTable(), 400, {}
    stop = threading.Event()

    def write() -> None:
        while True:
            last = stop.is_set()
            rows = table.take(everything=last)
            if rows is not None:
                taken.update(zip(rows["step"].tolist(), rows["tokens"].tolist(), strict=True))
            if last:
                return

    thread = threading.Thread(target=write)
    thread.start()
    for i in range(num):
        table.begin(i, i)
        table.add(tokens=1)
        table.end(i + 1, memory=lambda: (0.0, 0.0))
        for _ in range(3):
            table.add(tokens=1)
    stop.set()
    thread.join()
    assert taken == dict.fromkeys(range(num), 4.0)


def test_mean_sum_and_last(tmp_path):
    with record(tmp_path) as session:
        with mappnb.step():
            for loss, tokens, skipped in itertools.zip_longest([1.0, 3.0], [5, 6], [1, 0]):
                session.step_values(loss=loss, tokens=tokens, skipped=skipped, microbatches=1)
    steps = mappnb.attach(tmp_path).steps.isel(rank=0, step=0)
    assert (float(steps.loss), float(steps.tokens), float(steps.skipped), float(steps.microbatches)) == (2, 11, 0, 2)


# ------------------------------------------------------------------------------------------------------ on and off
def test_pause_leaves_no_events_no_row_and_no_ghost(tmp_path):
    with record(tmp_path, flush_s=3600.0) as session:
        for i in range(6):
            mappnb.step(i)
            with mappnb.span("work"):
                if i == 2:
                    assert session.flush()  # the open spans are on disk
                    session.pause()
            with mappnb.span("after"):
                pass
            if i == 4:
                session.unpause()
    run = mappnb.attach(tmp_path)
    assert run.steps.step.values.tolist() == [0, 1, 5], "steps that were not recorded whole are no rows"
    names = run.sel(op="span")
    assert names.step.values[names.name.values == "after"].tolist() == [0, 1, 5]
    assert names.step.values[(names.name.values == "work") & (names.flags.values == 0)].tolist() == [0, 1, 5]
    cut = run.sel(step=2)
    assert (cut.flags.values[cut.op.values != "span"] & Flag.CLIPPED).all()
    still = (run.sel().flags.values & (Flag.OPEN | Flag.CLIPPED)) == Flag.OPEN
    assert not still.any(), "a span that ended while paused does not look stuck"


def test_a_span_that_ends_while_paused_is_told_to_the_reader(tmp_path):
    with record(tmp_path, flush_s=3600.0) as session:
        mappnb.step()
        with mappnb.span("long"):
            assert session.flush()
            found = mappnb.attach(tmp_path).sel(op="span")
            assert found.flags.values.tolist() == [Flag.OPEN]
            session.pause()
        session._writer.flush(5.0)
        found = mappnb.attach(tmp_path).sel(op="span")
        assert found.flags.values.tolist() == [Flag.OPEN | Flag.CLIPPED]


def test_unpause_can_say_where_the_program_is(tmp_path):
    with record(tmp_path) as session:
        with mappnb.step():
            pass
        session.pause()
        session.unpause(step=50)
        with mappnb.step():
            pass
    assert mappnb.attach(tmp_path).steps.step.values.tolist() == [0, 50]
