// From the values of one event to a row of the columns.
#include <limits>

#include "trace_json.hpp"

namespace mappnb::trace {

namespace {
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

bool hex_key(std::string_view text, int64_t& out) {
  if (text.size() < 3 || text.size() > 18 || text[0] != '0' || (text[1] != 'x' && text[1] != 'X')) return false;
  uint64_t x = 0;
  for (const char c : text.substr(2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
    if (digit < 0) return false;
    x = x << 4 | uint64_t(digit);
  }
  out = int64_t(x);
  return true;
}

bool not_a_number(std::string_view text, double& out) {
  const bool negative = !text.empty() && text[0] == '-';
  if (negative) text.remove_prefix(1);
  if (text == "NaN" || text == "nan") {
    out = kNan;
  } else if (text == "Infinity" || text == "inf" || text == "Inf") {
    out = negative ? -kInfinity : kInfinity;
  } else {
    return false;
  }
  return true;
}
}  // namespace

void Reader::clear(int field) {
  row_ints_[size_t(field)] = fields_[size_t(field)].kind == Kind::text     ? -1
                             : fields_[size_t(field)].kind == Kind::letter ? 0
                                                                           : kMissing;
  row_reals_[size_t(field)] = kNan;
}

void Reader::touch(int field) {
  if (row_seen_[size_t(field)]) {
    mended(Repair::duplicate_keys);
    clear(field);
    return;
  }
  row_seen_[size_t(field)] = 1;
  row_touched_.push_back(field);
}

void Reader::reset_row() {
  for (const int field : row_touched_) {
    clear(field);
    row_seen_[size_t(field)] = 0;
  }
  row_touched_.clear();
  args_seen_ = false;
}

int32_t Reader::name_id(std::string_view text) {
  const int32_t id = names_.id(text);
  if (id < 0) {
    mended(Repair::long_strings);
  } else if (names_.damaged(id)) {
    mended(Repair::bad_utf8);
  }
  return id;
}

bool Reader::put_decimal(int field, std::string_view text) {
  const Decimal d = read_decimal(text);
  if (!d.ok) return false;
  const Kind kind = fields_[size_t(field)].kind;
  if (kind == Kind::real) {
    row_reals_[size_t(field)] = to_double(d, text);
    return true;
  }
  const bool time = kind == Kind::time;
  if (!to_int64(d, time ? shift_ : 0, time, row_ints_[size_t(field)])) {
    row_ints_[size_t(field)] = kMissing;
    mended(Repair::out_of_range);
  }
  return true;
}

void Reader::put_text(int field, std::string_view text) {
  const Kind kind = fields_[size_t(field)].kind;
  int64_t& slot = row_ints_[size_t(field)];
  if (kind == Kind::text) {
    slot = name_id(text);
  } else if (kind == Kind::letter) {
    slot = text.empty() ? 0 : uint8_t(text[0]);
  } else if (put_decimal(field, trimmed(text))) {
    if (kind == Kind::time) mended(Repair::numbers_as_text);
  } else if (kind == Kind::key) {
    if (!hex_key(text, slot)) {
      const int32_t id = name_id(text);
      slot = id < 0 ? kMissing : kTextKey + id;
    }
  } else if (double x = 0; kind == Kind::time || !not_a_number(trimmed(text), x)) {
    mended(Repair::bad_values, kind == Kind::time);
  } else if (kind == Kind::real) {
    row_reals_[size_t(field)] = x;
  }
}

void Reader::put_bare(int field, std::string_view text) {
  const Kind kind = fields_[size_t(field)].kind;
  const bool digit = text[0] == '-' || (text[0] >= '0' && text[0] <= '9');
  if (digit && kind != Kind::text && kind != Kind::letter && put_decimal(field, text)) return;
  double x = 0;
  if (text == "null") return;
  if (text == "true" || text == "false") {
    if (kind == Kind::text) put_raw(field, text);
    if (kind == Kind::integer) row_ints_[size_t(field)] = text == "true";
    if (kind == Kind::real) row_reals_[size_t(field)] = text == "true";
    return;
  }
  if (not_a_number(text, x)) {
    mended(Repair::not_a_number);
    if (kind == Kind::real) row_reals_[size_t(field)] = x;
    if (kind == Kind::text) put_raw(field, text);
    return;
  }
  if (kind == Kind::text) {
    put_raw(field, text);
  } else if (kind == Kind::letter || !put_decimal(field, text)) {
    mended(Repair::bad_values);
  }
}

void Reader::put_raw(int field, std::string_view text) {
  if (fields_[size_t(field)].kind == Kind::text) row_ints_[size_t(field)] = name_id(text);
}

void Reader::commit() {
  if (phase_field_ < 0 || row_ints_[size_t(phase_field_)] == 0) {
    damaged(Repair::not_events);
    reset_row();
    return;
  }
  not_cut();
  if (counter_field_ >= 0 && row_ints_[size_t(phase_field_)] == 'C' && !args_text_.empty())
    columns_[size_t(counter_field_)].put(rows_, name_id(args_text_), 0);
  for (const int field : row_touched_) {
    const size_t i = size_t(field);
    if (row_seen_[i] == 0) continue;
    row_seen_[i] = 0;  // twice in the list if its args came twice
    columns_[i].put(rows_, row_ints_[i], row_reals_[i]);
    clear(field);
  }
  row_touched_.clear();
  args_seen_ = false;
  rows_++;
}

std::vector<Column> Reader::take() {
  std::vector<Column> out(fields_.size());
  for (size_t i = 0; i < fields_.size(); i++) {
    out[i].kind = fields_[i].kind;
    columns_[i].fill(rows_);
  }
  out.swap(columns_);
  rows_ = 0;
  return out;
}

}  // namespace mappnb::trace
