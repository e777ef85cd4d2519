// The small parts of reading JSON that may be damaged: runs of plain bytes, numbers without a double between, and names
// kept once. None of them reads beyond the end it is given.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mappnb::trace {

constexpr int64_t kMissing = INT64_MIN;            // an integer or a time that is not there
constexpr int64_t kTextKey = -(int64_t(1) << 62);  // kTextKey + id: a pid, tid or id that is text

inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// Characters that end a number or a word.
struct EndsToken {
  bool yes[256] = {};
  constexpr EndsToken() {
    for (const char c : {',', '}', ']', '"', '{', '[', ' ', '\n', '\t', '\r'}) yes[uint8_t(c)] = true;
  }
};
inline constexpr EndsToken kEndsToken;

inline const char* skip_space(const char* p, const char* end) {
  while (p < end && uint8_t(*p) <= ' ' && is_space(*p)) p++;
  return p;
}

// First quote, backslash or control character at or after p.
inline const char* plain_run(const char* p, const char* end) {
#if defined(__SSE2__)
  const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1f);
  for (; end - p >= 16; p += 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i odd = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(x, quote), _mm_cmpeq_epi8(x, slash)),
                                     _mm_cmpeq_epi8(_mm_min_epu8(x, control), x));
    if (const int mask = _mm_movemask_epi8(odd)) return p + __builtin_ctz(unsigned(mask));
  }
#endif
  while (p < end && *p != '"' && *p != '\\' && uint8_t(*p) > 0x1f) p++;
  return p;
}

// A decimal number, exact up to 38 digits.
struct Decimal {
  bool ok = false, negative = false, integral = true;
  unsigned __int128 digits = 0;
  int exponent = 0;  // value = digits * 10^exponent
};

Decimal read_decimal(std::string_view text);
// The value times 10^shift, rounded half away from zero or cut towards zero; false beyond 64 bits.
bool to_int64(const Decimal& d, int shift, bool round, int64_t& out);
double to_double(const Decimal& d, std::string_view text);
bool valid_utf8(std::string_view text);
void append_utf8(std::string& out, uint32_t code);

// Texts by number, each kept once.
class Names {
 public:
  Names() : table_(1024, -1) {}
  int32_t id(std::string_view text);
  std::string_view operator[](size_t i) const { return texts_[i]; }
  bool damaged(int32_t i) const { return damaged_[size_t(i)]; }
  size_t size() const { return texts_.size(); }
  bool full() const { return bytes_ > kMaxBytes; }

 private:
  static constexpr size_t kMaxBytes = size_t(256) << 20;
  static constexpr size_t kBlock = size_t(1) << 18;
  void grow();
  std::string_view keep(std::string_view text);
  std::vector<int32_t> table_;
  std::vector<uint64_t> hashes_;
  std::vector<std::string_view> texts_;
  std::vector<bool> damaged_;
  std::deque<std::string> blocks_;
  size_t bytes_ = 0;
};

}  // namespace mappnb::trace
