// The document around the events: what is an array of events, what is metadata, and where to go on after damage.
#include "trace_json.hpp"

#include <algorithm>

namespace mappnb::trace {

namespace {
constexpr size_t kMaxEvent = size_t(4) << 20;      // an event longer than this is damage
constexpr size_t kMaxMetaValue = size_t(1) << 16;  // metadata is kept up to here
constexpr size_t kMaxMeta = size_t(1) << 20;
constexpr int64_t kRescanFree = int64_t(64) << 20;  // reading again after damage: 4 times the data and this
constexpr int kLookBack = 64;
}  // namespace

const char* const kRepairNames[kRepairs] = {
    "truncated",    "control_characters", "unescaped_quotes", "lost_quotes",  "bad_escapes", "bad_utf8",
    "not_a_number", "duplicate_keys",     "numbers_as_text",  "out_of_range", "bad_values",  "missing_commas",
    "not_events",   "broken_events",      "oversized_events", "long_strings", "junk_bytes"};

void FieldIndex::add(std::string_view name, int field) {
  size_t i = place(name);
  while (slots_[i].field >= 0) i = (i + 1) & 255;
  kept_.emplace_back(name);
  slots_[i] = {kept_.back().data(), name.size(), field};
}

Reader::Reader(std::vector<Field> fields, int shift, bool hunt)
    : fields_(std::move(fields)), columns_(fields_.size()), shift_(shift) {
  row_ints_.assign(fields_.size(), kMissing);
  row_reals_.assign(fields_.size(), 0);
  row_seen_.assign(fields_.size(), 0);
  for (size_t i = 0; i < fields_.size(); i++) {
    columns_[i].kind = fields_[i].kind;
    if (fields_[i].kind == Kind::counter) {
      counter_field_ = int(i);
    } else {
      (fields_[i].in_args ? args_index_ : event_index_).add(fields_[i].name, int(i));
    }
    if (fields_[i].kind == Kind::letter && fields_[i].name == "ph") phase_field_ = int(i);
    clear(int(i));
  }
  if (hunt) state_ = State::resync, uncertain_ = true;
}

const char* Reader::state() const {
  static const char* const names[] = {"start", "object", "metadata", "events", "resync", "done"};
  return names[int(state_)];
}

void Reader::feed(const char* data, size_t size) {
  bytes_ += int64_t(size);
  buffer_.append(data, size);
  if (buffer_.size() >= need_) run();
}

void Reader::finish() {
  last_ = true;
  run();
  if (state_ == State::metadata) remember(meta_key_, meta_text_);
  if (state_ != State::done && state_ != State::resync && bytes_ > 0 && !lines_ &&
      repairs_[size_t(Repair::truncated)] == 0)
    mended(Repair::truncated);
}

void Reader::run() {
  p_ = buffer_.data();
  end_ = p_ + buffer_.size();
  need_ = 0;
  while (advance() == Status::ok) {
  }
  buffer_.erase(0, size_t(p_ - buffer_.data()));
}

Reader::Status Reader::advance() {
  switch (state_) {
    case State::start:
      return at_start();
    case State::object:
      return in_object();
    case State::metadata:
      return in_metadata();
    case State::events:
      return in_events();
    case State::resync:
      return in_resync();
    default:
      return at_done();
  }
}

void Reader::lose(const char* to) {
  if (cut_bytes_ >= 0) {
    cut_bytes_ += to - p_;
  } else {
    mended(Repair::junk_bytes, to - p_);
  }
  p_ = to;
}

// Counts an event that is left out, but not the pieces of one that ran into the end of the data.
void Reader::damaged(Repair r) {
  if (cut_bytes_ < 0) mended(r);
}

// Another event after one that seemed cut off: it was damaged, then, not cut.
void Reader::not_cut() {
  if (cut_bytes_ < 0) return;
  mended(Repair::truncated, -1);
  mended(Repair::broken_events);
  mended(Repair::junk_bytes, cut_bytes_);
  cut_bytes_ = -1;
}

Reader::Status Reader::at_start() {
  p_ = skip_space(p_, end_);
  if (!last_ && end_ - p_ < 3) return Status::more;
  if (end_ - p_ >= 3 && std::memcmp(p_, "\xef\xbb\xbf", 3) == 0) p_ += 3;
  p_ = skip_space(p_, end_);
  if (p_ == end_) return Status::more;
  if (*p_ == '{' || *p_ == '[') {
    bare_ = *p_ == '[';
    state_ = bare_ ? State::events : State::object;
    seen_any_ = bare_;
    p_ += bare_;  // of an object the brace is kept until its first key is known
    return Status::ok;
  }
  state_ = State::resync;
  uncertain_ = true;
  return Status::ok;
}

Reader::Status Reader::in_object() {
  const char* const start = p_;
  p_ = skip_space(p_ + (!seen_any_ && *p_ == '{'), end_);
  while (p_ < end_ && *p_ == ',') p_ = skip_space(p_ + 1, end_);
  auto more = [&] {
    p_ = start;
    return Status::more;
  };
  if (p_ == end_) return more();
  if (*p_ == '}') {
    seen_any_ = true;
    p_++;
    state_ = State::done;
    return Status::ok;
  }
  std::string_view key;
  Status s = *p_ == '"' ? string(In::key, key) : Status::broken;
  if (s == Status::more && !last_ && size_t(end_ - start) < kMaxEvent) return more();
  if (s == Status::ok) {
    const Status begun = begin_member(start, std::string(key));
    return begun == Status::more ? more() : begun;
  }
  seen_any_ = true;
  p_ = start;
  state_ = State::resync;
  uncertain_ = true;
  return Status::ok;
}

// After a key: its events, its metadata, or no document at all but events one after the other.
Reader::Status Reader::begin_member(const char* start, std::string name) {
  p_ = skip_space(p_, end_);
  if (p_ < end_ && *p_ == ':') p_ = skip_space(p_ + 1, end_);
  if (p_ == end_) return Status::more;
  if (!seen_any_ && event_index_.find(name) >= 0) {
    p_ = start;
    state_ = State::events;
    uncertain_ = seen_any_ = lines_ = true;
    return Status::ok;
  }
  seen_any_ = true;
  const bool events = name == "traceEvents" && *p_ == '[';
  if (events) p_++;
  state_ = events ? State::events : State::metadata;
  meta_key_ = std::move(name);
  meta_text_.clear();
  meta_depth_ = 0;
  meta_string_ = meta_escape_ = meta_cut_ = false;
  return Status::ok;
}

Reader::Status Reader::in_metadata() {
  const char* const from = p_;
  bool over = false;
  for (; p_ < end_ && !over; p_++) {
    const char c = *p_;
    if (meta_string_) {
      if (meta_escape_) {
        meta_escape_ = false;
      } else if (c == '\\') {
        meta_escape_ = true;
      } else if (c == '"') {
        meta_string_ = false;
        over = meta_depth_ == 0;
      }
    } else if (c == '"') {
      meta_string_ = true;
    } else if (c == '{' || c == '[') {
      meta_depth_++;
    } else if (c == '}' || c == ']') {
      if (meta_depth_ == 0) break;
      over = --meta_depth_ == 0;
    } else if (c == ',' && meta_depth_ == 0) {
      break;
    }
  }
  const size_t room = kMaxMetaValue > meta_text_.size() ? kMaxMetaValue - meta_text_.size() : 0;
  meta_cut_ = meta_cut_ || size_t(p_ - from) > room;
  meta_text_.append(from, std::min(room, size_t(p_ - from)));
  if (p_ == end_ && !over) return Status::more;
  if (meta_cut_) mended(Repair::long_strings);
  remember(meta_key_, meta_text_);
  state_ = State::object;
  return Status::ok;
}

void Reader::remember(const std::string& key, std::string text) {
  while (!text.empty() && is_space(text.back())) text.pop_back();
  if (meta_bytes_ + key.size() + text.size() > kMaxMeta) {
    mended(Repair::long_strings);
    return;
  }
  meta_bytes_ += key.size() + text.size();
  metadata_[key] = std::move(text);
}

Reader::Status Reader::in_events() {
  while (p_ < end_ && (is_space(*p_) || *p_ == ',')) p_++;
  if (p_ == end_) return Status::more;
  if (*p_ == '{') return attempt();
  if (*p_ == ']') {
    const Status s = uncertain_ ? closes_array() : Status::ok;
    if (s == Status::more) return s;
    if (s == Status::ok) {
      p_++;
      state_ = bare_ ? State::done : State::object;
      return Status::ok;
    }
  }
  lose(p_ + 1);
  uncertain_ = true;
  state_ = State::resync;
  return Status::ok;
}

// After damage a bracket may be one inside an event: it closes the array only if what follows fits.
Reader::Status Reader::closes_array() {
  const char* q = skip_space(p_ + 1, end_);
  if (q == end_) return last_ ? Status::ok : Status::more;
  if (*q == '}') return Status::ok;
  if (*q != ',' || bare_) return Status::broken;
  q = skip_space(q + 1, end_);
  if (q == end_) return last_ ? Status::ok : Status::more;
  return *q == '"' ? Status::ok : Status::broken;
}

Reader::Status Reader::attempt() {
  const char* const start = p_;
  const auto before = repairs_;
  const size_t rows = rows_;
  const Status s = event();
  if (s == Status::ok) {
    const bool wrapper = rows_ == rows && uncertain_ && rescanned_ <= 4 * bytes_ + kRescanFree;
    if (!wrapper) return s;
    rescanned_ += p_ - start;  // no event, but after damage events may lie in it
    p_ = start;
    lose(start + 1);
    state_ = State::resync;
    return s;
  }
  repairs_ = before;
  reset_row();
  if (s == Status::more && !last_ && size_t(end_ - start) < kMaxEvent) {
    p_ = start;
    need_ = 2 * size_t(end_ - start);
    return s;
  }
  return give_up(start, s);
}

// Leaves an event out and looks for the next one: inside it too, as long as that has not become expensive.
Reader::Status Reader::give_up(const char* start, Status why) {
  const bool cut = why != Status::broken && last_;
  damaged(why == Status::broken ? Repair::broken_events : last_ ? Repair::truncated : Repair::oversized_events);
  if (cut && cut_bytes_ < 0) cut_bytes_ = 0;
  const char* reached = why == Status::broken ? p_ : end_;
  rescanned_ += reached - start;
  p_ = start;
  lose(rescanned_ <= 4 * bytes_ + kRescanFree ? start + 1 : std::max(start + 1, reached));
  uncertain_ = true;
  state_ = State::resync;
  return Status::ok;
}

Reader::Status Reader::in_resync() {
  while (true) {
    const void* found = p_ < end_ ? std::memchr(p_, '{', size_t(end_ - p_)) : nullptr;
    if (!found) {
      lose(end_);
      return Status::more;
    }
    const char* brace = static_cast<const char*>(found);
    const char* before = brace;
    for (int i = 0; i < kLookBack && before > buffer_.data() && is_space(before[-1]); i++) before--;
    const bool fits = before == buffer_.data() || std::memchr(",[}\"]", before[-1], 5) || is_space(before[-1]);
    const char* after = skip_space(brace + 1, end_);
    if (after == end_ && !last_ && size_t(end_ - brace) < kMaxEvent) {
      lose(brace);
      return Status::more;
    }
    if (fits && after < end_ && *after == '"') {
      lose(brace);
      state_ = State::events;
      return Status::ok;
    }
    lose(brace + 1);
  }
}

Reader::Status Reader::at_done() {
  p_ = skip_space(p_, end_);
  if (p_ == end_) return Status::more;
  uncertain_ = true;
  state_ = State::resync;
  return Status::ok;
}

}  // namespace mappnb::trace
