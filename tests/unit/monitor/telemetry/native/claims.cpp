// Claims about the native recorder: `claims NAME [LIBRARY]`, where LIBRARY is the stand-in for the
// driver. Without PyTorch and without a device.

#include <sys/resource.h>

#include <cmath>
#include <thread>
#include <tuple>
#include <vector>

#include "claim.h"
#include "device_clock.h"
#include "device_watch.h"
#include "driver.h"

using namespace keepstep;

namespace {

// A lane of operations, opened for writing.
class TestLane : public LaneFile {
 public:
  explicit TestLane(size_t capacity = 1024)
      : LaneFile(capacity), lane(Lane::open(path, layout)) {
    HOLDS(lane != nullptr);
  }

  std::shared_ptr<Lane> lane;
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

// A call of a collective that is launched on a stream.
Call collective(TestLane& lane, Nccl& nccl, void* on) {
  Call call(lane);
  nccl.collective(on);
  call.returns();
  return call;
}

// A claim about a rank that computes in context 0, and whose NCCL has the plugin.
#define RANK_CLAIM(name)                       \
  void name##_of(TestLane& lane, Nccl& nccl);  \
  CLAIM(name) {                                \
    use(0);                                    \
    TestLane lane;                             \
    Nccl nccl(ncclProfiler_v5);                \
    name##_of(lane, nccl);                     \
  }                                            \
  void name##_of(TestLane& lane, Nccl& nccl)

CLAIM(process_without_the_driver_observes_nothing_and_loads_nothing) {
  HOLDS(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY) == nullptr);
  Nccl nccl(ncclProfiler_v5);
  HOLDS(nccl.mask == 0);
  HOLDS(!does_nccl_report());
  HOLDS(!DeviceWatch::get().record(nullptr));
  HOLDS(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY) == nullptr);
}

CLAIM(driver_that_is_loaded_later_is_found) {
  // The library was loaded before `main`; what is claimed is that loading finds all functions.
  HOLDS(Driver::get() != nullptr);
  Nccl nccl(ncclProfiler_v5);
  HOLDS(nccl.mask == (1 << 8 | 1 << 9 | 1 << 10 | 1 << 11));
  HOLDS(does_nccl_report());
}

