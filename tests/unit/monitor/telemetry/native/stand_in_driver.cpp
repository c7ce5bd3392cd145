#include "stand_in_driver.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr int SUCCESS = 0, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600,
              CAPTURE_UNSUPPORTED = 900, CAPTURED_EVENT = 907;
constexpr int MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1;

struct StandInEvent {
  void* context = nullptr;
  bool is_recorded = false;
  bool is_captured = false;
  int open_records = 0;  // Of those, how many have not completed.
  double device_s = 0.0;
};

struct Simulation {
  std::mutex mutex;
  std::deque<StandInEvent> events;
  std::map<void*, std::deque<StandInEvent*>> streams;
  void* captured_stream = nullptr;
  bool is_capture_valid = true;
  int failure = SUCCESS;
  int forbidden = 0;
  int queries = 0;
};

Simulation& simulation() {
  static auto* const it = new Simulation;
  return *it;
}

thread_local void* context = nullptr;
thread_local int capture_mode = MODE_GLOBAL;
thread_local bool is_capturing_here = false;

char contexts[8], streams[64];

// With the mutex held: a call that a capture by another thread forbids in the default mode.
bool breaks_capture(Simulation& it) {
  const bool breaks = it.captured_stream != nullptr &&
                      (is_capturing_here ? capture_mode <= MODE_THREAD_LOCAL
                                         : capture_mode == MODE_GLOBAL);
  if (breaks) it.is_capture_valid = false;
  return breaks;
}

// As the driver does: what it holds is gone when the process ends, and nobody may ask then.
void end() {
  const int queries = stand_in_queries();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  if (stand_in_queries() != queries) _exit(3);
}

const bool ends_with_the_process = std::atexit(end) == 0;

}  // namespace

extern "C" {

int cuCtxGetCurrent(void** current) {
  *current = context;
  return SUCCESS;
}

int cuCtxSetCurrent(void* wanted) {
  context = wanted;
  return SUCCESS;
}

int cuCtxCreate_v2(void**, unsigned int, int) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  ++it.forbidden;
  return INVALID_CONTEXT;
}

int cuStreamIsCapturing(void* stream, int* status) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  *status = stream != nullptr && stream == it.captured_stream ? 1 : 0;
  return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int former = capture_mode;
  capture_mode = *mode;
  *mode = former;
  return SUCCESS;
}

int cuEventCreate(void** event, unsigned int) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  if (context == nullptr) return INVALID_CONTEXT;
  if (breaks_capture(it)) return CAPTURE_UNSUPPORTED;
  it.events.push_back({});
  it.events.back().context = context;
  *event = &it.events.back();
  return SUCCESS;
}

int cuEventDestroy_v2(void*) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  ++it.forbidden;
  return SUCCESS;
}

int cuEventRecord(void* handle, void* stream) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  if (it.failure != SUCCESS) return it.failure;
  auto* const event = static_cast<StandInEvent*>(handle);
  if (event->context != context) return INVALID_HANDLE;
  event->is_captured = stream == it.captured_stream && stream != nullptr;
  if (event->is_captured) {
    ++it.forbidden;
    return SUCCESS;
  }
  event->is_recorded = true;
  ++event->open_records;
  it.streams[stream].push_back(event);
  return SUCCESS;
}

int cuEventQuery(void* handle) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  ++it.queries;
  auto* const event = static_cast<StandInEvent*>(handle);
  if (event->context != context) ++it.forbidden;
  if (breaks_capture(it)) return CAPTURE_UNSUPPORTED;
  if (it.failure != SUCCESS) return it.failure;
  if (event->is_captured) return CAPTURED_EVENT;
  return event->open_records > 0 ? NOT_READY : SUCCESS;
}

int cuEventElapsedTime_v2(float* span_ms, void* from, void* to) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  if (it.failure != SUCCESS) return it.failure;
  const auto* const first = static_cast<StandInEvent*>(from);
  const auto* const last = static_cast<StandInEvent*>(to);
  if (!first->is_recorded || !last->is_recorded || first->context != last->context) {
    return INVALID_HANDLE;
  }
  if (first->open_records > 0 || last->open_records > 0) return NOT_READY;
  *span_ms = static_cast<float>(1e3 * (last->device_s - first->device_s));
  return SUCCESS;
}

void stand_in_use(void* wanted) { context = wanted; }
void* stand_in_context(int number) { return &contexts[number]; }
void* stand_in_stream(int number) { return &streams[number]; }

void stand_in_complete(void* stream, int count, double device_s) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  auto& pending = it.streams[stream];
  for (; count > 0 && !pending.empty(); --count) {
    pending.front()->device_s = device_s;
    --pending.front()->open_records;
    pending.pop_front();
  }
}

int stand_in_pending(void* stream) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  return static_cast<int>(it.streams[stream].size());
}

void stand_in_fail(int code) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  it.failure = code;
}

void stand_in_forget_events() {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  for (StandInEvent& event : it.events) event.is_recorded = false;
}

void stand_in_begin_capture(void* stream) {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  it.captured_stream = stream;
  it.is_capture_valid = true;
  is_capturing_here = true;
}

bool stand_in_end_capture() {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  it.captured_stream = nullptr;
  is_capturing_here = false;
  return it.is_capture_valid;
}

int stand_in_forbidden() {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  return it.forbidden;
}

int stand_in_queries() {
  auto& it = simulation();
  const std::lock_guard lock(it.mutex);
  return it.queries;
}
}
