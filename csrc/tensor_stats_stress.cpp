// Native test of the tensor statistics, made for sanitizers (sanitize.sh): odd lengths, strides and values of every
// kind, against a plain loop in long double.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "tensor_stats.hpp"

namespace {

void check(bool good, const char* what, int64_t rows, int64_t columns) {
  if (good) return;
  std::fprintf(stderr, "FAILED: %s (%lld x %lld)\n", what, (long long)rows, (long long)columns);
  std::exit(1);
}

template <class T>
void compare(std::mt19937& random, mappnb::Number kind, int64_t rows, int64_t columns, int64_t gap) {
  const int64_t stride = columns + gap;
  std::vector<T> x(size_t(rows * stride));  // exactly as long as the rows: a read behind them is found
  std::normal_distribution<double> normal(3, 2);
  const T special[] = {T(0),
                       T(-0.0),
                       std::numeric_limits<T>::quiet_NaN(),
                       std::numeric_limits<T>::infinity(),
                       -std::numeric_limits<T>::infinity(),
                       std::numeric_limits<T>::denorm_min()};
  for (auto& v : x) v = random() % 8 ? T(normal(random)) : special[random() % 6];
  mappnb::TensorStats found;
  mappnb::tensor_stats(found, x.data(), kind, rows, columns, stride);
  long double sum = 0, m2 = 0;
  int64_t count = 0, binned = 0;
  const auto each = [&](auto&& fn) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++)
        if (std::isfinite(x[size_t(r * stride + c)])) fn((long double)x[size_t(r * stride + c)]);
  };
  each([&](long double v) { sum += v, count++; });
  each([&](long double v) { m2 += (v - sum / count) * (v - sum / count); });
  for (const int64_t n : found.histogram) binned += n;
  const int64_t apart = found.nan + found.posinf + found.neginf;
  check(found.moments.count == double(count) && count + apart == rows * columns, "counts", rows, columns);
  check(binned + found.zeros == count, "histogram", rows, columns);
  check(count == 0 || std::abs(found.moments.mean - double(sum / count)) < 1e-12 * (1 + std::abs(double(sum / count))),
        "mean", rows, columns);
  check(std::abs(found.moments.m2 - double(m2)) <= 1e-11 * double(m2), "m2", rows, columns);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  std::mt19937 random(1);
  for (int i = 0; i < rounds; i++) {
    const int64_t rows = random() % 5, columns = random() % 2500, gap = random() % 3 ? 0 : random() % 9;
    compare<float>(random, mappnb::Number::kFloat32, rows, columns, gap);
    compare<double>(random, mappnb::Number::kFloat64, rows, columns, gap);
  }
  std::printf("tensor statistics: %d rounds agree\n", rounds);
}
