// Python's view of nesting.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "nesting.hpp"

namespace nb = nanobind;

namespace {

using In = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

Out array(std::vector<int64_t>&& from) {
  auto kept = std::make_unique<std::vector<int64_t>>(std::move(from));
  int64_t* data = kept->data();
  const size_t n = kept->size();
  nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Out(data, {n}, owner);
}

std::tuple<Out, Out, Out> segments(In lane, In start, In end) {
  if (start.shape(0) != lane.shape(0) || end.shape(0) != lane.shape(0))
    throw std::invalid_argument("lane, start and end: one for each span");
  mappnb::Segments out;
  {
    nb::gil_scoped_release unlocked;
    out = mappnb::innermost_segments(lane.data(), start.data(), end.data(), lane.shape(0));
  }
  return {array(std::move(out.span)), array(std::move(out.start)), array(std::move(out.end))};
}

}  // namespace

void register_nesting(nb::module_& m) {
  m.def("innermost_segments", &segments, nb::arg("lane"), nb::arg("start"), nb::arg("end"),
        "Cut nested spans into segments: index of the innermost span, start, end. See mappnb.analysis._intervals.");
}
