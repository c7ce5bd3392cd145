// Claims about the native recorder, one a process: `claims NAME [LIBRARY]`, where LIBRARY is the
// stand-in for the driver. Without PyTorch and without a device.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "device_clock.h"
#include "device_watch.h"
#include "driver.h"
#include "lane.h"
#include "nccl_profiler.h"
#include "stand_in_driver.h"

using namespace keepstep;

namespace {

std::map<std::string, std::function<void()>>& claims() {
  static std::map<std::string, std::function<void()>> it;
  return it;
}

#define CLAIM(name)                                                    \
  void name();                                                         \
  const bool name##_is_known = claims().emplace(#name, name).second;   \
  void name()

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::_Exit(1);                                                          \
    }                                                                         \
  } while (false)

template <typename Condition>
void wait_until(int line, const char* text, Condition condition) {
  const double deadline_s = now_s() + 60.0;
  while (!condition()) {
    if (now_s() > deadline_s) {
      std::fprintf(stderr, "line %d: %s never held\n", line, text);
      std::_Exit(1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}
#define WAIT_UNTIL(condition) wait_until(__LINE__, #condition, [&] { return condition; })

// The stand-in's functions, found in the library that was loaded.
template <typename Function>
Function* stand_in(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}
#define STAND_IN(name) stand_in(static_cast<decltype(&name)>(nullptr), #name)

void use(int context) { STAND_IN(stand_in_use)(STAND_IN(stand_in_context)(context)); }
void* stream(int number) { return STAND_IN(stand_in_stream)(number); }
void complete(void* of, int count, double device_s) {
  STAND_IN(stand_in_complete)(of, count, device_s);
}
int pending(void* of) { return STAND_IN(stand_in_pending)(of); }

// A ring's lane in a file of its own.
class TestLane {
 public:
  explicit TestLane(size_t capacity = 1024) : capacity_(capacity) {
    char path[] = "/tmp/keepstep-lane-XXXXXX";
    const int descriptor = mkstemp(path);
    const size_t nbytes = OFFSET + capacity * sizeof(Record);
    CHECK(ftruncate(descriptor, static_cast<off_t>(nbytes)) == 0);
    memory_ = static_cast<uint8_t*>(
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
    ::close(descriptor);
    lane = Lane::open(path, {nbytes, OFFSET, capacity, 0, 8});
    CHECK(lane != nullptr);
    unlink(path);
  }

  template <typename Field>
  Field read(uint64_t position, Field Record::*field) const {
    Record& slot = reinterpret_cast<Record*>(memory_ + OFFSET)[position & (capacity_ - 1)];
    return std::atomic_ref<Field>(slot.*field).load(std::memory_order_acquire);
  }
  double started_s(uint64_t position) const { return read(position, &Record::started_s); }
  double ended_s(uint64_t position) const { return read(position, &Record::ended_s); }
  uint8_t flags(uint64_t position) const { return read(position, &Record::flags); }

  std::shared_ptr<Lane> lane;

 private:
  static constexpr size_t OFFSET = 64;
  size_t capacity_;
  uint8_t* memory_ = nullptr;
};

// A call of an operation, as the dispatcher kernel makes it.
class Call {
 public:
  explicit Call(TestLane& lane) {
    Record fields{};
    fields.flags = DEVICE_TIMES;
    position = lane.lane->begin(fields);
    operation = DeviceWatch::get().begin({lane.lane, position});
    DeviceWatch::calling() = operation;
  }
  void returns(bool has_failed = false) {
    DeviceWatch::calling() = nullptr;
    DeviceWatch::get().returned(operation, has_failed);
  }

  uint64_t position;
  Operation* operation;
};

// A communicator of NCCL with the plugin, as NCCL's sources call it.
class Nccl {
 public:
  Nccl() { CHECK(ncclProfiler_v5.init(&context_, 1, &mask, "", 1, 2, 0, nullptr) == 0); }
  ~Nccl() {
    if (context_ != nullptr) ncclProfiler_v5.finalize(context_);
  }

  void* start_group(bool is_captured = false) {
    ProfilerEvent event = of_type(GROUP_API, nullptr);
    event.group.is_captured = is_captured;
    event.group.depth = 1;
    return start(event);
  }
  void call(void* group, ProfilerEventType type = COLLECTIVE_API) {
    CHECK(start(of_type(type, group)) == nullptr);
  }
  void* start_launch(void* group, void* on) {
    ProfilerEvent event = of_type(KERNEL_LAUNCH, group);
    event.launch.stream = on;
    return start(event);
  }
  // As NCCL does, which holds no handle then.
  void stop(void* handle) {
    if (handle != nullptr) CHECK(ncclProfiler_v5.stop(handle) == 0);
  }
  void launch(void* group, void* on) { stop(start_launch(group, on)); }
  // A collective outside of a group, by a blocking communicator.
  void collective(void* on) {
    void* const group = start_group();
    call(group);
    launch(group, on);
    stop(group);
  }

  int mask = 0;

 private:
  static ProfilerEvent of_type(ProfilerEventType type, void* parent) {
    ProfilerEvent event{};
    event.type = type;
    event.parent = parent;
    return event;
  }
  void* start(ProfilerEvent event) {
    void* handle = &handle;
    CHECK(ncclProfiler_v5.start(context_, &handle, &event) == 0);
    return handle;
  }
  void* context_ = nullptr;
};

void check_nothing_forbidden() { CHECK(STAND_IN(stand_in_forbidden)() == 0); }

CLAIM(process_without_the_driver_observes_nothing_and_loads_nothing) {
  CHECK(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY) == nullptr);
  Nccl nccl;
  CHECK(nccl.mask == 0);
  CHECK(!does_nccl_report());
  CHECK(!DeviceWatch::get().record(nullptr));
  CHECK(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY) == nullptr);
}

CLAIM(driver_that_is_loaded_later_is_found) {
  // The library was loaded before `main`; what is claimed is that loading finds all functions.
  CHECK(Driver::get() != nullptr);
  Nccl nccl;
  CHECK(nccl.mask == (1 << 8 | 1 << 9 | 1 << 10 | 1 << 11));
  CHECK(does_nccl_report());
}

CLAIM(operation_is_open_until_its_end_is_seen_on_the_device) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  nccl.collective(stream(0));
  call.returns();
  CHECK(pending(stream(0)) == 2);
  CHECK(lane.started_s(call.position) == 0.0);
  CHECK(lane.ended_s(call.position) == 0.0);
  const double before_s = now_s();
  complete(stream(0), 1, 100.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  CHECK(lane.ended_s(call.position) == 0.0);
  CHECK(lane.started_s(call.position) >= before_s - 1.0);
  complete(stream(0), 1, 100.5);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  CHECK(lane.ended_s(call.position) >= lane.started_s(call.position));
  CHECK(lane.flags(call.position) == DEVICE_TIMES);
  check_nothing_forbidden();
}

CLAIM(stream_that_hangs_holds_up_no_other_stream) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call hung(lane);
  nccl.collective(stream(0));
  hung.returns();
  Call other(lane);
  nccl.collective(stream(1));
  other.returns();
  complete(stream(1), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(other.position) > 0.0);
  CHECK(lane.started_s(hung.position) == 0.0);
  CHECK(lane.ended_s(hung.position) == 0.0);
}

CLAIM(coalesced_operations_share_the_launch_at_the_end_of_their_group) {
  use(0);
  TestLane lane;
  Nccl nccl;
  void* group = nullptr;
  std::vector<uint64_t> positions;
  for (int index = 0; index < 3; ++index) {
    Call call(lane);
    if (group == nullptr) group = nccl.start_group();
    nccl.call(group, PAIR_API);
    nccl.call(group, PAIR_API);
    call.returns();
    positions.push_back(call.position);
  }
  nccl.launch(group, stream(2));
  nccl.stop(group);
  CHECK(pending(stream(2)) == 2);
  complete(stream(2), 2, 1.0);
  for (const uint64_t position : positions) WAIT_UNTIL(lane.ended_s(position) > 0.0);
  CHECK(lane.ended_s(positions[0]) == lane.ended_s(positions[2]));
  CHECK(lane.started_s(positions[0]) > 0.0);
}

CLAIM(operation_of_several_launches_begins_with_the_first_and_ends_with_the_last) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  nccl.launch(group, stream(0));
  nccl.launch(group, stream(1));
  nccl.stop(group);
  call.returns();
  complete(stream(1), 2, 1.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  const double started_s = lane.started_s(call.position);
  Call after(lane);
  nccl.collective(stream(1));
  after.returns();
  complete(stream(1), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(after.position) > 0.0);
  CHECK(lane.ended_s(call.position) == 0.0);
  complete(stream(0), 2, 3.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  CHECK(lane.started_s(call.position) == started_s);
  CHECK(lane.ended_s(call.position) > lane.ended_s(after.position));
}

CLAIM(captured_operation_is_not_observed_and_no_event_enters_the_graph) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call told(lane);
  void* const group = nccl.start_group(true);
  nccl.call(group);
  CHECK(nccl.start_launch(group, stream(0)) == nullptr);
  nccl.stop(group);
  told.returns();
  WAIT_UNTIL(lane.flags(told.position) & UNOBSERVED);
  CHECK(lane.ended_s(told.position) == 0.0);

  // The stream of this launch is captured although the group's first call was not.
  STAND_IN(stand_in_begin_capture)(stream(0));
  Call untold(lane);
  nccl.collective(stream(0));
  untold.returns();
  CHECK(STAND_IN(stand_in_end_capture)());
  WAIT_UNTIL(lane.flags(untold.position) & UNOBSERVED);
  CHECK(lane.ended_s(untold.position) == 0.0);
  check_nothing_forbidden();
}

CLAIM(capture_survives_that_the_watch_polls) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  nccl.collective(stream(0));
  call.returns();
  STAND_IN(stand_in_begin_capture)(stream(5));
  const int queries = STAND_IN(stand_in_queries)();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() > queries + 5);
  // New events are created meanwhile, by a thread in the default mode.
  std::thread([&] {
    use(0);
    Call other(lane);
    nccl.collective(stream(1));
    other.returns();
  }).join();
  CHECK(STAND_IN(stand_in_end_capture)());
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  CHECK(lane.flags(call.position) == DEVICE_TIMES);
}

