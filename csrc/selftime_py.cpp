// Python's view of selftime.hpp: arrays of a rank's rows in, arrays by cell out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "selftime.hpp"

namespace nb = nanobind;
using mappnb::Column;
using mappnb::EventRows;
using mappnb::SelfTime;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
Column<T> column(const In<T>& values, size_t rows, const char* name) {
  if (values.shape(0) != rows && values.shape(0) != 1)
    throw std::invalid_argument(std::string(name) + ": as many values as rows, or one");
  return {values.data(), values.shape(0) == rows ? size_t(1) : size_t(0)};
}

void add(SelfTime& self, int32_t rank, int64_t offset, In<int64_t> start, In<int64_t> duration, In<int32_t> step,
         In<int32_t> site, In<int16_t> stage, In<int64_t> group, In<int64_t> seq, In<int64_t> bytes, In<int32_t> peer,
         In<int32_t> thread, In<int32_t> stream, In<uint16_t> flags, In<int8_t> kind, In<int32_t> op) {
  EventRows r{};
  r.rows = start.shape(0);
  r.offset = offset;
  r.start = column(start, r.rows, "start");
  r.duration = column(duration, r.rows, "duration");
  r.step = column(step, r.rows, "step");
  r.site = column(site, r.rows, "site");
  r.stage = column(stage, r.rows, "stage");
  r.group = column(group, r.rows, "group");
  r.seq = column(seq, r.rows, "seq");
  r.bytes = column(bytes, r.rows, "bytes");
  r.peer = column(peer, r.rows, "peer");
  r.thread = column(thread, r.rows, "thread");
  r.stream = column(stream, r.rows, "stream");
  r.flags = column(flags, r.rows, "flags");
  if (kind.shape(0) == 0 || op.shape(0) != kind.shape(0))
    throw std::invalid_argument("kind and op: one for each site, and one for unknown sites");
  for (size_t i = 0; i < kind.shape(0); i++)
    if (kind.data()[i] < -1 || kind.data()[i] > mappnb::kWaitRecv) throw std::invalid_argument("kind: no such kind");
  r.kind = kind.data();
  r.op = op.data();
  r.sites = kind.shape(0);
  nb::gil_scoped_release unlocked;
  self.add(r, rank);
}

void end_rank(SelfTime& self, int64_t column) {
  if (column < 0 || column >= self.ranks()) throw std::invalid_argument("column: outside the ranks");
  nb::gil_scoped_release unlocked;
  self.end_rank(column);
}

// Columns of entries: kind, group, source, target, seq, tag, cell, start.
void read_entries(const SelfTime& self, In<int64_t> which, nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig> out) {
  if (out.shape(0) != 8 || out.shape(1) != which.shape(0))
    throw std::invalid_argument("out: 8 rows, one column per entry");
  const size_t n = which.shape(0);
  for (size_t i = 0; i < n; i++) {
    const int64_t at = which.data()[i];
    if (at < 0 || at >= int64_t(self.entries.size())) throw std::invalid_argument("no such entry");
    const auto& e = self.entries[at];
    const auto& c = self.channels[e.channel];
    const int64_t values[8] = {e.kind, c.group, c.source, c.target, e.seq, int64_t(e.tag), e.cell, e.start};
    for (size_t k = 0; k < 8; k++) out.data()[k * n + i] = values[k];
  }
}

void renumber(SelfTime& self, In<int64_t> which, In<int64_t> seq, In<uint8_t> by_order) {
  if (seq.shape(0) != which.shape(0) || by_order.shape(0) != which.shape(0))
    throw std::invalid_argument("as many numbers as entries");
  for (size_t i = 0; i < which.shape(0); i++) {
    if (which.data()[i] < 0 || which.data()[i] >= int64_t(self.entries.size()))
      throw std::invalid_argument("no such entry");
    self.renumber(which.data()[i], seq.data()[i], by_order.data()[i] != 0);
  }
}

void read_cells(const SelfTime& self, nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig> out) {
  const size_t n = self.cells.size();
  if (out.shape(0) != 8 || out.shape(1) != n) throw std::invalid_argument("out: 8 rows, one column per cell");
  for (size_t i = 0; i < n; i++) {
    const auto& c = self.cells[i];
    const int64_t values[8] = {c.first, c.last, c.wait, c.transfer, c.covered, c.imposed, c.last_calls, c.calls};
    for (size_t k = 0; k < 8; k++) out.data()[k * n + i] = values[k];
  }
}

void read_part(const SelfTime& self, size_t part, Out<int64_t> ns, Out<int32_t> count) {
  const size_t n = self.cells.size();
  if (part >= self.parts.size() || ns.shape(0) != n || count.shape(0) != n)
    throw std::invalid_argument("a part that exists, and one value per cell");
  for (size_t i = 0; i < n; i++) {
    ns.data()[i] = self.parts[part].self[i];
    count.data()[i] = self.parts[part].count[i];
  }
}

}  // namespace

void register_self_time(nb::module_& m) {
  nb::class_<SelfTime>(m, "SelfTime", "Self time and arrivals of some steps of all ranks. See mappnb.analysis.work.")
      .def(
          "__init__",
          [](SelfTime* self, int64_t ranks) {
            if (ranks < 0 || ranks > INT32_MAX) throw std::invalid_argument("ranks: a number of columns");
            new (self) SelfTime(ranks);
          },
          nb::arg("ranks"))
      .def("begin", &SelfTime::begin, nb::arg("first_step"), nb::arg("last_step"),
           "Forget all rows; count these steps.")
      .def("add", &add, nb::arg("rank"), nb::arg("offset"), nb::arg("start"), nb::arg("duration"), nb::arg("step"),
           nb::arg("site"), nb::arg("stage"), nb::arg("group"), nb::arg("seq"), nb::arg("bytes"), nb::arg("peer"),
           nb::arg("thread"), nb::arg("stream"), nb::arg("flags"), nb::arg("kind"), nb::arg("op"),
           "Take rows of a rank; those of other steps are left out.")
      .def("end_rank", &end_rank, nb::arg("column"), "Work out the rows taken since the last rank ended.")
      .def("suspects", &SelfTime::suspects, nb::call_guard<nb::gil_scoped_release>(),
           "Entries of channels whose numbers do not hold.")
      .def("read_entries", &read_entries, nb::arg("which"), nb::arg("out"))
      .def("renumber", &renumber, nb::arg("which"), nb::arg("seq"), nb::arg("by_order"))
      .def("finish", &SelfTime::finish, nb::call_guard<nb::gil_scoped_release>(),
           "Once all ranks ended, and once only.")
      .def("read_cells", &read_cells, nb::arg("out"),
           "first, last, wait, transfer, covered (ns), imposed, last_calls, calls.")
      .def("read_part", &read_part, nb::arg("part"), nb::arg("ns"), nb::arg("count"))
      .def_prop_ro("steps", [](const SelfTime& self) { return self.steps; })
      .def_prop_ro("parts", [](const SelfTime& self) {
        std::vector<std::tuple<int, int>> out;
        for (const auto& p : self.parts) out.emplace_back(p.kind, p.stage);
        return out;
      });
}
