// Statistics of a tensor in one pass: moments, ends, zeros, NaN and infinite values, histogram of exponents. Knows
// nothing of Python (see tensor_stats_py.cpp). The twin is mappnb/activation_stats.py: tensor_stats_reference and
// merge.
#pragma once

#include <cstdint>

namespace mappnb {

enum class Number { kFloat32, kFloat64, kFloat16, kBfloat16 };

// Bins are floor(log2 |x|) from kLowest to kHighest, with one more at each end for all below and all above.
constexpr int kLowest = -40, kHighest = 40, kBins = kHighest - kLowest + 3;

// Moments of finite values: m2 to m4 are sums of powers of the distance from the mean.
struct Moments {
  double count = 0, mean = 0, m2 = 0, m3 = 0, m4 = 0, min = 0, max = 0;

  // Pebay (2008), equations 3.1 to 3.4.
  void merge(const Moments& b);
};

struct TensorStats {
  Moments moments;
  int64_t zeros = 0, nan = 0, posinf = 0, neginf = 0;
  int64_t histogram[kBins] = {};
};

// Takes rows of columns values each; row r begins stride * r values after data.
void tensor_stats(TensorStats& out, const void* data, Number kind, int64_t rows, int64_t columns, int64_t stride);

}  // namespace mappnb
