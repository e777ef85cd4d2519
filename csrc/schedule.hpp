// Times of a pipeline schedule: one pass over the ranks' orders, each action as early as its rank and its input allow.
// Knows nothing of Python (see schedule_py.cpp). The plain-Python twin mappnb/sched/reference.py is the one to read
// first.
#pragma once

#include <cstdint>
#include <vector>

namespace mappnb {

// One action in 32 bits, as mappnb/sched/codes.py writes it.
struct Code {
  uint32_t bits;
  uint32_t microbatch() const { return bits & 0x1ffff; }
  uint32_t stage() const { return (bits >> 17) & 0xfff; }
  uint32_t kind() const { return (bits >> 29) & 3; }  // F, B, I, W
  bool paired() const { return bits >> 31; }
};

enum class Send { kAsync = 0, kSync = 1, kBlocking = 2 };

// Where the message of an action goes, and what it costs: tables by (mirrored, backward, stage of the producer).
struct Hops {
  const double* latency;
  const double* wire;
  const int32_t* link;  // -1: the consumer is on the same rank
};

struct Pass {
  const uint32_t* codes;
  const int64_t* offsets;  // by rank, and the end
  int ranks, stages, microbatches, links;
  int64_t mirrored_from;   // first microbatch that takes the second half of the tables
  const double* duration;  // by (kind, stage, microbatch or 1)
  bool by_microbatch;
  bool any_paired;
  double overlap_ratio;
  Hops next;  // to the next stage (forward) or the one before (backward)
  Hops ship;  // from a stage's forward to its backward on another rank; by stage; link is null where there is none
  Send send;
  double* start;  // by action
  double* end;
};

// Runs the schedule. Returns how far each rank came: all of it unless the ranks wait for one another.
std::vector<int64_t> run_pass(const Pass& pass);

// One forward, one backward in turn, after `warm_up[rank]` forwards: interleaved pipelines and their kin. Microbatches
// pass the chunks in groups of `group`; backwards go through the chunks the other way. Fills 2 * ranks * chunks *
// microbatches codes.
void one_forward_one_backward(int ranks, int chunks, int microbatches, int group, const int64_t* warm_up,
                              uint32_t* codes);

}  // namespace mappnb
