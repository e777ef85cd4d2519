#include "tensor_stats.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

// Each kernel is compiled for several instruction sets, and the loader takes the best that the machine has; where that
// is not to be had (other compilers, musl, sanitizers that start later than the loader), for the plain one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(MAPPNB_NO_CLONES)
#define MAPPNB_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MAPPNB_CLONES
#endif
#define MAPPNB_INLINE inline __attribute__((always_inline))

namespace mappnb {

namespace {

constexpr int kBlock = 1024;  // values per block: they stay in the first cache for the second look
constexpr int kLanes = 16;    // independent sums, so that the compiler may use vectors of any width

struct Sums {
  double sum, min, max;
  int64_t zeros;
};

template <class T>
MAPPNB_INLINE Sums first_look(const T* x, int n) {
  double sum[kLanes] = {};
  T low[kLanes], high[kLanes];
  int32_t zeros[kLanes] = {};
  for (int l = 0; l < kLanes; l++) low[l] = high[l] = x[0];
  const int whole = n - n % kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; l++) {
      const T v = x[i + l];
      sum[l] += double(v);
      low[l] = v < low[l] ? v : low[l];
      high[l] = v > high[l] ? v : high[l];
      zeros[l] += v == T(0);
    }
  Sums out = {0, double(low[0]), double(high[0]), 0};
  for (int i = whole; i < n; i++) {
    out.sum += double(x[i]);
    out.min = std::min(out.min, double(x[i]));
    out.max = std::max(out.max, double(x[i]));
    out.zeros += x[i] == T(0);
  }
  for (int l = 0; l < kLanes; l++) {
    out.sum += sum[l];
    out.min = std::min(out.min, double(low[l]));
    out.max = std::max(out.max, double(high[l]));
    out.zeros += zeros[l];
  }
  return out;
}

template <class T>
MAPPNB_INLINE void second_look(const T* x, int n, double mean, double* out) {
  double m2[kLanes] = {}, m3[kLanes] = {}, m4[kLanes] = {};
  const int whole = n - n % kLanes;
  for (int i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; l++) {
      const double d = double(x[i + l]) - mean, d2 = d * d;
      m2[l] += d2;
      m3[l] += d2 * d;
      m4[l] += d2 * d2;
    }
  for (int i = whole; i < n; i++) {
    const double d = double(x[i]) - mean, d2 = d * d;
    m2[0] += d2;
    m3[0] += d2 * d;
    m4[0] += d2 * d2;
  }
  for (int l = 0; l < kLanes; l++) {
    out[0] += m2[l];
    out[1] += m3[l];
    out[2] += m4[l];
  }
}

template <class T>
MAPPNB_INLINE int64_t look(Moments& moments, const T* x, int n) {
  if (n == 0) return 0;
  const Sums s = first_look(x, n);
  Moments block;
  double m[3] = {};
  block.count = n;
  block.mean = s.sum / n;
  second_look(x, n, block.mean, m);
  block.m2 = m[0];
  block.m3 = m[1];
  block.m4 = m[2];
  block.min = s.min;
  block.max = s.max;
  moments.merge(block);
  return s.zeros;
}

MAPPNB_CLONES int64_t look_float(Moments& moments, const float* x, int n) { return look(moments, x, n); }
MAPPNB_CLONES int64_t look_double(Moments& moments, const double* x, int n) { return look(moments, x, n); }

MAPPNB_CLONES bool all_finite(const uint32_t* bits, int n) {
  uint32_t found = 0;
  for (int i = 0; i < n; i++) found |= uint32_t((bits[i] & 0x7f800000u) == 0x7f800000u);
  return found == 0;
}

MAPPNB_CLONES void widen_bfloat16(const uint16_t* from, int n, uint32_t* to) {
  for (int i = 0; i < n; i++) to[i] = uint32_t(from[i]) << 16;
}

// The exponent is moved by a multiplication, which is exact and right for denormal values too.
MAPPNB_CLONES void widen_float16(const uint16_t* from, int n, uint32_t* to) {
  for (int i = 0; i < n; i++) {
    const uint32_t half = from[i], shifted = (half & 0x7fffu) << 13;
    float value;
    std::memcpy(&value, &shifted, 4);
    value *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits |= shifted >= 0x0f800000u ? 0x7f800000u : 0u;
    to[i] = bits | (half & 0x8000u) << 16;
  }
}

// Counts raw exponents in several tables: equal neighbours would wait for each other's count.
class ExponentCounts {
 public:
  void add(const float* x, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      uint64_t a, b;
      std::memcpy(&a, x + i, 8);
      std::memcpy(&b, x + i + 2, 8);
      tables_[0][a >> 23 & 0xff]++;
      tables_[1][a >> 55 & 0xff]++;
      tables_[2][b >> 23 & 0xff]++;
      tables_[3][b >> 55 & 0xff]++;
    }
    for (; i < n; i++) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      tables_[0][bits >> 23 & 0xff]++;
    }
  }

  // Zeros share their exponent with denormal values.
  void collect(int64_t* histogram, int64_t zeros) const {
    for (int e = 0; e < 255; e++) {
      const int64_t n = int64_t(tables_[0][e]) + tables_[1][e] + tables_[2][e] + tables_[3][e];
      histogram[std::clamp(e - 127, kLowest - 1, kHighest + 1) - (kLowest - 1)] += n;
    }
    histogram[0] -= zeros;
  }

 private:
  int64_t tables_[4][256] = {};
};

