// One event: its pairs, the strings and numbers in them, and what to make of damaged ones.
#include <algorithm>

#include "trace_json.hpp"

namespace mappnb::trace {

namespace {
constexpr size_t kMaxString = size_t(1) << 20;
constexpr int kMaxKey = 64;
constexpr int kPlainDigits = 19;  // fit into 64 bits without a sign

bool key_char(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }
bool between(char c) { return is_space(c) || std::memchr(".()%/-:", c, 7) != nullptr; }
}  // namespace

Reader::Status Reader::event() {
  args_text_ = {};
  const Status s = pairs(false);
  if (s == Status::ok) commit();
  return s;
}

Reader::Status Reader::pairs(bool args) {
  const FieldIndex& index = args ? args_index_ : event_index_;
  bool comma = true;
  p_++;
  while (true) {
    p_ = skip_space(p_, end_);
    if (p_ == end_) return Status::more;
    if (*p_ == '}') {
      p_++;
      return Status::ok;
    }
    if (*p_ == ',') {
      comma = true;
      p_++;
      continue;
    }
    if (*p_ != '"') return Status::broken;
    if (!comma) mended(Repair::missing_commas);
    comma = false;
    std::string_view key;
    if (!plain_key(key)) {
      if (const Status s = string(In::key, key); s != Status::ok) return s;
      p_ = skip_space(p_, end_);
      if (p_ == end_) return Status::more;
      if (*p_++ != ':') return Status::broken;
    }
    const int field = index.find(key);
    p_ = skip_space(p_, end_);
    if (p_ == end_) return Status::more;
    const Status s = field < 0                                   ? skip_value()
                     : fields_[size_t(field)].kind == Kind::args ? args_value()
                                                                 : scalar(field);
    if (s != Status::ok) return s;
  }
}

// Reads a key as nearly all are, up to behind its colon; false, and nothing read, for any other.
inline bool Reader::plain_key(std::string_view& out) {
  const char* const begin = p_ + 1;
  const char* const q = plain_run(begin, end_);
  if (end_ - q < 2 || q[0] != '"' || q[1] != ':') return false;
  out = std::string_view(begin, size_t(q - begin));
  p_ = q + 2;
  return true;
}

// Reads a number as nearly all are: of digits only, but for times with as many decimals as they may have; false, and
// nothing read, for any other.
inline bool Reader::plain_number(int field) {
  const Kind kind = fields_[size_t(field)].kind;
  if (kind != Kind::time && kind != Kind::integer && kind != Kind::key) return false;
  const char* p = p_;
  const char* const most = end_ - p > kPlainDigits + 2 ? p + kPlainDigits + 2 : end_;
  uint64_t x = 0;
  while (p < most && *p >= '0' && *p <= '9') x = x * 10 + uint64_t(*p++ - '0');
  int64_t digits = p - p_, decimals = 0;
  if (digits == 0 || p == most) return false;
  if (kind == Kind::time) {
    if (*p == '.')
      for (p++; p < most && *p >= '0' && *p <= '9'; decimals++) x = x * 10 + uint64_t(*p++ - '0');
    digits += shift_;
    if (p == most || decimals > shift_) return false;
    for (; decimals < shift_; decimals++) x *= 10;
  }
  if (digits > kPlainDigits || x > uint64_t(INT64_MAX) || !kEndsToken.yes[uint8_t(*p)]) return false;
  row_ints_[size_t(field)] = int64_t(x);
  p_ = p;
  return true;
}

Reader::Status Reader::args_value() {
  for (size_t i = 0; args_seen_ && i < fields_.size(); i++)
    if (fields_[i].in_args && row_seen_[i]) {  // a second set of args replaces the first
      clear(int(i));
      row_seen_[i] = 0;
      mended(Repair::duplicate_keys);
    }
  args_seen_ = true;
  const char* const begin = p_;
  const Status s = *p_ == '{' ? pairs(true) : skip_value();
  if (s == Status::ok) args_text_ = std::string_view(begin, size_t(p_ - begin));
  return s;
}

Reader::Status Reader::token(std::string_view& out) {
  const char* const begin = p_;
  while (p_ < end_ && !kEndsToken.yes[uint8_t(*p_)]) p_++;
  if (p_ == end_) return Status::more;
  out = std::string_view(begin, size_t(p_ - begin));
  if (out.empty()) mended(Repair::bad_values);
  return Status::ok;
}

Reader::Status Reader::scalar(int field) {
  touch(field);
  std::string_view text;
  if (*p_ == '"') {
    const Status s = string(In::object, text);
    if (s == Status::ok) put_text(field, text);
    return s;
  }
  if (*p_ == '{' || *p_ == '[') {
    const char* const begin = p_;
    const Status s = skip_container();
    if (s == Status::ok) put_raw(field, std::string_view(begin, size_t(p_ - begin)));
    return s;
  }
  if (plain_number(field)) return Status::ok;
  const Status s = token(text);
  if (s == Status::ok && !text.empty()) put_bare(field, text);
  return s;
}

Reader::Status Reader::skip_value() {
  std::string_view text;
  if (*p_ == '"') return string(In::object, text);
  if (*p_ == '{' || *p_ == '[') return skip_container();
  return token(text);
}

Reader::Status Reader::skip_container() {
  std::string_view text;
  for (int64_t depth = 0; p_ < end_;) {
    const char c = *p_;
    if (c == '"') {
      if (const Status s = string(In::array, text); s != Status::ok) return s;
      continue;
    }
    p_++;
    if (c == '{' || c == '[') depth++;
    if ((c == '}' || c == ']') && --depth == 0) return Status::ok;
  }
  return Status::more;
}

// Whether a quote before p can be the end of a string: by what follows it.
Reader::Status Reader::ends(const char* p, In in, bool& yes) const {
  const char* q = skip_space(p, end_);
  yes = true;
  if (q == end_) return at_edge();
  const char c = *q;
  if (in == In::key) {
    yes = c == ':';
  } else if (in == In::array) {
    yes = c == ',' || c == '}' || c == ']' || c == ':';
  } else if (c == ',') {
    q = skip_space(q + 1, end_);
    if (q == end_) return at_edge();
    yes = *q == '"' || *q == '}';
  } else if (c == '"') {
    return begins_key(q, yes);
  } else {
    yes = c == '}';
  }
  return Status::ok;
}

Reader::Status Reader::begins_key(const char* quote, bool& yes) const {
  const char* q = quote + 1;
  const char* const most = end_ - q > kMaxKey ? q + kMaxKey : end_;
  yes = false;
  while (q < most && (key_char(*q) || between(*q))) q++;
  if (q == end_) return at_edge();
  if (q == quote + 1 || q == most || *q != '"') return Status::ok;
  q = skip_space(q + 1, end_);
  if (q == end_) return at_edge();
  yes = *q == ':';
  return Status::ok;
}

Reader::Status Reader::string(In in, std::string_view& out) {
  const char* const begin = p_ + 1;
  const char* const q = plain_run(begin, end_);
  if (q < end_ && *q == '"') {
    bool yes = in == In::object && end_ - q > 3 &&
               (q[1] == '}' || (q[1] == ',' && (q[2] == '"' || (q[2] == ' ' && q[3] == '"'))));
    if (yes) {
      out = std::string_view(begin, size_t(q - begin));
      p_ = q + 1;
      return Status::ok;
    }
    if (const Status s = ends(q + 1, in, yes); s != Status::ok) return s;
    if (yes) {
      out = std::string_view(begin, size_t(q - begin));
      p_ = q + 1;
      return Status::ok;
    }
  }
  return string_slowly(in, out);
}

void Reader::keep(const char* from, const char* to) {
  const size_t room = kMaxString - std::min(kMaxString, scratch_.size());
  scratch_.append(from, std::min(room, size_t(to - from)));
}

Reader::Status Reader::string_slowly(In in, std::string_view& out) {
  const char* const begin = ++p_;
  scratch_.clear();
  for (bool over = false; !over;) {
    const char* const q = plain_run(p_, end_);
    keep(p_, q);
    p_ = q;
    if (p_ == end_) return Status::more;
    const Status s = *p_ == '"' ? odd_quote(in, begin, over) : *p_ == '\\' ? escape() : odd_control(in, over);
    if (s != Status::ok) return s;
  }
  if (scratch_.size() >= kMaxString) mended(Repair::long_strings);
  out = scratch_;
  return Status::ok;
}

// A quote inside a string: its end, one that should have been escaped, or the first of a key, the string's own end
// being lost.
Reader::Status Reader::odd_quote(In in, const char* begin, bool& over) {
  if (const Status s = ends(p_ + 1, in, over); s != Status::ok) return s;
  if (over) {
    p_++;
    return Status::ok;
  }
  const char* cut = p_;
  auto back = [&](char wanted) {
    const char* q = cut;
    for (int i = 0; i < kMaxKey && q > begin && is_space(q[-1]); i++) q--;
    const bool found = q > begin && q[-1] == wanted;
    if (found) cut = q - 1;
    return found;
  };
  const bool next_event = in != In::key && back('{') && back(',') && back('}');
  while (next_event && back('}')) {
  }
  if (!next_event) cut = p_;
  if (next_event || (in != In::key && back(','))) {
    bool key = false;
    if (const Status s = begins_key(p_, key); s != Status::ok) return s;
    if (key && scratch_.size() >= size_t(p_ - cut) && scratch_.size() < kMaxString) {
      mended(Repair::lost_quotes);
      scratch_.resize(scratch_.size() - size_t(p_ - cut));
      p_ = cut;
      over = true;
      return Status::ok;
    }
  }
  mended(Repair::unescaped_quotes);
  keep(p_, p_ + 1);
  p_++;
  return Status::ok;
}

// A raw control character. A line break before the end of the event tells of a lost quote.
Reader::Status Reader::odd_control(In in, bool& over) {
  const char* q = p_ + 1;
  if (*p_ == '\n' && in == In::object) {
    q = skip_space(q, end_);
    if (q == end_) {
      if (!last_) return Status::more;
    } else if (*q == '}') {
      const char* r = skip_space(q + 1, end_);
      if (r == end_ && !last_) return Status::more;
      over = r == end_ || *r == ',' || *r == ']' || *r == '}';
    }
  }
  if (over) {
    mended(Repair::lost_quotes);
    p_ = q;
    return Status::ok;
  }
  mended(Repair::control_characters);
  keep(p_, q);
  p_ = q;
  return Status::ok;
}

Reader::Status Reader::escape() {
  if (end_ - p_ < 2) return Status::more;
  static constexpr char kFrom[] = "\"\\/bfnrt", kTo[] = "\"\\/\b\f\n\r\t";
  if (p_[1] == 'u') return escape_unicode();
  const void* found = p_[1] ? std::memchr(kFrom, p_[1], 8) : nullptr;
  if (!found) {
    mended(Repair::bad_escapes);
    keep(p_, p_ + 1);
    p_++;
    return Status::ok;
  }
  const char c = kTo[static_cast<const char*>(found) - kFrom];
  keep(&c, &c + 1);
  p_ += 2;
  return Status::ok;
}

bool Reader::hex4(const char* p, uint32_t& code) const {
  code = 0;
  for (int i = 0; i < 4; i++) {
    const char c = p[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return false;
    code = code * 16 + uint32_t(digit);
  }
  return true;
}

Reader::Status Reader::escape_unicode() {
  if (end_ - p_ < 12 && !last_) return Status::more;
  uint32_t code = 0, low = 0;
  if (end_ - p_ < 6 || !hex4(p_ + 2, code)) {
    mended(Repair::bad_escapes);
    keep(p_, p_ + 1);
    p_++;
    return Status::ok;
  }
  p_ += 6;
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (surrogate && code < 0xdc00 && end_ - p_ >= 6 && p_[0] == '\\' && p_[1] == 'u' && hex4(p_ + 2, low) &&
      low >= 0xdc00 && low < 0xe000) {
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    p_ += 6;
  } else if (surrogate) {
    mended(Repair::bad_escapes);
    code = 0xfffd;
  }
  if (scratch_.size() < kMaxString) append_utf8(scratch_, code);
  return Status::ok;
}

}  // namespace mappnb::trace
