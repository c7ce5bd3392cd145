// Records every operation of torch.distributed into the worker's telemetry ring (format:
// monitor/telemetry/ring.py).
//
// All of PyTorch's process groups dispatch their operations: c10d::ProcessGroup::allreduce and the
// like, called by Python, by DDP's reducer, by functional collectives and compiled graphs, call the
// operators c10d::allreduce_ and the like. A boxed kernel at the key BackendSelect, which every
// call passes before it reaches a backend, receives them all, for every backend. It changes
// nothing: it records the call, passes the arguments on, and adds a callback to the work's future
// that records the end.
//
// A kernel in Python works too, but took 25 us of the calling thread and 10 more of the backend's
// for each operation; this one takes about one in all. And callbacks in Python wait for the GIL, so
// a worker that holds it in C would appear to be inside an operation that ended long ago.
//
// Nothing here takes the GIL, except once for each new process group, and then no lock is held.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// The values of monitor/records.py.
enum Operation : uint8_t {
  ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL,
  BARRIER, SEND, RECEIVE
};
enum Flag : uint8_t { ASYNCHRONOUS = 1, DEVICE_TIMES = 2, FAILED = 4, UNOBSERVED = 8 };
constexpr uint8_t KIND_OPERATION = 1;

// Indices of an operator's arguments; -1: it has none.
struct Plan {
  const char* name;
  Operation operation;
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

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // What Python's time.monotonic() reads.
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Record {
  uint64_t stamp;
  uint8_t kind, code, dtype, flags;
  uint32_t communicator;
  uint64_t number, nbytes;
  int32_t peer;
  uint32_t step;
  double enqueued_s, started_s, ended_s;
};
static_assert(sizeof(Record) == 64);

template <typename T>
void store(T& place, T value) {
  std::atomic_ref<T>(place).store(value, std::memory_order_release);
}

// The lane of operations of one ring file. Callbacks hold a reference, so that it stays mapped
// until the last operation has ended.
class Lane {
 public:
  Lane(uint8_t* memory, size_t nbytes, size_t offset, size_t capacity, size_t counter_offset,
       size_t step_offset)
      : memory_(memory),
        nbytes_(nbytes),
        slots_(reinterpret_cast<Record*>(memory + offset)),
        capacity_(capacity),
        counter_(*reinterpret_cast<uint64_t*>(memory + counter_offset)),
        step_(*reinterpret_cast<uint32_t*>(memory + step_offset)) {}
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() { munmap(memory_, nbytes_); }

  uint64_t begin(Record record) {
    const uint64_t position =
        std::atomic_ref<uint64_t>(counter_).fetch_add(1, std::memory_order_acq_rel);
    Record& slot = slots_[position & (capacity_ - 1)];
    record.stamp = 2 * position + 1;
    record.kind = KIND_OPERATION;
    record.step = std::atomic_ref<uint32_t>(step_).load(std::memory_order_relaxed);
    record.enqueued_s = record.started_s = now_s();
    record.ended_s = 0.0;
    store(slot.stamp, record.stamp);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    slot = record;
    store(slot.stamp, 2 * position + 2);
    return position;
  }

  void end(uint64_t position, uint8_t flags, double ended_s, double started_s = 0.0) {
    Record& slot = slots_[position & (capacity_ - 1)];
    const uint64_t stamp = std::atomic_ref<uint64_t>(slot.stamp).load(std::memory_order_acquire);
    if (stamp != 2 * position + 2) return;
    if (started_s != 0.0) store(slot.started_s, started_s);
    store(slot.flags, static_cast<uint8_t>(slot.flags | flags));
    store(slot.ended_s, ended_s);
  }

 private:
  uint8_t* memory_;
  size_t nbytes_;
  Record* slots_;
  size_t capacity_;
  uint64_t& counter_;
  uint32_t& step_;
};

// One operation that has not ended.
struct Ticket {
  std::shared_ptr<Lane> lane;
  uint64_t position = 0;

