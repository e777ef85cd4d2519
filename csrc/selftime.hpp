// Self time per (step, rank) and part, and who came last to each transfer, in one pass over the rows of each rank.
// Knows nothing of Python (see selftime_py.cpp). The numpy twin mappnb/analysis/_work_cells.py is the one to read
// first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "nesting.hpp"
#include "selftime_store.hpp"

namespace mappnb {

// A column of rows, or one value for all of them.
template <class T>
struct Column {
  const T* data;
  size_t stride;  // 1, or 0 for one value
  T operator[](size_t i) const { return data[i * stride]; }
};

struct EventRows {
  size_t rows;
  int64_t offset;  // added to start
  Column<int64_t> start, duration, group, seq, bytes;
  Column<int32_t> step, site, peer, thread, stream;
  Column<int16_t> stage;
  Column<uint16_t> flags;
  const int8_t* kind;  // by site, the last one for unknown sites; -1: a mark
  const int32_t* op;   // by site; negative where members' sizes may differ
  size_t sites;
};

// Numbers of mappnb/analysis/_work_parts.py.
enum Kind : int8_t {
  kComputeKinds = 6,
  kOptimizer = 6,
  kHost = 11,
  kCollective = 12,
  kSend,
  kRecv,
  kWait,
  kWaitSend,
  kWaitRecv
};

inline bool is_transfer(int8_t kind) { return kind >= kCollective && kind < kWait; }

struct PerCell {  // by (step, rank)
  int64_t first = INT64_MAX, last = INT64_MIN, wait = 0, transfer = 0, covered = 0, imposed = 0;
  int32_t last_calls = 0, calls = 0;
};

struct Part {
  int32_t kind, stage;
};

struct Share {  // what a part has of a cell
  int64_t self = 0;
  int32_t count = 0;
};

struct Entry {  // a transfer, or a wait for one
  int64_t start, end, seq;
  uint32_t tag;                 // equal where op and size agree
  int32_t channel, step, call;  // step: its index; call: known after find_calls, -1 for none
  int8_t kind;
  bool aside, whole;  // in flight beside the program; innermost from its start to its end
};

struct Piece {  // of a cell with several lanes, or of a transfer that holds other spans
  int64_t left, right;
  int32_t step, entry;
  int8_t rank;  // what covers what: 0 compute and optimizer, 1 transfers, 3 all else
};

struct ColumnCells {  // of one rank: by step, by step and part, and its transfers; numbers are those of its pass
  std::vector<PerCell> of;
  std::vector<Share> shares;
  Span<Entry> entries;
  std::vector<Piece> pieces;
  size_t parts = 0, pass = 0;
};

struct Channel {
  int64_t group;
  int32_t source, target;                           // -1 for collectives
  bool by_order = false;                            // numbers were found by order: waits do not know them
  bool wide = false;                                // few numbers in a wide range: they are listed
  int64_t least = INT64_MAX, most = -1, count = 0;  // of the numbers of transfers
  int64_t offset = 0;                               // where its calls begin
  void count_in(int64_t seq) {
    if (seq < 0) return;
    least = std::min(least, seq);
    most = std::max(most, seq);
    count++;
  }
};

// Channels by what they are.
class Channels {
 public:
  int32_t number(int64_t group, int32_t source, int32_t target);
  void clear();
  std::vector<Channel> all;

 private:
  struct Cached {
    int64_t group = 0;
    int32_t source = 0, target = 0, number = -1;
  };
  Cached cache_[64];
  std::unordered_map<uint64_t, std::vector<int32_t>> known_;
};

// One pass over the rows of some ranks: add the rows of a rank, end it, then the next. Has numbers of its own for
// steps, parts and channels, so that several passes may be under way at once.
class RankPass {
 public:
  // Begin with other steps; what was allocated is used again.
  void begin(int32_t first_step, int32_t last_step);
  void add(const EventRows& rows, int32_t rank);
  void end_rank(ColumnCells& mine);

  std::vector<int32_t> steps;  // in the order in which they were met
  std::vector<Part> parts;     // of earlier steps too
  Channels channels;

