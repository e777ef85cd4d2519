// Python's view of tensor_stats.hpp: an array in, fields and counts out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "tensor_stats.hpp"

namespace nb = nanobind;
using mappnb::Number;
using mappnb::TensorStats;

namespace {

using Values = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Fields = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Number number_of(const Values& values, bool bfloat16) {
  const nb::dlpack::dtype found = values.dtype();
  const auto code = nb::dlpack::dtype_code(found.code);
  if (bfloat16) {
    if (found.bits != 16) throw std::invalid_argument("values: bfloat16 has 16 bits");
    return Number::kBfloat16;
  }
  if (code == nb::dlpack::dtype_code::Float && found.bits == 64) return Number::kFloat64;
  if (code == nb::dlpack::dtype_code::Float && found.bits == 32) return Number::kFloat32;
  if (code == nb::dlpack::dtype_code::Float && found.bits == 16) return Number::kFloat16;
  throw std::invalid_argument("values: expected float16, float32, float64, or 16 bits with bfloat16=True");
}

// Order of fields: mappnb.activation_stats.FIELDS.
void tensor_stats(const Values& values, Fields fields, Counts histogram, bool bfloat16) {
  if (fields.shape(0) != 11 || histogram.shape(0) != size_t(mappnb::kBins))
    throw std::invalid_argument("fields: 11 numbers; histogram: " + std::to_string(mappnb::kBins) + " counts");
  const Number kind = number_of(values, bfloat16);
  const int64_t rows = int64_t(values.shape(0)), columns = int64_t(values.shape(1));
  if (columns > 1 && values.stride(1) != 1) throw std::invalid_argument("values: rows must be contiguous");
  const int64_t stride = rows > 1 ? values.stride(0) : columns;
  const void* data = values.data();
  TensorStats out;
  if (rows > 0 && columns > 0) {
    nb::gil_scoped_release unlocked;
    mappnb::tensor_stats(out, data, kind, rows, columns, stride);
  }
  const auto& m = out.moments;
  const double inf = std::numeric_limits<double>::infinity();
  const double all[11] = {m.count,
                          m.mean,
                          m.m2,
                          m.m3,
                          m.m4,
                          m.count > 0 ? m.min : inf,
                          m.count > 0 ? m.max : -inf,
                          double(out.zeros),
                          double(out.nan),
                          double(out.posinf),
                          double(out.neginf)};
  for (int i = 0; i < 11; i++) fields.data()[i] = all[i];
  for (int i = 0; i < mappnb::kBins; i++) histogram.data()[i] = out.histogram[i];
}

}  // namespace

void register_tensor_stats(nb::module_& m) {
  m.def("tensor_stats", &tensor_stats, nb::arg("values"), nb::arg("fields"), nb::arg("histogram"),
        nb::arg("bfloat16") = false,
        "Statistics of rows of contiguous values, in one pass without Python's lock. See mappnb.activation_stats.");
}