  void end(uint8_t flags) const { lane->end(position, flags, now_s()); }
};

// Calls Python to describe a process group: sets its identity and the global ranks of its `size`
// members.
using Describe = void (*)(const char* name, int32_t group_rank, int32_t size, uint32_t* identity,
                          int32_t* ranks);

// Sequence numbers outlive a process group: one that is created again with the same name and ranks
// continues them, on every rank.
struct Counters {
  uint64_t collectives = 0;
  std::map<std::pair<bool, int32_t>, uint64_t> pairs;
};

struct Communicator {
  // A weak reference: it does not keep the group alive, but its address is not reused while it is a
  // key.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  uint32_t identity = 0;
  std::vector<int32_t> ranks;
  std::shared_ptr<Counters> counters;
  // Operators whose works have no future in this group. Finding out costs an exception, so it is
  // tried once.
  std::bitset<PLANS.size()> without_future;
};

struct Recorder {
  std::mutex mutex;
  std::shared_ptr<Lane> lane;
  Describe describe = nullptr;
  std::unordered_map<c10d::ProcessGroup*, Communicator> communicators;
  std::unordered_map<uint32_t, std::shared_ptr<Counters>> counters;
};

// Never destroyed: threads of backends may end operations while the process exits.
Recorder& recorder() {
  static auto* const it = new Recorder;
  return *it;
}

// Outside the recorder, because a forked child must not take a lock.
std::atomic<bool> is_recording{false};

uint8_t dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kBool: return 1;
    case at::kByte: return 2;
    case at::kChar: return 3;
    case at::kShort: return 4;
    case at::kInt: return 5;
    case at::kLong: return 6;
    case at::kHalf: return 7;
    case at::kBFloat16: return 8;
    case at::kFloat: return 9;
    case at::kDouble: return 10;
    case at::kFloat8_e4m3fn: return 11;
    case at::kFloat8_e4m3fnuz: return 12;
    case at::kFloat8_e5m2: return 13;
    case at::kFloat8_e5m2fnuz: return 14;
    case at::kComplexFloat: return 15;
    case at::kComplexDouble: return 16;
    default: return 17;
  }
}

struct Payload {
  uint64_t nbytes = 0;
  uint8_t dtype = 0;
  c10::Device device{c10::kCPU};

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (dtype == 0) {
      dtype = dtype_code(tensor.scalar_type());
      device = tensor.device();
    }
    // The size of a sparse tensor depends on its data.
    if (tensor.layout() == at::kStrided) nbytes += tensor.nbytes();
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) add(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& inner : value.toListRef()) add(inner);
    }
  }
};

// Wraps a work without a future (gloo's sends and receives); records its end when it is waited for.
class WatchedWork : public c10d::Work {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> inner, Ticket ticket)
      : inner_(std::move(inner)), ticket_(std::move(ticket)) {}
  ~WatchedWork() override { record_end(UNOBSERVED); }
  bool isCompleted() override {
    const bool is_completed = inner_->isCompleted();
    if (is_completed) record_end(0);
    return is_completed;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool is_completed = inner_->wait(timeout);
      // gloo's wait returns false if it was aborted.
      record_end(is_completed ? 0 : FAILED);
      return is_completed;
    } catch (...) {
      record_end(FAILED);
      throw;
    }
  }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  void record_end(uint8_t flags) {
    if (!is_end_recorded_.exchange(true)) ticket_.end(flags);
  }
  c10::intrusive_ptr<c10d::Work> inner_;
  Ticket ticket_;
  std::atomic<bool> is_end_recorded_{false};
};

// Detects when operations on a device have ended, without making the job wait: its own thread,
// without the GIL, queries the oldest event of each communicator once a millisecond. Not the
// calling thread, because a query may block when a device's queue is full.
//
// The device's events give spans only. The first event of a communicator is its anchor: the least
// delay with which an event was observed after its span from the anchor determines the time of the
// anchor. Every ten seconds a new anchor is taken, before the device's clock has drifted or the
// spans, which are single precision, have lost their microseconds.
//
// No test covers this class: the tests run without a device.
class DeviceWatch {
 public:
  struct Pending {
    Ticket ticket;
    c10::Event began, ended;
  };

  // Never destroyed, like the recorder.
  static DeviceWatch& get() {
    static auto* const it = new DeviceWatch;
    return *it;
  }

  void add(uint32_t communicator, Pending pending) {
    const std::lock_guard lock(mutex_);
    timelines_[communicator].queue.push_back(std::move(pending));
    ++waiting_;
    if (!is_running_) {
      is_running_ = true;
      std::thread([this] { run(); }).detach();
    }
    added_.notify_one();
  }

 private:
  static constexpr double ANCHOR_KEPT_S = 10.0;

