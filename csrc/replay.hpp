// Replay of a dependency graph: every operation as early as its dependencies, its stream and its queues allow.
// Knows nothing of Python (see replay_py.cpp). The plain-Python twin mappnb/_pyreplay.py is the one to read first.
#pragma once

#include <cstdint>
#include <vector>

namespace mappnb {

struct Graph {
  int64_t ops, streams, queues, groups;
  const double* duration;  // by operation
  const double* delay;     // between the last dependency and the start
  const int32_t* stream;   // -1: none; operations of one stream run in the order of their index
  const int32_t* queue;    // two per operation, -1: none; served in the order in which operations are ready
  const int32_t* group;    // -1: none; all members begin before any ends
  const int32_t* slows;    // two streams per operation that run slower while it runs, -1: none
  double interference;     // by this fraction
  const int64_t* dep_offsets;
  const int32_t* dep;  // what each operation depends on
  const double* lag;   // least time from the end of the dependency
};

struct Replayed {
  double* start;
  double* end;
  int32_t* cause;               // the operation whose end decided the start; -1: none
  int32_t* late;                // the member of its group that came last; itself without a group
  std::vector<int32_t> order;   // operations as they ended
  std::vector<int32_t> served;  // by operation: who was served next by its queues (two each), -1: nobody
};

// Returns with `order` shorter than the operations if they wait for one another.
void replay(const Graph& graph, bool by_events, Replayed* out);

// Latest start and end of every operation that leave the last end where it is; `horizon` is that end.
void latest(const Graph& graph, const Replayed& done, double horizon, double* latest_start, double* latest_end);

}  // namespace mappnb
