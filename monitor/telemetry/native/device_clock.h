// Tells at which host time an event of a device completed.
//
// The device's events give spans only. One event is the anchor, and the host time of the anchor is
// estimated: whoever polled an event knows two host times between which it completed, and the
// estimate is moved, as little as possible, to where the anchor's time plus the span lies between
// them. So errors, and the drift of the device's clock, stay below the time between two polls.

#pragma once

#include "driver.h"

namespace keepstep {

class DeviceClock {
 public:
  // Returns the host time of an event that has completed between two host times; sets `result` to
  // what the driver says. Nothing but the driver's failure makes it an error.
  double time_of(const Driver& driver, Event event, double earliest_s, double latest_s,
                 int* result);

  // Takes an event whose time was told last as the new anchor if the old one is none or too old.
  // Returns the event that may be used again: the old anchor, this event, or null.
  Event offer_anchor(Event event);

 private:
  Event anchor_ = nullptr;
  double anchor_s_ = 0.0;
  double told_s_ = 0.0;
  double told_span_s_ = 0.0;
};

}  // namespace keepstep
