// The interface between NCCL and its profiler plugins, version 5, as far as it is used here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace keepstep {

// Bits of an event's type, and of the mask of those that a plugin asks for.
enum ProfilerEventType : int {
  GROUP_API = 1 << 8,
  COLLECTIVE_API = 1 << 9,
  PAIR_API = 1 << 10,
  KERNEL_LAUNCH = 1 << 11,
};

struct ProfilerEvent {
  uint64_t type;
  void* parent;  // A handle that the plugin returned, or null.
  int rank;
  union {
    struct {
      bool is_captured;
      int depth;
    } group;
    struct {
      void* stream;
    } launch;
  };
};
static_assert(offsetof(ProfilerEvent, group) == 24);

using ProfilerLog = void (*)(int level, unsigned long flags, const char* file, int line,
                             const char* format, ...);

// Each function returns NCCL's result code, 0: success.
struct Profiler {
  const char* name;
  int (*init)(void** context, uint64_t communicator, int* mask, const char* name, int nodes,
              int ranks, int rank, ProfilerLog log);
  int (*start)(void* context, void** handle, ProfilerEvent* event);
  int (*stop)(void* handle);
  int (*state)(void* handle, int state, void* arguments);
  int (*finalize)(void* context);
};

// Whether NCCL has loaded this plugin for a communicator that exists.
bool does_nccl_report();

}  // namespace keepstep

extern "C" keepstep::Profiler ncclProfiler_v5;