RANK_CLAIM(operation_is_open_until_its_end_is_seen_on_the_device) {
  const Call call = collective(lane, nccl, stream(0));
  HOLDS(pending(stream(0)) == 2);
  HOLDS(lane.flags(call.position) == (DEVICE_TIMES | LAUNCHED));
  HOLDS(lane.started_s(call.position) == 0.0);
  HOLDS(lane.ended_s(call.position) == 0.0);
  const double before_s = now_s();
  complete(stream(0), 1, 100.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  HOLDS(lane.ended_s(call.position) == 0.0);
  HOLDS(lane.started_s(call.position) >= before_s - 1.0);
  complete(stream(0), 1, 100.5);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  HOLDS(lane.ended_s(call.position) >= lane.started_s(call.position));
  HOLDS(lane.flags(call.position) == (DEVICE_TIMES | LAUNCHED));
  check_nothing_forbidden();
}

RANK_CLAIM(stream_that_hangs_holds_up_no_other_stream) {
  const Call hung = collective(lane, nccl, stream(0));
  const Call other = collective(lane, nccl, stream(1));
  complete(stream(1), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(other.position) > 0.0);
  HOLDS(lane.started_s(hung.position) == 0.0);
  HOLDS(lane.ended_s(hung.position) == 0.0);
}

RANK_CLAIM(coalesced_operations_share_the_launch_at_the_end_of_their_group) {
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
  HOLDS(pending(stream(2)) == 2);
  complete(stream(2), 2, 1.0);
  for (const uint64_t position : positions) WAIT_UNTIL(lane.ended_s(position) > 0.0);
  HOLDS(lane.ended_s(positions[0]) == lane.ended_s(positions[2]));
  HOLDS(lane.started_s(positions[0]) > 0.0);
}

RANK_CLAIM(operation_of_several_launches_begins_with_the_first_and_ends_with_the_last) {
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
  const Call after = collective(lane, nccl, stream(1));
  complete(stream(1), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(after.position) > 0.0);
  HOLDS(lane.ended_s(call.position) == 0.0);
  complete(stream(0), 2, 3.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  HOLDS(lane.started_s(call.position) == started_s);
  HOLDS(lane.ended_s(call.position) > lane.ended_s(after.position));
}

RANK_CLAIM(captured_operation_is_not_observed_and_no_event_enters_the_graph) {
  Call told(lane);
  void* const group = nccl.start_group(true);
  nccl.call(group);
  HOLDS(nccl.start_launch(group, stream(0)) == nullptr);
  nccl.stop(group);
  told.returns();
  WAIT_UNTIL(lane.flags(told.position) & UNOBSERVED);
  HOLDS(lane.ended_s(told.position) == 0.0);

  // The stream of this launch is captured although the group's first call was not.
  STAND_IN(stand_in_begin_capture)(stream(0));
  const Call untold = collective(lane, nccl, stream(0));
  HOLDS(STAND_IN(stand_in_end_capture)());
  WAIT_UNTIL(lane.flags(untold.position) & UNOBSERVED);
  HOLDS(lane.ended_s(untold.position) == 0.0);
  check_nothing_forbidden();
}

RANK_CLAIM(capture_survives_that_the_watch_polls) {
  const Call call = collective(lane, nccl, stream(0));
  STAND_IN(stand_in_begin_capture)(stream(5));
  const int queries = STAND_IN(stand_in_queries)();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() > queries + 5);
  // New events are created meanwhile, by a thread in the default mode.
  std::thread([&] {
    use(0);
    collective(lane, nccl, stream(1));
  }).join();
  HOLDS(STAND_IN(stand_in_end_capture)());
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  HOLDS(lane.flags(call.position) == (DEVICE_TIMES | LAUNCHED));
}

RANK_CLAIM(operation_without_a_launch_is_neither_ended_nor_observed) {
  // Of one rank: NCCL reports nothing.
  Call silent(lane);
  HOLDS(DeviceWatch::get().is_launched(silent.operation) == false);
  silent.returns();
  HOLDS(lane.flags(silent.position) == (DEVICE_TIMES | UNOBSERVED));
  HOLDS(lane.ended_s(silent.position) == 0.0);
  // By copy engines: a group and a call, and no launch. Another thread might still launch it.
  Call copied(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  HOLDS(!DeviceWatch::get().is_launched(copied.operation));
  nccl.stop(group);
  HOLDS(DeviceWatch::get().is_launched(copied.operation) == false);
  copied.returns();
  HOLDS(lane.flags(copied.position) == DEVICE_TIMES);
  WAIT_UNTIL(lane.flags(copied.position) & UNOBSERVED);
  HOLDS(lane.ended_s(copied.position) == 0.0);
}

RANK_CLAIM(non_blocking_communicator_launches_after_the_end_of_its_group) {
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  nccl.call(group);
  nccl.stop(group);
  call.returns();
  HOLDS(lane.flags(call.position) == DEVICE_TIMES);
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
  HOLDS(lane.ended_s(call.position) == 0.0);
  complete(stream(1), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  HOLDS(lane.flags(call.position) == (DEVICE_TIMES | LAUNCHED));
}

CLAIM(launch_of_a_group_that_is_over_is_not_observed) {
  use(0);
  TestLane lane(8192);
  Nccl nccl(ncclProfiler_v5);
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
    collective(lane, nccl, stream(1));
    complete(stream(1), 2, 2.0);
    HOLDS(nccl.start_launch(group, stream(0)) == nullptr);
  }
  HOLDS(lane.ended_s(call.position) == ended_s);
}

CLAIM(calls_that_are_not_recorded_are_not_observed) {
  use(0);
  Nccl nccl(ncclProfiler_v5);
  HOLDS(nccl.start_group() == nullptr);
  nccl.collective(stream(0));
  HOLDS(pending(stream(0)) == 0);
}

CLAIM(events_around_a_call_give_its_times_where_nccl_reports_nothing) {
  use(0);
  TestLane lane;
  auto& watch = DeviceWatch::get();
  Call call(lane);
  const auto before = watch.record(stream(0));
  const auto after = watch.record(stream(0));
  HOLDS(before && after);
  watch.bracket(call.operation, *before, *after);
  call.returns();
  complete(stream(0), 1, 5.0);
  WAIT_UNTIL(lane.started_s(call.position) > 0.0);
  HOLDS(lane.ended_s(call.position) == 0.0);
  complete(stream(0), 1, 6.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
}

RANK_CLAIM(call_that_raises_has_failed_whatever_was_launched) {
  Call call(lane);
  nccl.collective(stream(0));
  call.returns(true);
  HOLDS(lane.flags(call.position) & FAILED);
  const double ended_s = lane.ended_s(call.position);
  HOLDS(ended_s > 0.0);
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(pending(stream(0)) == 0);
  const Call next = collective(lane, nccl, stream(0));
  complete(stream(0), 2, 2.0);
  WAIT_UNTIL(lane.ended_s(next.position) > 0.0);
  HOLDS(lane.ended_s(call.position) == ended_s);
}

CLAIM(operations_fail_with_the_device_and_not_with_the_context) {
  for (const auto& [code, flags, is_ended] :
       {std::tuple{719, LAUNCHED | DEVICE_TIMES | FAILED | UNOBSERVED, true},
        std::tuple{709, LAUNCHED | DEVICE_TIMES | UNOBSERVED, false},
        std::tuple{4, LAUNCHED | DEVICE_TIMES | UNOBSERVED, false}}) {
    use(0);
    TestLane lane;
    Nccl nccl(ncclProfiler_v5);
    const Call call = collective(lane, nccl, stream(0));
    STAND_IN(stand_in_fail)(code);
    WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
    WAIT_UNTIL((lane.ended_s(call.position) > 0.0) == is_ended);
    HOLDS(lane.flags(call.position) == flags);
    STAND_IN(stand_in_fail)(0);
    complete(stream(0), 2, 1.0);
  }
}

RANK_CLAIM(operations_are_observed_again_after_the_events_of_a_context_are_gone) {
  const auto observe = [&](bool is_forgotten) {
    const Call call = collective(lane, nccl, stream(0));
    complete(stream(0), 1, 1.0);
    WAIT_UNTIL(lane.started_s(call.position) > 0.0);
    if (is_forgotten) STAND_IN(stand_in_forget_events)();
    complete(stream(0), 1, 2.0);
    WAIT_UNTIL(lane.ended_s(call.position) > 0.0 || (lane.flags(call.position) & UNOBSERVED));
    return lane.ended_s(call.position) > 0.0;
  };
  HOLDS(observe(false));
  HOLDS(!observe(true));
  HOLDS(observe(false));
}

RANK_CLAIM(watch_with_nothing_to_do_sleeps) {
  const Call call = collective(lane, nccl, stream(0));
  complete(stream(0), 2, 1.0);
  WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  const auto wakes = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
  };
  // It polls once a millisecond while something is due.
  const auto wakes_in_30_ms = [&] {
    const auto before = wakes();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    return wakes() - before;
  };
  WAIT_UNTIL(wakes_in_30_ms() < 5);
}

RANK_CLAIM(many_streams_come_and_go) {
  for (int count = 0; count < 300; ++count) {
    void* const on = reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + count));
    Call call(lane);
    nccl.collective(on);
    call.returns();
    complete(on, 2, count);
    WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  }
}

