#include "selftime.hpp"

#include <algorithm>

namespace mappnb {

namespace {

constexpr uint16_t kClipped = 2, kAsync = 16;  // mappnb.terms.Flag

uint64_t mix(uint64_t x) {  // splitmix64, Steele et al. 2014
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

bool is_pair(int8_t kind) { return kind == kSend || kind == kRecv || kind > kWait; }
bool is_sender(int8_t kind) { return kind == kSend || kind == kWaitSend; }

}  // namespace

void Channels::clear() {
  all.clear();
  known_.clear();
  for (Cached& c : cache_) c.number = -1;
}

int32_t Channels::number(int64_t group, int32_t source, int32_t target) {
  const uint64_t hash = mix(uint64_t(group) ^ mix(uint64_t(uint32_t(source)) << 32 | uint32_t(target)));
  Cached& near = cache_[hash & 63];
  if (near.number >= 0 && near.group == group && near.source == source && near.target == target) return near.number;
  auto& found = known_[hash];
  int32_t out = -1;
  for (const int32_t c : found)
    if (all[c].group == group && all[c].source == source && all[c].target == target) out = c;
  if (out < 0) {
    out = int32_t(all.size());
    all.emplace_back();
    all.back().group = group;
    all.back().source = source;
    all.back().target = target;
    found.push_back(out);
  }
  near = {group, source, target, out};
  return out;
}

void RankPass::begin(int32_t first_step, int32_t last_step) {
  first_step_ = first_step;
  last_step_ = last_step;
  steps.clear();
  channels.clear();
  step_number_.clear();
  met_step_ = INT32_MIN;
  entries_.clear();
  store_.clear();
  rows_.clear();
  lanes_.clear();
  step_lane_.clear();
  met_lane_ = -1;
}

int32_t RankPass::step_index(int32_t step) {
  if (step == met_step_) return met_index_;
  const auto [at, is_new] = step_number_.try_emplace(step, int32_t(steps.size()));
  if (is_new) steps.push_back(step);
  met_step_ = step;
  return met_index_ = at->second;
}

int32_t RankPass::part_of(int8_t kind, int32_t stage) {
  if (kind >= kComputeKinds || stage < 0) stage = -1;
  CachedPart& near = part_cache_[kind];
  if (near.stage == stage) return near.number;
  const auto [at, is_new] = part_number_.try_emplace(int32_t(kind) * 65536 + stage + 1, int32_t(parts.size()));
  if (is_new) parts.push_back({kind, stage});
  near = {stage, at->second};
  return at->second;
}

int32_t RankPass::lane_of(int32_t step, int32_t thread, int32_t stream) {
  const auto same = [&](const Lane& l) { return l.step == step && l.thread == thread && l.stream == stream; };
  if (met_lane_ >= 0 && same(lanes_[met_lane_])) return met_lane_;
  if (size_t(step) >= step_lane_.size()) step_lane_.resize(steps.size(), -1);
  for (int32_t l = step_lane_[step]; l >= 0; l = lanes_[l].next)
    if (same(lanes_[l])) return met_lane_ = l;
  lanes_.push_back({step, thread, stream, step_lane_[step], 0, 0});
  return met_lane_ = step_lane_[step] = int32_t(lanes_.size() - 1);
}

// Fields are written where they stay: a record made elsewhere and copied waits for its own small stores.
int32_t RankPass::add_entry(const EventRows& r, size_t i, const Row& row, int32_t op, int32_t rank, bool aside) {
  const bool pair = is_pair(row.kind), sender = is_sender(row.kind);
  const int32_t peer = r.peer[i];
  const int32_t source = !pair ? -1 : sender ? rank : peer, target = !pair ? -1 : sender ? peer : rank;
  const bool named = source >= 0 || target < 0;  // a receive from nobody knows no channel
  const int64_t size = op < 0 ? -1 : r.bytes[i];
  Entry& e = entries_.emplace_back();
  e.start = row.start;
  e.end = row.end;
  e.seq = named ? r.seq[i] : -1;
  e.tag = uint32_t(mix(uint64_t(size) * 31 + (pair ? 0 : uint32_t(op))) >> 32);
  e.channel = channels.number(r.group[i], source, target);
  e.step = row.step;
  e.call = -1;
  e.kind = row.kind;
  e.aside = aside;
  e.whole = false;
  if (is_transfer(row.kind)) channels.all[size_t(e.channel)].count_in(e.seq);
  return int32_t(entries_.size() - 1);
}

void RankPass::add(const EventRows& r, int32_t rank) {
  rows_.reserve(rows_.size() + r.rows);
  for (size_t i = 0; i < r.rows; i++) {
    const int32_t step = r.step[i];
    if (step < first_step_ || step > last_step_) continue;
    const size_t site = size_t(r.site[i]) < r.sites ? size_t(r.site[i]) : r.sites - 1;
    int8_t kind = r.kind[site];
    const uint16_t flags = r.flags[i];
    if (kind < 0) {
      if (flags & kClipped) continue;  // a step that was begun and never worked in
      kind = kHost;
    }
    const bool aside = is_transfer(kind) && (flags & kAsync);
    Row& row = rows_.emplace_back();
    row.start = r.start[i] + r.offset;
    row.end = row.start + r.duration[i];
    row.step = step_index(step);
    row.kind = kind;
    row.on_host = r.stream[i] < 0;
    row.part = kind > kHost ? -1 : part_of(kind, r.stage[i]);
    row.entry = kind > kHost ? add_entry(r, i, row, r.op[site], rank, aside) : -1;
    row.lane = aside ? -1 : lane_of(row.step, r.thread[i], r.stream[i]);
  }
}

// Whether each lane's rows are side by side, by start with the longest first, and the lanes by step; counts them.
bool RankPass::in_order() {
  bool sorted = true;
  int32_t lane = -1;
  const Row* last = nullptr;
  for (size_t i = 0; i < rows_.size(); i++) {
    const Row& row = rows_[i];
    if (row.lane < 0) continue;
    if (row.lane != lane) {
      sorted &= row.lane == lane + 1 && (lane < 0 || lanes_[row.lane].step > lanes_[lane].step);
      lane = row.lane;
      lanes_[lane].at = i;
    } else {
      sorted &= row.start > last->start || (row.start == last->start && row.end <= last->end);
    }
    last = &row;
    lanes_[lane].rows++;
  }
  for (const Row& row : rows_) sorted &= row.lane >= 0;
  return sorted;
}

// Rows of one lane together, those of one step side by side; in a lane by start, the longest first.
void RankPass::order_rows() {
  if ((ordered_ = in_order())) return;
  std::vector<int32_t> by_step(lanes_.size());
  for (size_t i = 0; i < by_step.size(); i++) by_step[i] = int32_t(i);
  const auto earlier = [&](int32_t a, int32_t b) { return lanes_[a].step < lanes_[b].step; };
  std::stable_sort(by_step.begin(), by_step.end(), earlier);
  size_t at = 0;
  std::vector<Lane> sorted;
  std::vector<size_t> next(lanes_.size());
  for (const int32_t l : by_step) {
    lanes_[l].at = next[l] = at;
    at += lanes_[l].rows;
    sorted.push_back(lanes_[l]);
  }
  order_.resize(at);
  for (size_t i = 0; i < rows_.size(); i++)
    if (rows_[i].lane >= 0) order_[next[rows_[i].lane]++] = uint32_t(i);
  lanes_.swap(sorted);
  const auto before = [&](uint32_t a, uint32_t b) {
    const Row &x = rows_[a], &y = rows_[b];
    return x.start != y.start ? x.start < y.start : x.end > y.end;
  };
  for (const Lane& lane : lanes_) {
    const auto begin = order_.begin() + ptrdiff_t(lane.at), end = begin + ptrdiff_t(lane.rows);
    size_t moves = 0;
    for (auto i = begin; i < end && moves <= 32 * lane.rows; ++i) {  // rows in order of end are nearly in order
      const uint32_t row = *i;
      auto j = i;
      for (; j > begin && before(row, *(j - 1)); --j, ++moves) *j = *(j - 1);
      *j = row;
    }
    if (moves > 32 * lane.rows) std::stable_sort(begin, end, before);  // equal rows have kept their order so far
  }
}

inline void RankPass::emit(const Row& row, int64_t left, int64_t right, ColumnCells& mine, bool alone) {
  const int8_t kind = only_issues(row) ? int8_t(kHost) : row.kind;
  if (kind == kHost) return;
  if (kind < kHost) {
    mine.shares[size_t(row.step) * mine.parts + size_t(row.part)].self += right - left;
    if (alone)
      mine.of[row.step].covered += right - left;
    else
      mine.pieces.push_back({left, right, row.step, -1, int8_t(kind <= kOptimizer ? 0 : 3)});
    return;
  }
  Entry& e = entries_[row.entry];
  if (alone && left == e.start && right == e.end)
    e.whole = true;
  else
    mine.pieces.push_back({left, right, row.step, row.entry, 1});
}

void RankPass::sweep(const Lane& lane, ColumnCells& mine, bool alone) {
  const auto take = [&](const Row& row, int64_t left, int64_t right) { emit(row, left, right, mine, alone); };
  for (size_t i = lane.at; i < lane.at + lane.rows; i++) {
    const Row& row = rows_[ordered_ ? i : order_[i]];
    if (row.end > row.start) open_.add(&row, take);  // an instant takes no time
  }
  open_.end(take);
}

void RankPass::end_rank(ColumnCells& mine) {
  timed_.assign(steps.size(), 0);
  for (const Row& row : rows_)
    if (row.kind < kComputeKinds && !row.on_host) timed_[row.step] = 1;
  mine.parts = parts.size();
  mine.of.assign(steps.size(), PerCell());
  mine.shares.assign(steps.size() * parts.size(), Share());
  mine.pieces.clear();
  for (const Row& row : rows_) {
    PerCell& c = mine.of[row.step];
    c.first = std::min(c.first, row.start);
    c.last = std::max(c.last, row.end);
    if (row.entry < 0 && !only_issues(row)) mine.shares[size_t(row.step) * parts.size() + size_t(row.part)].count++;
  }
  order_rows();
  for (size_t l = 0; l < lanes_.size(); l++) {
    const bool alone = (l == 0 || lanes_[l - 1].step != lanes_[l].step) &&
                       (l + 1 == lanes_.size() || lanes_[l + 1].step != lanes_[l].step);
    sweep(lanes_[l], mine, alone);
  }
  mine.entries = kept(store_, entries_);
  entries_.clear();
  rows_.clear();
  lanes_.clear();
  std::fill(step_lane_.begin(), step_lane_.end(), -1);
  met_lane_ = -1;
}

}  // namespace mappnb
