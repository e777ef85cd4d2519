"""Compiled parts of mappnb; each has a pure-Python twin."""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


def record_dtype() -> numpy.dtype[numpy.void]:
    """Layout of a record, as compiled."""

class Span:
    """Reusable, re-entrant ``with`` target of one site."""

    @property
    def site(self) -> int:
        """Id of the site that it records."""

    def __enter__(self) -> None:
        """Open a span."""

    def __exit__(self, exc_type: object, exc: object, tb: object, /) -> None:
        """Close it; an exception passes through and sets ``Flag.FAILED``."""

class Recorder:
    """Native core of ``mappnb.capture.recorder.Recorder``."""

    def __init__(self, capacity: int = 65536, cpu_time: bool = False, thread_name: Callable[[], str] | None = None) -> None: ...

    def begin(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread; returns its token."""

    def end(self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0) -> None:
        """Close the span of ``token`` (0: the innermost) and record it."""

    def record(self, site: int, start_ns: int, duration_ns: int, issue_ns: int = -1, cpu_ns: int = -1, bytes: int = -1, seq: int = -1, group: int = -1, peer: int = -1, stream: int = -1, flags: int = 0, depth: int = -1, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Add a finished event that was measured elsewhere."""

    def set_context(self, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """
        Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value.
        """

    def span(self, site: int) -> Span:
        """Make a ``with`` target for ``site``."""

    def context(self) -> tuple[int, int, int, int]:
        """Step, stage, chunk, microbatch as set now."""

    @property
    def enabled(self) -> bool:
        """Whether events are recorded."""

    @enabled.setter
    def enabled(self, arg: bool, /) -> None: ...

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns."""

    def drain(self) -> numpy.typing.NDArray[numpy.void]:
        """Take the finished records of all threads."""

    def open_spans(self) -> numpy.typing.NDArray[numpy.void]:
        """Look at the spans that are open now, in all threads."""

    def threads(self) -> list[tuple[int, int, str]]:
        """Every thread seen: index, native thread id, Python name or ''."""

    def counters(self) -> dict[str, int]:
        """
        ``recorded``, ``dropped``, ``mismatched``, ``too_deep`` and ``threads``.
        """

    def before_fork(self) -> None:
        """Hold the reading side."""

    def after_fork_in_parent(self) -> None:
        """Let go of it in the parent."""

    def after_fork_in_child(self) -> None:
        """Let go of it in the child, and stop recording."""

class ModuleHook:
    """The two forward hooks of one module."""

    def pre(self, module: object, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """Before the forward: begin its span, and tie the end of its backward to its input."""

    def post(self, module: object, args: object, output: object, /) -> None:
        """After the forward: end its span, and tie the begin of its backward to its output."""

    def __deepcopy__(self, memo: object, /) -> ModuleHook:
        """Return itself: copies of a module share its hooks."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as a hook that does nothing."""

    @property
    def num_open(self) -> int:
        """Calls that are open."""

    def drop(self) -> None:
        """Forget calls that exceptions left open."""

class Boundary:
    """A tensor between modules, called with its gradient."""

    def __call__(self, gradient: object, /) -> None:
        """End and begin the passes that meet here."""

    @property
    def num_passes(self) -> int:
        """Passes that are tied to it."""

    __torch_unserializable__: bool = True

class ModuleHooks:
    """Native twin of ``mappnb.capture._pymodulehooks.PyModuleHooks``."""

    def __init__(self, recorder: object, begin: Callable[[int], int] | None, end: Callable[[int], None] | None, fail: Callable[[str, BaseException], None], key: int, graph_task: Callable[[], int], grad_enabled: Callable[[], bool], tensor_type: type, no_hook: type) -> None: ...

    @property
    def muted(self) -> bool:
        """Whether the backward pass goes through no module as a whole."""

    @muted.setter
    def muted(self, arg: bool, /) -> None: ...

    @property
    def backward_index(self) -> int:
        """Which site a backward pass has: 1, or 3 for input only."""

    @backward_index.setter
    def backward_index(self, arg: int, /) -> None: ...

    def hook(self, sites: Sequence[int], backward: bool, before: Callable[..., None] | None, after: Callable[[], None] | None, keyword: str) -> ModuleHook:
        """Make the hooks of one module."""

    def has_gradient(self, value: object | None) -> bool:
        """Whether autograd will give a gradient for ``value``."""

    def boundary(self, tensor: object) -> Boundary:
        """Return the boundary at a tensor; hook it the first time."""

    def forget(self) -> None:
        """Make the passes until now those of an earlier generation."""

    def close(self) -> None:
        """Let go of the session: tensors may live longer than it."""

    def end_tails(self) -> None:
        """End the backward of modules whose input has no gradient."""

def schedule_times(codes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stages: int, microbatches: int, mirrored_from: int, duration: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], overlap_ratio: float, latency: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], wire: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], link: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], ships: bool, links: int, send: int, known: bool, paired: bool, start: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], end: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> list[int] | None:
    """
    Fill start and end of every action. Returns None, or how far each rank came if they wait for one another. `known`: the codes are within the sizes, and `paired` tells whether there are pairs. See mappnb.sched.times.
    """

