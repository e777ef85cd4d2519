# Signatures of the plain C functions in recorder_py.cpp and module_hooks_py.cpp, which nanobind's stubgen cannot know, and of functions that take arrays of any numbers.
_core.Recorder.begin:
    def begin(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread; returns its token."""

_core.Recorder.end:
    def end(self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0) -> None:
        """Close the span of ``token`` (0: the innermost) and record it."""

_core.Recorder.record:
    def record(self, site: int, start_ns: int, duration_ns: int, issue_ns: int = -1, cpu_ns: int = -1, bytes: int = -1, seq: int = -1, group: int = -1, peer: int = -1, stream: int = -1, flags: int = 0, depth: int = -1, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Add a finished event that was measured elsewhere."""

_core.Recorder.set_context:
    def set_context(self, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """
        Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value.
        """

_core.Span.__enter__:
    def __enter__(self) -> None:
        """Open a span."""

_core.Span.__exit__:
    def __exit__(self, exc_type: object, exc: object, tb: object, /) -> None:
        """Close it; an exception passes through and sets ``Flag.FAILED``."""

_core.ModuleHook.pre:
    def pre(self, module: object, args: tuple[object, ...], kwargs: dict[str, object], /) -> None:
        """Before the forward: begin its span, and tie the end of its backward to its input."""

_core.ModuleHook.post:
    def post(self, module: object, args: object, output: object, /) -> None:
        """After the forward: end its span, and tie the begin of its backward to its output."""

_core.ModuleHook.__deepcopy__:
    def __deepcopy__(self, memo: object, /) -> ModuleHook:
        """Return itself: copies of a module share its hooks."""

_core.ModuleHook.__reduce__:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as a hook that does nothing."""

_core.Boundary.__call__:
    def __call__(self, gradient: object, /) -> None:
        """End and begin the passes that meet here."""

_core.Boundary.__torch_unserializable__:
    __torch_unserializable__: bool = True

_core.SegmentColumns.read:
    def read(self, path: str, row_groups: Sequence[int], names: Sequence[str], out: Sequence[NDArray[numpy.generic]]) -> None:
        """
        Fill one array per column with the rows of some row groups; what it cannot read, it refuses (RuntimeError).
        """

_core.tensor_stats:
    def tensor_stats(values: Annotated[NDArray[numpy.generic], dict(shape=(None, None), device="cpu", writable=False)], fields: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu")], histogram: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")], bfloat16: bool = False) -> None:
        """
        Statistics of rows of contiguous values, in one pass without Python's lock. See mappnb.activation_stats.
        """
