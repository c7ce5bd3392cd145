#include "lane.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>

namespace keepstep {

namespace {

constexpr size_t RECORD_WORDS = sizeof(Record) / sizeof(uint64_t);
using Words = std::array<uint64_t, RECORD_WORDS>;

template <typename T>
void store(T& place, T value) {
  std::atomic_ref<T>(place).store(value, std::memory_order_release);
}

}  // namespace

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::shared_ptr<Lane> Lane::open(const char* path, const LaneLayout& layout) {
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return nullptr;
  void* const memory =
      mmap(nullptr, layout.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const int error = errno;
  ::close(descriptor);
  if (memory == MAP_FAILED) {
    errno = error;
    return nullptr;
  }
  return std::make_shared<Lane>(static_cast<uint8_t*>(memory), layout);
}

Lane::Lane(uint8_t* memory, const LaneLayout& layout)
    : memory_(memory),
      nbytes_(layout.nbytes),
      slots_(reinterpret_cast<Record*>(memory + layout.offset)),
      capacity_(layout.capacity),
      counter_(reinterpret_cast<uint64_t*>(memory + layout.counter_offset)),
      step_(reinterpret_cast<uint32_t*>(memory + layout.step_offset)) {}

Lane::~Lane() { munmap(memory_, nbytes_); }

uint64_t Lane::begin(Record record) {
  const uint64_t position =
      std::atomic_ref<uint64_t>(*counter_).fetch_add(1, std::memory_order_acq_rel);
  record.stamp = 2 * position + 1;
  record.kind = KIND_OPERATION;
  record.step = std::atomic_ref<uint32_t>(*step_).load(std::memory_order_relaxed);
  record.enqueued_s = now_s();
  record.started_s = (record.flags & DEVICE_TIMES) ? 0.0 : record.enqueued_s;
  record.ended_s = 0.0;
  auto* const words = reinterpret_cast<uint64_t*>(&slots_[position & (capacity_ - 1)]);
  const Words values = std::bit_cast<Words>(record);
  const std::atomic_ref<uint64_t> stamp(words[0]);
  uint64_t found = stamp.load(std::memory_order_relaxed);
  // A thread that stopped here while others filled the whole lane has lost its slot, and one that
  // stopped while it wrote keeps it: a record is lost, never mixed with another.
  const bool is_lost = found % 2 == 1 || found > record.stamp;
  if (is_lost || !stamp.compare_exchange_strong(found, record.stamp, std::memory_order_relaxed)) {
    return position;
  }
  // Each store is a release, so that a reader that sees any field of this record sees the odd stamp
  // after it. By words, because the end of an operation that this record overwrites may look at the
  // stamp at the same time.
  for (size_t word = 1; word < RECORD_WORDS; ++word) store(words[word], values[word]);
  store(words[0], 2 * position + 2);
  return position;
}

void Lane::start(uint64_t position, double started_s) {
  if (Record* const slot = slot_of(position)) store(slot->started_s, started_s);
}

void Lane::end(uint64_t position, uint8_t flags, double ended_s) {
  Record* const slot = slot_of(position);
  if (slot == nullptr) return;
  mark(position, flags);
  store(slot->ended_s, ended_s);
}

void Lane::mark(uint64_t position, uint8_t flags) {
  Record* const slot = slot_of(position);
  if (slot == nullptr || flags == 0) return;
  std::atomic_ref<uint8_t>(slot->flags).fetch_or(flags, std::memory_order_release);
}

Record* Lane::slot_of(uint64_t position) {
  Record& slot = slots_[position & (capacity_ - 1)];
  const uint64_t stamp = std::atomic_ref<uint64_t>(slot.stamp).load(std::memory_order_acquire);
  return stamp == 2 * position + 2 ? &slot : nullptr;
}

}  // namespace keepstep