CLAIM(operation_without_a_launch_is_neither_ended_nor_observed) {
  use(0);
  TestLane lane;
  Nccl nccl;
  // Of one rank: NCCL reports nothing.
  Call silent(lane);
  CHECK(DeviceWatch::get().is_launched(silent.operation) == false);
  silent.returns();
  CHECK(lane.flags(silent.position) == (DEVICE_TIMES | UNOBSERVED));
  CHECK(lane.ended_s(silent.position) == 0.0);
  // By copy engines: a group and a call, and no launch. Another thread might still launch it.
  Call copied(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  CHECK(!DeviceWatch::get().is_launched(copied.operation));
  nccl.stop(group);
  CHECK(DeviceWatch::get().is_launched(copied.operation) == false);
  copied.returns();
  CHECK(lane.flags(copied.position) == DEVICE_TIMES);
  WAIT_UNTIL(lane.flags(copied.position) & UNOBSERVED);
  CHECK(lane.ended_s(copied.position) == 0.0);
}

CLAIM(non_blocking_communicator_launches_after_the_end_of_its_group) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  nccl.call(group);
  nccl.stop(group);
  call.returns();
  const auto launch = [&](int on) {
    std::thread([&] {
      use(0);
      nccl.launch(group, stream(on));
    }).join();
  };
  launch(0);
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  launch(1);
  CHECK(lane.ended_s(call.position) == 0.0);
  complete(stream(1), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  CHECK(lane.flags(call.position) == DEVICE_TIMES);
}

CLAIM(launch_of_a_group_that_is_over_is_not_observed) {
  use(0);
  TestLane lane(8192);
  Nccl nccl;
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  nccl.launch(group, stream(0));
  nccl.stop(group);
  call.returns();
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  const double ended_s = lane.ended_s(call.position);
  // Thousands of groups later its handle is still free.
  for (int count = 0; count < 4000; ++count) {
    Call later(lane);
    nccl.collective(stream(1));
    later.returns();
    complete(stream(1), 2, 2.0);
    CHECK(nccl.start_launch(group, stream(0)) == nullptr);
  }
  CHECK(lane.ended_s(call.position) == ended_s);
}

CLAIM(calls_that_are_not_recorded_are_not_observed) {
  use(0);
  Nccl nccl;
  CHECK(nccl.start_group() == nullptr);
  nccl.collective(stream(0));
  CHECK(pending(stream(0)) == 0);
}

CLAIM(events_around_a_call_give_its_times_where_nccl_reports_nothing) {
  use(0);
  TestLane lane;
  auto& watch = DeviceWatch::get();
  Call call(lane);
  const auto before = watch.record(stream(0));
  const auto after = watch.record(stream(0));
  CHECK(before && after);
  watch.bracket(call.operation, *before, *after);
  call.returns();
  complete(stream(0), 1, 5.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  CHECK(lane.ended_s(call.position) == 0.0);
  complete(stream(0), 1, 6.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
}

CLAIM(call_that_raises_has_failed_whatever_was_launched) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  nccl.collective(stream(0));
  call.returns(true);
  CHECK(lane.flags(call.position) & FAILED);
  const double ended_s = lane.ended_s(call.position);
  CHECK(ended_s > 0.0);
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(pending(stream(0)) == 0);
  Call next(lane);
  nccl.collective(stream(0));
  next.returns();
  complete(stream(0), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(next.position) > 0.0);
  CHECK(lane.ended_s(call.position) == ended_s);
}

CLAIM(operations_fail_with_the_device_and_not_with_the_context) {
  for (const auto& [code, flags, is_ended] :
       {std::tuple{719, DEVICE_TIMES | FAILED | UNOBSERVED, true},
        std::tuple{709, DEVICE_TIMES | UNOBSERVED, false},
        std::tuple{4, DEVICE_TIMES | UNOBSERVED, false}}) {
    use(0);
    TestLane lane;
    Nccl nccl;
    Call call(lane);
    nccl.collective(stream(0));
    call.returns();
    STAND_IN(stand_in_fail)(code);
    WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
    WAIT_UNTIL((lane.ended_s(call.position) > 0.0) == is_ended);
    CHECK(lane.flags(call.position) == flags);
    STAND_IN(stand_in_fail)(0);
    complete(stream(0), 2, 1.0);
  }
}

CLAIM(launch_that_cannot_be_recorded_is_not_observed) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  void* const launch = nccl.start_launch(group, stream(0));
  STAND_IN(stand_in_fail)(719);
  nccl.stop(launch);
  CHECK(nccl.start_launch(group, stream(0)) == nullptr);
  nccl.stop(group);
  call.returns();
  WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
  CHECK(lane.ended_s(call.position) == 0.0);
}

CLAIM(events_are_reused_and_never_destroyed) {
  use(0);
  TestLane lane;
  Nccl nccl;
  for (int count = 0; count < 1000; ++count) {
    Call call(lane);
    nccl.collective(stream(count % 2));
    call.returns();
    complete(stream(count % 2), 2, count);
    if (count % 10 == 9) WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  }
  CHECK(DeviceWatch::get().created_events() < 60);
  check_nothing_forbidden();
}

CLAIM(events_are_queried_in_their_own_context) {
  TestLane lane;
  Nccl nccl;
  std::vector<uint64_t> positions;
  for (int number = 0; number < 4; ++number) {
    use(number);
    Call call(lane);
    nccl.collective(stream(number));
    call.returns();
    positions.push_back(call.position);
  }
  const int queries = STAND_IN(stand_in_queries)();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() > queries + 8);
  for (int number = 0; number < 4; ++number) complete(stream(number), 2, 1.0);
  for (const uint64_t position : positions) WAIT_UNTIL(lane.ended_s(position) > 0.0);
  check_nothing_forbidden();
}