void count_exponents(int64_t* histogram, const double* x, int n) {
  for (int i = 0; i < n; i++) {
    uint64_t bits;
    std::memcpy(&bits, x + i, 8);
    const int e = int(bits >> 52 & 0x7ff) - 1023;
    histogram[std::clamp(e, kLowest - 1, kHighest + 1) - (kLowest - 1)]++;
  }
}

// Copies the finite values and counts the others; returns how many it copied.
template <class T>
int keep_finite(TensorStats& out, const T* x, int n, T* kept) {
  int m = 0;
  for (int i = 0; i < n; i++) {
    if (std::isfinite(x[i]))
      kept[m++] = x[i];
    else if (std::isnan(x[i]))
      out.nan++;
    else if (x[i] > 0)
      out.posinf++;
    else
      out.neginf++;
  }
  return m;
}

struct Pass {
  TensorStats& out;
  ExponentCounts exponents;
  alignas(64) float wide[kBlock], clean[kBlock];
  alignas(64) double clean_double[kBlock];
  int64_t zeros = 0;

  explicit Pass(TensorStats& stats) : out(stats) {}

  void take(const float* x, int n) {
    if (!all_finite(reinterpret_cast<const uint32_t*>(x), n)) {
      n = keep_finite(out, x, n, clean);
      x = clean;
    }
    exponents.add(x, n);
    zeros += look_float(out.moments, x, n);
  }

  void take(const double* x, int n) {
    n = keep_finite(out, x, n, clean_double);
    count_exponents(out.histogram, clean_double, n);
    zeros += look_double(out.moments, clean_double, n);
  }

  void block(const char* data, Number kind, int n) {
    auto* bits = reinterpret_cast<uint32_t*>(wide);
    auto* half = reinterpret_cast<const uint16_t*>(data);
    if (kind == Number::kFloat64) return take(reinterpret_cast<const double*>(data), n);
    if (kind == Number::kFloat32) return take(reinterpret_cast<const float*>(data), n);
    kind == Number::kBfloat16 ? widen_bfloat16(half, n, bits) : widen_float16(half, n, bits);
    take(wide, n);
  }
};

int64_t bytes_of(Number kind) { return kind == Number::kFloat64 ? 8 : kind == Number::kFloat32 ? 4 : 2; }

}  // namespace

void Moments::merge(const Moments& b) {
  if (b.count == 0) return;
  if (count == 0) {
    *this = b;
    return;
  }
  const double n = count + b.count, d = b.mean - mean, fa = count / n, fb = b.count / n, d2 = d * d;
  m4 += b.m4 + d2 * d2 * count * fb * (fa * fa - fa * fb + fb * fb) + 6 * d2 * (fa * fa * b.m2 + fb * fb * m2) +
        4 * d * (fa * b.m3 - fb * m3);
  m3 += b.m3 + d2 * d * count * fb * (fa - fb) + 3 * d * (fa * b.m2 - fb * m2);
  m2 += b.m2 + d2 * count * fb;
  mean += d * fb;
  count = n;
  min = std::min(min, b.min);
  max = std::max(max, b.max);
}

void tensor_stats(TensorStats& out, const void* data, Number kind, int64_t rows, int64_t columns, int64_t stride) {
  if (stride == columns) {
    columns *= rows;
    rows = 1;
  }
  auto pass = std::make_unique<Pass>(out);
  const int64_t size = bytes_of(kind);
  for (int64_t r = 0; r < rows; r++) {
    const char* row = static_cast<const char*>(data) + r * stride * size;
    for (int64_t i = 0; i < columns; i += kBlock)
      pass->block(row + i * size, kind, int(std::min<int64_t>(kBlock, columns - i)));
  }
  out.zeros = pass->zeros;
  pass->exponents.collect(out.histogram, pass->zeros);
}

}  // namespace mappnb
