// Python's view of recorder.hpp. The hot calls are plain C functions: nanobind's dispatcher, with its keywords and
// defaults, costs more than the recording itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "recorder.hpp"

namespace nb = nanobind;
using mappnb::Recorder;

namespace {

template <typename Int>
Int saturate(int64_t value) {
  using Limits = std::numeric_limits<Int>;
  return static_cast<Int>(std::clamp<int64_t>(value, Limits::min(), Limits::max()));
}

uint16_t to_flags(int64_t value) { return static_cast<uint16_t>(value & 0xFFFF); }

// Reads an integer; one that does not fit becomes the nearest that does. False: a Python error is set.
bool to_int(PyObject* object, int64_t* out) {
  int overflow = 0;
  *out = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) {
    *out = overflow > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
    return true;
  }
  return *out != -1 || PyErr_Occurred() == nullptr;
}

// Arguments of a METH_FASTCALL | METH_KEYWORDS function of integers; the last `num_optional` may be None.
template <int N>
struct Arguments {
  const char* function;
  const char* names[N];
  int num_required;
  int num_optional;
  PyObject* interned[N] = {};  // keywords are interned nearly always: then comparing addresses is enough

  void intern() {
    for (int i = 0; i < N; ++i) interned[i] = PyUnicode_InternFromString(names[i]);
  }

  bool parse(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords, int64_t* out, uint32_t* given) const {
    if (num_args > N) {
      PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments (%zd given)", function, N, num_args);
      return false;
    }
    *given = 0;
    for (Py_ssize_t i = 0; i < num_args; ++i) {
      if (!take(static_cast<int>(i), args[i], out, given)) return false;
    }
    const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_Size(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
      const int index = find(PyTuple_GetItem(keywords, i), *given);
      if (index < 0 || !take(index, args[num_args + i], out, given)) return false;
    }
    const uint32_t required = (1U << num_required) - 1;
    if ((*given & required) == required) return true;
    PyErr_Format(PyExc_TypeError, "%s() needs at least its first %d arguments", function, num_required);
    return false;
  }

 private:
  bool take(int index, PyObject* value, int64_t* out, uint32_t* given) const {
    if (value == Py_None && index >= N - num_optional) return true;
    *given |= 1U << index;
    return to_int(value, out + index);
  }

  int find(PyObject* keyword, uint32_t given) const {
    int index = 0;
    while (index < N && interned[index] != keyword) ++index;
    if (index == N) {
      index = 0;
      while (index < N && PyUnicode_CompareWithASCIIString(keyword, names[index]) != 0) ++index;
    }
    if (index == N) {
      PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, keyword);
      return -1;
    }
    if ((given >> index & 1) == 0) return index;
    PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", function, keyword);
    return -1;
  }
};

Recorder& recorder_of(PyObject* self) { return *nb::inst_ptr<Recorder>(nb::handle(self)); }

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* recorder_begin(PyObject* self, PyObject* site) {
  int64_t id;
  if (!to_int(site, &id)) return nullptr;
  return PyLong_FromLongLong(recorder_of(self).begin(saturate<int32_t>(id)));
}

Arguments<6> end_arguments = {"end", {"token", "bytes", "group", "seq", "peer", "flags"}, 0, 0};

PyObject* recorder_end(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  int64_t v[6] = {0, -1, -1, -1, -1, 0};
  uint32_t given;
  if ((num_args > 0 || keywords != nullptr) && !end_arguments.parse(args, num_args, keywords, v, &given))
    return nullptr;
  recorder_of(self).end(v[0], {v[1], v[3], v[2], saturate<int32_t>(v[4]), to_flags(v[5])});
  return none();
}

Arguments<16> record_arguments = {"record",
                                  {"site", "start_ns", "duration_ns", "issue_ns", "cpu_ns", "bytes", "seq", "group",
                                   "peer", "stream", "flags", "depth", "step", "stage", "chunk", "microbatch"},
                                  3,
                                  4};

PyObject* recorder_record(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  Recorder& recorder = recorder_of(self);
  const mappnb::Context now = recorder.context();
  int64_t v[16] = {0, 0, 0, -1, -1, -1, -1, -1, -1, -1, 0, -1, now.step, now.stage, now.chunk, now.microbatch};
  uint32_t given;
  if (!record_arguments.parse(args, num_args, keywords, v, &given)) return nullptr;
  const mappnb::Record event = {v[1],
                                v[2],
                                v[3],
                                v[4],
                                v[5],
                                v[6],
                                v[7],
                                saturate<int32_t>(v[0]),
                                saturate<int32_t>(v[12]),
                                saturate<int32_t>(v[8]),
                                saturate<int16_t>(v[13]),
                                saturate<int16_t>(v[14]),
                                saturate<int32_t>(v[15]),
                                saturate<int16_t>(v[11]),
                                to_flags(v[10]),
                                0,
                                saturate<int32_t>(v[9])};
  recorder.record(event, v[11] == -1);
  return none();
}

Arguments<4> context_arguments = {"set_context", {"step", "stage", "chunk", "microbatch"}, 0, 4};