CLAIM(thread_without_a_context_records_no_event) {
  Nccl nccl;
  TestLane lane;
  Call call(lane);
  nccl.collective(stream(0));
  call.returns();
  WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
  check_nothing_forbidden();
}

CLAIM(stuck_device_is_asked_less_often) {
  use(0);
  TestLane lane;
  Nccl nccl;
  Call call(lane);
  nccl.collective(stream(0));
  call.returns();
  const double began_s = now_s();
  WAIT_UNTIL(now_s() > began_s + 1.2);
  const int queries = STAND_IN(stand_in_queries)();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() >= queries + 20);
  // 20 queries 10 ms apart.
  CHECK(now_s() > began_s + 1.2 + 0.15);
}

CLAIM(process_ends_while_operations_are_open) {
  use(0);
  static auto* const lane = new TestLane;
  static auto* const nccl = new Nccl;
  Call call(*lane);
  nccl->collective(stream(0));
  call.returns();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() > 3);
  // The stand-in fails the process if it is asked while it ends.
}

CLAIM(clock_follows_a_device_whose_clock_drifts) {
  // Events at known device times; the host saw each within a millisecond. 100 ppm of drift.
  use(0);
  const Driver& driver = *Driver::get();
  DeviceClock clock;
  void* const on = stream(0);
  double worst_s = 0.0, last_s = 0.0;
  for (int count = 0; count < 600; ++count) {
    const double host_s = 1000.0 + 0.1 * count + 0.0007 * (count % 13);
    const Event event = driver.create_event();
    CHECK(driver.record(event, on) == 0);
    complete(on, 1, (host_s - 1000.0) * 1.0001);
    int result = -1;
    const double earliest_s = host_s - 0.0001 * (count % 10);
    const double told_s =
        clock.time_of(driver, event, earliest_s, host_s + 0.0001 * (9 - count % 9), &result);
    CHECK(result == 0);
    clock.offer_anchor(event);
    worst_s = std::max(worst_s, std::abs(told_s - host_s));
    CHECK(told_s > last_s);
    last_s = told_s;
  }
  CHECK(worst_s < 0.001);
}

