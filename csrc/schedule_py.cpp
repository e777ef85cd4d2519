// Python's view of schedule.hpp: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>

#include "schedule.hpp"

namespace nb = nanobind;
using mappnb::Pass;

namespace {

using Codes = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table3 = nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Links3 = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// The C++ pass trusts its input: whatever would make it read elsewhere is refused here.
void check(Pass& p, int64_t num_codes, size_t durations, bool known) {
  require(p.ranks >= 1 && p.offsets[0] == 0 && p.offsets[p.ranks] == num_codes, "offsets do not cover the codes");
  for (int r = 0; r < p.ranks; r++) require(p.offsets[r] <= p.offsets[r + 1], "offsets fall");
  require(durations == size_t(4) * p.stages * (p.by_microbatch ? p.microbatches : 1), "duration: wrong shape");
  if (known) return;
  int32_t stage = 0, microbatch = 0;
  uint32_t any = 0;
  for (int64_t i = 0; i < num_codes; i++) {
    const mappnb::Code code{p.codes[i]};
    stage = std::max(stage, int32_t(code.stage()));
    microbatch = std::max(microbatch, int32_t(code.microbatch()));
    any |= code.bits;
  }
  p.any_paired = mappnb::Code{any}.paired();
  require(num_codes == 0 || (stage < p.stages && microbatch < p.microbatches), "an action outside the sizes");
}

std::optional<std::vector<int64_t>> schedule_times(Codes codes, Offsets offsets, int stages, int microbatches,
                                                   int64_t mirrored_from, Table3 duration, double overlap_ratio,
                                                   Table3 latency, Table3 wire, Links3 link, bool ships, int links,
                                                   int send, bool known, bool paired, Out start, Out end) {
  Pass p{};
  p.codes = codes.data();
  p.offsets = offsets.data();
  p.ranks = int(offsets.shape(0)) - 1;
  p.stages = stages;
  p.microbatches = microbatches;
  p.links = links;
  p.mirrored_from = mirrored_from < 0 ? std::numeric_limits<int64_t>::max() : mirrored_from;
  p.duration = duration.data();
  p.by_microbatch = duration.shape(2) > 1;
  p.overlap_ratio = overlap_ratio;
  p.next = {latency.data(), wire.data(), link.data()};
  const size_t tables = latency.shape(0), ship = size_t(4) * stages;
  if (ships) p.ship = {latency.data() + ship, wire.data() + ship, link.data() + ship};
  p.send = mappnb::Send(send);
  p.start = start.data();
  p.end = end.data();
  require(tables == (ships ? 3u : 2u) && latency.shape(1) == 2 && latency.shape(2) == size_t(stages), "latency: shape");
  require(wire.size() == latency.size() && link.size() == latency.size(), "latency, wire and link differ in shape");
  for (size_t i = 0; i < link.size(); i++) require(link.data()[i] < links, "a link outside the links");
  require(start.shape(0) == codes.shape(0) && end.shape(0) == codes.shape(0), "start, end: wrong length");
  p.any_paired = paired;
  check(p, int64_t(codes.shape(0)), duration.size(), known);
  std::vector<int64_t> came;
  {
    nb::gil_scoped_release unlocked;
    came = run_pass(p);
  }
  for (int r = 0; r < p.ranks; r++)
    if (came[r] < p.offsets[r + 1]) return came;
  return std::nullopt;
}

void generate(int ranks, int chunks, int microbatches, int group, Offsets warm_up,
              nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> codes) {
  require(ranks >= 1 && chunks >= 1 && microbatches >= 1 && group >= 1, "sizes: expected at least 1");
  require(warm_up.shape(0) == size_t(ranks), "warm_up: one entry per rank");
  require(int64_t(ranks) * chunks <= 1 << 12 && microbatches <= 1 << 17, "too many stages or microbatches for a code");
  require(codes.shape(0) == size_t(2) * ranks * chunks * microbatches, "codes: wrong length");
  nb::gil_scoped_release unlocked;
  mappnb::one_forward_one_backward(ranks, chunks, microbatches, group, warm_up.data(), codes.data());
}

}  // namespace

void register_schedule(nb::module_& m) {
  m.def("schedule_times", &schedule_times, nb::arg("codes"), nb::arg("offsets"), nb::arg("stages"),
        nb::arg("microbatches"), nb::arg("mirrored_from"), nb::arg("duration"), nb::arg("overlap_ratio"),
        nb::arg("latency"), nb::arg("wire"), nb::arg("link"), nb::arg("ships"), nb::arg("links"), nb::arg("send"),
        nb::arg("known"), nb::arg("paired"), nb::arg("start"), nb::arg("end"),
        "Fill start and end of every action. Returns None, or how far each rank came if they wait for one another. "
        "`known`: the "
        "codes are within the sizes, and `paired` tells whether there are pairs. See mappnb.sched.times.");
  m.def("one_forward_one_backward", &generate, nb::arg("ranks"), nb::arg("chunks"), nb::arg("microbatches"),
        nb::arg("group"), nb::arg("warm_up"), nb::arg("codes"),
        "Fill the codes of an interleaved order. See mappnb.sched.interleaved.");
}
