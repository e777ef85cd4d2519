"""The native core of the recorder equals its pure-Python twin, whatever is done to both."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb import _core
from mappnb.capture._pyrecorder import PyRecorder
from mappnb.capture._record import MAX_DEPTH

small = st.integers(-2, 2)
wide = st.one_of(small, st.sampled_from([1 << 14, 1 << 15, 1 << 31, 1 << 40, 1 << 63, -(1 << 70)]))
maybe = st.one_of(st.none(), wide)
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), small),
    st.tuples(
        st.just("end"),
        st.integers(-3, 12),
        st.dictionaries(st.sampled_from(["bytes", "group", "seq", "peer", "flags"]), wide),
    ),
    st.tuples(st.just("enter"), st.integers(0, 2)),
    st.tuples(st.just("exit"), st.integers(0, 2), st.booleans()),
    st.tuples(
        st.just("record"),
        st.tuples(small, wide, wide),
        st.dictionaries(
            st.sampled_from(["issue_ns", "cpu_ns", "bytes", "seq", "group", "peer", "stream", "flags", "depth"]), wide
        ),
        st.dictionaries(st.sampled_from(["step", "stage", "chunk", "microbatch"]), maybe),
    ),
    st.tuples(st.just("context"), st.dictionaries(st.sampled_from(["step", "stage", "chunk", "microbatch"]), maybe)),
    st.tuples(st.just("clock"), st.integers(-5, 1000)),
    st.tuples(st.just("enable"), st.booleans()),
    st.tuples(st.just("look"), st.none()),
    st.tuples(st.just("drain"), st.none()),
)


class Player:
    """Plays a list of operations on one core and keeps all that can be seen from outside."""

    def __init__(self, core) -> None:
        self.core = core
        self.clock_ns = 1000
        self.tokens = [0]
        self.spans = [core.span(100 + i) for i in range(3)]
        self.seen: list[object] = []
        core._set_test_clock(self.clock_ns)

    def play(self, operations) -> list[object]:
        for name, *arguments in operations:
            getattr(self, name)(*arguments)
        self.drain(None)
        return [*self.seen, self.tokens, self.core.context(), self.core.counters()]

    def begin(self, site) -> None:
        self.tokens.append(self.core.begin(site))

    def end(self, which, values) -> None:
        known = 0 <= which < len(self.tokens)
        self.core.end(self.tokens[-1 - which] if known else which * (1 << 50), **values)

    def enter(self, which) -> None:
        self.spans[which].__enter__()

    def exit(self, which, failed) -> None:
        error = ValueError() if failed else None
        assert not self.spans[which].__exit__(type(error) if failed else None, error, None)

    def record(self, required, values, context) -> None:
        self.core.record(*required, **values, **context)

    def context(self, values) -> None:
        self.core.set_context(**values)

    def clock(self, step_ns) -> None:
        self.clock_ns += step_ns
        self.core._set_test_clock(self.clock_ns)

    def enable(self, on) -> None:
        self.core.enabled = on

    def look(self, _) -> None:
        self.seen.append(self.core.open_spans().tolist())

    def drain(self, _) -> None:
        self.seen.append(self.core.drain().tolist())


@settings(deadline=None, max_examples=300)
@given(operations=st.lists(OPERATIONS, max_size=60), capacity=st.integers(1, 8), cpu_time=st.booleans())
def test_native_equals_twin(operations, capacity, cpu_time) -> None:
    native = Player(_core.Recorder(capacity, cpu_time)).play(operations)
    twin = Player(PyRecorder(capacity, cpu_time)).play(operations)
    assert native == twin


@settings(deadline=None, max_examples=20)
@given(ups=st.integers(MAX_DEPTH - 3, MAX_DEPTH + 5), downs=st.lists(st.integers(0, 3), max_size=20))
def test_native_equals_twin_at_the_depth_limit(ups, downs) -> None:
    operations = [("begin", 1)] * ups + [("end", which, {}) for which in downs] + [("enter", 1), ("exit", 1, False)]
    results = [Player(core).play(operations) for core in (_core.Recorder(1000), PyRecorder(1000))]
    assert results[0] == results[1]
