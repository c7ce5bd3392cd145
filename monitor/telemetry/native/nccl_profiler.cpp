// Tells the device watch which kernels NCCL launches for which operations: a profiler plugin of
// NCCL, version 5 of its interface, which NCCL 2.28.3 and later load.
//
// NCCL opens the library that NCCL_PROFILER_PLUGIN names, which is this one, loaded already, and
// looks for `ncclProfiler_v5`. Layouts and values below are those of NCCL's profiler_v5.h and
// nccl_profiler.h. Of a call in NCCL it reports, in this order and by the calling thread: the
// outermost group of calls ("group API"), each call in it, each launch of a kernel between two
// callbacks, the end of the group. With non-blocking communicators another thread launches, maybe
// after the end of the group. Collectives of one rank and those by copy engines launch no kernel.
//
// Nothing here takes the GIL, waits, or allocates memory once the job is in its steady state.

#include "nccl_profiler.h"

#include <atomic>
#include <cstdint>

#include "device_watch.h"
#include "driver.h"

namespace keepstep {

namespace {

std::atomic<int> communicators{0};

int on_init(void** context, uint64_t, int* mask, const char*, int, int, int, ProfilerLog) {
  // Never an error: NCCL would count the plugin's users wrongly from then on.
  *context = nullptr;
  *mask = 0;
  if (Driver::get() == nullptr) return 0;
  // NCCL calls `on_finalize` only for contexts that are not null.
  *context = &communicators;
  *mask = GROUP_API | COLLECTIVE_API | PAIR_API | KERNEL_LAUNCH;
  communicators.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

int on_start(void*, void** handle, ProfilerEvent* event) {
  *handle = nullptr;
  Operation* const operation = DeviceWatch::calling();
  if (event->type == GROUP_API) {
    // Calls that were not recorded are not observed either.
    if (operation == nullptr) return 0;
    *handle = static_cast<Handle*>(DeviceWatch::get().open_group(event->group.is_captured));
    return 0;
  }
  auto* const parent = static_cast<Handle*>(event->parent);
  if (parent == nullptr || parent->kind != Handle::Kind::GROUP) return 0;
  auto* const group = static_cast<Group*>(parent);
  if (event->type == COLLECTIVE_API || event->type == PAIR_API) {
    if (operation != nullptr) DeviceWatch::get().join(group, operation);
  } else if (event->type == KERNEL_LAUNCH) {
    Launch* const launch = DeviceWatch::get().begin_launch(group, event->launch.stream);
    if (launch != nullptr) *handle = static_cast<Handle*>(launch);
  }
  return 0;
}

int on_stop(void* handle) {
  auto* const it = static_cast<Handle*>(handle);
  if (it == nullptr) return 0;
  if (it->kind == Handle::Kind::GROUP) {
    DeviceWatch::get().close_group(static_cast<Group*>(it));
  } else {
    DeviceWatch::get().end_launch(static_cast<Launch*>(it));
  }
  return 0;
}

int on_state(void*, int, void*) { return 0; }

int on_finalize(void*) {
  communicators.fetch_sub(1, std::memory_order_relaxed);
  return 0;
}

}  // namespace

bool does_nccl_report() { return communicators.load(std::memory_order_relaxed) > 0; }

}  // namespace keepstep

extern "C" {
keepstep::Profiler ncclProfiler_v5 = {
    "keepstep",        keepstep::on_init,  keepstep::on_start,
    keepstep::on_stop, keepstep::on_state, keepstep::on_finalize,
};
}
