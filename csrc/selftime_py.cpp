// Python's view of selftime.hpp: arrays of a rank's rows in, arrays by cell out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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

void check_pass(const SelfTime& self, int64_t pass) {
  if (pass < 0 || pass >= self.passes()) throw std::invalid_argument("which: no such pass");
}

void add(SelfTime& self, int64_t pass, int32_t rank, int64_t offset, In<int64_t> start, In<int64_t> duration,
         In<int32_t> step, In<int32_t> site, In<int16_t> stage, In<int64_t> group, In<int64_t> seq, In<int64_t> bytes,
         In<int32_t> peer, In<int32_t> thread, In<int32_t> stream, In<uint16_t> flags, In<int8_t> kind,
         In<int32_t> op) {
  check_pass(self, pass);
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
  self.add(pass, r, rank);
}

void end_rank(SelfTime& self, int64_t pass, int64_t column) {
  check_pass(self, pass);
  if (column < 0 || column >= self.ranks()) throw std::invalid_argument("column: outside the ranks");
  nb::gil_scoped_release unlocked;
  self.end_rank(pass, column);
}

// Rows of out: kind, group, source, target, seq, tag, column, step, start.
void read_entries(SelfTime& self, In<int64_t> which, nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig> out) {
  if (out.shape(0) != 9 || out.shape(1) != which.shape(0))
    throw std::invalid_argument("out: 9 rows, one column per entry");
  const size_t n = which.shape(0);
  for (size_t i = 0; i < n; i++) {
    const int64_t number = which.data()[i];
    if (number < 0 || number >= self.num_entries()) throw std::invalid_argument("no such entry");
    const SelfTime::Place at = self.place(number);
    const auto& column = self.columns[size_t(at.column)];
    const auto& e = column.entries[size_t(at.entry)];
    const auto& c = self.channels[size_t(e.channel)];
    const int64_t values[9] = {
        e.kind, c.group, c.source, c.target, e.seq, int64_t(e.tag), at.column, self.step_of(column, e.step), e.start};
    for (size_t k = 0; k < 9; k++) out.data()[k * n + i] = values[k];
  }
}

void renumber(SelfTime& self, In<int64_t> which, In<int64_t> seq, In<uint8_t> by_order) {
  if (seq.shape(0) != which.shape(0) || by_order.shape(0) != which.shape(0))
    throw std::invalid_argument("as many numbers as entries");
  for (size_t i = 0; i < which.shape(0); i++) {
    if (which.data()[i] < 0 || which.data()[i] >= self.num_entries()) throw std::invalid_argument("no such entry");
    self.renumber(which.data()[i], seq.data()[i], by_order.data()[i] != 0);
  }
}

void read_cells(SelfTime& self, nb::ndarray<int64_t, nb::ndim<3>, nb::c_contig> out) {
  self.unite();
  const size_t ranks = self.columns.size(), steps = self.steps.size(), n = steps * ranks;
  if (out.shape(0) != 8 || out.shape(1) != steps || out.shape(2) != ranks)
    throw std::invalid_argument("out: shape (8, step, rank)");
  int64_t* const to = out.data();
  for (size_t i = 0; i < 8 * n; i++) to[i] = i < n ? INT64_MAX : i < 2 * n ? INT64_MIN : 0;
  for (size_t r = 0; r < ranks; r++) {
    const auto& column = self.columns[r];
    const auto& row = self.row_of(column);
    for (size_t s = 0; s < column.of.size(); s++) {
      const mappnb::PerCell& c = column.of[s];
      const int64_t values[8] = {c.first, c.last, c.wait, c.transfer, c.covered, c.imposed, c.last_calls, c.calls};
      for (size_t k = 0; k < 8; k++) to[k * n + size_t(row[s]) * ranks + r] = values[k];
    }
  }
}

void read_parts(SelfTime& self, nb::ndarray<int64_t, nb::ndim<3>, nb::c_contig> ns,
                nb::ndarray<int32_t, nb::ndim<3>, nb::c_contig> count) {
  self.unite();
  const size_t ranks = self.columns.size(), steps = self.steps.size(), parts = self.parts.size();
  for (size_t k = 0; k < 3; k++) {
    const size_t expected[3] = {steps, ranks, parts};
    if (ns.shape(k) != expected[k] || count.shape(k) != expected[k])
      throw std::invalid_argument("ns and count: shape (step, rank, part)");
  }
  std::fill(ns.data(), ns.data() + ns.size(), 0);
  std::fill(count.data(), count.data() + count.size(), 0);
  for (size_t r = 0; r < ranks; r++) {
    const auto& c = self.columns[r];
    const auto &row = self.row_of(c), &part = self.part_of(c);
    for (size_t s = 0; s < c.of.size(); s++) {
      const size_t cell = (size_t(row[s]) * ranks + r) * parts;
      for (size_t p = 0; p < c.parts; p++) {
        const auto& share = c.shares[s * c.parts + p];
        ns.data()[cell + size_t(part[p])] = share.self;
        count.data()[cell + size_t(part[p])] = share.count;
      }
    }
  }
}

}  // namespace

void register_self_time(nb::module_& m) {
  nb::class_<SelfTime>(m, "SelfTime", "Self time and arrivals of some steps of all ranks. See mappnb.analysis.work.")
      .def(
          "__init__",
          [](SelfTime* self, int64_t ranks, int64_t passes) {
            if (ranks < 0 || ranks > INT32_MAX) throw std::invalid_argument("ranks: a number of columns");
            if (passes < 1 || passes > 1024) throw std::invalid_argument("passes: 1 to 1024");
            new (self) SelfTime(ranks, passes);
          },
          nb::arg("ranks"), nb::arg("passes") = 1)
      .def("begin", &SelfTime::begin, nb::arg("first_step"), nb::arg("last_step"),
           "Forget all rows; count these steps.")
      .def(
          "add", &add, nb::arg("which"), nb::arg("rank"), nb::arg("offset"), nb::arg("start"), nb::arg("duration"),
          nb::arg("step"), nb::arg("site"), nb::arg("stage"), nb::arg("group"), nb::arg("seq"), nb::arg("bytes"),
          nb::arg("peer"), nb::arg("thread"), nb::arg("stream"), nb::arg("flags"), nb::arg("kind"), nb::arg("op"),
          "Take rows of a rank in a pass; those of other steps are left out. Threads may use different passes at once.")
      .def("end_rank", &end_rank, nb::arg("which"), nb::arg("column"),
           "Work out the rows that a pass took since the last rank ended in it.")
      .def("suspects", &SelfTime::suspects, nb::call_guard<nb::gil_scoped_release>(),
           "Entries of channels whose numbers do not hold.")
      .def("read_entries", &read_entries, nb::arg("which"), nb::arg("out"))
      .def("renumber", &renumber, nb::arg("which"), nb::arg("seq"), nb::arg("by_order"))
      .def("finish", &SelfTime::finish, nb::call_guard<nb::gil_scoped_release>(),
           "Once all ranks ended, and once only.")
      .def("read_cells", &read_cells, nb::arg("out"),
           "first, last, wait, transfer, covered (ns), imposed, last_calls, calls.")
      .def("read_parts", &read_parts, nb::arg("ns"), nb::arg("count"))
      .def_prop_ro("steps",
                   [](SelfTime& self) {
                     self.unite();
                     return self.steps;
                   })
      .def_prop_ro("parts", [](SelfTime& self) {
        self.unite();
        std::vector<std::tuple<int, int>> out;
        for (const auto& p : self.parts) out.emplace_back(p.kind, p.stage);
        return out;
      });
}
