// The operators of PyTorch by which process groups communicate.

#pragma once

#include <array>
#include <cstdint>

namespace keepstep {

// The values of monitor/records.py.
enum Code : uint8_t {
  ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL,
  BARRIER, SEND, RECEIVE
};

// Indices of an operator's arguments; -1: it has none.
struct Plan {
  const char* name;
  Code code;
  int group;
  int payload;
  int peer;
};

constexpr std::array<Plan, 20> PLANS{{
    {"allreduce_", ALL_REDUCE, 1, 0, -1},
    {"allreduce_coalesced_", ALL_REDUCE, 1, 0, -1},
    {"allgather_", ALL_GATHER, 2, 1, -1},
    {"_allgather_base_", ALL_GATHER, 2, 1, -1},
    {"allgather_coalesced_", ALL_GATHER, 2, 1, -1},
    {"allgather_into_tensor_coalesced_", ALL_GATHER, 2, 1, -1},
    {"reduce_scatter_", REDUCE_SCATTER, 2, 1, -1},
    {"_reduce_scatter_base_", REDUCE_SCATTER, 2, 1, -1},
    {"reduce_scatter_tensor_coalesced_", REDUCE_SCATTER, 2, 1, -1},
    {"broadcast_", BROADCAST, 1, 0, 2},
    {"reduce_", REDUCE, 1, 0, 3},
    {"gather_", GATHER, 2, 1, 3},
    {"scatter_", SCATTER, 2, 0, 3},
    {"alltoall_", ALL_TO_ALL, 2, 1, -1},
    {"alltoall_base_", ALL_TO_ALL, 2, 1, -1},
    {"barrier", BARRIER, 1, -1, -1},
    {"monitored_barrier_", BARRIER, 1, -1, -1},
    {"send", SEND, 1, 0, 2},
    {"recv_", RECEIVE, 1, 0, 2},
    {"recv_any_source_", RECEIVE, 1, 0, -1},
}};

}  // namespace keepstep
