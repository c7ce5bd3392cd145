// What the programs of claims share: a claim is a function that is run in a process of its own.

#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "lane.h"
#include "nccl_profiler.h"
#include "stand_in_driver.h"

namespace keepstep {

inline std::map<std::string, std::function<void()>>& claims() {
  static std::map<std::string, std::function<void()>> it;
  return it;
}

#define CLAIM(name)                                                    \
  void name();                                                         \
  const bool name##_is_known = claims().emplace(#name, name).second;   \
  void name()

#define HOLDS(condition)                                                         \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::_Exit(1);                                                          \
    }                                                                         \
  } while (false)

template <typename Condition>
void wait_until(int line, const char* text, Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
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

inline void use(int context) { STAND_IN(stand_in_use)(STAND_IN(stand_in_context)(context)); }
inline void* stream(int number) { return STAND_IN(stand_in_stream)(number); }
inline void complete(void* of, int count, double device_s) {
  STAND_IN(stand_in_complete)(of, count, device_s);
}
inline int pending(void* of) { return STAND_IN(stand_in_pending)(of); }

// A file with a lane of operations, as a ring has one.
class LaneFile {
 public:
  explicit LaneFile(size_t capacity = 1024)
      : layout{OFFSET + capacity * sizeof(Record), OFFSET, capacity, 0, 8} {
    const int descriptor = mkstemp(path);
    HOLDS(ftruncate(descriptor, static_cast<off_t>(layout.nbytes)) == 0);
    memory_ = static_cast<uint8_t*>(
        mmap(nullptr, layout.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
    ::close(descriptor);
  }
  LaneFile(const LaneFile&) = delete;
  LaneFile& operator=(const LaneFile&) = delete;
  ~LaneFile() { unlink(path); }

  template <typename Field>
  Field read(uint64_t position, Field Record::*field) const {
    Record& slot =
        reinterpret_cast<Record*>(memory_ + OFFSET)[position & (layout.capacity - 1)];
    return std::atomic_ref<Field>(slot.*field).load(std::memory_order_acquire);
  }
  double started_s(uint64_t position) const { return read(position, &Record::started_s); }
  double ended_s(uint64_t position) const { return read(position, &Record::ended_s); }
  uint8_t flags(uint64_t position) const { return read(position, &Record::flags); }

  char path[32] = "/tmp/keepstep-lane-XXXXXX";
  const LaneLayout layout;

 private:
  static constexpr size_t OFFSET = 64;
  uint8_t* memory_ = nullptr;
};

inline void check_nothing_forbidden() { HOLDS(STAND_IN(stand_in_forbidden)() == 0); }

// A communicator of NCCL with the plugin, as NCCL's sources call it.
class Nccl {
 public:
  explicit Nccl(Profiler& plugin) : plugin_(plugin) {
    HOLDS(plugin_.init(&context_, 1, &mask, "", 1, 2, 0, nullptr) == 0);
  }
  ~Nccl() {
    if (context_ != nullptr) plugin_.finalize(context_);
  }

  void* start_group(bool is_captured = false) {
    ProfilerEvent event = of_type(GROUP_API, nullptr);
    event.group.is_captured = is_captured;
    event.group.depth = 1;
    return start(event);
  }
  void call(void* group, ProfilerEventType type = COLLECTIVE_API) {
    HOLDS(start(of_type(type, group)) == nullptr);
  }
  void* start_launch(void* group, void* on) {
    ProfilerEvent event = of_type(KERNEL_LAUNCH, group);
    event.launch.stream = on;
    return start(event);
  }
  // As NCCL does, which holds no handle then.
  void stop(void* handle) {
    if (handle != nullptr) HOLDS(plugin_.stop(handle) == 0);
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
    HOLDS(plugin_.start(context_, &handle, &event) == 0);
    return handle;
  }
  Profiler& plugin_;
  void* context_ = nullptr;
};

inline int run_claim(int count, char** arguments) {
  if (count < 2 || claims().count(arguments[1]) == 0) return 2;
  for (int index = 2; index < count; ++index) {
    if (dlopen(arguments[index], RTLD_NOW | RTLD_GLOBAL) != nullptr) continue;
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  claims().at(arguments[1])();
  return 0;
}

}  // namespace keepstep
