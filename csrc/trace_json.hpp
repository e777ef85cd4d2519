// Reads trace-event JSON (Chrome, Kineto, MegaScan) that comes in pieces, into columns. Tolerant: what is damaged is
// mended or left out, and counted; an event costs the same however long the file, and the memory does not grow with it.
#pragma once

#include <array>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trace_text.hpp"

namespace mappnb::trace {

enum class Repair : int {
  truncated,
  control_characters,
  unescaped_quotes,
  lost_quotes,
  bad_escapes,
  bad_utf8,
  not_a_number,
  duplicate_keys,
  numbers_as_text,
  out_of_range,
  bad_values,
  missing_commas,
  not_events,
  broken_events,
  oversized_events,
  long_strings,
  junk_bytes,
  count
};
constexpr size_t kRepairs = size_t(Repair::count);
extern const char* const kRepairNames[kRepairs];

enum class Kind : char {
  integer = 'i',
  real = 'f',
  text = 's',
  key = 'k',
  time = 't',
  letter = 'c',
  args = 'a',
  counter = 'r'
};

// A wanted field: of the event, or of its args. `counter`: the args of counter samples (ph C) as they are written.
struct Field {
  std::string name;
  Kind kind;
  bool in_args;
};

struct Column {
  Kind kind;
  std::vector<int64_t> ints;  // integer, key, time
  std::vector<double> reals;
  std::vector<int32_t> texts;  // ids of Names; -1: none
  std::vector<uint8_t> letters;

  // Fills up with "nothing": a column that no event has costs next to nothing.
  void fill(size_t n) {
    if (kind == Kind::real) {
      reals.resize(n, std::numeric_limits<double>::quiet_NaN());
    } else if (kind == Kind::text || kind == Kind::counter) {
      texts.resize(n, -1);
    } else if (kind == Kind::letter) {
      letters.resize(n, 0);
    } else if (kind != Kind::args) {
      ints.resize(n, kMissing);
    }
  }
  void put(size_t row, int64_t whole, double real) {
    if (kind == Kind::real) {
      if (reals.size() < row) fill(row);
      reals.push_back(real);
    } else if (kind == Kind::text || kind == Kind::counter) {
      if (texts.size() < row) fill(row);
      texts.push_back(int32_t(whole));
    } else if (kind == Kind::letter) {
      if (letters.size() < row) fill(row);
      letters.push_back(uint8_t(whole));
    } else if (kind != Kind::args) {
      if (ints.size() < row) fill(row);
      ints.push_back(whole);
    }
  }
};

// Finds a field by its name; at most 128 of them.
class FieldIndex {
 public:
  void add(std::string_view name, int field);
  int find(std::string_view name) const {
    for (size_t i = place(name); slots_[i].field >= 0; i = (i + 1) & 255)
      if (slots_[i].size == name.size() && same(slots_[i].name, name.data(), name.size())) return slots_[i].field;
    return -1;
  }

 private:
  struct Slot {
    const char* name = nullptr;
    size_t size = 0;
    int field = -1;
  };
  static uint64_t word(const char* p, size_t n) {
    uint64_t x = 0;
    std::memcpy(&x, p, n);
    return x;
  }
  static bool same(const char* a, const char* b, size_t n) {  // a call of memcmp costs more than such short names
    if (n < 4) {
      for (size_t i = 0; i < n; i++)
        if (a[i] != b[i]) return false;
      return true;
    }
    if (n < 8) return word(a, 4) == word(b, 4) && word(a + n - 4, 4) == word(b + n - 4, 4);
    for (size_t i = 0; i + 8 <= n; i += 8)
      if (word(a + i, 8) != word(b + i, 8)) return false;
    return word(a + n - 8, 8) == word(b + n - 8, 8);
  }
  static size_t place(std::string_view name) {
    const size_t n = name.size();
    if (n == 0) return 0;
    return (n * 37 + uint8_t(name[0]) * 7 + uint8_t(name[n - 1]) * 131 + uint8_t(name[n / 2]) * 17) & 255;
  }
  std::array<Slot, 256> slots_;
  std::deque<std::string> kept_;
};

class Reader {
 public:
  // `shift`: decimal places from the file's time unit to ns. `hunt`: look for events anywhere, as in a file whose head
  // is lost.
  Reader(std::vector<Field> fields, int shift, bool hunt);
  void feed(const char* data, size_t size);
  void finish();

