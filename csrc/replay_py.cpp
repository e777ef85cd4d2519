// Python's view of replay.hpp: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "replay.hpp"

namespace nb = nanobind;
using mappnb::Graph;
using mappnb::Replayed;

namespace {

using F64 = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I32 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I32x2 = nb::ndarray<const int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using I64 = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutF64 = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutI32 = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void within(const int32_t* values, size_t n, int64_t below, const char* what) {
  for (size_t i = 0; i < n; i++)
    if (values[i] < -1 || values[i] >= below) throw std::invalid_argument(what);
}

void same(size_t length, size_t ops, const char* what) {
  if (length != ops) throw std::invalid_argument(what);
}

// The engine trusts its input: whatever would make it read elsewhere is refused here.
void check(const Graph& g, int64_t edges) {
  within(g.stream, g.ops, g.streams, "stream: a number outside the streams");
  within(g.queue, 2 * g.ops, g.queues, "queue: a number outside the queues");
  within(g.group, g.ops, g.groups, "group: a number outside the groups");
  within(g.slows, 2 * g.ops, g.streams, "slows: a number outside the streams");
  if (g.dep_offsets[0] != 0 || g.dep_offsets[g.ops] != edges) throw std::invalid_argument("dep_offsets: wrong ends");
  for (int64_t i = 0; i < g.ops; i++)
    if (g.dep_offsets[i] > g.dep_offsets[i + 1]) throw std::invalid_argument("dep_offsets fall");
  for (int64_t e = 0; e < edges; e++)
    if (g.dep[e] < 0 || g.dep[e] >= g.ops) throw std::invalid_argument("dep: a number outside the operations");
}

// Returns the number of operations that ended; fills the arrays, and `latest_start` and `latest_end` if they are not
// empty.
int64_t replay(F64 duration, F64 delay, I32 stream, I32x2 queue, I32 group, I32x2 slows, double interference,
               I64 dep_offsets, I32 dep, F64 lag, int64_t streams, int64_t queues, int64_t groups, bool by_events,
               OutF64 start, OutF64 end, OutI32 cause, OutI32 late, OutF64 latest_start, OutF64 latest_end) {
  Graph g{};
  const size_t n = duration.shape(0);
  for (const size_t length : {delay.shape(0), stream.shape(0), queue.shape(0), group.shape(0), slows.shape(0)})
    same(length, n, "arrays of operations differ in length");
  for (const size_t length : {start.shape(0), end.shape(0), cause.shape(0), late.shape(0)})
    same(length, n, "results differ in length from the operations");
  same(dep_offsets.shape(0), n + 1, "dep_offsets: one more than the operations");
  same(lag.shape(0), dep.shape(0), "lag: one per dependency");
  same(latest_end.shape(0), latest_start.shape(0), "latest_start and latest_end differ in length");
  g.ops = int64_t(n);
  g.streams = streams;
  g.queues = queues;
  g.groups = groups;
  g.duration = duration.data();
  g.delay = delay.data();
  g.stream = stream.data();
  g.queue = queue.data();
  g.group = group.data();
  g.slows = slows.data();
  g.interference = interference;
  g.dep_offsets = dep_offsets.data();
  g.dep = dep.data();
  g.lag = lag.data();
  check(g, int64_t(dep.shape(0)));
  Replayed out{start.data(), end.data(), cause.data(), late.data(), {}, {}};
  const bool wants_latest = latest_start.shape(0) == n && n > 0;
  nb::gil_scoped_release unlocked;
  mappnb::replay(g, by_events, &out);
  if (wants_latest && out.order.size() == n) {
    double horizon = 0;
    for (size_t i = 0; i < n; i++) horizon = std::max(horizon, out.end[i]);
    mappnb::latest(g, out, horizon, latest_start.data(), latest_end.data());
  }
  return int64_t(out.order.size());
}

}  // namespace

void register_replay(nb::module_& m) {
  m.def("replay", &replay, nb::arg("duration"), nb::arg("delay"), nb::arg("stream"), nb::arg("queue"), nb::arg("group"),
        nb::arg("slows"), nb::arg("interference"), nb::arg("dep_offsets"), nb::arg("dep"), nb::arg("lag"),
        nb::arg("streams"), nb::arg("queues"), nb::arg("groups"), nb::arg("by_events"), nb::arg("start"),
        nb::arg("end"), nb::arg("cause"), nb::arg("late"), nb::arg("latest_start"), nb::arg("latest_end"),
        "Fill the results; returns how many operations ended. See mappnb.replay.");
}