  struct Timeline {
    std::deque<Pending> queue;
    std::optional<c10::Event> anchor;
    double anchor_s = 0.0;
    double last_ended_s = 0.0;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      added_.wait(lock, [this] { return waiting_ > 0; });
      // Other threads add timelines and append to queues, which keeps references valid; only this
      // thread removes entries.
      for (auto& entry : timelines_) {
        Timeline& timeline = entry.second;
        while (!timeline.queue.empty()) {
          Pending& oldest = timeline.queue.front();
          lock.unlock();
          const bool is_over = settle(timeline, oldest);
          lock.lock();
          if (!is_over) break;
          timeline.queue.pop_front();
          --waiting_;
        }
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
    }
  }

  // Records the end of an operation if it has ended; returns whether it has. Its end event may
  // become the timeline's anchor.
  static bool settle(Timeline& timeline, Pending& pending) {
    try {
      if (!pending.ended.query()) return false;
      const double observed_s = now_s();
      const double duration_s = 1e-3 * pending.began.elapsedTime(pending.ended);
      const double span_s =
          timeline.anchor ? 1e-3 * timeline.anchor->elapsedTime(pending.ended) : 0.0;
      const bool takes_anchor = !timeline.anchor || span_s > ANCHOR_KEPT_S;
      timeline.anchor_s =
          takes_anchor ? observed_s : std::min(timeline.anchor_s, observed_s - span_s);
      const double ended_s = timeline.anchor_s + (takes_anchor ? 0.0 : span_s);
      // An operation that was called while the previous one ran began when that one had ended.
      const double started_s =
          std::min(std::max(ended_s - duration_s, timeline.last_ended_s), ended_s);
      timeline.last_ended_s = ended_s;
      pending.ticket.lane->end(pending.ticket.position, DEVICE_TIMES, ended_s, started_s);
      if (takes_anchor) timeline.anchor.emplace(std::move(pending.ended));
    } catch (const std::exception&) {
      // The device has failed, or the process is ending: the job's own error handling deals with
      // that.
      pending.ticket.end(FAILED | UNOBSERVED);
    }
    return true;
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::map<uint32_t, Timeline> timelines_;
  size_t waiting_ = 0;
  bool is_running_ = false;
};

// Returns whether a graph is being captured: nothing runs then, and timing events would become part
// of the graph.
template <typename Stream>
bool is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
  return false;
}

// Returns an event after all work in the device's current stream; none if the device has no events
// or captures a graph.
std::optional<c10::Event> record_event(const c10::Device& device) {
  try {
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (is_capturing(stream)) return std::nullopt;
    c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event.record(stream);
    return event;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Adds a group to the recorder, unless it is there. Takes the GIL the first time.
void add_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto& it = recorder();
  Describe describe = nullptr;
  {
    const std::lock_guard lock(it.mutex);
    if (it.communicators.count(group.get()) != 0) return;
    describe = it.describe;
  }
  uint32_t identity = 0;
  std::vector<int32_t> ranks(group->getSize(), -1);
  if (describe != nullptr) {
    describe(group->getGroupName().c_str(), group->getRank(), group->getSize(), &identity,
             ranks.data());
  }
  const std::lock_guard lock(it.mutex);
  for (auto at = it.communicators.begin(); at != it.communicators.end();) {
    at = at->second.group.expired() ? it.communicators.erase(at) : std::next(at);
  }
  auto& counters = it.counters[identity];
  if (!counters) counters = std::make_shared<Counters>();
  it.communicators.try_emplace(
      group.get(), Communicator{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), identity,
                                std::move(ranks), counters, {}});
}

// The state of a recorded call.
struct Call {
  Ticket ticket;
  uint32_t communicator = 0;
  c10::Device device{c10::kCPU};
  // Set if the operation runs on a device that provides events.
  std::optional<c10::Event> began;
  bool has_future = true;
};

bool runs_on_device(const c10::Device& device) { return !device.is_cpu(); }

