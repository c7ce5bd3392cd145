// Records every operation of torch.distributed into the worker's telemetry ring.
//
// All of PyTorch's process groups dispatch their operations: c10d::ProcessGroup::allreduce and the
// like, called by Python, by DDP's reducer, by functional collectives and compiled graphs, call the
// operators c10d::allreduce_ and the like. A boxed kernel at the key BackendSelect, which every
// call passes before it reaches a backend, receives them all, for every backend. It changes
// nothing: it records the call, passes the arguments on, and arranges that the end is recorded.
//
// A kernel in Python works too, but took 25 us of the calling thread and 10 more of the backend's
// for each operation; this one takes about one in all. And callbacks in Python wait for the GIL, so
// a worker that holds it in C would appear to be inside an operation that ended long ago.
//
// How the end is seen depends on the backend. gloo's threads complete the work's future. NCCL's
// future is complete as soon as a kernel is in a queue, and a callback that uses it would take
// streams from the pool that users' streams come from; so NCCL's profiler plugin reports launches
// to the device watch (`nccl_profiler.cpp`). Without it (NCCL before 2.28.3, or a user's own plugin)
// events are recorded on the current stream around synchronous operations, which run there. Other
// operations are marked as UNOBSERVED, and never as ended.
//
// Nothing here takes the GIL, except once for each new process group, and then no lock is held.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "communicators.h"
#include "device_watch.h"
#include "lane.h"
#include "nccl_profiler.h"
#include "operators.h"
#include "payload.h"
#include "watched_work.h"

namespace keepstep {

namespace {

// Outside the recorder, because a forked child must not take a lock.
std::atomic<bool> is_recording{false};

// How many threads are inside a call of a backend: while it is not 0, aborting one may crash it.
std::atomic<int> calls_inside{0};

// Whether this thread is in a block of coalesced operations, which are launched at its end.
thread_local bool is_coalescing = false;

// The state of a recorded call.
struct Call {
  Ticket ticket;
  c10::Device device{c10::kCPU};
  Seen seen = Seen::ON_HOST;
  bool has_future = true;
  // Of calls that are seen on the device.
  Operation* operation = nullptr;
  std::shared_ptr<Counters> counters;
  std::optional<Mark> before;
};

bool is_seen_on_device(Seen seen) {
  return seen == Seen::ON_NCCL_STREAM || seen == Seen::ON_DEVICE;
}

// Records an event after all work in the device's current stream.
std::optional<Mark> record_on_current_stream(const c10::Device& device) {
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    return DeviceWatch::get().record(guard.getStreamNativeHandle(guard.getStream(device)));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Records a call; returns nothing if it is not to be recorded. An invalid call must behave as if it
// were not recorded.
template <size_t INDEX>
std::optional<Call> enter(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  constexpr Plan PLAN = PLANS[INDEX];
  constexpr bool IS_PAIR = PLAN.code == SEND || PLAN.code == RECEIVE;
  static const int IS_ASYNCHRONOUS = schema.argumentIndexWithName("async_op").value_or(-1);
  const auto argument = [&](int index) -> const c10::IValue& {
    return stack[stack.size() - schema.arguments().size() + index];
  };
  try {
    const auto group = argument(PLAN.group).template toCustomClass<c10d::ProcessGroup>();
    Payload payload;
    payload.add(argument(PLAN.payload < 0 ? 0 : PLAN.payload));
    // Nothing is sent: a model is being traced.
    if (payload.device.is_meta()) return std::nullopt;
    auto& recorder = Recorder::get();
    recorder.add(group);
    const bool is_asynchronous = IS_ASYNCHRONOUS >= 0 && argument(IS_ASYNCHRONOUS).toBool();
    Call call;
    call.device = payload.device;

    std::unique_lock lock(recorder.mutex);
    Communicator* const communicator = recorder.find(group.get());
    if (!recorder.lane || communicator == nullptr) return std::nullopt;
    const auto place = communicator->seen.find(call.device.type());
    call.seen = place != communicator->seen.end()
                    ? place->second
                    : communicator->seen.emplace(call.device.type(),
                                                 where_seen(*group, call.device.type()))
                          .first->second;
    Record fields{};
    fields.code = PLAN.code;
    fields.communicator = communicator->identity;
    fields.peer = -1;
    if (PLAN.peer >= 0) {
      const auto peer = argument(PLAN.peer).toInt();
      const auto size = static_cast<int64_t>(communicator->ranks.size());
      if (peer >= 0 && peer < size) fields.peer = communicator->ranks[peer];
    }
    if (PLAN.payload >= 0) {
      fields.nbytes = payload.nbytes;
      fields.dtype = payload.dtype;
    }
    if (is_asynchronous) fields.flags = ASYNCHRONOUS;
    if (is_seen_on_device(call.seen)) fields.flags |= DEVICE_TIMES;
    fields.number = IS_PAIR ? ++communicator->counters->pairs[{PLAN.code == SEND, fields.peer}]
                            : ++communicator->counters->collectives;
    call.has_future = !communicator->without_future[INDEX];
    if (is_seen_on_device(call.seen)) call.counters = communicator->counters;
    call.ticket = {recorder.lane, recorder.lane->begin(fields)};
    lock.unlock();

    if (!is_seen_on_device(call.seen)) return call;
    call.operation = DeviceWatch::get().begin(call.ticket);
    // Messages, and what is coalesced, run on streams of the backend even if they are synchronous.
    const bool is_launch_expected = does_nccl_report() && call.counters->is_launch_seen;
    if (call.seen == Seen::ON_NCCL_STREAM && !is_launch_expected && !is_asynchronous && !IS_PAIR &&
        !is_coalescing) {
      call.before = record_on_current_stream(call.device);
    }
    return call;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Tells the device watch that a call has returned.
void leave(Call& call, bool has_work, bool has_failed) {
  auto& watch = DeviceWatch::get();
  const auto is_launched = watch.is_launched(call.operation);
  if (!has_failed && !is_coalescing && is_launched) {
    call.counters->is_launch_seen = *is_launched;
    if (call.before && !has_work && !*is_launched) {
      if (const auto after = record_on_current_stream(call.device)) {
        watch.bracket(call.operation, *call.before, *after);
        call.before.reset();
      }
    }
  }
  if (call.before) watch.drop(*call.before);
  watch.returned(call.operation, has_failed);
}

// Arranges that the end of an operation is recorded. May replace its work in `result`.
template <size_t INDEX>
void watch(Call& call, c10d::ProcessGroup* group, c10::IValue& result) {
  const auto work = result.toCustomClass<c10d::Work>();
  if (call.operation != nullptr) return leave(call, work.defined(), false);
  if (!work || call.seen != Seen::ON_HOST) return call.ticket.mark(UNOBSERVED);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  if (call.has_future) {
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
      auto& recorder = Recorder::get();
      const std::lock_guard lock(recorder.mutex);
      if (auto* const communicator = recorder.find(group)) {
        communicator->without_future[INDEX] = true;
      }
      call.has_future = false;
    }
  }
  if (future) {
    // A callback that does not use the future: others run with streams of the device's pool.
    future->addCallback(
        [ticket = call.ticket](c10::ivalue::Future& done) {
          ticket.end(done.hasError() ? FAILED : 0);
        },
        /*uses_future=*/false);
  } else if (!call.has_future) {
    result = c10::IValue(
        c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WatchedWork>(work, call.ticket)));
  } else {
    call.ticket.mark(UNOBSERVED);
  }
}

// Lets the profiler plugin know, while it exists, which operation this thread is calling, and
// whoever wants to abort that it is.
class Calling {
 public:
  explicit Calling(Operation* operation)
      : former_(std::exchange(DeviceWatch::calling(), operation)) {
    calls_inside.fetch_add(1, std::memory_order_relaxed);
  }
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;
  ~Calling() {
    calls_inside.fetch_sub(1, std::memory_order_relaxed);
    DeviceWatch::calling() = former_;
  }

 private:
  Operation* former_;
};

template <size_t INDEX>
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                c10::DispatchKey::BackendSelect);
  if (!is_recording.load(std::memory_order_relaxed)) return op.redispatchBoxed(below, stack);
  const auto& schema = op.schema();
  const size_t first_argument = stack->size() - schema.arguments().size();
  const auto group =
      (*stack)[first_argument + PLANS[INDEX].group].toCustomClass<c10d::ProcessGroup>();
  auto call = enter<INDEX>(schema, *stack);
  if (!call) return op.redispatchBoxed(below, stack);
  try {
    const Calling calling(call->operation);
    op.redispatchBoxed(below, stack);
  } catch (...) {
    if (call->operation != nullptr) {
      leave(*call, false, true);
    } else {
      call->ticket.end(FAILED);
    }
    throw;
  }
  if (schema.returns().empty()) {
    if (call->operation != nullptr) return leave(*call, false, false);
    return call->ticket.end(0);
  }
  try {
    watch<INDEX>(*call, group.get(), stack->back());
  } catch (const std::exception&) {
    call->ticket.mark(UNOBSERVED);
  }
}

template <size_t... INDEX>
void register_all(torch::Library& library, std::index_sequence<INDEX...>) {
  (library.impl(PLANS[INDEX].name, torch::CppFunction::makeFromBoxedFunction<&record<INDEX>>()),
   ...);
}

void stop_in_child() { is_recording.store(false); }

}  // namespace