PyObject* recorder_set_context(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  Recorder& recorder = recorder_of(self);
  const mappnb::Context now = recorder.context();
  int64_t v[4] = {now.step, now.stage, now.chunk, now.microbatch};
  uint32_t given;
  if (!context_arguments.parse(args, num_args, keywords, v, &given)) return nullptr;
  recorder.set_context(
      {saturate<int32_t>(v[0]), saturate<int16_t>(v[1]), saturate<int16_t>(v[2]), saturate<int32_t>(v[3])});
  return none();
}

struct Span {
  nb::object keep;  // the Python object that owns `recorder`
  Recorder* recorder;
  int32_t site;
  uint64_t owner;
};

PyObject* span_enter(PyObject* self, PyObject*) {
  const Span& span = *nb::inst_ptr<Span>(nb::handle(self));
  span.recorder->begin(span.site, span.owner);
  return none();
}

PyObject* span_exit(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const Span& span = *nb::inst_ptr<Span>(nb::handle(self));
  span.recorder->exit(span.owner, num_args > 0 && args[0] != Py_None ? mappnb::kFailed : 0);
  return none();
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
using KeywordCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

PyCFunction erase(KeywordCall f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }
PyCFunction erase(FastCall f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }

PyMethodDef recorder_methods[] = {
    {"begin", recorder_begin, METH_O, "Open a span of ``site`` in this thread; returns its token."},
    {"end", erase(recorder_end), METH_FASTCALL | METH_KEYWORDS,
     "Close the span of ``token`` (0: the innermost) and record it."},
    {"record", erase(recorder_record), METH_FASTCALL | METH_KEYWORDS,
     "Add a finished event that was measured elsewhere."},
    {"set_context", erase(recorder_set_context), METH_FASTCALL | METH_KEYWORDS,
     "Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value."},
};
PyMethodDef span_methods[] = {
    {"__enter__", span_enter, METH_NOARGS, "Open a span."},
    {"__exit__", erase(span_exit), METH_FASTCALL, "Close it; an exception passes through and sets ``Flag.FAILED``."},
};

template <size_t N>
void add_methods(nb::handle type, PyMethodDef (&methods)[N]) {
  for (PyMethodDef& method : methods) {
    const nb::object descriptor = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
    nb::setattr(type, method.ml_name, descriptor);
  }
}

nb::object record_dtype() {
  static const char* const fields[][2] = {
      {"start_ns", "i8"}, {"duration_ns", "i8"}, {"issue_ns", "i8"},   {"cpu_ns", "i8"}, {"bytes", "i8"},
      {"seq", "i8"},      {"group", "i8"},       {"site", "i4"},       {"step", "i4"},   {"peer", "i4"},
      {"stage", "i2"},    {"chunk", "i2"},       {"microbatch", "i4"}, {"depth", "i2"},  {"flags", "u2"},
      {"thread", "i4"},   {"stream", "i4"}};
  nb::list description;
  for (const auto& field : fields) description.append(nb::make_tuple(field[0], field[1]));
  return nb::module_::import_("numpy").attr("dtype")(description);
}

// The same object each time: numpy is slow where two types are equal but not one.
nb::handle kept_record_dtype() {
  static PyObject* kept = nullptr;  // for good; no lock, since making it may let go of the GIL
  if (kept == nullptr) kept = record_dtype().release().ptr();
  return kept;
}

// Records in memory that Python owns: a bytearray, so that numpy can make an array of it by one plain call, where
// nanobind's own way goes through DLPack.
class Words {
 public:
  explicit Words(uint64_t num_records)
      : bytes_(nb::steal(PyByteArray_FromStringAndSize(nullptr, size_of(num_records)))) {
    if (!bytes_) throw nb::python_error();
  }
  uint64_t* data() const { return reinterpret_cast<uint64_t*>(PyByteArray_AsString(bytes_.ptr())); }

  nb::object to_array(uint64_t num_records) const {
    if (PyByteArray_Resize(bytes_.ptr(), size_of(num_records)) != 0) throw nb::python_error();
    static PyObject* from_buffer = nullptr;  // for good, as above
    if (from_buffer == nullptr)
      from_buffer = nb::object(nb::module_::import_("numpy").attr("frombuffer")).release().ptr();
    return nb::handle(from_buffer)(bytes_, kept_record_dtype());
  }

 private:
  static Py_ssize_t size_of(uint64_t num_records) {
    return static_cast<Py_ssize_t>(num_records * mappnb::kRecordWords * sizeof(uint64_t));
  }
  const nb::object bytes_;
};

nb::object drain(Recorder& recorder) {
  const Recorder::States states = recorder.states(), ended = Recorder::ended(states);
  uint64_t room;
  {
    const nb::gil_scoped_release unlocked;
    room = recorder.waiting(states);
  }
  const Words words(room);
  uint64_t* data = words.data();
  uint64_t num_records;
  {
    const nb::gil_scoped_release unlocked;
    num_records = recorder.drain(states, data, room);
  }
  nb::object out = words.to_array(num_records);
  recorder.retire(ended);
  return out;
}

nb::object open_spans(const Recorder& recorder) {
  const std::vector<mappnb::Record> records = recorder.open_spans();
  const Words words(records.size());
  std::memcpy(words.data(), records.data(), records.size() * sizeof(mappnb::Record));
  return words.to_array(records.size());
}

nb::dict counters(const Recorder& recorder) {
  const Recorder::States states = recorder.states();
  mappnb::Counters total = recorder.retired();
  {
    const nb::gil_scoped_release unlocked;
    total = recorder.counters(states, total);
  }
  nb::dict out;
  out["recorded"] = total.recorded;
  out["dropped"] = total.dropped;
  out["mismatched"] = total.mismatched;
  out["too_deep"] = total.too_deep;
  out["threads"] = total.threads;
  return out;
}

std::vector<std::tuple<int, int64_t, std::string>> threads(const Recorder& recorder) {
  std::vector<std::tuple<int, int64_t, std::string>> out;
  for (const mappnb::ThreadInfo& info : recorder.threads()) out.emplace_back(info.index, info.native_id, info.name);
  return out;
}

// Calls `function` for the name of a new thread; whatever goes wrong there must not reach the training code.
Recorder::NameOfThread name_of_thread(nb::object function) {
  if (function.is_none()) return {};
  return [function]() -> std::string {
    try {
      return nb::cast<std::string>(function());
    } catch (const std::exception&) {
      return {};
    }
  };
}

void make_recorder(Recorder* self, int64_t capacity, bool cpu_time, nb::object thread_name) {
  new (self) Recorder(static_cast<uint64_t>(std::max<int64_t>(1, capacity)), cpu_time, name_of_thread(thread_name));
}

void register_span(nb::module_& m) {
  auto span = nb::class_<Span>(m, "Span", "Reusable, re-entrant ``with`` target of one site.");
  span.def_ro("site", &Span::site, "Id of the site that it records.");
  add_methods(span, span_methods);
}

Span make_span(nb::handle self, int64_t site) {
  Recorder& recorder = recorder_of(self.ptr());
  return {nb::borrow(self), &recorder, saturate<int32_t>(site), recorder.new_owner()};
}

std::tuple<int, int, int, int> context(const Recorder& recorder) {
  const mappnb::Context c = recorder.context();
  return {c.step, c.stage, c.chunk, c.microbatch};
}

void set_test_clock(Recorder& recorder, std::optional<int64_t> ns) {
  recorder.set_test_clock(ns.value_or(mappnb::kRealClock));
}

void define_calls(nb::class_<Recorder>& type) {
  type.def("__init__", &make_recorder, nb::arg("capacity") = 65536, nb::arg("cpu_time") = false,
           nb::arg("thread_name").none() = nb::none(),
           nb::sig("def __init__(self, capacity: int = 65536, cpu_time: bool = False, "
                   "thread_name: collections.abc.Callable[[], str] | None = None) -> None"));
  type.def(
      "span", [](nb::handle_t<Recorder> self, int64_t site) { return make_span(self, site); }, nb::arg("site"),
      "Make a ``with`` target for ``site``.");
  type.def("context", &context, "Step, stage, chunk, microbatch as set now.");
  type.def_prop_rw("enabled", &Recorder::enabled, &Recorder::set_enabled, "Whether events are recorded.");
  type.def("now_ns", &Recorder::now_ns, "``CLOCK_MONOTONIC`` in ns.");
  type.def("_set_test_clock", &set_test_clock, nb::arg("ns").none(),
           "Make both clocks stand at ``ns``; ``None`` gives the real ones back.");
}

void define_readers(nb::class_<Recorder>& type) {
  type.def("drain", &drain, nb::sig("def drain(self) -> numpy.typing.NDArray[numpy.void]"),
           "Take the finished records of all threads.");
  type.def("open_spans", &open_spans, nb::sig("def open_spans(self) -> numpy.typing.NDArray[numpy.void]"),
           "Look at the spans that are open now, in all threads.");
  type.def("threads", &threads, "Every thread seen: index, native thread id, Python name or ''.");
  type.def("counters", &counters, nb::sig("def counters(self) -> dict[str, int]"),
           "``recorded``, ``dropped``, ``mismatched``, ``too_deep`` and ``threads``.");
  type.def("before_fork", &Recorder::before_fork, nb::call_guard<nb::gil_scoped_release>(), "Hold the reading side.");
  type.def("after_fork_in_parent", &Recorder::after_fork_in_parent, "Let go of it in the parent.");
  type.def("after_fork_in_child", &Recorder::after_fork_in_child, "Let go of it in the child, and stop recording.");
}

}  // namespace

void register_recorder(nb::module_& m) {
  m.def("record_dtype", &record_dtype, nb::sig("def record_dtype() -> numpy.dtype[numpy.void]"),
        "Layout of a record, as compiled.");
  end_arguments.intern();
  record_arguments.intern();
  context_arguments.intern();
  register_span(m);
  auto type = nb::class_<Recorder>(m, "Recorder", "Native core of ``mappnb.capture.recorder.Recorder``.");
  add_methods(type, recorder_methods);
  define_calls(type);
  define_readers(type);
}
