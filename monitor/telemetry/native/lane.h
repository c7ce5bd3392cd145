// Writes records of operations into the lane of a ring (format: monitor/telemetry/ring.py).
//
// Any thread may write, without a lock: a slot belongs to the thread that made its stamp odd, until
// it is even again; after that each field changes at most once, by one aligned store.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace keepstep {

// The values of monitor/records.py.
enum Flag : uint8_t {
  ASYNCHRONOUS = 1,
  DEVICE_TIMES = 2,
  FAILED = 4,
  UNOBSERVED = 8,
  LAUNCHED = 16,
};
constexpr uint8_t KIND_OPERATION = 1;

// Returns what Python's time.monotonic() does.
double now_s();

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

// Where a ring's lane of operations lies, in bytes from the start of its file; capacity in records.
struct LaneLayout {
  size_t nbytes, offset, capacity, counter_offset, step_offset;
};

// The lane of operations of one ring file. Whoever may still end an operation holds a reference, so
// that it stays mapped until the last has ended.
class Lane {
 public:
  // Maps a ring file; returns null and sets errno if that fails.
  static std::shared_ptr<Lane> open(const char* path, const LaneLayout& layout);

  Lane(uint8_t* memory, const LaneLayout& layout);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane();

  // Writes a record of an operation that is called now; returns its position. The start of one with
  // DEVICE_TIMES is 0 until it begins on the device.
  uint64_t begin(Record record);
  // Each does nothing if the record was overwritten.
  void start(uint64_t position, double started_s);
  void end(uint64_t position, uint8_t flags, double ended_s);
  // Adds flags to an operation that has not ended.
  void mark(uint64_t position, uint8_t flags);

 private:
  Record* slot_of(uint64_t position);

  uint8_t* memory_;
  size_t nbytes_;
  Record* slots_;
  size_t capacity_;
  uint64_t* counter_;
  uint32_t* step_;
};

// One operation in a lane.
struct Ticket {
  std::shared_ptr<Lane> lane;
  uint64_t position = 0;

  void end(uint8_t flags) const { lane->end(position, flags, now_s()); }
  void mark(uint8_t flags) const { lane->mark(position, flags); }
};

}  // namespace keepstep
