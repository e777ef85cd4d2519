// Dynamic order of a pipeline: each rank takes, when it is idle, the ready and admitted action of the smallest
// priority. Knows nothing of Python (see policy_py.cpp). The plain-Python twin mappnb/sched/_pypolicy.py is the one to
// read first; both are equal to the last bit.
#pragma once

#include <cstdint>
#include <vector>

namespace mappnb {

enum class Admit { kNone = 0, kCredits = 1 };

// What a policy is run on; the fields of mappnb.sched._pypolicy.Problem.
struct PolicyProblem {
  const int32_t* where;  // rank, by (mirrored, backward, stage)
  int64_t mirrored_from;
  int ranks, stages, microbatches;
  bool split;
  const double* duration;  // by (kind, stage, microbatch or 1)
  bool by_microbatch;
  const double* latency;  // by (source rank, destination rank), as the next two
  const double* transfer;
  const double* ship;
  int send;                // 0 async, 1 sync, 2 blocking
  const double* priority;  // by (table, kind, stage, microbatch)
  int tables;
  double threshold;
  bool alternate;
  const double* takes;  // by (kind, stage)
  const double* frees;
  const double* limit;  // by rank
  Admit admission;
  const int64_t* offsets;  // by rank, and the end
};

// Where the result goes: by action, the peak by rank.
struct PolicyResult {
  uint32_t* codes;
  double* start;
  double* end;
  double* peak;
};

// Runs the policy. Returns how many actions each rank ran: all of them unless some are stuck.
std::vector<int64_t> run_policy(const PolicyProblem& problem, const PolicyResult& result);

}  // namespace mappnb