// Records a call; returns nothing if it is not to be recorded. An invalid call must behave as if it
// were not recorded.
template <size_t INDEX>
std::optional<Call> enter(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  constexpr Plan PLAN = PLANS[INDEX];
  constexpr bool IS_PAIR = PLAN.operation == SEND || PLAN.operation == RECEIVE;
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
    add_group(group);
    Call call;
    call.device = payload.device;
    if (runs_on_device(call.device)) call.began = record_event(call.device);

    auto& it = recorder();
    const std::lock_guard lock(it.mutex);
    const auto entry = it.communicators.find(group.get());
    if (!it.lane || entry == it.communicators.end()) return std::nullopt;
    Communicator& communicator = entry->second;
    Record fields{};
    fields.code = PLAN.operation;
    fields.communicator = call.communicator = communicator.identity;
    fields.peer = -1;
    if (PLAN.peer >= 0) {
      const auto peer = argument(PLAN.peer).toInt();
      const auto size = static_cast<int64_t>(communicator.ranks.size());
      if (peer >= 0 && peer < size) fields.peer = communicator.ranks[peer];
    }
    if (PLAN.payload >= 0) {
      fields.nbytes = payload.nbytes;
      fields.dtype = payload.dtype;
    }
    if (IS_ASYNCHRONOUS >= 0 && argument(IS_ASYNCHRONOUS).toBool()) fields.flags = ASYNCHRONOUS;
    fields.number = IS_PAIR ? ++communicator.counters->pairs[{PLAN.operation == SEND, fields.peer}]
                            : ++communicator.counters->collectives;
    call.has_future = !communicator.without_future[INDEX];
    call.ticket = {it.lane, it.lane->begin(fields)};
    return call;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Arranges that the end of an operation is recorded. May replace its work in `result`.
template <size_t INDEX>
void watch(Call& call, c10d::ProcessGroup* group, c10::IValue& result) {
  const auto work = result.toCustomClass<c10d::Work>();
  if (!work || (runs_on_device(call.device) && !call.began)) return call.ticket.end(UNOBSERVED);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  if (call.has_future) {
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
      auto& it = recorder();
      const std::lock_guard lock(it.mutex);
      const auto entry = it.communicators.find(group);
      if (entry != it.communicators.end()) entry->second.without_future[INDEX] = true;
      call.has_future = false;
    }
  }
  if (future && !call.began) {
    future->addCallback([ticket = call.ticket](c10::ivalue::Future& done) {
      ticket.end(done.hasError() ? FAILED : 0);
    });
  } else if (future) {
    // A device's future is complete once all work is in its queue; it then runs callbacks with
    // current streams that wait for that work.
    auto began = std::make_shared<c10::Event>(std::move(*call.began));
    future->addCallback([ticket = call.ticket, communicator = call.communicator,
                         device = call.device, began](c10::ivalue::Future& done) {
      if (done.hasError()) return ticket.end(FAILED);
      auto ended = record_event(device);
      if (!ended) return ticket.end(UNOBSERVED);
      DeviceWatch::get().add(communicator, {ticket, std::move(*began), std::move(*ended)});
    });
  } else if (!call.began && !call.has_future) {
    result = c10::IValue(
        c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WatchedWork>(work, call.ticket)));
  } else {
    call.ticket.end(UNOBSERVED);
  }
}

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
    op.redispatchBoxed(below, stack);
  } catch (...) {
    call->ticket.end(FAILED);
    throw;
  }
  if (schema.returns().empty()) return call->ticket.end(0);
  try {
    watch<INDEX>(*call, group.get(), stack->back());
  } catch (const std::exception&) {
    call->ticket.end(UNOBSERVED);
  }
}

template <size_t... INDEX>
void register_all(torch::Library& library, std::index_sequence<INDEX...>) {
  (library.impl(PLANS[INDEX].name,
                torch::CppFunction::makeFromBoxedFunction<&record<INDEX>>()),
   ...);
}

void stop_in_child() { is_recording.store(false); }

}  // namespace

TORCH_LIBRARY_IMPL(c10d, BackendSelect, library) {
  register_all(library, std::make_index_sequence<PLANS.size()>());
  pthread_atfork(nullptr, nullptr, stop_in_child);
}

extern "C" {

// Starts to record into the ring at `path`, with all counters at 0. Returns 0, or an errno.
int keepstep_open(const char* path, size_t nbytes, size_t offset, size_t capacity,
                  size_t counter_offset, size_t step_offset, Describe describe) {
  const int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return errno;
  void* const memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const int error = errno;
  close(descriptor);
  if (memory == MAP_FAILED) return error;
  auto lane = std::make_shared<Lane>(
      static_cast<uint8_t*>(memory), nbytes, offset, capacity, counter_offset, step_offset);
  auto& it = recorder();
  const std::lock_guard lock(it.mutex);
  it.lane = std::move(lane);
  it.describe = describe;
  it.communicators.clear();
  it.counters.clear();
  is_recording.store(true);
  return 0;
}

// Stops recording. The ends of open operations are still recorded.
void keepstep_close() {
  is_recording.store(false);
  auto& it = recorder();
  const std::lock_guard lock(it.mutex);
  it.lane = nullptr;
  it.describe = nullptr;
}
}
