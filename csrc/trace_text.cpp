#include "trace_text.hpp"

#include <cstdlib>

namespace mappnb::trace {

namespace {

constexpr int kMaxDigits = 38;

uint64_t hash_of(std::string_view text) {
  uint64_t h = 0x9e3779b97f4a7c15u ^ text.size();
  const char* p = text.data();
  size_t n = text.size();
  auto mix = [&h](uint64_t x) {
    const unsigned __int128 product = (unsigned __int128)(h ^ x) * 0xd6e8feb86659fd93u;
    h = uint64_t(product) ^ uint64_t(product >> 64);
  };
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    mix(x);
  }
  uint64_t x = 0;
  std::memcpy(&x, p, n);
  mix(x + n);
  return h;
}

// Reads digits from p; digits beyond what is exact only move the exponent.
const char* read_digits(const char* p, const char* end, bool fraction, Decimal& d, int& kept, bool& any) {
  for (; p < end && *p >= '0' && *p <= '9'; p++) {
    any = true;
    if (kept < kMaxDigits) {
      d.digits = d.digits * 10 + unsigned(*p - '0');
      kept += d.digits != 0;
      d.exponent -= fraction;
    } else {
      d.exponent += !fraction;
    }
  }
  return p;
}

}  // namespace

Decimal read_decimal(std::string_view text) {
  Decimal d;
  const char *p = text.data(), *end = p + text.size();
  if (p < end && (*p == '-' || *p == '+')) d.negative = *p++ == '-';
  uint64_t fast = 0;
  const char* first = p;
  while (p < end && p - first < 18 && *p >= '0' && *p <= '9') fast = fast * 10 + uint64_t(*p++ - '0');
  d.digits = fast;
  bool any = p > first;
  if (p == end) {
    d.ok = any;
    return d;
  }
  int kept = fast ? int(p - first) : 0;
  p = read_digits(p, end, false, d, kept, any);
  if (p < end && *p == '.') {
    d.integral = false;
    p = read_digits(p + 1, end, true, d, kept, any);
  }
  if (any && p < end && (*p == 'e' || *p == 'E')) {
    d.integral = false;
    bool down = false;
    if (++p < end && (*p == '-' || *p == '+')) down = *p++ == '-';
    any = p < end;
    int power = 0;
    for (; p < end && *p >= '0' && *p <= '9'; p++) power = power < 100000 ? power * 10 + (*p - '0') : power;
    d.exponent += down ? -power : power;
  }
  d.ok = any && p == end;
  return d;
}

bool to_int64(const Decimal& d, int shift, bool round, int64_t& out) {
  unsigned __int128 x = d.digits;
  int e = d.exponent + shift;
  const unsigned __int128 most = (unsigned __int128)1 << 63;
  for (; e > 0 && x != 0; e--) {
    if (x > most) return false;
    x *= 10;
  }
  unsigned last = 0;
  for (; e < 0 && (x != 0 || last != 0); e++) {
    last = unsigned(x % 10);
    x /= 10;
  }
  if (round && last >= 5) x++;
  if (x >= most) return false;
  out = d.negative ? -int64_t(x) : int64_t(x);
  return true;
}

double to_double(const Decimal& d, std::string_view text) {
  if (d.exponent == 0 && d.digits < ((unsigned __int128)1 << 53)) {
    const double x = double(uint64_t(d.digits));
    return d.negative ? -x : x;
  }
  return std::strtod(std::string(text).c_str(), nullptr);
}

bool valid_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const auto* end = p + text.size();
  while (p < end) {
    const uint8_t c = *p++;
    if (c < 0x80) continue;
    const int more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
    if (c < 0xc2 || c > 0xf4 || end - p < more) return false;
    if ((c == 0xe0 && p[0] < 0xa0) || (c == 0xed && p[0] > 0x9f)) return false;
    if ((c == 0xf0 && p[0] < 0x90) || (c == 0xf4 && p[0] > 0x8f)) return false;
    for (int i = 0; i < more; i++)
      if ((*p++ & 0xc0) != 0x80) return false;
  }
  return true;
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += char(0xc0 | code >> 6);
    out += char(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    out += char(0xe0 | code >> 12);
    out += char(0x80 | (code >> 6 & 0x3f));
    out += char(0x80 | (code & 0x3f));
  } else {
    out += char(0xf0 | code >> 18);
    out += char(0x80 | (code >> 12 & 0x3f));
    out += char(0x80 | (code >> 6 & 0x3f));
    out += char(0x80 | (code & 0x3f));
  }
}

std::string_view Names::keep(std::string_view text) {
  if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < text.size()) {
    blocks_.emplace_back();
    blocks_.back().reserve(text.size() > kBlock ? text.size() : kBlock);
  }
  std::string& block = blocks_.back();
  const size_t at = block.size();
  block.append(text);  // within the capacity: nothing moves
  bytes_ += text.size() + 32;
  return std::string_view(block).substr(at);
}

int32_t Names::id(std::string_view text) {
  const uint64_t h = hash_of(text);
  const size_t mask = table_.size() - 1;
  size_t slot = h & mask;
  for (; table_[slot] >= 0; slot = (slot + 1) & mask) {
    const size_t i = size_t(table_[slot]);
    if (hashes_[i] == h && texts_[i] == text) return int32_t(i);
  }
  if (full()) return -1;
  table_[slot] = int32_t(texts_.size());
  texts_.push_back(keep(text));
  hashes_.push_back(h);
  damaged_.push_back(!valid_utf8(text));
  if (texts_.size() * 2 > table_.size()) grow();
  return int32_t(texts_.size() - 1);
}

void Names::grow() {
  table_.assign(table_.size() * 2, -1);
  for (size_t i = 0; i < hashes_.size(); i++) {
    size_t slot = hashes_[i] & (table_.size() - 1);
    while (table_[slot] >= 0) slot = (slot + 1) & (table_.size() - 1);
    table_[slot] = int32_t(i);
  }
}

}  // namespace mappnb::trace
