// Python's view of segment_columns.hpp: arrays of rows to be filled.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "segment_columns.hpp"

namespace nb = nanobind;
using mappnb::SegmentColumns;
using mappnb::Target;

namespace {

using Out = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void fill(SegmentColumns& self, const std::string& path, const std::vector<int64_t>& row_groups,
          const std::vector<std::string>& names, const std::vector<Out>& out) {
  if (names.size() != out.size()) throw std::invalid_argument("names and out: one array for each column");
  std::vector<Target> targets;
  for (size_t i = 0; i < names.size(); i++) {
    const nb::dlpack::dtype kind = out[i].dtype();
    if (kind.code == uint8_t(nb::dlpack::dtype_code::Float) || kind.lanes != 1)
      throw std::invalid_argument(names[i] + ": an array of whole numbers");
    targets.push_back({names[i], static_cast<uint8_t*>(out[i].data()), out[i].shape(0), size_t(kind.bits / 8)});
  }
  nb::gil_scoped_release unlocked;
  self.read(path, row_groups, targets);
}

}  // namespace

void register_segment_columns(nb::module_& m) {
  nb::class_<SegmentColumns>(m, "SegmentColumns",
                             "Decodes columns of whole numbers of closed segments. See mappnb.analysis._work_rows.")
      .def(nb::init<>())
      .def("read", &fill, nb::arg("path"), nb::arg("row_groups"), nb::arg("names"), nb::arg("out"),
           "Fill one array per column with the rows of some row groups; what it cannot read, it refuses "
           "(RuntimeError).");
}