CLAIM(record_is_never_seen_torn_while_its_slot_is_overwritten) {
  TestLane lane(256);
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> torn{0}, whole{0};
  std::thread reader([&] {
    for (uint64_t position = 0; !is_over; position = (position + 1) & 255) {
      const uint64_t stamp = lane.read(position, &Record::stamp);
      const uint64_t number = lane.read(position, &Record::number);
      const uint64_t nbytes = lane.read(position, &Record::nbytes);
      if (stamp % 2 == 1 || stamp == 0 || lane.read(position, &Record::stamp) != stamp) continue;
      ++whole;
      if (nbytes != 3 * number) ++torn;
    }
  });
  std::vector<std::thread> writers;
  for (uint64_t writer = 0; writer < 3; ++writer) {
    writers.emplace_back([&lane, writer] {
      for (uint64_t count = 0; count < 20000; ++count) {
        Record fields{};
        fields.number = writer << 32 | count;
        fields.nbytes = 3 * fields.number;
        const uint64_t position = lane.lane->begin(fields);
        lane.lane->start(position, 1.0);
        lane.lane->end(position, FAILED, 2.0);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  is_over = true;
  reader.join();
  CHECK(whole > 0);
  CHECK(torn == 0);
}

CLAIM(many_threads_record_while_the_device_runs) {
  constexpr int THREADS = 4, CALLS = 400;
  TestLane lane(4096);
  Nccl nccl;
  std::atomic<int> running{THREADS};
  std::thread device([&] {
    for (double device_s = 0.0; running > 0; device_s += 0.001) {
      for (int number = 0; number < THREADS + 2; ++number) complete(stream(number), 3, device_s);
      std::this_thread::yield();
    }
    for (int number = 0; number < THREADS + 2; ++number) complete(stream(number), 10000, 1e3);
  });
  std::vector<std::thread> threads;
  for (int number = 0; number < THREADS; ++number) {
    threads.emplace_back([&, number] {
      use(number % 2);
      auto& watch = DeviceWatch::get();
      for (int count = 0; count < CALLS; ++count) {
        Call call(lane);
        // A stream of its own, so that all events of a stream have one context.
        void* const on = stream(number);
        if (count % 4 == 0) {
          const auto before = watch.record(on);
          if (const auto after = watch.record(on)) watch.bracket(call.operation, *before, *after);
        } else if (count % 4 == 1) {
          void* const group = nccl.start_group();
          nccl.call(group);
          nccl.stop(group);
          std::thread late([&] {
            use(number % 2);
            nccl.launch(group, on);
          });
          call.returns(count % 8 == 1);
          late.join();
          continue;
        } else if (count % 4 == 2) {
          void* const group = nccl.start_group(count % 8 == 2);
          nccl.call(group);
          nccl.launch(group, on);
          nccl.stop(group);
        } else {
          nccl.collective(on);
        }
        call.returns();
      }
      --running;
    });
  }
  for (auto& thread : threads) thread.join();
  device.join();
  for (uint64_t position = 0; position < THREADS * CALLS; ++position) {
    WAIT_UNTIL(lane.ended_s(position) > 0.0 || (lane.flags(position) & UNOBSERVED));
  }
  check_nothing_forbidden();
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || claims().count(arguments[1]) == 0) return 2;
  if (count > 2 && dlopen(arguments[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  claims().at(arguments[1])();
  return 0;
}
