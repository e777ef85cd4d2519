// The second half of selftime.hpp: calls of the transfers that the rows of all ranks hold.
#include <algorithm>

#include "selftime.hpp"

namespace mappnb {

SelfTime::SelfTime(int64_t ranks, int64_t passes) : columns(size_t(ranks)), united_(size_t(passes)) {
  for (int64_t i = 0; i < passes; i++) passes_.push_back(std::make_unique<RankPass>());
}

void SelfTime::begin(int32_t first_step, int32_t last_step) {
  for (auto& pass : passes_) pass->begin(first_step, last_step);
  for (ColumnCells& c : columns) {
    c.of.clear();
    c.shares.clear();
    c.entries = {};
    c.pieces.clear();
    c.pass = 0;
  }
  steps.clear();
  channels.clear();
  are_united_ = calls_known_ = renumbered_ = false;
}

void SelfTime::end_rank(int64_t pass, int64_t column) {
  columns[size_t(column)].pass = size_t(pass);
  passes_[size_t(pass)]->end_rank(columns[size_t(column)]);
}

template <class F>
void SelfTime::each_entry(F take) {
  for (size_t c = 0; c < columns.size(); c++)
    for (Entry& e : columns[c].entries) take(e, int32_t(c));
}

void SelfTime::unite() {
  if (are_united_) return;
  are_united_ = true;
  std::unordered_map<int32_t, int32_t> known, parts_known;
  for (size_t i = 0; i < parts.size(); i++) parts_known[parts[i].kind * 65536 + parts[i].stage + 1] = int32_t(i);
  for (size_t p = 0; p < passes_.size(); p++) {
    united_[p].steps.clear();
    for (const int32_t step : passes_[p]->steps) {
      const auto [at, is_new] = known.try_emplace(step, int32_t(steps.size()));
      if (is_new) steps.push_back(step);
      united_[p].steps.push_back(at->second);
    }
    united_[p].parts.clear();
    for (const Part& part : passes_[p]->parts) {
      const auto [at, is_new] = parts_known.try_emplace(part.kind * 65536 + part.stage + 1, int32_t(parts.size()));
      if (is_new) parts.push_back(part);
      united_[p].parts.push_back(at->second);
    }
  }
  unite_channels();
  first_entry_.assign(columns.size() + 1, 0);
  for (size_t c = 0; c < columns.size(); c++)
    first_entry_[c + 1] = first_entry_[c] + int64_t(columns[c].entries.size());
}

// Channels of all passes, with the numbers that their transfers have; entries get the numbers of these channels.
void SelfTime::unite_channels() {
  Channels known;
  for (size_t p = 0; p < passes_.size(); p++) {
    united_[p].channels.clear();
    for (const Channel& c : passes_[p]->channels.all) {
      const int32_t number = known.number(c.group, c.source, c.target);
      Channel& all = known.all[number];
      all.least = std::min(all.least, c.least);
      all.most = std::max(all.most, c.most);
      all.count += c.count;
      united_[p].channels.push_back(number);
    }
  }
  channels.swap(known.all);
  if (passes_.size() == 1) return;
  for (ColumnCells& c : columns) {
    const std::vector<int32_t>& to = united_[c.pass].channels;
    for (Entry& e : c.entries) e.channel = to[size_t(e.channel)];
  }
}

int64_t SelfTime::num_entries() {
  unite();
  return first_entry_.back();
}

SelfTime::Place SelfTime::place(int64_t entry) {
  unite();
  const auto after = std::upper_bound(first_entry_.begin(), first_entry_.end(), entry);
  const int64_t column = after - first_entry_.begin() - 1;
  return {column, entry - first_entry_[size_t(column)]};
}

int64_t SelfTime::find(const Entry& e) const {
  const Channel& c = channels[e.channel];
  if (e.seq < c.least || e.seq > c.most || e.seq < 0 || (c.by_order && !is_transfer(e.kind))) return -1;
  if (!c.wide) return c.offset + e.seq - c.least;
  const auto& few = numbers_[e.channel];
  const auto at = std::lower_bound(few.begin(), few.end(), e.seq);
  return at != few.end() && *at == e.seq ? c.offset + (at - few.begin()) : -1;
}

// Numbers were changed: count them again.
void SelfTime::count_numbers() {
  for (Channel& c : channels) c.least = INT64_MAX, c.most = -1, c.count = 0;
  each_entry([&](Entry& e, int32_t) {
    if (is_transfer(e.kind)) channels[e.channel].count_in(e.seq);
  });
}

// Where the calls of each channel lie, side by side; channels with few numbers in a wide range list them.
void SelfTime::place_calls() {
  if (renumbered_) count_numbers();
  bool any = false;
  for (Channel& c : channels) any |= c.wide = c.count && (c.most - c.least) / 4 > c.count + 64;
  numbers_.assign(any ? channels.size() : 0, std::vector<int64_t>());
  if (any) {
    each_entry([&](Entry& e, int32_t) {
      if (is_transfer(e.kind) && e.seq >= 0 && channels[e.channel].wide) numbers_[e.channel].push_back(e.seq);
    });
    for (auto& few : numbers_) {
      std::sort(few.begin(), few.end());
      few.erase(std::unique(few.begin(), few.end()), few.end());
    }
  }
  int64_t at = 0;
  for (size_t c = 0; c < channels.size(); c++) {
    channels[c].offset = at;
    const int64_t dense = channels[c].count ? channels[c].most - channels[c].least + 1 : 0;
    at += channels[c].wide ? int64_t(numbers_[c].size()) : dense;
  }
  calls_.assign(size_t(at), Call());
}

// Calls of all channels, and who came last to each.
void SelfTime::find_calls() {
  if (calls_known_) return;
  unite();
  calls_known_ = true;
  has_strays_ = false;
  place_calls();
  each_entry([&](Entry& e, int32_t column) {
    e.call = int32_t(find(e));
    if (!is_transfer(e.kind)) return;
    if (e.call < 0)
      has_strays_ = true;
    else
      meet(e, column);
  });
}

inline void SelfTime::meet(Entry& e, int32_t column) {
  Call& call = calls_[e.call];
  if (!call.members) call.tag = e.tag;
  call.odd |= call.tag != e.tag || (column == call.column && e.kind == kCollective);
  call.column = column;
  call.pair = e.kind != kCollective;
  call.sends += e.kind == kSend;
  call.members++;
  if (e.start > call.arrival || call.last_column < 0) {
    call.second = call.arrival;
    call.arrival = e.start;
    call.last_column = column;
    call.last_step = e.step;
  } else {
    call.second = std::max(call.second, e.start);
  }
}

bool SelfTime::agrees(const Call& call) {
  return !call.odd && call.members >= 2 && (!call.pair || (call.members == 2 && call.sends == 1));
}

std::vector<int64_t> SelfTime::suspects() {
  find_calls();
  const auto empty_or_good = [](const Call& call) { return call.members == 0 || agrees(call); };
  if (!has_strays_ && std::all_of(calls_.begin(), calls_.end(), empty_or_good)) return {};
  std::vector<int32_t> total(channels.size()), good(channels.size()), members(channels.size());
  std::vector<char> numberless(channels.size()), alone(channels.size());
  std::vector<int32_t> touched;
  for (const ColumnCells& column : columns) {  // one count per channel serves all ranks in turn
    for (const Entry& e : column.entries) {
      if (!is_transfer(e.kind)) continue;
      if (!total[e.channel]++) touched.push_back(e.channel);
      if (e.call < 0)
        numberless[e.channel] = 1;
      else
        good[e.channel] += agrees(calls_[e.call]);
    }
    for (const int32_t c : touched) {
      alone[c] |= 2 * good[c] < total[c];
      members[c]++;
      total[c] = good[c] = 0;
    }
    touched.clear();
  }
  std::vector<int64_t> out;
  int64_t i = 0;
  each_entry([&](Entry& e, int32_t) {
    const int32_t k = e.channel;
    const Channel& c = channels[k];
    const bool known = (c.source >= 0) == (c.target >= 0) && (c.group >= 0 || c.source >= 0);
    if (is_transfer(e.kind) && known && (numberless[k] || (alone[k] && members[k] > 1))) out.push_back(i);
    i++;
  });
  return out;
}

void SelfTime::renumber(int64_t entry, int64_t seq, bool by_order) {
  const Place at = place(entry);
  Entry& e = columns[size_t(at.column)].entries[size_t(at.entry)];
  calls_known_ = false;
  renumbered_ = true;
  e.seq = seq;
  channels[e.channel].by_order |= by_order;
}

void SelfTime::finish() {
  find_calls();
  for (size_t c = 0; c < columns.size(); c++) settle(columns[c], int32_t(c));
  for (const Call& call : calls_) {
    if (call.members < 2 || call.arrival <= call.second) continue;
    PerCell& cell = columns[call.last_column].of[call.last_step];
    cell.last_calls++;
    if (call.until > INT64_MIN)
      cell.imposed += std::max<int64_t>(0, std::min(call.arrival, call.until) - std::max(call.second, call.since));
  }
}

// What a rank waited, and how long it is blocked beside the one that came last to each of its calls.
void SelfTime::settle(ColumnCells& column, int32_t which) {
  for (const Entry& e : column.entries) {
    PerCell& cell = column.of[e.step];
    int64_t met = e.start;
    if (e.call >= 0) {
      Call& call = calls_[e.call];
      cell.calls += is_transfer(e.kind) && call.members > 1;
      if (call.members) met = std::min(std::max(call.arrival, e.start), e.end);
      if (!e.aside && call.members > 1 && call.arrival > call.second && call.last_column != which) {
        call.since = std::min(call.since, e.start);
        call.until = std::max(call.until, e.end);
      }
    }
    if (!e.whole) continue;
    cell.wait += met - e.start;
    cell.transfer += e.end - met;
    cell.covered += e.end - e.start;
  }
  settle_pieces(column);
}

int64_t SelfTime::arrival(const Entry& e) const {
  return e.call >= 0 && calls_[e.call].members ? calls_[e.call].arrival : e.start;
}

// Pieces of cells with several lanes, and of transfers that hold other spans: compute hides waits, waits hide
// transfers.
void SelfTime::settle_pieces(ColumnCells& column) {
  std::vector<Piece> cell;
  const std::vector<Piece>& pieces = column.pieces;
  for (size_t i = 0; i < pieces.size();) {
    cell.clear();
    const int32_t step = pieces[i].step;
    for (; i < pieces.size() && pieces[i].step == step; i++) {
      const Piece& p = pieces[i];
      if (p.entry < 0) {
        cell.push_back(p);
        continue;
      }
      const int64_t met = std::min(std::max(arrival(column.entries[p.entry]), p.left), p.right);
      if (met > p.left) cell.push_back({p.left, met, step, -1, 1});
      if (p.right > met) cell.push_back({met, p.right, step, -1, 2});
    }
    std::sort(cell.begin(), cell.end(), [](const Piece& a, const Piece& b) { return a.left < b.left; });
    int64_t reach[4] = {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN}, length[4] = {};
    for (const Piece& p : cell)
      for (int k = p.rank; k < 4; k++) {
        if (p.right <= reach[k]) continue;
        length[k] += p.right - std::max(p.left, reach[k]);
        reach[k] = p.right;
      }
    PerCell& c = column.of[step];
    c.wait += length[1] - length[0];
    c.transfer += length[2] - length[1];
    c.covered += length[3];
  }
}

}  // namespace mappnb
