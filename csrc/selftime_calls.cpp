// The second half of selftime.hpp: calls of the transfers that the rows of all ranks hold.
#include <algorithm>

#include "selftime.hpp"

namespace mappnb {

int64_t SelfTime::find(const Entry& e) const {
  const Channel& c = channels[e.channel];
  if (e.seq < c.least || e.seq > c.most || e.seq < 0 || (c.by_order && !is_transfer(e.kind))) return -1;
  const auto& few = numbers_[e.channel];
  if (few.empty()) return offset_[e.channel] + e.seq - c.least;
  const auto at = std::lower_bound(few.begin(), few.end(), e.seq);
  return at != few.end() && *at == e.seq ? offset_[e.channel] + (at - few.begin()) : -1;
}

void SelfTime::note_number(const Entry& e) {
  Channel& c = channels[e.channel];
  if (e.seq < 0) return;
  c.least = std::min(c.least, e.seq);
  c.most = std::max(c.most, e.seq);
  c.count++;
}

// Where the calls of each channel lie, side by side; channels with few numbers in a wide range list them.
void SelfTime::place_calls() {
  for (Channel& c : channels) c.least = INT64_MAX, c.most = -1, c.count = 0;
  for (const Entry& e : entries)
    if (is_transfer(e.kind)) note_number(e);
  const auto is_wide = [](const Channel& c) { return c.count && (c.most - c.least) / 4 > c.count + 64; };
  numbers_.assign(channels.size(), {});
  if (std::any_of(channels.begin(), channels.end(), is_wide)) {
    for (const Entry& e : entries)
      if (is_transfer(e.kind) && e.seq >= 0 && is_wide(channels[e.channel])) numbers_[e.channel].push_back(e.seq);
    for (auto& few : numbers_) {
      std::sort(few.begin(), few.end());
      few.erase(std::unique(few.begin(), few.end()), few.end());
    }
  }
  offset_.assign(channels.size() + 1, 0);
  for (size_t c = 0; c < channels.size(); c++) {
    const int64_t dense = channels[c].count ? channels[c].most - channels[c].least + 1 : 0;
    offset_[c + 1] = offset_[c] + (numbers_[c].empty() ? dense : int64_t(numbers_[c].size()));
  }
}

// Calls of all channels, and who came last to each.
void SelfTime::find_calls() {
  if (calls_known_) return;
  calls_known_ = true;
  place_calls();
  calls_.assign(size_t(offset_.back()), Call());
  for (size_t i = 0; i < entries.size(); i++) {
    Entry& e = entries[i];
    e.call = int32_t(find(e));
    if (e.call < 0 || !is_transfer(e.kind)) continue;
    Call& call = calls_[e.call];
    if (!call.members) call.tag = e.tag;
    call.odd |= call.tag != e.tag || (e.column == call.column && e.kind == kCollective);
    call.column = e.column;
    call.pair = e.kind != kCollective;
    call.sends += e.kind == kSend;
    call.members++;
    if (e.start > call.arrival || call.last < 0) {
      call.second = call.arrival;
      call.arrival = e.start;
      call.last = int32_t(i);
    } else {
      call.second = std::max(call.second, e.start);
    }
  }
}

bool SelfTime::agrees(const Call& call) {
  return !call.odd && call.members >= 2 && (!call.pair || (call.members == 2 && call.sends == 1));
}

std::vector<int64_t> SelfTime::suspects() {
  find_calls();
  const auto stray = [](const Entry& e) { return is_transfer(e.kind) && e.call < 0; };
  const auto empty_or_good = [](const Call& call) { return call.members == 0 || agrees(call); };
  if (std::all_of(calls_.begin(), calls_.end(), empty_or_good) && std::none_of(entries.begin(), entries.end(), stray))
    return {};
  // entries come rank by rank: one count per channel serves all ranks in turn
  std::vector<int32_t> total(channels.size()), good(channels.size()), members(channels.size());
  std::vector<char> numberless(channels.size()), alone(channels.size());
  std::vector<int32_t> touched;
  const auto judge = [&] {
    for (const int32_t c : touched) {
      alone[c] |= 2 * good[c] < total[c];
      members[c]++;
      total[c] = good[c] = 0;
    }
    touched.clear();
  };
  int32_t column = -1;
  for (const Entry& e : entries) {
    if (!is_transfer(e.kind)) continue;
    if (e.column != column) judge();
    column = e.column;
    if (!total[e.channel]++) touched.push_back(e.channel);
    if (e.call < 0)
      numberless[e.channel] = 1;
    else
      good[e.channel] += agrees(calls_[e.call]);
  }
  judge();
  std::vector<int64_t> out;
  for (size_t i = 0; i < entries.size(); i++) {
    const Channel& c = channels[entries[i].channel];
    const int32_t k = entries[i].channel;
    const bool known = (c.source >= 0) == (c.target >= 0) && (c.group >= 0 || c.source >= 0);
    if (is_transfer(entries[i].kind) && known && (numberless[k] || (alone[k] && members[k] > 1)))
      out.push_back(int64_t(i));
  }
  return out;
}

void SelfTime::renumber(int64_t entry, int64_t seq, bool by_order) {
  calls_known_ = false;
  entries[entry].seq = seq;
  channels[entries[entry].channel].by_order |= by_order;
}

void SelfTime::finish() {
  find_calls();
  for (const Entry& e : entries) {  // who is blocked beside the one that came last, and how long
    if (e.aside || e.call < 0) continue;
    Call& call = calls_[e.call];
    if (call.members > 1 && call.arrival > call.second && entries[call.last].column != e.column) {
      call.since = std::min(call.since, e.start);
      call.until = std::max(call.until, e.end);
    }
  }
  for (const Call& call : calls_) {
    if (call.members < 2 || call.arrival <= call.second) continue;
    const Entry& last = entries[call.last];
    PerCell& cell = columns[last.column].of[last.step];
    cell.last_calls++;
    if (call.until > INT64_MIN)
      cell.imposed += std::max<int64_t>(0, std::min(call.arrival, call.until) - std::max(call.second, call.since));
  }
  for (const Entry& e : entries) {
    PerCell& cell = columns[e.column].of[e.step];
    cell.calls += e.call >= 0 && is_transfer(e.kind) && calls_[e.call].members > 1;
    if (!e.whole) continue;
    const int64_t met = std::min(std::max(arrival(e), e.start), e.end);
    cell.wait += met - e.start;
    cell.transfer += e.end - met;
    cell.covered += e.end - e.start;
  }
  settle_pieces();
}

int64_t SelfTime::arrival(const Entry& e) const {
  return e.call >= 0 && calls_[e.call].members ? calls_[e.call].arrival : e.start;
}

// Pieces of cells with several lanes, and of transfers that hold other spans: compute hides waits, waits hide
// transfers.
void SelfTime::settle_pieces() {
  std::vector<Piece> cell;
  for (size_t i = 0; i < pieces_.size();) {
    cell.clear();
    const int32_t column = pieces_[i].column, step = pieces_[i].step;
    for (; i < pieces_.size() && pieces_[i].column == column && pieces_[i].step == step; i++) {
      const Piece& p = pieces_[i];
      if (p.entry < 0) {
        cell.push_back(p);
        continue;
      }
      const int64_t met = std::min(std::max(arrival(entries[p.entry]), p.left), p.right);
      if (met > p.left) cell.push_back({p.left, met, column, step, -1, 1});
      if (p.right > met) cell.push_back({met, p.right, column, step, -1, 2});
    }
    std::sort(cell.begin(), cell.end(), [](const Piece& a, const Piece& b) { return a.left < b.left; });
    int64_t reach[4] = {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN}, length[4] = {};
    for (const Piece& p : cell)
      for (int k = p.rank; k < 4; k++) {
        if (p.right <= reach[k]) continue;
        length[k] += p.right - std::max(p.left, reach[k]);
        reach[k] = p.right;
      }
    PerCell& c = columns[column].of[step];
    c.wait += length[1] - length[0];
    c.transfer += length[2] - length[1];
    c.covered += length[3];
  }
}

}  // namespace mappnb
