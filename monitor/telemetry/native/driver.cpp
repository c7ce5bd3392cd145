#include "driver.h"

#include <dlfcn.h>

#include <atomic>

namespace keepstep {

namespace {

constexpr unsigned int DEFAULT_EVENT = 0;  // With timing.
constexpr int CAPTURE_THREAD_LOCAL = 1;
constexpr int CAPTURE_RELAXED = 2;

template <typename Function>
bool find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const Driver* Driver::get() {
  static std::atomic<const Driver*> found{nullptr};
  static std::atomic<bool> is_settled{false};
  if (!is_settled.load(std::memory_order_acquire)) {
    // Several threads may get here at once: what they find is equal, and never freed.
    bool is_final = false;
    const Driver* const loaded = load(&is_final);
    if (loaded != nullptr) found.store(loaded, std::memory_order_release);
    if (is_final) is_settled.store(true, std::memory_order_release);
  }
  return found.load(std::memory_order_acquire);
}

const Driver* Driver::load(bool* is_final) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  *is_final = true;
  static Driver driver;
  static const bool is_complete =
      find(library, driver.get_context_, "cuCtxGetCurrent") &&
      find(library, driver.set_context, "cuCtxSetCurrent") &&
      find(library, driver.is_capturing_, "cuStreamIsCapturing") &&
      find(library, driver.exchange_capture_mode_, "cuThreadExchangeStreamCaptureMode") &&
      find(library, driver.create_, "cuEventCreate") &&
      find(library, driver.record, "cuEventRecord") &&
      find(library, driver.query, "cuEventQuery") &&
      // The second version, of CUDA 12.8, is the one that later drivers document.
      (find(library, driver.elapsed_ms, "cuEventElapsedTime_v2") ||
       find(library, driver.elapsed_ms, "cuEventElapsedTime"));
  return is_complete ? &driver : nullptr;
}

Context Driver::current_context() const {
  Context context = nullptr;
  return get_context_(&context) == SUCCESS ? context : nullptr;
}

bool Driver::is_capturing(Stream stream) const {
  int status = 0;
  return is_capturing_(stream, &status) != SUCCESS || status != 0;
}

Event Driver::create_event() const {
  int mode = CAPTURE_RELAXED;
  const bool is_exchanged = exchange_capture_mode_(&mode) == SUCCESS;
  Event event = nullptr;
  const int result = create_(&event, DEFAULT_EVENT);
  if (is_exchanged) exchange_capture_mode_(&mode);
  return result == SUCCESS ? event : nullptr;
}

void Driver::ignore_captures_of_other_threads() const {
  int mode = CAPTURE_THREAD_LOCAL;
  exchange_capture_mode_(&mode);
}

}  // namespace keepstep