 private:
  struct Row {
    int64_t start, end;
    int32_t step, part, entry, lane;
    int8_t kind;
    bool on_host;
  };
  struct Lane {
    int32_t step, thread, stream, next;  // next: another lane of the same step, -1 for none
    size_t rows, at;
  };
  int32_t step_index(int32_t step);
  int32_t part_of(int8_t kind, int32_t stage);
  int32_t lane_of(int32_t step, int32_t thread, int32_t stream);
  int32_t add_entry(const EventRows& rows, size_t i, const Row& row, int32_t op, int32_t rank, bool aside);
  void order_rows();
  void sweep(const Lane& lane, ColumnCells& mine, bool alone);
  void emit(const Row& row, int64_t left, int64_t right, ColumnCells& mine, bool alone);
  // Host spans of steps in which the rank computes on a device lane only issued that work.
  bool only_issues(const Row& row) const { return row.on_host && row.kind <= kOptimizer && timed_[row.step]; }
  bool in_order();

  int32_t first_step_ = 0, last_step_ = -1;
  std::unordered_map<int32_t, int32_t> step_number_;
  std::unordered_map<int32_t, int32_t> part_number_;
  int32_t met_step_ = INT32_MIN, met_index_ = -1;
  struct CachedPart {
    int32_t stage = -2, number = -1;
  };
  CachedPart part_cache_[kHost + 1];
  std::vector<Entry> entries_;  // of the rank that is being added
  Pages store_;                 // those of the ranks that have ended
  std::vector<Row> rows_;
  std::vector<Lane> lanes_;
  std::vector<int32_t> step_lane_;  // the last lane met of each step
  int32_t met_lane_ = -1;
  std::vector<uint32_t> order_;
  Innermost<Row> open_;      // spans around the one that is looked at
  std::vector<char> timed_;  // by step: the rank computes on a device lane
  bool ordered_ = false;     // rows are in order as they came
};

// Steps of all ranks: passes take the ranks, each rank in one of them; finish when all ranks are in.
class SelfTime {
 public:
  SelfTime(int64_t ranks, int64_t passes);
  SelfTime(const SelfTime&) = delete;
  SelfTime& operator=(const SelfTime&) = delete;
  void begin(int32_t first_step, int32_t last_step);
  // Different passes may be used by different threads at once, for different columns.
  void add(int64_t pass, const EventRows& rows, int32_t rank) { passes_[size_t(pass)]->add(rows, rank); }
  void end_rank(int64_t pass, int64_t column);
  // Entries of channels whose numbers do not hold (mappnb.analysis._match_identity: "auto"), counted over all columns.
  std::vector<int64_t> suspects();
  struct Place {
    int64_t column, entry;
  };
  Place place(int64_t entry);
  int64_t num_entries();
  void renumber(int64_t entry, int64_t seq, bool by_order);
  void finish();
  int64_t ranks() const { return int64_t(columns.size()); }
  int64_t passes() const { return int64_t(passes_.size()); }
  // The steps and parts of all passes; and for each pass which of them its own are. Valid once all ranks ended.
  void unite();
  const std::vector<int32_t>& row_of(const ColumnCells& c) const { return united_[c.pass].steps; }
  const std::vector<int32_t>& part_of(const ColumnCells& c) const { return united_[c.pass].parts; }
  int32_t step_of(const ColumnCells& c, int32_t step) const { return passes_[c.pass]->steps[size_t(step)]; }

  std::vector<int32_t> steps;
  std::vector<ColumnCells> columns;
  std::vector<Part> parts;
  std::vector<Channel> channels;

 private:
  struct Call {
    int64_t arrival = INT64_MIN, second = INT64_MIN, since = INT64_MAX, until = INT64_MIN;
    uint32_t tag = 0;
    int32_t members = 0, sends = 0, column = -1;
    int32_t last_column = -1, last_step = -1;
    bool odd = false, pair = false;
  };
  struct United {
    std::vector<int32_t> steps, parts, channels;
  };
  template <class F>
  void each_entry(F take);
  int64_t find(const Entry& e) const;
  void find_calls();
  void unite_channels();
  void count_numbers();
  void place_calls();
  void meet(Entry& e, int32_t column);
  static bool agrees(const Call& call);
  int64_t arrival(const Entry& e) const;
  void settle(ColumnCells& column, int32_t which);
  void settle_pieces(ColumnCells& column);

  std::vector<std::unique_ptr<RankPass>> passes_;
  std::vector<United> united_;  // by pass
  bool are_united_ = false, calls_known_ = false, has_strays_ = false, renumbered_ = false;
  std::vector<Call> calls_;
  std::vector<std::vector<int64_t>> numbers_;  // of wide channels
  std::vector<int64_t> first_entry_;           // of each column, counted over all
};

}  // namespace mappnb