  size_t rows() const { return rows_; }
  std::vector<Column> take();
  const std::vector<Field>& fields() const { return fields_; }
  const Names& names() const { return names_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::array<int64_t, kRepairs>& repairs() const { return repairs_; }
  int64_t bytes() const { return bytes_; }
  const char* state() const;

 private:
  enum class State { start, object, metadata, events, resync, done };
  enum class Status { ok, more, broken };
  enum class In { key, object, array };

  void run();
  Status advance();
  Status at_start();
  Status in_object();
  Status begin_member(const char* start, std::string name);
  Status in_metadata();
  Status in_events();
  Status in_resync();
  Status at_done();
  Status attempt();
  Status give_up(const char* start, Status why);
  Status closes_array();
  void lose(const char* to);
  void damaged(Repair r);
  void not_cut();

  Status event();
  Status pairs(bool args);
  bool plain_key(std::string_view& out);
  bool plain_number(int field);
  Status value(int field);
  Status args_value();
  Status scalar(int field);
  Status skip_value();
  Status skip_container();
  Status token(std::string_view& out);
  Status string(In in, std::string_view& out);
  Status string_slowly(In in, std::string_view& out);
  Status odd_quote(In in, const char* begin, bool& over);
  Status odd_control(In in, bool& over);
  Status escape();
  Status escape_unicode();
  bool hex4(const char* p, uint32_t& code) const;
  Status ends(const char* p, In in, bool& yes) const;
  Status begins_key(const char* quote, bool& yes) const;
  void keep(const char* from, const char* to);
  Status at_edge() const { return last_ ? Status::ok : Status::more; }  // the data may go on
  void put_text(int field, std::string_view text);
  void put_bare(int field, std::string_view text);
  bool put_decimal(int field, std::string_view text);
  void put_raw(int field, std::string_view text);
  void touch(int field);
  void clear(int field);
  void reset_row();
  void commit();
  void mended(Repair r, int64_t n = 1) { repairs_[size_t(r)] += n; }
  int32_t name_id(std::string_view text);
  void remember(const std::string& key, std::string text);

  std::vector<Field> fields_;
  FieldIndex event_index_, args_index_;
  std::vector<Column> columns_;
  std::vector<int64_t> row_ints_;
  std::vector<double> row_reals_;
  std::vector<uint8_t> row_seen_;
  std::vector<int> row_touched_;
  int phase_field_ = -1, counter_field_ = -1;
  std::string_view args_text_;  // of this event, in the buffer
  bool args_seen_ = false;
  size_t rows_ = 0;
  int shift_;
  Names names_;

  std::string buffer_, scratch_;
  const char *p_ = nullptr, *end_ = nullptr;
  bool last_ = false, uncertain_ = false, bare_ = false, seen_any_ = false, lines_ = false;
  size_t need_ = 0;
  int64_t bytes_ = 0, rescanned_ = 0;
  int64_t cut_bytes_ = -1;  // lost since an event ran into the end of the data; -1: none did
  State state_ = State::start;

  std::map<std::string, std::string> metadata_;
  std::string meta_key_, meta_text_;
  size_t meta_bytes_ = 0;
  int meta_depth_ = 0;
  bool meta_string_ = false, meta_escape_ = false, meta_cut_ = false;
  std::array<int64_t, kRepairs> repairs_{};
};

}  // namespace mappnb::trace