TORCH_LIBRARY_IMPL(c10d, BackendSelect, library) {
  register_all(library, std::make_index_sequence<PLANS.size()>());
  pthread_atfork(nullptr, nullptr, stop_in_child);
}

}  // namespace keepstep

extern "C" {

// Starts to record into the ring at `path`, with all counters at 0. Returns 0, or an errno.
int keepstep_open(const char* path, size_t nbytes, size_t offset, size_t capacity,
                  size_t counter_offset, size_t step_offset, keepstep::Describe describe) {
  auto lane = keepstep::Lane::open(path, {nbytes, offset, capacity, counter_offset, step_offset});
  if (!lane) return errno;
  auto& recorder = keepstep::Recorder::get();
  const std::lock_guard lock(recorder.mutex);
  recorder.lane = std::move(lane);
  recorder.describe = describe;
  recorder.communicators.clear();
  recorder.counters.clear();
  keepstep::is_recording.store(true);
  return 0;
}

// Stops recording. The ends of open operations are still recorded.
void keepstep_close() {
  keepstep::is_recording.store(false);
  auto& recorder = keepstep::Recorder::get();
  const std::lock_guard lock(recorder.mutex);
  recorder.lane = nullptr;
  recorder.describe = nullptr;
}

// Returns how many threads are inside a call of a backend.
int keepstep_calls_inside() { return keepstep::calls_inside.load(std::memory_order_relaxed); }

// Tells whether this thread is in a block of coalesced operations.
void keepstep_set_coalescing(int is_coalescing) {
  keepstep::is_coalescing = is_coalescing != 0;
}
}