def one_forward_one_backward(ranks: int, chunks: int, microbatches: int, group: int, warm_up: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], codes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Fill the codes of an interleaved order. See mappnb.sched.interleaved."""

def policy_run(where: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], mirrored_from: int, microbatches: int, split: bool, duration: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], links: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], send: int, priority: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)], threshold: float, alternate: bool, memory: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], limit: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], admission: int, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], codes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')], times: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], peak: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> list[int]:
    """
    Run a policy into codes, times and peak; returns how many actions each rank ran. See mappnb.sched.policies.
    """

def replay(duration: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], delay: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], queue: Annotated[NDArray[numpy.int32], dict(shape=(None, 2), order='C', device='cpu', writable=False)], group: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slows: Annotated[NDArray[numpy.int32], dict(shape=(None, 2), order='C', device='cpu', writable=False)], interference: float, dep_offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], dep: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lag: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], streams: int, queues: int, groups: int, by_events: bool, start: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], end: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], cause: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], late: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], latest_start: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], latest_end: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    Fill the results; returns how many operations ended. See mappnb.replay.
    """

class SelfTime:
    """
    Self time and arrivals of some steps of all ranks. See mappnb.analysis.work.
    """

    def __init__(self, ranks: int, passes: int = 1) -> None: ...

    def begin(self, first_step: int, last_step: int) -> None:
        """Forget all rows; count these steps."""

    def add(self, which: int, rank: int, offset: int, start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], duration: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], step: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], site: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], stage: Annotated[NDArray[numpy.int16], dict(shape=(None,), order='C', device='cpu', writable=False)], group: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seq: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], peer: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], thread: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)], kind: Annotated[NDArray[numpy.int8], dict(shape=(None,), order='C', device='cpu', writable=False)], op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Take rows of a rank in a pass; those of other steps are left out. Threads may use different passes at once.
        """

    def end_rank(self, which: int, column: int) -> None:
        """Work out the rows that a pass took since the last rank ended in it."""

    def suspects(self) -> list[int]:
        """Entries of channels whose numbers do not hold."""

    def read_entries(self, which: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C')]) -> None: ...

    def renumber(self, which: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seq: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], by_order: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def finish(self) -> None:
        """Once all ranks ended, and once only."""

    def read_cells(self, out: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C')]) -> None:
        """first, last, wait, transfer, covered (ns), imposed, last_calls, calls."""

    def read_parts(self, ns: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C')], count: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C')]) -> None: ...

    @property
    def steps(self) -> list[int]: ...

    @property
    def parts(self) -> list[tuple[int, int]]: ...

def innermost_segments(lane: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
    """
    Cut nested spans into segments: index of the innermost span, start, end. See mappnb.analysis._intervals.
    """

TRACE_MISSING: int = -9223372036854775808

TRACE_TEXT_KEY: int = -4611686018427387904

class TraceReader:
    """
    Reads trace-event JSON in pieces into columns. See mappnb.capture.importers._tracejson.
    """

    def __init__(self, fields: Sequence[object], shift: int = 3, hunt: bool = False) -> None: ...

    def feed(self, data: bytes) -> None:
        """Read on."""

    def finish(self) -> None:
        """Tell that the data is at its end."""

    def take(self) -> dict[str, object]:
        """Return the rows read since the last call, as columns."""

    def names(self, first: int = 0) -> list[str]:
        """Return the texts from number `first` on."""

    @property
    def rows(self) -> int:
        """Rows not taken yet."""

    @property
    def metadata(self) -> dict[str, str]:
        """Top-level entries other than the events, as JSON text."""

    @property
    def repairs(self) -> dict[str, int]:
        """What was mended or left out, by kind."""

    @property
    def bytes(self) -> int:
        """Bytes fed."""

    @property
    def state(self) -> str:
        """Where in the document the reader is."""

class SegmentColumns:
    """
    Decodes columns of whole numbers of closed segments. See mappnb.analysis._work_rows.
    """

    def __init__(self) -> None: ...

    def read(self, path: str, row_groups: Sequence[int], names: Sequence[str], out: Sequence[NDArray[numpy.generic]]) -> None:
        """
        Fill one array per column with the rows of some row groups; what it cannot read, it refuses (RuntimeError).
        """

def tensor_stats(values: Annotated[NDArray[numpy.generic], dict(shape=(None, None), device="cpu", writable=False)], fields: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu")], histogram: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")], bfloat16: bool = False) -> None:
    """
    Statistics of rows of contiguous values, in one pass without Python's lock. See mappnb.activation_stats.
    """
