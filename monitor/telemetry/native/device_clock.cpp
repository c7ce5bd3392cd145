#include "device_clock.h"

#include <algorithm>

namespace keepstep {

namespace {

// Spans are single-precision milliseconds: after ten seconds they resolve a microsecond.
constexpr double ANCHOR_KEPT_S = 10.0;

}  // namespace

double DeviceClock::time_of(const Driver& driver, Event event, double earliest_s, double latest_s,
                            int* result) {
  *result = Driver::SUCCESS;
  earliest_s = std::min(earliest_s, latest_s);
  told_s_ = latest_s;
  if (anchor_ == nullptr) return told_s_;
  float span_ms = 0.0F;
  *result = driver.elapsed_ms(&span_ms, anchor_, event);
  if (*result != Driver::SUCCESS) return told_s_;
  told_span_s_ = 1e-3 * static_cast<double>(span_ms);
  anchor_s_ = std::clamp(anchor_s_, earliest_s - told_span_s_, latest_s - told_span_s_);
  told_s_ = anchor_s_ + told_span_s_;
  return told_s_;
}

Event DeviceClock::offer_anchor(Event event) {
  if (anchor_ != nullptr && told_span_s_ < ANCHOR_KEPT_S) return event;
  const Event former = anchor_;
  anchor_ = event;
  anchor_s_ = told_s_;
  told_span_s_ = 0.0;
  return former;
}

}  // namespace keepstep