RANK_CLAIM(launch_that_cannot_be_recorded_is_not_observed) {
  Call call(lane);
  void* const group = nccl.start_group();
  nccl.call(group);
  void* const launch = nccl.start_launch(group, stream(0));
  STAND_IN(stand_in_fail)(719);
  nccl.stop(launch);
  HOLDS(nccl.start_launch(group, stream(0)) == nullptr);
  nccl.stop(group);
  call.returns();
  WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
  HOLDS(lane.ended_s(call.position) == 0.0);
}

RANK_CLAIM(events_are_reused_and_never_destroyed) {
  for (int count = 0; count < 1000; ++count) {
    Call call(lane);
    nccl.collective(stream(count % 2));
    call.returns();
    complete(stream(count % 2), 2, count);
    if (count % 10 == 9) WAIT_UNTIL(lane.ended_s(call.position) > 0.0);
  }
  HOLDS(DeviceWatch::get().created_events() < 60);
  check_nothing_forbidden();
}

CLAIM(events_are_queried_in_their_own_context) {
  TestLane lane;
  Nccl nccl(ncclProfiler_v5);
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
  Nccl nccl(ncclProfiler_v5);
  TestLane lane;
  const Call call = collective(lane, nccl, stream(0));
  WAIT_UNTIL(lane.flags(call.position) & UNOBSERVED);
  check_nothing_forbidden();
}

RANK_CLAIM(stuck_device_is_asked_less_often) {
  collective(lane, nccl, stream(0));
  const double began_s = now_s();
  WAIT_UNTIL(now_s() > began_s + 1.2);
  const int queries = STAND_IN(stand_in_queries)();
  WAIT_UNTIL(STAND_IN(stand_in_queries)() >= queries + 20);
  // 20 queries 10 ms apart.
  HOLDS(now_s() > began_s + 1.2 + 0.15);
}

CLAIM(process_ends_while_operations_are_open) {
  use(0);
  static auto* const lane = new TestLane;
  static auto* const nccl = new Nccl(ncclProfiler_v5);
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
    HOLDS(driver.record(event, on) == 0);
    complete(on, 1, (host_s - 1000.0) * 1.0001);
    int result = -1;
    const double earliest_s = host_s - 0.0001 * (count % 10);
    const double told_s =
        clock.time_of(driver, event, earliest_s, host_s + 0.0001 * (9 - count % 9), &result);
    HOLDS(result == 0);
    clock.offer_anchor(event);
    worst_s = std::max(worst_s, std::abs(told_s - host_s));
    HOLDS(told_s > last_s);
    last_s = told_s;
  }
  HOLDS(worst_s < 0.001);
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
  HOLDS(whole > 0);
  HOLDS(torn == 0);
}

CLAIM(many_threads_record_while_the_device_runs) {
  constexpr int THREADS = 4, CALLS = 400;
  TestLane lane(4096);
  Nccl nccl(ncclProfiler_v5);
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

int main(int count, char** arguments) { return run_claim(count, arguments); }
